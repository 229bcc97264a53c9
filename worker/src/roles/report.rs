//! Lines of JSON on standard output, from which a supervisor follows the start of a worker.

use std::convert::Infallible;
use std::time::Duration;

use hearth_crds::{StreamedPrompts, WorkerReport};
use hearth_engine::Engine;

use crate::logging::print_line;

/// Time between two reports that a process is alive, while it loads, too.
const ALIVE_PERIOD: Duration = Duration::from_secs(1);

/// Reports repeatedly that the process is alive.
pub(crate) async fn stay_alive() -> Infallible {
    loop {
        send_report(&WorkerReport::Alive);
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
        // The last copies of a prompt may be told before it ends.
        if since.passes == 0 && since.copied_bytes == told_bytes {
            continue;
        }
        told_bytes = since.copied_bytes;
        if since.passes > 0 {
            (before, told_bytes) = (now, 0);
        }
        send_report(&WorkerReport::Streamed(StreamedPrompts {
            tokens: since.rows,
            copied_bytes: since.copied_bytes,
            copy_ms: ms(since.copy_ns),
            wait_ms: ms(since.wait_ns),
            pass_ms: ms(since.pass_ns),
        }));
    }
}

/// Prints the line of a report; if the supervisor has gone, the process continues to serve.
pub(crate) fn send_report(report: &WorkerReport) {
    if let Ok(line) = serde_json::to_string(report) {
        print_line(line);
    }
}
