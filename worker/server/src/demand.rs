//! The load as it arrives, before a worker is found for it, and who reads its prompts: what an autoscaler needs that the work which is
//! done does not show.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::router::Role;

/// Upper bounds of the lengths of prompts, in tokens.
const PROMPT_TOKENS: [f64; 14] = [
    16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 32_768.0,
    65_536.0, 131_072.0,
];

/// Number of those who may watch the load at a time: operators, of which one leads.
const MOST_WATCHES: usize = 8;

/// Time between two looks of those who watch while there are choices, and while there are none.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(4));
/// The least time between two looks, however choices arrive.
const LEAST_PAUSE: Duration = Duration::from_millis(200);

/// Counts by the role of the workers that read the prompts.
type ByReader = Family<[(&'static str, &'static str); 1], Counter>;

/// Choices that arrived, and those of them that are not answered yet.
pub(crate) struct Demand {
    arrived: Histogram,
    read: ByReader,
    read_tokens: ByReader,
    open: Arc<Open>,
}

#[derive(Debug)]
struct Open {
    /// Number of choices that have no token yet.
    unanswered: watch::Sender<usize>,
    activity: Mutex<Activity>,
    /// Places of those who watch.
    watches: Arc<Semaphore>,
}

#[derive(Clone, Copy, Debug)]
struct Activity {
    /// Number of choices that have not ended.
    choices: usize,
    /// Time at which the last of them ended.
    idle_since: Instant,
}

impl Demand {
    /// Creates the metrics and registers them.
    pub(crate) fn new(registry: &mut Registry) -> Self {
        let demand = Self {
            arrived: Histogram::new(PROMPT_TOKENS),
            read: ByReader::default(),
            read_tokens: ByReader::default(),
            open: Arc::new(Open {
                unanswered: watch::Sender::new(0),
                activity: Mutex::new(Activity {
                    choices: 0,
                    idle_since: Instant::now(),
                }),
                watches: Arc::new(Semaphore::new(MOST_WATCHES)),
            }),
        };
        registry.register(
            "hearth_arrived_prompt_tokens",
            "Prompt tokens of choices when they arrive, also of those that are refused because the queue is full",
            demand.arrived.clone(),
        );
        registry.register(
            "hearth_prompts_read",
            "Prompts of started choices by the role of the workers that read them",
            demand.read.clone(),
        );
        registry.register(
            "hearth_prompts_read_tokens",
            "Tokens of these prompts, those whose KV was reused among them",
            demand.read_tokens.clone(),
        );
        // Zeros say that there were none; without them nobody would know.
        for counts in [&demand.read, &demand.read_tokens] {
            for role in [Role::Prefill, Role::Decode] {
                drop(counts.get_or_create(&[("role", role.as_str())]));
            }
        }
        registry.register_collector(Box::new(Scrape(Arc::clone(&demand.open))));
        demand
    }

    /// Counts a choice that arrives, as without a token and as open; each count falls when its guard is dropped.
    pub(crate) fn arrived(&self, prompt_tokens: usize) -> (UnansweredGuard, OpenGuard) {
        self.arrived.observe(prompt_tokens as f64);
        self.open.activity().choices += 1;
        self.open.unanswered.send_modify(|count| *count += 1);
        let guards = [Arc::clone(&self.open), Arc::clone(&self.open)];
        let [unanswered, open] = guards;
        (UnansweredGuard(unanswered), OpenGuard(open))
    }

    /// Counts a choice that has started, whose prompt a worker of this role reads.
    pub(crate) fn started(&self, reader: Role, prompt_tokens: usize) {
        let labels = [("role", reader.as_str())];
        self.read.get_or_create(&labels).inc();
        let tokens = self.read_tokens.get_or_create(&labels);
        tokens.inc_by(prompt_tokens as u64);
    }

    /// Number of choices that have not ended.
    pub(crate) fn choices(&self) -> usize {
        self.open.activity().choices
    }

    /// Watches the load; `None` if many do already.
    pub(crate) fn watch(&self) -> Option<Watch> {
        let place = Arc::clone(&self.open.watches).try_acquire_owned().ok()?;
        Some(Watch {
            open: Arc::clone(&self.open),
            unanswered: self.open.unanswered.subscribe(),
            looked: None,
            _place: place,
        })
    }
}

