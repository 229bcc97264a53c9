//! Lines of JSON on standard output, from which a supervisor follows the start of a worker.

use std::convert::Infallible;
use std::time::Duration;

use serde::Serialize;

/// A report from a worker to its supervisor.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Report<'a> {
    /// Weights are being mapped and warmed up.
    Loading {
        /// Progress, from 0 to 100.
        percent: u32,
    },
    /// Requests are being served.
    Ready {
        /// `host:port`.
        endpoint: &'a str,
        /// Device and kernels.
        device: &'a str,
    },
    /// The process is alive; sent every [`ALIVE_PERIOD`].
    Alive,
    /// New requests are no longer accepted.
    Draining,
    /// The time for finishing requests in flight is over.
    CutOff {
        /// Number of answers that had not ended.
        answers: u64,
    },
}

/// Time between two reports that a serving process is alive.
const ALIVE_PERIOD: Duration = Duration::from_secs(1);

/// Reports repeatedly that the process is alive.
pub(crate) async fn stay_alive() -> Infallible {
    loop {
        Report::Alive.send();
        tokio::time::sleep(ALIVE_PERIOD).await;
    }
}

impl Report<'_> {
    /// Prints the line; if the supervisor has gone, the process continues to serve.
    pub(crate) fn send(&self) {
        use std::io::Write;
        if let Ok(line) = serde_json::to_string(self) {
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }
}
