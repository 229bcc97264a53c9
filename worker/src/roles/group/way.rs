//! What this member has sent to another and has not arrived there yet: its measure, and its limit.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearth_parallel::{GroupError, Pace, Times};
use hearth_transport::v1;

/// Time between two questions whether a sender waits in vain.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
/// Part of a message on a slow way, and where the rate is not known yet: a frame of HTTP/2. Smaller ones would be in the way of a member
/// that has hardly any CPU.
const LEAST_PIECE_BYTES: usize = 16 << 10;
const MOST_PIECE_BYTES: usize = 64 << 10;
/// Time that a part of a message takes at the rate of the message before: its arrival is a sign of life, also where the way is suddenly
/// a hundred times slower.
const PIECE_PERIOD: Duration = Duration::from_millis(20);
/// Time from which on a message that is smaller than a part tells of the rate, too, not of the latency alone.
const LONG: Duration = Duration::from_secs(1);

/// Messages on one way. The receiver tells what has come ([`v1::Received`]).
#[derive(Default)]
pub(super) struct Way {
    state: Mutex<State>,
    has_changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes that were sent, with one more for each message: also empty ones arrive.
    sent: u64,
    /// How many of these have arrived.
    arrived: u64,
    messages: VecDeque<Sent>,
    /// When the first of them was sent, or the one before it arrived.
    first_since: Option<Instant>,
    /// When something arrived last, or the first message was sent.
    moved: Option<Instant>,
    pace: Pace,
    /// Bytes per second of the message that arrived last.
    rate: Option<f64>,
}

struct Sent {
    /// Of all that was sent, the part up to its end.
    end: u64,
    bytes: usize,
    at: Instant,
}

