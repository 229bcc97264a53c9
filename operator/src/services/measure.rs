//! Measurements that the gateways' `/metrics` have, scraped or pushed: latencies as medians over the last few minutes, and the
//! resources that their workers got from the machines.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use hearth_controller_core::key::Key;
use hearth_controller_core::observed::Measured;
use hearth_controller_core::observed::placement::{self, Placement};
use tokio::time::Instant;

use super::demand::Loads;
use super::scrape::Client;
use crate::exposition::{TPOT, TTFT};

/// Interval at which gateways are scraped.
const EVERY: Duration = Duration::from_secs(30);
/// Interval for gateways with a worker that is no longer ready, as they know whether it hangs, with the second rank of a Pod, as
/// they alone know whether it is ready, or with a group, as its head knows first whether that is whole.
const EVERY_IN_DOUBT: Duration = Duration::from_secs(2);
/// Time window of the medians.
const WINDOW: Duration = Duration::from_secs(5 * 60);
/// Time after which an unseen gateway is considered gone.
const FORGOTTEN: Duration = Duration::from_secs(3600);
/// Number of gateways scraped concurrently.
const CONCURRENCY: usize = 16;
/// Time between two of the samples that are kept of a gateway; the newest besides.
const THINNED: Duration = Duration::from_secs(4);
/// The most bounds of a histogram that are read: more than gateways have.
const MOST_BOUNDS: usize = 64;
/// Share by which a median must move to count as changed.
const NEWS: f64 = 0.1;

/// Gateways known to the operator's cache.
pub(crate) trait Gateways: Send + Sync + 'static {
    /// Ready gateways: their deployment, the Pod's uid and its address.
    fn gateways(&self) -> Vec<(Key, String, String)>;
    /// The same of some deployments, with the uids of those of their gateways that were listed before.
    fn gateways_of(&self, known: &BTreeMap<Key, BTreeSet<String>>) -> Vec<(Key, String, String)>;
    /// Ready gateways of deployments that have a worker which was ready, still runs, and is no longer ready, a Pod with a second
    /// rank, or a stage.
    fn in_doubt(&self) -> Vec<(Key, String, String)>;
    /// Queues a deployment, since its measurements have changed.
    fn wake(&self, deployment: &Key);
}

/// Latencies by deployment. One task runs [`Measures::run`]; the others read them.
#[derive(Debug, Default)]
pub(crate) struct Measures {
    /// Loads that pools follow.
    pub(crate) loads: Loads,
    deployments: Mutex<BTreeMap<Key, Deployment>>,
}

#[derive(Debug, Default)]
struct Deployment {
    /// Histories by uid of the gateway's Pod.
    gateways: BTreeMap<String, History>,
    told: Option<Measured>,
    /// Placements of its workers, by worker address.
    placements: BTreeMap<SocketAddr, Placement>,
}

impl Measures {
    /// Recent measurements of a deployment's gateways; `None` before the first request.
    pub(crate) fn measured(&self, deployment: &Key) -> Option<Measured> {
        self.lock().get(deployment).and_then(|known| known.told)
    }

    /// Resources that a deployment's workers got from their machines, by worker address.
    pub(crate) fn placements(&self, deployment: &Key) -> BTreeMap<SocketAddr, Placement> {
        let deployments = self.lock();
        let known = deployments.get(deployment);
        known.map_or_else(BTreeMap::new, |known| known.placements.clone())
    }

    /// Forgets a deployment that is gone.
    pub(crate) fn forget(&self, deployment: &Key) {
        self.lock().remove(deployment);
        self.loads.follow(deployment, false);
    }

