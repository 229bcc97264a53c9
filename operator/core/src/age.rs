//! Age of a timestamp.

use std::time::Duration;

use jiff::Timestamp;

/// Returns the time from `since` to `now`; zero if `since` is later, which happens when two machines' clocks differ.
pub fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// Whether `since` is at least `than` ago; `false` if it is unknown.
pub fn is_older(since: Option<Timestamp>, now: Timestamp, than: Duration) -> bool {
    since.is_some_and(|since| age(since, now) >= than)
}
