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
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};

use crate::router::Role;

/// Upper bounds of the lengths of prompts, in tokens.
const PROMPT_TOKENS: [f64; 14] = [
    16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 32_768.0,
    65_536.0, 131_072.0,
];

/// Number of those who may wait for choices at a time: operators, of which one leads.
const MOST_WAITS: usize = 8;

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
    /// Those who wait for choices at a time.
    waits: Semaphore,
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
                waits: Semaphore::new(MOST_WAITS),
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

    /// Waits until there is a choice without a token, `patience` at most, and not at all if many do already; the number of these.
    pub(crate) async fn unanswered(&self, patience: Duration) -> usize {
        let mut counts = self.open.unanswered.subscribe();
        let Ok(_wait) = self.open.waits.try_acquire() else {
            return *counts.borrow();
        };
        // The sender is here, so that nothing but the time ends it.
        match timeout(patience, counts.wait_for(|count| *count > 0)).await {
            Ok(Ok(count)) => *count,
            Ok(Err(_)) | Err(_) => 0,
        }
    }
}

impl Open {
    fn activity(&self) -> std::sync::MutexGuard<'_, Activity> {
        // Each change is complete before anything can panic.
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
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
    async fn whoever_waits_for_choices_learns_of_them_at_once() {
        let demand = Demand::new(&mut Registry::default());
        let patience = Duration::from_secs(20);
        assert_eq!(demand.unanswered(patience).await, 0);
        let began = Instant::now();
        let (count, _guards) = tokio::join!(demand.unanswered(patience), async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            demand.arrived(5)
        });
        assert_eq!((count, began.elapsed().as_secs()), (1, 1));
    }
}