    /// Scrapes all gateways repeatedly until it is dropped.
    pub(crate) async fn run<G: Gateways>(&self, gateways: &G) {
        let client = Client::new();
        let Ok(client) = client.inspect_err(|error| tracing::error!(%error, "no HTTP client"))
        else {
            return std::future::pending().await;
        };
        let mut ticks = tokio::time::interval(EVERY_IN_DOUBT);
        let mut all_due = Instant::now();
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let now = Instant::now();
            let asked = if now < all_due {
                gateways.in_doubt()
            } else {
                all_due = now + EVERY;
                gateways.gateways()
            };
            futures::stream::iter(asked)
                .for_each_concurrent(CONCURRENCY, |(deployment, uid, address)| {
                    let client = &client;
                    async move {
                        match client.metrics(&address).await {
                            Ok(text) => {
                                if self.learn(&deployment, &uid, &text, Instant::now()) {
                                    gateways.wake(&deployment);
                                }
                            }
                            Err(error) => {
                                tracing::debug!(%deployment, address, error, "no metrics")
                            }
                        }
                    }
                })
                .await;
        }
    }

    /// Stores a gateway's response; returns whether the measurements changed.
    pub(super) fn learn(&self, deployment: &Key, uid: &str, text: &str, now: Instant) -> bool {
        // Reconciles wait for the lock.
        let (sample, placements) = (Sample::read(text), placement::read(text));
        let mut deployments = self.lock();
        let known = deployments.entry(deployment.clone()).or_default();
        known.gateways.retain(|_, history| history.is_recent(now));
        let history = known.gateways.entry(uid.to_owned()).or_default();
        history.push(sample, now);
        history.placements = placements;
        let median = |part: fn(&Sample) -> &Buckets| {
            let recent = known
                .gateways
                .values()
                .map(|history| history.recent(part, now));
            let sum = recent.fold(Buckets::default(), Buckets::plus);
            sum.median_ms()
        };
        let (ttft_ms, tpot_ms) = (median(|sample| &sample.ttft), median(|sample| &sample.tpot));
        let before = known.told.unwrap_or_default();
        // Without recent requests, the last measurements still hold.
        let after = Measured {
            ttft_ms: steady(before.ttft_ms, ttft_ms),
            tpot_ms: steady(before.tpot_ms, tpot_ms),
        };
        // Gateways that are gone are remembered; the latest report wins.
        let mut told: Vec<&History> = known.gateways.values().collect();
        told.sort_by_key(|history| history.last);
        let placements: BTreeMap<SocketAddr, Placement> = told
            .into_iter()
            .flat_map(|history| history.placements.clone())
            .collect();
        let is_news = after != before || placements != known.placements;
        if after != before {
            known.told = Some(after);
        }
        known.placements = placements;
        is_news
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Deployment>> {
        self.deployments
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The new value, unless it is close to the old one.
fn steady(before: Option<f64>, after: Option<f64>) -> Option<f64> {
    match (before, after) {
        (Some(before), Some(after)) if (after - before).abs() <= before * NEWS => Some(before),
        (before, after) => after.or(before),
    }
}

/// Both histograms from one scrape.
#[derive(Clone, Debug, Default, PartialEq)]
struct Sample {
    ttft: Buckets,
    tpot: Buckets,
}

impl Sample {
    fn read(text: &str) -> Self {
        Self {
            ttft: Buckets::read(text, TTFT),
            tpot: Buckets::read(text, TPOT),
        }
    }
}

/// The relevant samples of one gateway: the newest before the window, and those in it.
#[derive(Debug, Default)]
struct History {
    samples: VecDeque<(Instant, Sample)>,
    last: Option<Instant>,
    /// Placements of its workers that it last reported.
    placements: BTreeMap<SocketAddr, Placement>,
}

impl History {
    fn push(&mut self, sample: Sample, now: Instant) {
        self.last = Some(now);
        let newest = self.samples.back();
        if newest.is_some_and(|(_, newest)| *newest == sample) {
            return self.drop_old(now);
        }
        let before = self.samples.iter().rev().nth(1);
        let is_close = before.is_some_and(|(at, _)| now.duration_since(*at) < THINNED);
        if is_close {
            self.samples.pop_back();
        }
        self.samples.push_back((now, sample));
        self.drop_old(now);
    }

    fn drop_old(&mut self, now: Instant) {
        while let Some((at, _)) = self.samples.get(1)
            && now.duration_since(*at) >= WINDOW
        {
            self.samples.pop_front();
        }
    }

    /// Whether the gateway may still exist.
    fn is_recent(&self, now: Instant) -> bool {
        self.last
            .is_none_or(|last| now.duration_since(last) < FORGOTTEN)
    }

    /// Counts within the window; all counts if the gateway was first seen in it.
    fn recent(&self, part: fn(&Sample) -> &Buckets, now: Instant) -> Buckets {
        let Some((_, newest)) = self.samples.back() else {
            return Buckets::default();
        };
        let is_older = |(at, _): &&(Instant, Sample)| now.duration_since(*at) >= WINDOW;
        let base = self.samples.iter().rev().find(is_older);
        let counted = part(newest).clone();
        match base {
            Some((_, base)) => counted.minus(part(base)),
            None => counted,
        }
    }
}

/// Upper bounds in seconds with cumulative counts, in ascending order.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Buckets(Vec<(f64, f64)>);

impl Buckets {
    /// Reads the histogram of this name from OpenMetrics or Prometheus text, summed over all labels.
    pub(super) fn read(text: &str, name: &str) -> Self {
        let mut counts: Vec<(f64, f64)> = Vec::new();
        for line in text.lines() {
            let Some((bound, count)) = bucket_line(line, name) else {
                continue;
            };
            let has_room = counts.len() < MOST_BOUNDS;
            match counts.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, sum)) => *sum += count,
                None if has_room => counts.push((bound, count)),
                None => {}
            }
        }
        counts.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        Self(counts)
    }

    pub(super) fn plus(mut self, other: Self) -> Self {
        if self.0.is_empty() {
            return other;
        }
        for (bound, count) in &mut self.0 {
            *count += other.up_to(*bound);
        }
        self
    }

    /// Counts since `base`; all of them if the gateway has restarted its counters since then.
    pub(super) fn minus(self, base: &Self) -> Self {
        if self
            .0
            .iter()
            .any(|(bound, count)| *count < base.up_to(*bound))
        {
            return self;
        }
        let rest = self
            .0
            .iter()
            .map(|(bound, count)| (*bound, count - base.up_to(*bound)));
        Self(rest.collect())
    }

    fn up_to(&self, bound: f64) -> f64 {
        let below = self.0.iter().take_while(|(known, _)| *known <= bound);
        below.last().map_or(0.0, |(_, count)| *count)
    }

    /// All that was counted.
    pub(super) fn total(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, count)| *count)
    }

    /// Mean of the squares, as if each value lay in the middle of its bucket; 0 without any counts.
    pub(super) fn mean_square(&self) -> f64 {
        let (mut low, mut below, mut sum) = (0.0, 0.0, 0.0);
        for (bound, count) in &self.0 {
            let end = if bound.is_finite() { *bound } else { low };
            let middle = (low + end) / 2.0;
            sum += (count - below) * middle * middle;
            (low, below) = (*bound, *count);
        }
        sum / self.total().max(1.0)
    }

    /// The median in milliseconds; `None` without any counts.
    fn median_ms(&self) -> Option<f64> {
        self.quantile(0.5).map(|seconds| seconds * 1e3)
    }

    /// The value that a share of the counts does not exceed, interpolated linearly within its bucket; `None` without any counts.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let total = self.total();
        if total <= 0.0 {
            return None;
        }
        let wanted = total * share;
        let (mut low_s, mut low_count) = (0.0, 0.0);
        for (bound, count) in &self.0 {
            if *count >= wanted {
                // Beyond the last finite bound, that bound is the best estimate.
                if bound.is_infinite() {
                    return Some(low_s);
                }
                let part = (wanted - low_count) / (count - low_count);
                return Some(low_s + (bound - low_s) * part);
            }
            (low_s, low_count) = (*bound, *count);
        }
        None
    }
}

