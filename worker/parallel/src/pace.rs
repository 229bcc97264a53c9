//! How long things take, and when that is longer than it should be: the one place that says what is slow and what is lost.
//!
//! Times are those of the monotonic clock of the process where a thing happens; others are told durations, so no two clocks are
//! compared, and neither a jump of the wall clock nor a suspended machine makes anything late.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Ratio to what is usual from which a thing is slow.
const SLOW_FACTOR: u32 = 10;
/// Nothing shorter is slow: a busy machine interrupts computations for about as long.
const LEAST_SLOW: Duration = Duration::from_millis(100);
/// Time for which things of one rank must have been slow, one after the other, before anybody is told.
const SLOW_PATIENCE: Duration = Duration::from_secs(5);
/// What is new may take so long before it is slow: a first pass reads weights from disk, and nobody knows what is usual.
const FIRST_PATIENCE: Duration = Duration::from_secs(150);
/// Times of one kind from which on one knows what is usual.
const FEW: u32 = 4;
/// Times over which the usual one is averaged.
const MANY: u32 = 32;

/// Least time, by default, after which a thing that was done before is lost.
pub const LOST_PATIENCE: Duration = Duration::from_secs(60);
/// Ratio to the longest time so far below which nothing that was done before is lost, within [`MOST_PATIENCE`]: what takes a hundred
/// times as long is slow, and goes on.
const LOST_FACTOR: u32 = 1000;
/// Multiple of the least time that anything may take on any machine.
const MOST_PATIENCES: u32 = 5;
/// Ratio to the longest time so far below which nothing is lost, however long.
const ANY_FACTOR: u32 = 10;

/// Times of one sort of things (parts of passes, messages on a way), apart for each order of magnitude of their sizes.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    kinds: BTreeMap<u32, Kind>,
    /// Since when each thing has been slow.
    slow_since: Option<Instant>,
    /// When the last one ended.
    ended: Option<Instant>,
}

/// Things of about one size.
#[derive(Clone, Copy, Debug, Default)]
struct Kind {
    times: u32,
    usual: Duration,
    longest: Duration,
}

/// How long the present thing has taken, and others of its kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// So far.
    pub present: Duration,
    /// Usually; `None` as long as one does not know.
    pub usual: Option<Duration>,
    /// At most; `None` for the first one.
    pub longest: Option<Duration>,
    /// Time for which each thing, this one included, has taken at least ten times as long as usual.
    pub slow: Duration,
}

impl Times {
    /// Whether it is worth telling people.
    pub fn is_slow(&self) -> bool {
        self.slow >= SLOW_PATIENCE
    }

    /// Whether it will not end, where what was done before gets at least `patience`.
    pub fn is_lost(&self, patience: Duration) -> bool {
        self.present >= lost_after(self.longest, patience)
    }
}

/// Time after which a thing will not end whose longest time so far is known, or `None` for the first of its kind.
pub fn lost_after(longest: Option<Duration>, patience: Duration) -> Duration {
    let most = patience * MOST_PATIENCES;
    let Some(longest) = longest else {
        return most;
    };
    let most = most.max(longest.saturating_mul(ANY_FACTOR));
    let long = longest.saturating_mul(LOST_FACTOR);
    long.clamp(patience, most)
}

impl Pace {
    /// Notes that a thing begins: nothing is known of the time between this one and the last, if that was long.
    pub fn begin(&mut self, now: Instant) {
        let idle = self.ended.map(|at| now.saturating_duration_since(at));
        if idle.is_some_and(|idle| idle >= SLOW_PATIENCE) {
            self.slow_since = None;
        }
    }

    /// Notes that a thing of this size took so long, until now.
    pub fn end(&mut self, size: usize, took: Duration, now: Instant) {
        self.ended = Some(now);
        let kind = self.kinds.entry(magnitude(size)).or_default();
        let is_slow = kind.is_slow(took);
        kind.longest = kind.longest.max(took);
        // What is slow does not become usual, but for the first few.
        if !is_slow {
            kind.times = kind.times.saturating_add(1);
            let weight = kind.times.min(MANY);
            kind.usual = (kind.usual * (weight - 1) + took) / weight;
        }
        self.slow_since = match is_slow {
            true => self.slow_since.or_else(|| now.checked_sub(took)),
            false => None,
        };
    }

