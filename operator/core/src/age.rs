//! How long ago something was.

use std::time::Duration;

use jiff::Timestamp;

/// From `since` to `now`; zero where that lies ahead, as clocks of two machines may have it.
pub fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or_default()
}

/// Whether something is at least so old; not where it is not known.
pub fn is_older(since: Option<Timestamp>, now: Timestamp, than: Duration) -> bool {
    since.is_some_and(|since| age(since, now) >= than)
}
