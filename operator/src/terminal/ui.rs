//! User-facing progress: checked-off steps, a spinner on a terminal, errors. All of it on standard error.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use crate::environment::Environment;

/// Maximum width of the left part of a step, before its note.
const STEP_WIDTH: usize = 52;

/// Time after which a running step is first mentioned if there is no terminal.
const FIRST_LINE: Duration = Duration::from_millis(700);
/// Longest pause until a change is mentioned.
const MAX_LINE_PAUSE: Duration = Duration::from_secs(15);
/// Pause after which the same line is printed again.
const SAME_LINE_PAUSE: Duration = Duration::from_secs(60);

/// Steps of a command, printed as they happen.
pub(crate) struct Steps {
    colour: bool,
    terminal: bool,
}

impl Steps {
    /// Detects the terminal: colour and spinners only on a capable one, and no colour with `NO_COLOR`.
    pub(crate) fn new(environment: &Environment) -> Self {
        let terminal = std::io::stderr().is_terminal() && environment.has_cursor;
        Self {
            colour: terminal && environment.wants_colour,
            terminal,
        }
    }

    /// Prints a finished step.
    pub(crate) fn done(&self, text: &str) {
        let mark = if self.colour {
            "\u{1b}[32m✔\u{1b}[0m"
        } else {
            "✔"
        };
        say(format_args!("{mark} {text}"));
    }

    /// Prints a finished step, with a note on its right.
    pub(crate) fn done_with(&self, text: &str, note: &str) {
        let padding = STEP_WIDTH.saturating_sub(text.chars().count()).max(2);
        self.done(&format!("{text}{}{}", " ".repeat(padding), self.dim(note)));
    }

    /// Prints a warning about something that did not go as planned.
    pub(crate) fn warn(&self, text: &str) {
        let mark = if self.colour {
            "\u{1b}[33m!\u{1b}[0m"
        } else {
            "!"
        };
        say(format_args!("{mark} {text}"));
    }

    /// Prints a line that belongs to the step above.
    pub(crate) fn detail(&self, text: &str) {
        say(format_args!("  {text}"));
    }

    /// Starts a long step whose text may change: a spinner on a terminal, otherwise an occasional line, where it has changed.
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

    /// Like `busy`, with a progress bar on a terminal: see [`Busy::reached`].
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

/// A step in progress; dropping it finishes it.
pub(crate) struct Busy {
    bar: ProgressBar,
    lines: Option<Lines>,
}

impl Busy {
    /// Updates the text of what is being done.
    pub(crate) fn say(&self, text: String) {
        if let Some(lines) = &self.lines {
            lines.text().clone_from(&text);
        }
        self.bar.set_message(text);
    }

    /// Sets the progress of the bar.
    pub(crate) fn reached(&self, done: u64, all: u64) {
        self.bar.set_length(all.max(1));
        self.bar.set_position(done);
    }

    /// Prints lines above the spinner.
    pub(crate) fn suspend(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }

    /// Finishes the step: removes the spinner and stops printing lines.
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

/// A thread that prints a text from time to time, with growing pauses, where it has changed.
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
            let mut printed: Option<(String, Instant)> = None;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
                let now = shown.lock().unwrap_or_else(PoisonError::into_inner).clone();
                pause = (pause * 2).min(MAX_LINE_PAUSE);
                let is_old =
                    |(text, at): &(String, Instant)| *text == now && at.elapsed() < SAME_LINE_PAUSE;
                if !printed.as_ref().is_some_and(is_old) {
                    print(&now);
                    printed = Some((now, Instant::now()));
                }
            }
        });
        Self {
            text,
            end: Some(end),
            // Without a thread nothing is printed, and everything else continues.
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

/// Writes a line to standard error. If the disk behind it is full, the line is lost and execution continues.
pub(crate) fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints an error as `error: …`.
pub(crate) fn print_error(error: &anyhow::Error) {
    say(format_args!("error: {}", harmless(&sentence(error))));
}

/// Formats an error as one message.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    hearth_crds::sentence(&error.to_string(), &error.root_cause().to_string())
}

/// A text that does nothing to a terminal: names, logs and messages may come from anybody in a cluster.
fn harmless(text: &str) -> Cow<'_, str> {
    let is_harmful = |sign: char| sign.is_control() && !matches!(sign, '\n' | '\t');
    match text.contains(is_harmful) {
        true => text.replace(is_harmful, "\u{fffd}").into(),
        false => text.into(),
    }
}

/// Prints data to standard output, on a terminal without what would command it. A closed reader (`| head`) is not an error: the
/// process exits successfully.
///
/// # Errors
/// Another failure of standard output, such as a full disk.
pub(crate) fn print_data(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().is_terminal() {
        true => print_raw(&harmless(text)),
        false => print_raw(text),
    }
}

/// Prints data at the top left of the empty screen of a terminal.
///
/// # Errors
/// Those of [`print_data`].
pub(crate) fn print_screen(text: &str) -> anyhow::Result<()> {
    print_raw(&format!("\u{1b}[H\u{1b}[2J{}", harmless(text)))
}

fn print_raw(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        outcome => unwritten(outcome),
    }
}

/// Like [`print_data`], for a command that continues after its output: a closed reader is ignored.
///
/// # Errors
/// Those of [`print_data`].
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

/// Formats bytes in binary units: `7.4 MiB`.
pub(crate) fn bytes(count: u64) -> String {
    hearth_crds::format_bytes(count)
}

/// Formats milliseconds with a sensible number of digits: `0.6 ms`, `41 ms`, `1.4 s`.
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
        // Many pauses later.
        let again = heard.recv_timeout(Duration::from_millis(500));
        assert!(again.is_err(), "it has not changed");
        "two".clone_into(&mut lines.text());
        assert_eq!(heard.recv().unwrap(), "two");
        drop(lines);
        // The thread has ended, and with it its end of the channel.
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
