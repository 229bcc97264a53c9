//! Lines of JSON on standard output, by which a supervisor follows the start of a worker.

use std::convert::Infallible;
use std::time::Duration;

use serde::Serialize;

/// What a worker tells its supervisor.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Report<'a> {
    /// Weights are being mapped and warmed up.
    Loading {
        /// 0 to 100.
        percent: u32,
    },
    /// Requests are served.
    Ready {
        /// `host:port`.
        endpoint: &'a str,
        /// Device and kernels.
        device: &'a str,
    },
    /// The process is alive; said every [`ALIVE_PERIOD`].
    Alive,
    /// No new requests are taken.
    Draining,
    /// The time to finish what is in flight is over.
    CutOff {
        /// That had not ended.
        answers: u64,
    },
}

/// How often a process that serves says that it is alive.
const ALIVE_PERIOD: Duration = Duration::from_secs(1);

/// Says again and again that the process is alive.
pub(crate) async fn stay_alive() -> Infallible {
    loop {
        Report::Alive.send();
        tokio::time::sleep(ALIVE_PERIOD).await;
    }
}

impl Report<'_> {
    /// Prints the line; a supervisor that has gone is no reason to stop serving.
    pub(crate) fn send(&self) {
        use std::io::Write;
        if let Ok(line) = serde_json::to_string(self) {
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }
}
