//! The rate of all downloads of a process together: a token bucket.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time whose bytes may arrive at once after a pause.
const BURST: Duration = Duration::from_millis(250);

/// A limit that downloads share. Each waits for its turn after what it received, so that the server is slowed down by
/// TCP's own flow control.
#[derive(Debug)]
pub struct Throttle {
    bytes_per_second: NonZeroU64,
    bucket: Mutex<Bucket>,
}

impl Throttle {
    /// Allows as many bytes a second to all downloads together.
    pub fn new(bytes_per_second: NonZeroU64) -> Self {
        Self {
            bytes_per_second,
            bucket: Mutex::default(),
        }
    }

    /// Waits until the bytes that have arrived are within the limit.
    pub(crate) async fn take(&self, bytes: u64) {
        let wait = self.wait(bytes, Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }

    fn wait(&self, bytes: u64, now: Instant) -> Duration {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(bytes, self.bytes_per_second, now)
    }
}

/// When everything taken so far is paid for.
#[derive(Debug, Default)]
struct Bucket {
    paid_at: Option<Instant>,
}

impl Bucket {
    /// Takes bytes, and returns the wait until they are paid for.
    fn take(&mut self, bytes: u64, bytes_per_second: NonZeroU64, now: Instant) -> Duration {
        let costs = Duration::from_secs_f64(bytes as f64 / bytes_per_second.get() as f64);
        // A pause saves up at most one burst.
        let saved = now.checked_sub(BURST).unwrap_or(now);
        let paid_at = self.paid_at.map_or(saved, |paid_at| paid_at.max(saved)) + costs;
        self.paid_at = Some(paid_at);
        paid_at.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_share_the_rate_and_a_pause_saves_up_one_burst() {
        let throttle = Throttle::new(NonZeroU64::new(1000).unwrap());
        let start = Instant::now() + Duration::from_secs(60);
        let wait = |bytes, after_ms| {
            throttle
                .wait(bytes, start + Duration::from_millis(after_ms))
                .as_millis()
        };
        // 250 bytes are free at first, then each byte costs a millisecond, whoever takes it.
        assert_eq!([wait(250, 0), wait(100, 0), wait(400, 0)], [0, 100, 500]);
        assert_eq!(wait(100, 500), 100);
        assert_eq!(wait(0, 600), 0);
        // After an hour there is no more than a burst.
        assert_eq!([wait(250, 3_600_000), wait(1000, 3_600_000)], [0, 1000]);
    }

    #[test]
    fn what_is_taken_over_any_time_keeps_the_rate() {
        let throttle = Throttle::new(NonZeroU64::new(1 << 20).unwrap());
        let start = Instant::now() + Duration::from_secs(60);
        let mut now = start;
        for at in 0..1000_u64 {
            now += throttle.wait(1 + (at * 7919) % 16_384, now);
        }
        let bytes: u64 = (0..1000_u64).map(|at| 1 + (at * 7919) % 16_384).sum();
        let took = (now - start + BURST).as_secs_f64();
        let rate = bytes as f64 / took / f64::from(1 << 20);
        assert!((0.99..=1.01).contains(&rate), "{rate}");
    }
}
