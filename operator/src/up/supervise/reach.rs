//! Whether the gateway reaches the workers: one that has just become ready is reached a moment later, and until then
//! requests go without it, or wait where there is no other.

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
/// It does not within [`PATIENCE`]; the text says what it reaches, and what becomes of requests meanwhile.
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

/// A pool with a worker that is not reached, or that waits for a member of its ring.
fn unreached(body: &Value) -> Option<String> {
    ["decode", "prefill"].into_iter().find_map(|pool| {
        let count = |key| body[pool][key].as_u64();
        let (ready, of) = (count("ready"), count("of"));
        if of.is_some() && ready >= of {
            return None;
        }
        let text = |count: Option<u64>| count.map_or_else(|| "?".to_owned(), |n| n.to_string());
        let meanwhile = match (pool, ready) {
            ("prefill", _) => "prompts are read without the others",
            (_, Some(1..)) => "answers are computed without the others",
            _ => "requests wait",
        };
        Some(format!(
            "{} of {} {pool} workers so far{}; {meanwhile}",
            text(ready),
            text(of),
            waiting(body)
        ))
    })
}

/// Heads of rings that wait for a member, in brackets.
fn waiting(body: &Value) -> String {
    let told: Vec<String> = http::waits_for(body)
        .map(|(name, member)| format!("{name} waits for {member}"))
        .collect();
    match told.is_empty() {
        true => String::new(),
        false => format!(" ({})", told.join(", ")),
    }
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
            Some("0 of 1 prefill workers so far; prompts are read without the others")
        );
        assert_eq!(
            unreached(&body(1, 0)).as_deref(),
            Some("1 of 2 decode workers so far; answers are computed without the others")
        );
        let foreign = json!({"error": "not found"});
        assert_eq!(
            unreached(&foreign).as_deref(),
            Some("? of ? decode workers so far; requests wait")
        );
    }

    /// Nobody answers without it.
    #[test]
    fn a_ring_that_is_not_whole_lets_requests_wait() {
        let body = |waits_for: Option<&str>| {
            json!({
                "decode": {"ready": 0, "of": 1}, "prefill": {"ready": 0, "of": 0},
                "workers": [{"name": "decode-0", "role": "decode", "waits_for": waits_for}],
            })
        };
        assert_eq!(
            unreached(&body(Some("stage-1"))).as_deref(),
            Some("0 of 1 decode workers so far (decode-0 waits for stage-1); requests wait")
        );
        assert_eq!(
            unreached(&body(None)).as_deref(),
            Some("0 of 1 decode workers so far; requests wait")
        );
    }
}
