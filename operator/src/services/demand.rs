//! The load of deployments whose pools follow it, from their gateways' counters, as [`super::watch`] is told of them.
//!
//! Gateways count from their own start, and several of them count what they alone took in, but all report the same workers. A
//! gateway that is listed and cannot be read makes what is known old, and nothing shrinks by old figures.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hearth_controller_core::key::Key;
use hearth_controller_core::observed::Demand;
use tokio::time::Instant;

use super::measure::Buckets;
use crate::exposition::{TPOT, TTFT, label, sample};

/// Spans that arrivals are counted over: the last part of the span, the span, and the long span.
const RECENT: Duration = Duration::from_secs(15);
const SPAN: Duration = Duration::from_secs(60);
const LONG: Duration = Duration::from_secs(300);
/// What the newest reading counts for, at the least.
const LEAST_S: f64 = 0.001;
/// Age of a gateway that was never read.
const NEVER_READ_S: f64 = 3600.0;

/// Time from which a queue has lasted, and is no burst.
const LASTS: Duration = Duration::from_secs(8);
/// Time between readings that are kept: of the last part of the span, and of what was before it. The newest is always kept, and the
/// shortest queue of those that are not.
const THINNED: (Duration, Duration) = (Duration::from_millis(900), Duration::from_secs(4));
/// The most workers of which a gateway's figures are kept: more than deployments have.
const MOST_WORKERS: usize = 512;
/// The least time between two decisions while there are workers, however requests begin to wait.
const LEAST_PAUSE: Duration = Duration::from_secs(1);
/// Time between two decisions while nothing begins to wait, and while a deployment has no workers for what waits.
const DECIDE_EVERY: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(2));

const ARRIVED: &str = "hearth_arrived_prompt_tokens";

/// Load by deployment.
#[derive(Debug, Default)]
pub(crate) struct Loads {
    deployments: Mutex<BTreeMap<Key, Followed>>,
}

/// A deployment with a pool that follows its load.
#[derive(Debug, Default)]
struct Followed {
    /// Histories by uid of the gateway's Pod, of those that are ready.
    gateways: BTreeMap<String, History>,
    /// Time of the last decision.
    decided: Option<Instant>,
    /// Whether a decision was made since there is no load.
    is_told_idle: bool,
    /// Whether something waited at the last decision.
    was_waiting: bool,
    /// Whether there are no workers until a choice arrives.
    is_at_zero: bool,
}

impl Followed {
    /// Whether it may be decided about now, by what takes no time to find out.
    fn may_decide(&self, now: Instant) -> bool {
        let (_, at_zero) = DECIDE_EVERY;
        let last = self.gateways.values().filter_map(|it| it.0.back());
        match self.is_at_zero {
            true => self.has_paused(at_zero, now) || !self.was_waiting && held(last, now) > 0.0,
            false => self.has_paused(LEAST_PAUSE, now),
        }
    }

    fn has_paused(&self, pause: Duration, now: Instant) -> bool {
        self.decided
            .is_none_or(|at| now.duration_since(at) >= pause)
    }

    /// Whether the deployment is to be decided about now that `demand` is known, which is noted: at once if something waits that did
    /// not at the last decision, for workers where there are none and else for a slot.
    fn take_turn(&mut self, demand: &Demand, now: Instant) -> bool {
        let (usual, at_zero) = DECIDE_EVERY;
        let (is_waiting, pause) = match self.is_at_zero {
            true if demand.held > 0.0 => (true, at_zero),
            _ => (demand.queued > 0.0, usual),
        };
        let begins = is_waiting && !self.was_waiting;
        if !begins && !self.has_paused(pause, now) {
            return false;
        }
        let is_busy = is_waiting || demand.long_arrivals + demand.unanswered > 0.0;
        let is_known = demand.span_s >= SPAN.as_secs_f64();
        let was_told = std::mem::replace(&mut self.is_told_idle, !is_busy && is_known);
        let is_due = is_busy || !was_told;
        if is_due {
            self.decided = Some(now);
            self.was_waiting = is_waiting;
        }
        is_due
    }
}

