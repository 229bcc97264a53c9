//! Waiting for a state of the cluster.

use std::time::{Duration, Instant};

use anyhow::bail;

/// Polling interval.
const INTERVAL: Duration = Duration::from_millis(100);

/// Shortest wait that is worth reporting, since it adds to a test's time.
const WORTH_TELLING: Duration = Duration::from_secs(3);

/// Waits until `look` finds something.
///
/// # Panics
/// When it does not find it in time; `what` is in the message.
pub fn wait_until<T>(what: &str, timeout: Duration, look: impl FnMut() -> Option<T>) -> T {
    try_wait_until(what, timeout, look).unwrap_or_else(|error| panic!("{error}"))
}

/// Like [`wait_until`], for callers that have more to say about a failure.
///
/// # Errors
/// When it finds nothing in time.
pub fn try_wait_until<T>(
    what: &str,
    timeout: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    let deadline = began + timeout;
    loop {
        if let Some(found) = look() {
            let waited = began.elapsed();
            if waited >= WORTH_TELLING {
                eprintln!("{:.0} s until {what}", waited.as_secs_f64());
            }
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("waited {} s in vain: {what}", timeout.as_secs());
        }
        std::thread::sleep(INTERVAL);
    }
}
