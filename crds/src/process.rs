//! Supervision of a worker's process, by `hearth up` on one machine and by `hearth-worker supervise` in a container.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

/// Silence after which a serving process, which reports every second, counts as hung.
pub const HUNG_AFTER: Duration = Duration::from_secs(3);

/// Ends in a row without having been ready after which a process cannot be started.
pub const MAX_FAILED_STARTS: u32 = 3;
/// Time beyond the grace period for a process to end. The gateway takes two seconds for streams to send their last error.
pub const END_MARGIN: Duration = Duration::from_secs(4);
/// Time limit for reading the remaining output of a process that has ended.
pub const LAST_WORDS: Duration = Duration::from_secs(1);

/// First delay before a process is restarted; doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(100);
/// Longest delay before a process is restarted.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Time of being ready after which the delay is reset.
const STABLE: Duration = Duration::from_secs(10);
/// Prefix of the line in which a worker says why it ends.
const ERROR: &str = "error: ";
/// Maximum number of lines of an error that are kept.
const ERROR_LINES: usize = 6;

/// Delays before the restarts of one process.
#[derive(Clone, Copy, Debug)]
pub struct Restarts {
    pause: Duration,
}

impl Default for Restarts {
    fn default() -> Self {
        Self { pause: MIN_PAUSE }
    }
}

impl Restarts {
    /// The delay before the next start of a process that has ended `served` after it became ready; zero if it never did.
    pub fn pause(&mut self, served: Duration) -> Duration {
        if served >= STABLE {
            self.pause = MIN_PAUSE;
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(MAX_PAUSE);
        pause
    }
}

/// The end of a process in words, such as `killed by signal 9`, from its status if that could be read.
pub fn how_it_ended(status: Option<&ExitStatus>) -> String {
    match status.map(|status| (status.code(), status.signal())) {
        Some((Some(code), _)) => format!("ended with exit code {code}"),
        Some((None, Some(signal))) => format!("killed by signal {signal}"),
        Some((None, None)) => "ended".to_owned(),
        None => "was lost".to_owned(),
    }
}

/// The last error in a worker's log, with the lines that follow.
#[derive(Clone, Debug, Default)]
pub struct LastError {
    lines: Vec<String>,
}

impl LastError {
    /// Takes the log's next line.
    pub fn hear(&mut self, line: &str) {
        if let Some(first) = line.strip_prefix(ERROR) {
            self.lines = vec![first.to_owned()];
        } else if (1..ERROR_LINES).contains(&self.lines.len()) {
            self.lines.push(line.to_owned());
        }
    }

    /// The error; `None` if there was none.
    pub fn words(&self) -> Option<String> {
        (!self.lines.is_empty()).then(|| self.lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_until_the_process_was_ready_for_a_while() {
        let mut restarts = Restarts::default();
        let mut after = |served_s: u64| restarts.pause(Duration::from_secs(served_s)).as_millis();
        assert_eq!([0, 1, 9].map(&mut after), [100, 200, 400]);
        assert_eq!([0; 5].map(&mut after), [800, 1600, 3200, 6400, 10_000]);
        assert_eq!([0, 10, 0].map(&mut after), [10_000, 100, 200]);
    }

    #[test]
    fn the_last_error_is_kept_with_the_lines_after_it() {
        let mut error = LastError::default();
        error.hear("loading");
        assert_eq!(error.words(), None);
        for line in ["error: one", "  a remedy", "error: two", "  b", "c"] {
            error.hear(line);
        }
        assert_eq!(error.words().as_deref(), Some("two\n  b\nc"));
        (0..10).for_each(|_| error.hear("more"));
        assert_eq!(error.words().map(|words| words.lines().count()), Some(6));
    }
}
