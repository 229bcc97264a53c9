//! SIGTERM and Ctrl-C before a deployment's processes run: they end the worker's tool that is at work, and with it the command.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, Signal, kill_process};

use crate::signals;
use crate::terminal::ui;

/// Exit code of a command that SIGTERM or Ctrl-C has ended, as shells have it.
pub(crate) const STOPPED: u8 = 130;

/// What SIGTERM or Ctrl-C has ended, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Stopped(pub(crate) String);

/// Who gets SIGTERM and Ctrl-C: the tool that is at work, and this process between two of them. By default they are not heard, and end
/// this process by themselves.
#[derive(Clone, Default)]
pub(crate) struct Interrupts(Arc<Mutex<AtWork>>);

#[derive(Default)]
struct AtWork {
    tool: Option<Pid>,
    /// Whether a signal has come.
    is_stopped: bool,
    /// Whether others listen now.
    is_left: bool,
}

impl Interrupts {
    /// Begins to listen, until the process ends.
    ///
    /// # Errors
    /// The system refuses a handler or a thread.
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let interrupts = Self::default();
        let heard = interrupts.clone();
        signals::hand_over(move || heard.pass_on())?;
        Ok(interrupts)
    }

    fn pass_on(&self) {
        let mut work = self.at_work();
        if work.is_left {
            return;
        }
        work.is_stopped = true;
        match work.tool {
            // From a terminal it has got the signal itself.
            Some(tool) => {
                let _ = kill_process(tool, Signal::TERM);
            }
            None => {
                ui::say("stopped");
                std::process::exit(STOPPED.into());
            }
        }
    }

    /// Leaves the signals to another listener, which exists.
    pub(crate) fn leave(&self) {
        self.at_work().is_left = true;
    }

    /// Starts a tool, which a signal ends from then on.
    ///
    /// # Errors
    /// The program cannot be run.
    pub(crate) fn spawn(&self, tool: &mut Command) -> io::Result<Child> {
        // A signal waits until it is known.
        let mut work = self.at_work();
        let child = tool.spawn()?;
        work.tool = Some(Pid::from_child(&child));
        Ok(child)
    }

    /// Waits for the tool; `None` if SIGTERM or Ctrl-C has ended its work.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn wait(&self, tool: &mut Child) -> io::Result<Option<ExitStatus>> {
        let status = tool.wait()?;
        let ends = [Signal::INT, Signal::TERM].map(|signal| Some(signal.as_raw()));
        let mut work = self.at_work();
        if work.is_stopped || ends.contains(&status.signal()) {
            // The caller says so; a signal that is still to be heard would, too.
            work.is_left = true;
            return Ok(None);
        }
        work.tool = None;
        Ok(Some(status))
    }

    fn at_work(&self) -> MutexGuard<'_, AtWork> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