impl Open {
    fn activity(&self) -> std::sync::MutexGuard<'_, Activity> {
        // Each change is complete before anything can panic.
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One who watches the load.
pub(crate) struct Watch {
    open: Arc<Open>,
    unanswered: watch::Receiver<usize>,
    /// Time of the last look, and whether a choice was without a token then.
    looked: Option<(Instant, bool)>,
    _place: OwnedSemaphorePermit,
}

impl Watch {
    /// Waits until the load is to be looked at: not at all the first time, then until a choice is without a token where none was, and
    /// for [`LOOK_EVERY`] at most.
    pub(crate) async fn due(&mut self) {
        if let Some((at, was_waiting)) = self.looked {
            let (busy, idle) = LOOK_EVERY;
            let is_busy = self.open.activity().choices > 0;
            let arrives = async {
                // The sender is held here, so that these end with a choice alone.
                if was_waiting {
                    drop(self.unanswered.wait_for(|count| *count == 0).await);
                }
                drop(self.unanswered.wait_for(|count| *count > 0).await);
                sleep_until(at + LEAST_PAUSE).await;
            };
            let _ = timeout_at(at + if is_busy { busy } else { idle }, arrives).await;
        }
        let is_waiting = *self.unanswered.borrow_and_update() > 0;
        self.looked = Some((Instant::now(), is_waiting));
    }
}

/// Counts a choice without a token while it lives.
pub(crate) struct UnansweredGuard(Arc<Open>);

impl Drop for UnansweredGuard {
    fn drop(&mut self) {
        self.0.unanswered.send_modify(|count| *count -= 1);
    }
}

/// Counts a choice that has not ended while it lives.
pub(crate) struct OpenGuard(Arc<Open>);

impl Drop for OpenGuard {
    fn drop(&mut self) {
        let mut activity = self.0.activity();
        activity.choices -= 1;
        activity.idle_since = Instant::now();
    }
}

/// What is read at each scrape.
#[derive(Debug)]
struct Scrape(Arc<Open>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let activity = *self.0.activity();
        let idle_s = match activity.choices {
            0 => activity.idle_since.elapsed().as_secs_f64(),
            _ => 0.0,
        };
        let unanswered = *self.0.unanswered.borrow() as f64;
        for (name, help, value) in [
            (
                "hearth_choices_unanswered",
                "Choices that have arrived and have no token yet",
                unanswered,
            ),
            (
                "hearth_idle_seconds",
                "Time since the last choice ended, or since the start; 0 while there is one",
                idle_s,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(registry: &Registry, name: &str) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        let mut lines = text.lines();
        let line = lines.find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap().split_once(' ').unwrap().1.to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn time_without_a_choice_is_counted_from_the_end_of_the_last() {
        let mut registry = Registry::default();
        let demand = Demand::new(&mut registry);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(text(&registry, "hearth_idle_seconds"), "3.0");
        let (unanswered, open) = demand.arrived(5);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(text(&registry, "hearth_choices_unanswered"), "1.0");
        drop(unanswered);
        assert_eq!(text(&registry, "hearth_choices_unanswered"), "0.0");
        assert_eq!(text(&registry, "hearth_idle_seconds"), "0.0");
        drop(open);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(text(&registry, "hearth_idle_seconds"), "2.0");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_watches_looks_when_something_arrives_and_now_and_then() {
        let demand = Demand::new(&mut Registry::default());
        let mut watch = demand.watch().unwrap();
        let began = Instant::now();
        let look = async |watch: &mut Watch| {
            watch.due().await;
            began.elapsed().as_millis()
        };
        assert_eq!(look(&mut watch).await, 0);
        assert_eq!(look(&mut watch).await, 4000);
        let arrive = async |after_ms| {
            tokio::time::sleep(Duration::from_millis(after_ms)).await;
            demand.arrived(5)
        };
        let (at, (unanswered, open)) = tokio::join!(look(&mut watch), arrive(500));
        assert_eq!(at, 4500);
        // What waits still, and what comes besides, is seen at the next look.
        let (at, besides) = tokio::join!(look(&mut watch), arrive(100));
        assert_eq!(at, 5500);
        drop(besides);
        drop(unanswered);
        assert_eq!(look(&mut watch).await, 6500);
        // One after the other: not more often than that.
        let (at, next) = tokio::join!(look(&mut watch), arrive(10));
        assert_eq!(at, 6700);
        drop((next, open));
        assert_eq!(look(&mut watch).await, 10_700);
        // One that waited at the last look, and has ended since, hides none that comes after it.
        let (at, ended) = tokio::join!(look(&mut watch), arrive(100));
        assert_eq!(at, 10_900);
        drop(ended);
        let (at, _next) = tokio::join!(look(&mut watch), arrive(500));
        assert_eq!(at, 11_400);
    }

    #[tokio::test]
    async fn only_so_many_watch() {
        let demand = Demand::new(&mut Registry::default());
        let watches: Vec<_> = (0..MOST_WATCHES).map(|_| demand.watch()).collect();
        assert!(watches.iter().all(Option::is_some) && demand.watch().is_none());
        drop(watches);
        assert!(demand.watch().is_some());
    }
}