impl Loads {
    /// Notes whether a pool of the deployment follows its load.
    pub(crate) fn follow(&self, deployment: &Key, follows: bool) {
        let mut deployments = self.lock();
        match follows {
            true => drop(deployments.entry(deployment.clone()).or_default()),
            false => drop(deployments.remove(deployment)),
        }
    }

    /// Notes whether a deployment has no workers until a choice arrives.
    pub(crate) fn note_zero(&self, deployment: &Key, is_at_zero: bool) {
        if let Some(followed) = self.lock().get_mut(deployment) {
            followed.is_at_zero = is_at_zero;
        }
    }

    /// Seconds for which deployments have had no request, of those all of whose gateways have said so lately.
    pub(crate) fn idle_s(&self, now: Instant) -> BTreeMap<Key, f64> {
        let deployments = self.lock();
        let idle = deployments.iter().filter_map(|(key, followed)| {
            let last = followed.gateways.values().map(|it| it.0.back());
            let is_fresh = |(at, _): &&(Instant, Counts)| now.duration_since(*at) < RECENT;
            let read: Option<Vec<_>> = last.map(|read| read.filter(is_fresh)).collect();
            Some((key.clone(), idle_s(read?.into_iter(), now)?))
        });
        idle.collect()
    }

    /// The deployments that follow their load, with the uids of their gateways that were ready when they were last listed.
    pub(super) fn followed(&self) -> BTreeMap<Key, BTreeSet<String>> {
        let deployments = self.lock();
        let uids = |it: &Followed| it.gateways.keys().cloned().collect();
        let followed = deployments.iter().map(|(key, it)| (key.clone(), uids(it)));
        followed.collect()
    }

    /// Notes which gateways of these deployments are ready, and forgets the others.
    pub(super) fn list(&self, gateways: &[(Key, String, String)]) {
        let mut listed: BTreeMap<&Key, BTreeSet<&str>> = BTreeMap::new();
        for (key, uid, _) in gateways {
            listed.entry(key).or_default().insert(uid);
        }
        let mut deployments = self.lock();
        // Of a deployment without any the last ones stay, and what is known of them grows old.
        for (key, listed) in listed {
            let Some(followed) = deployments.get_mut(key) else {
                continue;
            };
            followed.gateways.retain(|uid, _| listed.contains(&**uid));
            for uid in listed {
                if !followed.gateways.contains_key(uid) {
                    followed.gateways.insert(uid.to_owned(), History::default());
                }
            }
        }
    }

    /// Stores what a gateway says; returns whether the deployment is to be decided about, and `None` if the gateway is not watched any
    /// more.
    pub(super) fn learn(
        &self,
        deployment: &Key,
        uid: &str,
        text: &str,
        now: Instant,
    ) -> Option<bool> {
        // Reconciles wait for the lock.
        let counts = Counts::read(text);
        let mut deployments = self.lock();
        let followed = deployments.get_mut(deployment)?;
        followed.gateways.get_mut(uid)?.push(now, counts);
        if !followed.may_decide(now) {
            return Some(false);
        }
        let demand = demand(&followed.gateways, now)?;
        Some(followed.take_turn(&demand, now))
    }

