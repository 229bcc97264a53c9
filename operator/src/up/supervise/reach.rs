//! Whether the gateway reaches the workers: one that has just become ready is reached a moment later, and until then
//! prompts are read without it.

use std::time::Duration;

use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::http;
use crate::up::state::Running;

/// Longest time until the gateway reaches a worker that is ready: several of its attempts.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// Waits until the gateway reaches all of its workers.
///
/// # Errors
/// It does not within [`PATIENCE`]; the text says what it reaches.
pub(super) async fn all(running: &Running) -> Result<(), String> {
    let url = running.endpoint.trim_end_matches("/v1").to_owned() + "/ready";
    let client = http::client(&url, running.certificate.as_deref(), Some(PATIENCE))
        .map_err(|error| error.to_string())?;
    let mut missing = format!("{url} does not answer");
    let reached = async {
        loop {
            // Its answer is JSON even while it is not ready.
            if let Ok(response) = client.get(&url).send().await
                && let Ok(body) = response.json().await
            {
                match unreached(&body) {
                    None => return,
                    Some(pool) => missing = pool,
                }
            }
            sleep(PAUSE).await;
        }
    };
    let outcome = timeout(PATIENCE, reached).await;
    outcome.map_err(|_| missing)
}

/// A pool with a worker that is not reached.
fn unreached(body: &Value) -> Option<String> {
    ["decode", "prefill"].into_iter().find_map(|pool| {
        let count = |key| body[pool][key].as_u64();
        let (ready, of) = (count("ready"), count("of"));
        let text = |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |n| n.to_string());
        (of.is_none() || ready < of)
            .then(|| format!("{} of {} {pool} workers", text(ready), text(of)))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::unreached;

    #[test]
    fn a_pool_is_reached_as_a_whole_or_named() {
        let body = |decode: u32, prefill: u32| json!({"decode": {"ready": decode, "of": 2}, "prefill": {"ready": prefill, "of": 1}});
        assert_eq!(unreached(&body(2, 1)), None);
        let none = json!({"decode": {"ready": 1, "of": 1}, "prefill": {"ready": 0, "of": 0}});
        assert_eq!(unreached(&none), None);
        assert_eq!(
            unreached(&body(2, 0)).as_deref(),
            Some("0 of 1 prefill workers")
        );
        assert_eq!(
            unreached(&body(1, 0)).as_deref(),
            Some("1 of 2 decode workers")
        );
        let foreign = json!({"error": "not found"});
        assert_eq!(
            unreached(&foreign).as_deref(),
            Some("? of ? decode workers")
        );
    }
}