impl Way {
    /// Notes that a message of so many bytes is sent, once no more than `most_bytes` are under way with it, or nothing else is: the
    /// sender waits meanwhile, so that a slow way slows the rank down instead of filling its memory. `lost` says why to wait no longer.
    ///
    /// # Errors
    /// What `lost` says.
    pub(super) fn send(
        &self,
        bytes: usize,
        most_bytes: usize,
        lost: impl Fn() -> Option<GroupError>,
    ) -> Result<(), GroupError> {
        let mut state = self.lock();
        loop {
            let waiting = state.sent - state.arrived;
            if waiting == 0 || waiting.saturating_add(bytes as u64) <= most_bytes as u64 {
                break;
            }
            if let Some(error) = lost() {
                return Err(error);
            }
            let waited = self.has_changed.wait_timeout(state, CHECK_PERIOD);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = Instant::now();
        if state.messages.is_empty() {
            state.first_since = Some(now);
            state.moved = Some(now);
            state.pace.begin(now);
        }
        state.sent += bytes as u64 + 1;
        let end = state.sent;
        state.messages.push_back(Sent {
            end,
            bytes,
            at: now,
        });
        Ok(())
    }

    /// Notes that so much has arrived of all that was sent. A receiver that says more than that counts as one that has all.
    pub(super) fn arrived(&self, bytes: u64) {
        let mut state = self.lock();
        if bytes > state.arrived {
            let arrived = bytes.min(state.sent);
            state.arrive(arrived, Instant::now());
            drop(state);
            self.has_changed.notify_all();
        }
    }

    /// Bytes of a message that are sent as one parcel: fewer where the way is slow.
    pub(super) fn piece_bytes(&self) -> usize {
        let rate = self.lock().rate;
        rate.map_or(LEAST_PIECE_BYTES, |rate| {
            let bytes = (rate * PIECE_PERIOD.as_secs_f64()) as usize;
            bytes.clamp(LEAST_PIECE_BYTES, MOST_PIECE_BYTES)
        })
    }

    /// What is under way, for the head; `None`: nothing.
    pub(super) fn told(&self, to: usize) -> Option<v1::Way> {
        let (state, now) = (self.lock(), Instant::now());
        let first = state.messages.front()?;
        let since = |at: Option<Instant>| now.saturating_duration_since(at.unwrap_or(now));
        let present = since(state.first_since);
        Some(v1::Way {
            to: to as u32,
            bytes: state.sent - state.arrived,
            times: Some(told(&state.pace.times(first.bytes, present, now))),
            still_us: since(state.moved).as_micros() as u64,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn arrive(&mut self, arrived: u64, now: Instant) {
        self.arrived = arrived;
        self.moved = Some(now);
        while let Some(first) = self.messages.front()
            && first.end <= arrived
        {
            // What waited behind another message was not late for it.
            let since = self.first_since.map_or(first.at, |at| at.max(first.at));
            let took = now.saturating_duration_since(since);
            self.pace.end(first.bytes, took, now);
            let tells_rate = first.bytes >= LEAST_PIECE_BYTES || took >= LONG;
            if tells_rate && !took.is_zero() {
                self.rate = Some(first.bytes as f64 / took.as_secs_f64());
            }
            self.messages.pop_front();
            self.first_since = Some(now);
        }
    }
}

/// Times for the head.
pub(super) fn told(times: &Times) -> v1::Times {
    let micros = |time: Duration| time.as_micros() as u64;
    v1::Times {
        present_us: micros(times.present),
        usual_us: times.usual.map(micros),
        longest_us: times.longest.map(micros),
        slow_us: micros(times.slow),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn lives() -> Option<GroupError> {
        None
    }

    #[test]
    fn a_sender_waits_while_more_is_under_way_than_may_wait() {
        let way = Arc::new(Way::default());
        way.send(60, 100, lives).unwrap();
        way.send(30, 100, lives).unwrap();
        let (sending, begun) = (Arc::clone(&way), Instant::now());
        let waits = std::thread::spawn(move || {
            sending.send(30, 100, lives).unwrap();
            begun.elapsed()
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!waits.is_finished());
        assert_eq!(way.told(1).unwrap().bytes, 92);
        way.arrived(61);
        let waited = waits.join().unwrap();
        assert!(
            waited >= Duration::from_millis(200) && waited < PATIENCE,
            "{waited:?}"
        );
        assert_eq!(way.told(1).unwrap().bytes, 62);
        way.arrived(u64::MAX);
        assert!(way.told(1).is_none());
        // One that is larger than all that may wait goes alone.
        way.send(500, 100, lives).unwrap();
    }

    #[test]
    fn a_sender_whose_group_is_over_waits_no_longer() {
        let way = Way::default();
        way.send(100, 100, lives).unwrap();
        let over = way.send(1, 100, || Some(GroupError::Left));
        assert_eq!(over, Err(GroupError::Left));
    }

    #[test]
    fn parts_are_smaller_on_a_slow_way() {
        let way = Way::default();
        let arrives_after = |bytes, ms| {
            way.send(bytes, 1 << 20, lives).unwrap();
            std::thread::sleep(Duration::from_millis(ms));
            way.arrived(u64::MAX);
        };
        assert_eq!(way.piece_bytes(), LEAST_PIECE_BYTES);
        arrives_after(16 << 20, 1);
        assert_eq!(way.piece_bytes(), MOST_PIECE_BYTES);
        // At most 2 MB/s.
        arrives_after(200_000, 100);
        let slower = way.piece_bytes();
        assert!((LEAST_PIECE_BYTES..=40_000).contains(&slower), "{slower}");
        // Latency.
        arrives_after(1000, 100);
        assert_eq!(way.piece_bytes(), slower);
        arrives_after(1000, 1000);
        assert_eq!(way.piece_bytes(), LEAST_PIECE_BYTES);
    }

    #[test]
    fn a_message_that_arrives_in_parts_moves_and_is_not_there_yet() {
        let way = Way::default();
        way.send(100, 1000, lives).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        way.arrived(50);
        let told = way.told(2).unwrap();
        let times = told.times.unwrap();
        assert!(
            times.present_us >= 60_000 && told.still_us < times.present_us,
            "{told:?}"
        );
        assert_eq!((told.to, told.bytes, times.longest_us), (2, 51, None));
    }
}
