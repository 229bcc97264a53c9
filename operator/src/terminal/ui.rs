//! What a person sees: checked-off steps, a spinner on a terminal, errors. All of it on standard error.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use crate::environment::Environment;

/// How wide the left part of a step may grow before its note.
const STEP_WIDTH: usize = 52;

/// What takes longer than this is told of where there is no terminal.
const FIRST_LINE: Duration = Duration::from_millis(700);
/// Longest pause between two such lines.
const MAX_LINE_PAUSE: Duration = Duration::from_secs(15);

/// Steps of a command, told as they happen.
pub(crate) struct Steps {
    colour: bool,
    terminal: bool,
}

impl Steps {
    /// Colour and spinners only on a terminal that can, and no colour with `NO_COLOR`.
    pub(crate) fn new(environment: &Environment) -> Self {
        let terminal = std::io::stderr().is_terminal() && environment.has_cursor;
        Self {
            colour: terminal && environment.wants_colour,
            terminal,
        }
    }

    /// A step that is done.
    pub(crate) fn done(&self, text: &str) {
        let mark = if self.colour {
            "\u{1b}[32m✔\u{1b}[0m"
        } else {
            "✔"
        };
        say(format_args!("{mark} {text}"));
    }

    /// A step that is done, with a note on its right.
    pub(crate) fn done_with(&self, text: &str, note: &str) {
        let padding = STEP_WIDTH.saturating_sub(text.chars().count()).max(2);
        self.done(&format!("{text}{}{}", " ".repeat(padding), self.dim(note)));
    }

    /// Something that went another way than planned.
    pub(crate) fn warn(&self, text: &str) {
        let mark = if self.colour {
            "\u{1b}[33m!\u{1b}[0m"
        } else {
            "!"
        };
        say(format_args!("{mark} {text}"));
    }

    /// A line that belongs to the step above.
    pub(crate) fn detail(&self, text: &str) {
        say(format_args!("  {text}"));
    }

    /// Something that takes time, with a text that may change: a spinner on a terminal, elsewhere a line now and then.
    pub(crate) fn busy(&self, text: &str) -> Busy {
        if !self.terminal {
            let lines = Lines::start(text, FIRST_LINE, |text| {
                say(format_args!("  {text}"));
            });
            return Busy {
                bar: ProgressBar::hidden(),
                lines: Some(lines),
            };
        }
        let bar = ProgressBar::new_spinner().with_message(text.to_owned());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(
                style.tick_strings(&["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏", " "]),
            );
        }
        bar.enable_steady_tick(Duration::from_millis(80));
        Busy { bar, lines: None }
    }

    /// The same with a bar on a terminal: see [`Busy::reached`].
    pub(crate) fn bar(&self, text: &str) -> Busy {
        let busy = self.busy(text);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {percent:>3} %")
        {
            busy.bar.set_style(style.progress_chars("━━─"));
        }
        busy
    }

    fn dim(&self, text: &str) -> String {
        if self.colour {
            format!("\u{1b}[2m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Something that takes time; what is dropped is done.
pub(crate) struct Busy {
    bar: ProgressBar,
    lines: Option<Lines>,
}

impl Busy {
    /// What is done now.
    pub(crate) fn say(&self, text: String) {
        if let Some(lines) = &self.lines {
            lines.text().clone_from(&text);
        }
        self.bar.set_message(text);
    }

    /// How far a bar is.
    pub(crate) fn reached(&self, done: u64, all: u64) {
        self.bar.set_length(all.max(1));
        self.bar.set_position(done);
    }

    /// Prints lines above the spinner.
    pub(crate) fn suspend(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// It is done: the spinner goes, and no more lines come.
    pub(crate) fn finish(&mut self) {
        self.bar.finish_and_clear();
        self.lines = None;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.finish();
    }
}

/// A thread that says a text now and then, in pauses that grow.
struct Lines {
    text: Arc<Mutex<String>>,
    /// Closed to end the thread.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lines {
    fn start(text: &str, first: Duration, print: impl Fn(&str) + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(text.to_owned()));
        let (end, ended) = mpsc::channel();
        let shown = Arc::clone(&text);
        let thread = std::thread::Builder::new().spawn(move || {
            let mut pause = first;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
                let now = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
                print(&now);
                pause = (pause * 2).min(MAX_LINE_PAUSE);
            }
        });
        Self {
            text,
            end: Some(end),
            // Without a thread nothing is said, and all else goes on.
            thread: thread.ok(),
        }
    }

    fn text(&self) -> std::sync::MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Writes a line to standard error. Where the disk behind it is full the line is lost, and nothing that runs with it.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints an error as `error: …`.
pub(crate) fn print_error(error: &anyhow::Error) {
    say(format_args!("error: {}", sentence(error)));
}

/// An error as one message.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    hearth_crds::sentence(&error.to_string(), &error.root_cause().to_string())
}

/// Prints data to standard output. A reader that has gone (`| head`) is no error: nobody wants the rest.
///
/// # Errors
/// Another fault of standard output, such as a full disk.
pub(crate) fn print_data(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => unwritten(outcome),
    }
}

/// [`print_data`] of something that goes on behind its output: a reader that has gone changes nothing.
///
/// # Errors
/// As [`print_data`].
pub(crate) fn print_beside(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        outcome => unwritten(outcome),
    }
}

fn unwritten(outcome: std::io::Result<()>) -> anyhow::Result<()> {
    outcome.context("standard output cannot be written")
}

/// Bytes in binary units, as people say them: `7.4 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    hearth_crds::format_bytes(count)
}

/// Milliseconds with as many digits as matter: `0.6 ms`, `41 ms`, `1.4 s`.
pub(crate) fn milliseconds(value_ms: f64) -> String {
    match value_ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_said_and_what_is_done_is_not() {
        let (said, heard) = mpsc::channel();
        let lines = Lines::start("one", Duration::from_millis(5), move |text| {
            let _ = said.send(text.to_owned());
        });
        assert_eq!(heard.recv().unwrap(), "one");
        "two".clone_into(&mut lines.text());
        while heard.recv().unwrap() != "two" {}
        drop(lines);
        // The thread has ended, and its end of the channel with it.
        while heard.recv().is_ok() {}
    }

    #[test]
    fn what_is_quick_is_not_mentioned() {
        let (said, heard) = mpsc::channel::<String>();
        drop(Lines::start(
            "quick",
            Duration::from_secs(3600),
            move |text| {
                let _ = said.send(text.to_owned());
            },
        ));
        assert!(heard.recv().is_err());
    }
}
