//! The least memory that was available on the node in the last minutes.

use std::time::{Duration, Instant};

/// Time after which a new span begins: the operator asks as often, so that it hears of each.
const SPAN: Duration = Duration::from_secs(60);

/// What the node could spare in this span and in the one before.
#[derive(Debug, Default)]
pub(super) struct Spare {
    now: Option<Span>,
    before: Option<Span>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    since: Instant,
    least_bytes: u64,
}

impl Spare {
    /// Notes what is available at `now`.
    pub(super) fn note(&mut self, available_bytes: u64, now: Instant) {
        match &mut self.now {
            Some(span) if now.duration_since(span.since) < SPAN => {
                span.least_bytes = span.least_bytes.min(available_bytes);
            }
            _ => {
                // What was noted long ago, before a pause, says nothing about the last minutes.
                let recent = |span: &Span| now.duration_since(span.since) < 2 * SPAN;
                self.before = self.now.take().filter(recent);
                self.now = Some(Span {
                    since: now,
                    least_bytes: available_bytes,
                });
            }
        }
    }

    /// The least that was noted in bytes, and for how many seconds it has been watched; `None` if nothing was noted.
    pub(super) fn least(&self, now: Instant) -> Option<(u64, u32)> {
        let spans = || self.before.iter().chain(&self.now);
        let least_bytes = spans().map(|span| span.least_bytes).min()?;
        let since = spans().map(|span| span.since).min()?;
        let seconds = now.duration_since(since).as_secs();
        Some((least_bytes, u32::try_from(seconds).unwrap_or(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_the_last_minutes_is_told_and_then_forgotten() {
        let start = Instant::now();
        let mut spare = Spare::default();
        assert_eq!(spare.least(start), None);
        let mut after = |second, bytes| {
            let now = start + Duration::from_secs(second);
            spare.note(bytes, now);
            spare.least(now)
        };
        assert_eq!(after(0, 800), Some((800, 0)));
        assert_eq!(after(30, 300), Some((300, 30)));
        assert_eq!(after(59, 900), Some((300, 59)));
        // Whoever asks once a minute hears of what was the least in it.
        assert_eq!(after(89, 900), Some((300, 89)));
        assert_eq!(after(119, 900), Some((300, 119)));
        assert_eq!(after(150, 850), Some((850, 61)));
        assert_eq!(after(600, 950), Some((950, 0)));
    }
}
