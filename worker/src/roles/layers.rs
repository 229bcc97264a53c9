//! Detection of stuck compute threads.
//!
//! The gateway checks whether a process responds; its checks are answered on a separate thread, so a long step on a
//! slow machine does not count as a hang. It cannot detect a computation that never ends: that shows as one layer
//! taking longer than any layer should, and the process then ends itself.

use std::time::Duration;

use crate::logging;

/// Time that a layer of a forward pass may take on any machine.
const LONGEST: Duration = Duration::from_secs(300);
/// Largest allowed ratio to the longest completed layer.
const FACTOR: u32 = 10;

/// Observations of layers, from repeated checks.
#[derive(Debug, Default)]
pub(super) struct Layers {
    longest_done: Duration,
    present: Duration,
}

impl Layers {
    /// Ends the process if it is stuck; nothing else would, since the compute threads never finish.
    pub(super) fn end_if_stuck(&mut self, at_layer_for: Option<Duration>) {
        if self.is_stuck(at_layer_for) {
            logging::say_last(format_args!(
                "the computation stands still: it has been at one layer for {} s, and the longest before took {:.1} s\n  \
                 the supervisor restarts this worker",
                self.present.as_secs(),
                self.longest_done.as_secs_f64()
            ));
            std::process::exit(1);
        }
    }

    fn is_stuck(&mut self, at_layer_for: Option<Duration>) -> bool {
        let now = at_layer_for.unwrap_or_default();
        if now < self.present {
            // A new layer: the one at the last check took at least as long as was observed.
            self.longest_done = self.longest_done.max(self.present);
        }
        self.present = now;
        now >= LONGEST.max(self.longest_done * FACTOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn a_layer_that_never_ends_is_found_and_a_long_one_is_not() {
        let mut layers = Layers::default();
        let mut first = (1..1000).filter(|time| layers.is_stuck(seconds(*time)));
        assert_eq!(first.next(), Some(300));
        // A machine on which a layer takes a minute.
        let mut slow = Layers::default();
        for _ in 0..3 {
            assert!((1..=60).all(|time| !slow.is_stuck(seconds(time))));
            assert!(!slow.is_stuck(None));
        }
        let mut late = (1..1000).filter(|time| slow.is_stuck(seconds(*time)));
        assert_eq!(late.next(), Some(600));
    }
}
