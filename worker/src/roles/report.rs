//! Lines of JSON on standard output, by which a supervisor follows the start of a worker.

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
    /// No new requests are taken.
    Draining,
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
