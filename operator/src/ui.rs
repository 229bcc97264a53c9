//! What a person sees: checked-off steps, a spinner on a terminal, errors. All of it on standard error.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How wide the left part of a step may grow before its note.
const STEP_WIDTH: usize = 52;

/// Steps of a command, told as they happen.
pub(crate) struct Steps {
    colour: bool,
    terminal: bool,
}

impl Steps {
    /// Colour and spinners only on a terminal, and no colour with `NO_COLOR`.
    pub(crate) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        Self {
            colour: terminal && std::env::var_os("NO_COLOR").is_none(),
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
        eprintln!("{mark} {text}");
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
        eprintln!("{mark} {text}");
    }

    /// A line that belongs to the step above.
    pub(crate) fn detail(&self, text: &str) {
        eprintln!("  {text}");
    }

    /// A spinner with a text that may change; nothing where there is no terminal.
    pub(crate) fn spinner(&self, text: &str) -> ProgressBar {
        if !self.terminal {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new_spinner().with_message(text.to_owned());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(
                style.tick_strings(&["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏", " "]),
            );
        }
        bar.enable_steady_tick(Duration::from_millis(80));
        bar
    }

    /// A bar with a text that may change; nothing where there is no terminal.
    pub(crate) fn bar(&self, text: &str) -> ProgressBar {
        let bar = self.spinner(text);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {percent:>3} %")
        {
            bar.set_style(style.progress_chars("━━─"));
        }
        bar
    }

    fn dim(&self, text: &str) -> String {
        if self.colour {
            format!("\u{1b}[2m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Prints an error as `error: …`.
pub(crate) fn print_error(error: &anyhow::Error) {
    eprintln!("error: {}", sentence(error));
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
        outcome => Ok(outcome?),
    }
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
