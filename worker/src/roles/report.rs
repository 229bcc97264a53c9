//! Lines of JSON on standard output, from which a supervisor follows the start of a worker.

use std::convert::Infallible;
use std::time::Duration;

use hearth_engine::Engine;
use serde::Serialize;

use crate::logging::print_line;

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
    /// Prompts were computed whose experts came over the link.
    Streamed {
        /// Tokens that were computed.
        tokens: u64,
        /// Bytes of experts that crossed the link.
        copied_bytes: u64,
        /// Milliseconds for which the link was busy with them.
        copy_ms: f64,
        /// Milliseconds for which computation waited for them.
        wait_ms: f64,
        /// Milliseconds from the begin of a pass to the end of its last experts, of all passes.
        pass_ms: f64,
    },
    /// The engine has failed: no requests are accepted until it has recovered.
    Unhealthy,
    /// The engine has recovered.
    Healthy,
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

/// Reports streamed prompts, those that are being read included, once a second at most, and only where there are any.
pub(crate) async fn report_streams(engine: &Engine) -> Infallible {
    let mut before = engine.stats().streamed;
    // Since then, of a prompt that has not ended.
    let mut told_bytes = 0;
    let ms = |ns: u64| ns as f64 / 1e6;
    loop {
        tokio::time::sleep(ALIVE_PERIOD).await;
        let now = engine.stats().streamed;
        let since = now.since(&before);
        if since.copied_bytes == told_bytes {
            continue;
        }
        told_bytes = since.copied_bytes;
        if since.passes > 0 {
            (before, told_bytes) = (now, 0);
        }
        Report::Streamed {
            tokens: since.rows,
            copied_bytes: since.copied_bytes,
            copy_ms: ms(since.copy_ns),
            wait_ms: ms(since.wait_ns),
            pass_ms: ms(since.pass_ns),
        }
        .send();
    }
}

impl Report<'_> {
    /// Prints the line; if the supervisor has gone, the process continues to serve.
    pub(crate) fn send(&self) {
        if let Ok(line) = serde_json::to_string(self) {
            print_line(line);
        }
    }
}