    /// The load of a deployment; `None` if it follows none, or no gateway has been read.
    pub(crate) fn demand(&self, deployment: &Key, now: Instant) -> Option<Demand> {
        demand(&self.lock().get(deployment)?.gateways, now)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Followed>> {
        self.deployments
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The most seconds of steps in a second: a little more than one, for clocks of two machines.
const MOST_WORK: f64 = 1.5;

/// Counts of one worker since its start, as a gateway reports them.
#[derive(Clone, Debug, Default)]
struct Work {
    is_prefill: bool,
    step_s: f64,
    steps: f64,
    generated_tokens: f64,
}

/// Prompts and their tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Prompts {
    prompts: f64,
    tokens: f64,
}

/// Prompts by the workers that read them.
#[derive(Clone, Copy, Debug, Default)]
struct Read {
    by_prefill: Prompts,
    by_decode: Prompts,
}

/// What one scrape says of the load.
#[derive(Clone, Debug, Default)]
struct Counts {
    arrived: Buckets,
    arrived_tokens: f64,
    /// Prompt tokens of choices that started, those whose KV was reused among them.
    started_tokens: f64,
    /// Prompts of choices that started, by who reads them; `None` of a gateway of an earlier version.
    read: Option<Read>,
    finished: f64,
    generated_tokens: f64,
    ttft: Buckets,
    tpot: Buckets,
    queued: f64,
    /// The part of `queued` that waits at decode workers, which every gateway reports.
    at_workers: f64,
    /// Choices that decode workers compute, which every gateway reports; `None` without one.
    running: Option<f64>,
    unanswered: f64,
    /// Seconds without a choice; `None` of a gateway of an earlier version.
    idle_s: Option<f64>,
    /// By address.
    workers: BTreeMap<SocketAddr, Work>,
}

impl Counts {
    fn read(text: &str) -> Self {
        let mut counts = Self {
            arrived: Buckets::read(text, ARRIVED),
            ttft: Buckets::read(text, TTFT),
            tpot: Buckets::read(text, TPOT),
            ..Self::default()
        };
        for line in text.lines().filter(|line| line.starts_with("hearth_")) {
            let Some((name, labels, value)) = sample(line) else {
                continue;
            };
            match name {
                "hearth_arrived_prompt_tokens_sum" => counts.arrived_tokens += value,
                "hearth_prompt_tokens_total" => counts.started_tokens += value,
                "hearth_prompts_read_total" => counts.read_by(labels).prompts += value,
                "hearth_prompts_read_tokens_total" => counts.read_by(labels).tokens += value,
                "hearth_choices_finished_total" => counts.finished += value,
                "hearth_generated_tokens_total" => counts.generated_tokens += value,
                "hearth_requests_queued" => counts.queued = value,
                "hearth_choices_unanswered" => counts.unanswered = value,
                "hearth_idle_seconds" => counts.idle_s = Some(value),
                "hearth_worker_waiting" if label(labels, "role") == Some("decode") => {
                    counts.at_workers += value;
                }
                "hearth_worker_running" if label(labels, "role") == Some("decode") => {
                    *counts.running.get_or_insert_default() += value;
                }
                _ => counts.work(name, labels, value),
            }
        }
        counts
    }

    fn read_by(&mut self, labels: &str) -> &mut Prompts {
        let read = self.read.get_or_insert_default();
        match label(labels, "role") {
            Some("prefill") => &mut read.by_prefill,
            _ => &mut read.by_decode,
        }
    }

    /// The part of `queued` that waits at the gateway itself.
    fn at_gateway(&self) -> f64 {
        (self.queued - self.at_workers).max(0.0)
    }

    /// Whether these are counted by another process than `last`.
    fn has_begun_anew(&self, last: &Self) -> bool {
        let counters = |counts: &Self| {
            [
                counts.finished,
                counts.generated_tokens,
                counts.started_tokens,
                counts.arrived_tokens,
            ]
        };
        let both = counters(self).into_iter().zip(counters(last));
        both.into_iter().any(|(now, before)| now < before)
    }

    fn work(&mut self, name: &str, labels: &str, value: f64) {
        let part: fn(&mut Work) -> &mut f64 = match name {
            "hearth_worker_step_seconds_total" => |work| &mut work.step_s,
            "hearth_worker_steps_total" => |work| &mut work.steps,
            "hearth_worker_generated_tokens_total" => |work| &mut work.generated_tokens,
            _ => return,
        };
        let address = label(labels, "address").and_then(|address| address.parse().ok());
        if let (Some(address), Some(role)) = (address, label(labels, "role")) {
            if self.workers.len() >= MOST_WORKERS && !self.workers.contains_key(&address) {
                return;
            }
            let work = self.workers.entry(address).or_default();
            work.is_prefill = role == "prefill";
            *part(work) = value;
        }
    }
}

/// The readings of one gateway: the newest before the long span, and those in it, which are fewer where they are older.
#[derive(Debug, Default)]
struct History(VecDeque<(Instant, Counts)>);

impl History {
    fn push(&mut self, now: Instant, counts: Counts) {
        // A gateway that has begun anew counts nothing of what its workers did before.
        if self
            .0
            .back()
            .is_some_and(|(_, last)| counts.has_begun_anew(last))
        {
            self.0.clear();
        }
        self.0.push_back((now, counts));
        while let Some((at, _)) = self.0.get(1)
            && now.duration_since(*at) >= LONG
        {
            self.0.pop_front();
        }
        let (recent, older) = THINNED;
        let mut kept: VecDeque<(Instant, Counts)> = VecDeque::with_capacity(self.0.len());
        for (at, counts) in self.0.drain(..) {
            let pause = match now.duration_since(at) < RECENT {
                true => recent,
                false => older,
            };
            match kept.back_mut() {
                Some((before, it)) if at != now && at.duration_since(*before) < pause => {
                    it.queued = it.queued.min(counts.queued);
                    it.at_workers = it.at_workers.min(counts.at_workers);
                }
                _ => kept.push_back((at, counts)),
            }
        }
        self.0 = kept;
    }

    /// What prefill or decode workers did in a span, from each reading to the next: of one that has come or gone meanwhile, what was
    /// seen.
    fn work(&self, span: Duration, now: Instant, is_prefill: bool) -> Work {
        let is_before = |(at, _): &(Instant, Counts)| now.duration_since(*at) >= span;
        let first = self.0.iter().rposition(is_before).unwrap_or(0);
        let mut sum = Work::default();
        // When the step times of each worker last rose: a pass may take longer than the time between two readings.
        let mut rose_at = BTreeMap::new();
        let readings = self.0.iter().skip(first);
        for ((then_at, then), (newer_at, newer)) in readings.clone().zip(readings.skip(1)) {
            for (address, now) in &newer.workers {
                let then = then.workers.get(address);
                let Some(then) = then.filter(|_| now.is_prefill == is_prefill) else {
                    continue;
                };
                let step_s = since(now.step_s, then.step_s);
                let rose_at = rose_at.entry(address).or_insert(*then_at);
                let passed_s = newer_at.duration_since(*rose_at).as_secs_f64();
                if step_s > 0.0 {
                    *rose_at = *newer_at;
                }
                // More than there was time for: its gateway had not read it yet, and this is of its whole life.
                if step_s > MOST_WORK * passed_s + 1.0 {
                    continue;
                }
                sum.step_s += step_s;
                sum.steps += since(now.steps, then.steps);
                sum.generated_tokens += since(now.generated_tokens, then.generated_tokens);
            }
        }
        sum
    }

    /// Readings of the last part of the span, newest first.
    fn recent(&self, now: Instant) -> impl Iterator<Item = &(Instant, Counts)> {
        let newest_first = self.0.iter().rev();
        newest_first.take_while(move |(at, _)| now.duration_since(*at) < RECENT)
    }

    /// The least of a figure at the readings of the last part of the span; 0 unless they are of a longer time.
    fn least(&self, now: Instant, part: impl Fn(&Counts) -> f64) -> f64 {
        let ends = self.recent(now).next().zip(self.recent(now).last());
        let has_lasted =
            ends.is_some_and(|((newest, _), (oldest, _))| newest.duration_since(*oldest) >= LASTS);
        let least = self.recent(now).map(|(_, it)| part(it)).reduce(f64::min);
        least.filter(|_| has_lasted).unwrap_or(0.0)
    }

    /// Mean over time of the choices that decode workers compute, in the last part of the span.
    fn running(&self, now: Instant) -> Option<f64> {
        let (mut choice_s, mut read_s, mut until) = (0.0, 0.0, now);
        for (at, it) in self.recent(now) {
            let Some(running) = it.running else {
                continue;
            };
            let lasted_s = until.duration_since(*at).as_secs_f64().max(LEAST_S);
            choice_s += running * lasted_s;
            read_s += lasted_s;
            until = *at;
        }
        (read_s > 0.0).then(|| choice_s / read_s)
    }

    /// The newest reading, and the last one from before a span, or the first; with the seconds between them.
    fn span(&self, span: Duration, now: Instant) -> Option<(&Counts, &Counts, f64)> {
        let (newest_at, newest) = self.0.back()?;
        let is_before = |(at, _): &&(Instant, Counts)| now.duration_since(*at) >= span;
        let base = self.0.iter().rev().find(is_before);
        let (at, base) = base.or_else(|| self.0.front())?;
        Some((newest, base, newest_at.duration_since(*at).as_secs_f64()))
    }
}

/// What was counted since `base`; everything if the counter has begun anew.
fn since(newest: f64, base: f64) -> f64 {
    if newest < base { newest } else { newest - base }
}

fn demand(gateways: &BTreeMap<String, History>, now: Instant) -> Option<Demand> {
    let last = || gateways.values().filter_map(|it| it.0.back());
    last().next()?;
    let age_s = gateways.values().map(|history| match history.0.back() {
        Some((at, _)) => now.duration_since(*at).as_secs_f64(),
        None => NEVER_READ_S,
    });
    let spans = |span: Duration| gateways.values().filter_map(move |it| it.span(span, now));
    let (recent_arrivals, recent_span_s) = arrivals(spans(RECENT));
    let (arrived, span_s) = arrivals(spans(SPAN));
    let (long_arrivals, long_span_s) = arrivals(spans(LONG));
    let total = |part: fn(&Counts) -> f64| -> f64 {
        let counted = spans(LONG).map(|(newest, base, _)| since(part(newest), part(base)));
        counted.sum()
    };
    let quantile_ms = |part: fn(&Counts) -> &Buckets| {
        let counted = spans(SPAN).map(|(newest, base, _)| part(newest).clone().minus(part(base)));
        let sum = counted.fold(Buckets::default(), Buckets::plus);
        sum.quantile(0.9).map(|seconds| seconds * 1e3)
    };
    let prompts = spans(LONG).map(|(newest, base, _)| newest.arrived.clone().minus(&base.arrived));
    let prompts = prompts.fold(Buckets::default(), Buckets::plus);
    let prompt_tokens = per(total(|it| it.arrived_tokens), prompts.total());
    let (finished, generated) = (total(|it| it.finished), total(|it| it.generated_tokens));
    // Each gateway sees all workers: by the one that has seen them longest.
    let seen_s = |span: Duration, it: &History| it.span(span, now).map_or(0.0, |(_, _, s)| s);
    let longest = |span: Duration| {
        let histories = gateways.values();
        histories.max_by(|a, b| seen_s(span, a).total_cmp(&seen_s(span, b)))
    };
    let work = |span: Duration, is_prefill: bool| {
        longest(span).map_or_else(Work::default, |it| it.work(span, now, is_prefill))
    };
    let (reading, stepping) = (work(LONG, true), work(SPAN, false));
    let at_workers = last().map(|(_, it)| it.at_workers).fold(0.0, f64::max);
    let waiting: f64 = last().map(|(_, it)| it.at_gateway()).sum();
    let least = |part: fn(&Counts) -> f64| gateways.values().map(move |it| it.least(now, part));
    Some(Demand {
        age_s: age_s.fold(0.0, f64::max),
        span_s,
        arrivals: arrived,
        long_span_s,
        long_arrivals,
        recent_span_s,
        recent_arrivals,
        prompt_tokens,
        prompt_cv2: prompt_tokens.map_or(0.0, |mean| {
            (prompts.mean_square() / (mean * mean) - 1.0).max(0.0)
        }),
        output_tokens: per(generated, finished),
        queued: waiting + at_workers,
        queued_least: least(Counts::at_gateway).sum::<f64>()
            + least(|it| it.at_workers).fold(0.0, f64::max),
        running: longest(SPAN).and_then(|it| it.running(now)),
        unanswered: last().map(|(_, it)| it.unanswered).sum(),
        held: held(last(), now),
        idle_s: idle_s(last(), now),
        ttft_p90_ms: quantile_ms(|it| &it.ttft),
        tpot_p90_ms: quantile_ms(|it| &it.tpot),
        prefill_ms_per_token: per(reading.step_s * 1e3, total(|it| it.started_tokens)),
        handed_over: handed_over(spans(SPAN), |it| it.prompts),
        handed_over_tokens: handed_over(spans(LONG), |it| it.tokens),
        step_ms: per(stepping.step_s * 1e3, stepping.steps),
        step_tokens: per(stepping.generated_tokens, stepping.steps),
    })
}

/// Share of the prompts in a span, or of their tokens, that prefill workers read; `None` without any, or where a gateway does not say.
fn handed_over<'a>(
    spans: impl Iterator<Item = (&'a Counts, &'a Counts, f64)>,
    part: fn(&Prompts) -> f64,
) -> Option<f64> {
    let (mut by_prefill, mut all) = (0.0, 0.0);
    for (newest, base, _) in spans {
        let (newest, base) = (newest.read?, base.read?);
        let read = since(part(&newest.by_prefill), part(&base.by_prefill));
        by_prefill += read;
        all += read + since(part(&newest.by_decode), part(&base.by_decode));
    }
    (all > 0.0).then(|| by_prefill / all)
}

/// Choices that are not answered in full, at gateways that were read lately; of one that says only that there are some, one.
fn held<'a>(read: impl Iterator<Item = &'a (Instant, Counts)>, now: Instant) -> f64 {
    read.filter(|(at, _)| now.duration_since(*at) < RECENT)
        .map(|(_, it)| match it.idle_s {
            Some(0.0) => it.unanswered.max(1.0),
            _ => it.unanswered,
        })
        .sum()
}

/// Seconds for which no gateway has had a choice, by now; `None` where one does not say.
fn idle_s<'a>(read: impl Iterator<Item = &'a (Instant, Counts)>, now: Instant) -> Option<f64> {
    read.map(|(at, it)| match it.idle_s {
        Some(0.0) => Some(0.0),
        idle_s => Some(idle_s? + now.duration_since(*at).as_secs_f64()),
    })
    .reduce(|a, b| Some(a?.min(b?)))?
}

fn per(amount: f64, count: f64) -> Option<f64> {
    (count > 0.0 && amount > 0.0).then(|| amount / count)
}

/// Choices that arrived, and over how many seconds: a gateway that began later is taken to have gone on like that before.
fn arrivals<'a>(spans: impl Iterator<Item = (&'a Counts, &'a Counts, f64)>) -> (f64, f64) {
    let mut longest_s: f64 = 0.0;
    let mut per_s = 0.0;
    for (newest, base, span_s) in spans.filter(|(_, _, span_s)| *span_s > 0.0) {
        let arrived = newest.arrived.clone().minus(&base.arrived).total();
        per_s += arrived / span_s;
        longest_s = longest_s.max(span_s);
    }
    (per_s * longest_s, longest_s)
}

#[cfg(test)]
mod tests;
