//! Timing of retries.

use std::time::{Duration, SystemTime};

/// Wait before retry `attempt` (1 for the first), doubled each time up to `most`. `jitter` in 0..1 spreads clients
/// that lost the same server over the second half of it.
pub(crate) fn backoff(attempt: u32, first: Duration, most: Duration, jitter: f64) -> Duration {
    let doubled = first.saturating_mul(1 << attempt.saturating_sub(1).min(16));
    doubled.min(most).mul_f64(0.5 + 0.5 * jitter)
}

/// The longest that all waits take from that before retry `attempt` to the one before the last of `tries`.
pub(crate) fn longest(attempt: u32, tries: u32, first: Duration, most: Duration) -> Duration {
    let waits = (attempt..tries).map(|attempt| backoff(attempt, first, most, 1.0));
    waits.fold(Duration::ZERO, Duration::saturating_add)
}

/// Wait that Retry-After asks for: seconds, or a date. `None` for anything else.
pub(crate) fn retry_after(header: &str, now: SystemTime) -> Option<Duration> {
    let header = header.trim();
    if let Ok(seconds) = header.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(header).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit() {
        let wait = |attempt, jitter| {
            let first = Duration::from_millis(500);
            backoff(attempt, first, Duration::from_secs(30), jitter).as_millis()
        };
        assert_eq!(
            [1, 2, 3, 7, 99].map(|n| wait(n, 1.0)),
            [500, 1000, 2000, 30_000, 30_000]
        );
        assert_eq!((wait(1, 0.0), wait(1, 0.5)), (250, 375));
        let all = |attempt| {
            let first = Duration::from_millis(500);
            longest(attempt, 8, first, Duration::from_secs(30)).as_millis()
        };
        assert_eq!([1, 7, 8].map(all), [61_500, 30_000, 0]);
    }

    #[test]
    fn servers_ask_in_seconds_or_by_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let asked = |text| retry_after(text, now).map(|wait| wait.as_secs());
        assert_eq!(asked(" 120 "), Some(120));
        assert_eq!(asked("Sun, 06 Nov 1994 08:49:47 GMT"), Some(10));
        // A date in the past asks for no wait.
        assert_eq!(asked("Sun, 06 Nov 1994 08:49:27 GMT"), Some(0));
        assert_eq!(asked("soon"), None);
    }
}