/// Parses the bound and the count of a histogram line, such as `x_bucket{a="b",le="0.5"} 3`.
fn bucket_line(line: &str, name: &str) -> Option<(f64, f64)> {
    let labels = line.strip_prefix(name)?.strip_prefix("_bucket{")?;
    // A label value may contain braces and spaces: after the last brace comes the value, then an optional timestamp.
    let (labels, value) = match labels.split_once(" # ") {
        Some((labels, _exemplar)) => labels,
        None => labels,
    }
    .rsplit_once('}')?;
    let bound = labels
        .split_once("le=\"")
        .filter(|(before, _)| before.is_empty() || before.ends_with(','))
        .or_else(|| labels.rsplit_once(",le=\""))?
        .1;
    let bound = match bound.split('"').next()? {
        "+Inf" => f64::INFINITY,
        number => number.parse().ok()?,
    };
    let count: f64 = value.split_whitespace().next()?.parse().ok()?;
    (count.is_finite() && count >= 0.0).then_some((bound, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# HELP gen_ai_server_time_to_first_token_seconds From the whole request to the first token of a choice.
# TYPE gen_ai_server_time_to_first_token_seconds histogram
gen_ai_server_time_to_first_token_seconds_sum{gen_ai_operation_name="chat",gen_ai_request_model="m"} 1.5
gen_ai_server_time_to_first_token_seconds_count{gen_ai_operation_name="chat",gen_ai_request_model="m"} 4
gen_ai_server_time_to_first_token_seconds_bucket{le="0.1",gen_ai_operation_name="chat",gen_ai_request_model="m"} 1
gen_ai_server_time_to_first_token_seconds_bucket{le="0.5",gen_ai_operation_name="chat",gen_ai_request_model="m"} 3
gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf",gen_ai_operation_name="chat",gen_ai_request_model="m"} 4
gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_operation_name="text_completion",gen_ai_request_model="} le=",le="0.1"} 2
gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_operation_name="text_completion",gen_ai_request_model="} le=",le="0.5"} 2 # {} 0.4
gen_ai_server_time_to_first_token_seconds_bucket{gen_ai_operation_name="text_completion",gen_ai_request_model="} le=",le="+Inf"} 2
gen_ai_server_time_per_output_token_seconds_bucket{le="nonsense"} 7
hearth_requests_running 0
# EOF
"#;

    #[test]
    fn a_histogram_is_read_over_all_labels() {
        let sample = Sample::read(TEXT);
        assert_eq!(
            sample.ttft.0,
            [(0.1, 3.0), (0.5, 5.0), (f64::INFINITY, 6.0)]
        );
        assert_eq!(sample.tpot, Buckets::default());
        let line = |bound| format!("{TTFT}_bucket{{le=\"{bound}\"}} 1\n");
        let many: String = (1..=2 * MOST_BOUNDS).map(line).collect();
        assert_eq!(Sample::read(&many).ttft.0.len(), MOST_BOUNDS);
    }

    #[test]
    fn medians_lie_within_their_bucket() {
        let median = |counts: &[(f64, f64)]| Buckets(counts.to_vec()).median_ms().map(f64::round);
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[(0.1, 0.0), (f64::INFINITY, 0.0)]), None);
        assert_eq!(median(&[(0.1, 4.0), (f64::INFINITY, 4.0)]), Some(50.0));
        assert_eq!(
            median(&[(0.1, 1.0), (0.5, 3.0), (f64::INFINITY, 4.0)]),
            Some(300.0)
        );
        assert_eq!(median(&[(0.1, 1.0), (f64::INFINITY, 9.0)]), Some(100.0));
    }

    fn text(quick: u64, slow: u64) -> String {
        let bucket = |bound: &str, count| format!("{TTFT}_bucket{{le=\"{bound}\"}} {count}\n");
        [
            bucket("0.1", quick),
            bucket("1.0", quick + slow),
            bucket("+Inf", quick + slow),
        ]
        .concat()
    }

    /// Feeds scrapes of gateways, each a number of seconds after the start, and returns the last median.
    fn after(scrapes: &[(u64, &str, String)]) -> (Measures, Option<f64>, usize) {
        let (measures, demo, start) = (
            Measures::default(),
            Key::new("default", "demo"),
            Instant::now(),
        );
        let mut news = 0;
        for (second, gateway, text) in scrapes {
            let now = start + Duration::from_secs(*second);
            news += usize::from(measures.learn(&demo, gateway, text, now));
        }
        let told = measures
            .measured(&demo)
            .and_then(|measured| measured.ttft_ms.map(f64::round));
        (measures, told, news)
    }

    #[test]
    fn only_the_last_minutes_count_and_silence_changes_nothing() {
        let scrapes = [(0, "a", text(10, 0)), (30, "a", text(10, 0))];
        let (_, told, news) = after(&scrapes);
        assert_eq!((told, news), (Some(50.0), 1));
        // Ten minutes later everything is slow.
        let later = [scrapes.to_vec(), vec![(600, "a", text(10, 4))]].concat();
        assert_eq!(after(&later).1, Some(550.0));
        // And then there are no requests.
        let silent = [
            later,
            vec![(1200, "a", text(10, 4)), (1500, "a", text(10, 4))],
        ]
        .concat();
        let (_, told, news) = after(&silent);
        assert_eq!((told, news), (Some(550.0), 2));
    }

    #[test]
    fn no_request_means_no_measure() {
        let (measures, told, news) = after(&[(0, "a", text(0, 0)), (30, "a", String::new())]);
        assert_eq!((told, news), (None, 0));
        assert_eq!(measures.measured(&Key::new("default", "demo")), None);
    }

    #[test]
    fn a_gateway_that_begins_anew_counts_from_nothing() {
        let scrapes = [
            (0, "a", text(100, 0)),
            (400, "a", text(100, 0)),
            (430, "a", text(0, 2)),
        ];
        assert_eq!(after(&scrapes).1, Some(550.0));
    }

    #[test]
    fn gateways_are_taken_together_and_small_moves_are_no_news() {
        let scrapes = [
            (0, "a", text(4, 0)),
            (1, "b", text(0, 4)),
            (30, "a", text(4, 0)),
            (31, "b", text(0, 4)),
        ];
        let (_, told, news) = after(&scrapes);
        assert_eq!((told, news), (Some(100.0), 2));
        assert_eq!(steady(Some(100.0), Some(109.0)), Some(100.0));
        assert_eq!(steady(Some(100.0), Some(111.0)), Some(111.0));
        assert_eq!(steady(Some(100.0), None), Some(100.0));
    }

    #[test]
    fn what_workers_got_is_news_when_it_changes() {
        let measures = Measures::default();
        let demo = Key::new("default", "demo");
        let text = |cpus: &str| {
            format!("hearth_worker_placement_info{{address=\"10.0.0.1:9000\",cpus=\"{cpus}\"}} 1\n")
        };
        let start = Instant::now();
        let learn = |text: &str| measures.learn(&demo, "a", text, start);
        assert!(learn(&text("0-1")));
        assert!(!learn(&text("0-1")));
        assert!(learn(&text("0")));
        let placements = measures.placements(&demo);
        let cpus: Vec<&str> = placements.values().map(|got| got.cpus.as_str()).collect();
        assert_eq!(cpus, ["0"]);
    }
}