    /// Times of the present thing, which is of this size and has taken so long.
    pub fn times(&self, size: usize, present: Duration, now: Instant) -> Times {
        let kind = self.kinds.get(&magnitude(size)).copied();
        let kind = kind.unwrap_or_default();
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let before = since(self.slow_since);
        let is_slow = kind.is_slow(present);
        Times {
            present,
            usual: kind.known_usual(),
            longest: (kind.times > 0).then_some(kind.longest),
            slow: match is_slow {
                true => before.unwrap_or_default().max(present),
                false => before.unwrap_or_default(),
            },
        }
    }
}

impl Kind {
    fn known_usual(&self) -> Option<Duration> {
        (self.times >= FEW).then_some(self.usual)
    }

    fn is_slow(&self, took: Duration) -> bool {
        let limit = match self.known_usual() {
            Some(usual) => usual.saturating_mul(SLOW_FACTOR).max(LEAST_SLOW),
            None => FIRST_PATIENCE,
        };
        took >= limit
    }
}

/// Things of one magnitude are alike: each is less than twice as large as any other.
fn magnitude(size: usize) -> u32 {
    size.max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    /// What is known after these things of one size, one directly after the other, and when the last one ended.
    fn after(took: &[(u32, Duration)]) -> (Pace, Instant) {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        for (times, took) in took {
            for _ in 0..*times {
                pace.begin(now);
                now += *took;
                pace.end(1, *took, now);
            }
        }
        (pace, now)
    }

    #[test]
    fn what_takes_a_hundred_times_as_long_again_and_again_is_slow_and_not_lost() {
        let (pace, now) = after(&[(20, 30 * MS), (1, 3 * SECOND)]);
        assert!(!pace.times(1, MS, now).is_slow(), "one alone may be chance");
        let (pace, now) = after(&[(20, 30 * MS), (50, 3 * SECOND)]);
        let times = pace.times(1, MS, now);
        assert!(times.is_slow(), "{times:?}");
        assert_eq!(times.slow, 150 * SECOND);
        assert_eq!(times.usual, Some(30 * MS));
        assert!(!pace.times(1, 3 * SECOND, now).is_lost(LOST_PATIENCE));
        // One that is fast again ends it.
        let (pace, now) = after(&[(20, 30 * MS), (50, 3 * SECOND), (1, 40 * MS)]);
        assert!(!pace.times(1, MS, now).is_slow());
    }

    #[test]
    fn one_that_does_not_end_is_slow_and_then_lost() {
        let (pace, now) = after(&[(20, 30 * MS)]);
        let at = |present: Duration| pace.times(1, present, now + present);
        assert!(!at(4 * SECOND).is_slow() && at(5 * SECOND).is_slow());
        assert!(!at(59 * SECOND).is_lost(LOST_PATIENCE) && at(60 * SECOND).is_lost(LOST_PATIENCE));
    }

    #[test]
    fn first_passes_and_long_prompts_are_neither() {
        // The first pass reads weights from a disk; the next ones do not.
        let (pace, now) = after(&[(1, 100 * SECOND), (40, 30 * MS)]);
        assert!(!pace.times(1, MS, now).is_slow());
        let first = Pace::default().times(1, 100 * SECOND, now);
        assert!(!first.is_slow() && !first.is_lost(LOST_PATIENCE));
        // A long prompt among answers: nothing is known of its size.
        let long = pace.times(1024, 140 * SECOND, now);
        assert!(!long.is_slow() && !long.is_lost(LOST_PATIENCE));
        assert!(pace.times(1024, 300 * SECOND, now).is_lost(LOST_PATIENCE));
    }

    #[test]
    fn what_was_slow_before_a_pause_is_not_held_against_the_next() {
        let (mut pace, now) = after(&[(20, 30 * MS), (10, 3 * SECOND)]);
        let later = now + 3600 * SECOND;
        pace.begin(later);
        assert!(!pace.times(1, 200 * MS, later + 200 * MS).is_slow());
    }

    #[test]
    fn nothing_is_lost_before_ten_times_its_longest() {
        let limits = [
            (None, 300),
            (Some(10 * MS), 60),
            (Some(100 * MS), 100),
            (Some(2 * SECOND), 300),
            (Some(60 * SECOND), 600),
        ];
        for (longest, want) in limits {
            let got = lost_after(longest, LOST_PATIENCE);
            assert_eq!(got.as_secs(), want, "{longest:?}");
        }
    }
}
