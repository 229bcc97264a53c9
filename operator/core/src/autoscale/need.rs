//! How many workers a pool needs for a load, and the figures that say so.

use super::queueing::{StepTime, waits_longer};
use super::{Bounds, Objectives, Service};
use crate::observed::Demand;

/// Share of requests that may miss an objective for lack of workers of one pool.
const MAY_MISS: f64 = 0.1;
/// Shortest part of the time to the first token that is left to waiting, as a share of the objective: where reading a prompt
/// takes all of it, no number of workers keeps it.
const LEAST_TO_WAIT: f64 = 0.25;
/// Part of the time to the first token, without reading the prompt, that may be spent waiting for a slot.
const SLOT_SHARE: f64 = 0.25;
/// Streams beyond the mean that a decode pool has room for, in standard deviations of a Poisson count: nine of ten moments.
const DEVIATIONS: f64 = 1.28;
/// Time to the first token that is aimed at where the spec has no objective, in milliseconds, and at least so many times what
/// reading a prompt takes.
const DEFAULT_TTFT_MS: f64 = 2000.0;
const DEFAULT_TTFT_TIMES: f64 = 3.0;
/// Standard deviations of a Poisson count from which a count is another rate, and not chance.
const DEVIATIONS_OF_NEWS: f64 = 2.0;
/// The most that a trend may raise the measured rate of arrivals.
const MOST_RISE: f64 = 2.0;

/// The load of one pool as the model sees it, some time ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// Choices a second.
    pub(super) arrivals_per_s: f64,
    /// Whether more are expected than were measured.
    pub(super) is_rising: bool,
    /// Mean prompt in tokens, and the squared coefficient of variation.
    prompt_tokens: f64,
    prompt_cv2: f64,
    /// Mean answer in tokens; `None` if none has ended yet.
    output_tokens: Option<f64>,
}

/// Number of workers that suffice, with a sentence.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Need {
    pub(super) replicas: u32,
    pub(super) why: String,
}

/// The load that a worker started now would find when it is ready; `None` if too little was measured to tell.
pub(super) fn load(demand: &Demand, start_s: f64) -> Option<Load> {
    if demand.span_s <= 0.0 || demand.long_span_s <= 0.0 {
        return None;
    }
    let usual = demand.long_arrivals / demand.long_span_s;
    let now = demand.arrivals / demand.span_s;
    let noise = DEVIATIONS_OF_NEWS * (usual * demand.span_s).sqrt();
    let news = demand.arrivals - usual * demand.span_s;
    let measured = if news.abs() > noise { now } else { usual };
    // What the last seconds brought for sure, before it shows in the span.
    let sure = demand.recent_arrivals - DEVIATIONS_OF_NEWS * demand.recent_arrivals.sqrt();
    let recent = sure / demand.recent_span_s.max(1.0);
    // The mean of a span is what it was in its middle.
    let apart_s = (demand.long_span_s - demand.span_s) / 2.0;
    let ahead = match news > noise && apart_s > 0.0 {
        true => now + (now - usual) / apart_s * (start_s + demand.span_s / 2.0),
        false => 0.0,
    };
    let expected = measured.max(recent).max(ahead.min(now * MOST_RISE));
    let (prompt_tokens, is_silent) = match demand.prompt_tokens {
        Some(tokens) => (tokens, false),
        None => (0.0, demand.arrivals == 0.0),
    };
    (demand.prompt_tokens.is_some() || is_silent).then_some(Load {
        arrivals_per_s: expected,
        is_rising: expected > measured * 1.1,
        prompt_tokens,
        prompt_cv2: demand.prompt_cv2,
        output_tokens: demand.output_tokens,
    })
}

impl Load {
    /// The same load with that many times the arrivals.
    pub(super) fn times(self, factor: f64) -> Self {
        Self {
            arrivals_per_s: self.arrivals_per_s * factor,
            ..self
        }
    }

    /// Seconds in which a prefill worker reads the mean prompt.
    pub(super) fn reading_s(&self, service: &Service) -> f64 {
        self.prompt_tokens * service.prefill_ms_per_token / 1e3
    }

    fn words(&self) -> String {
        let rising = if self.is_rising { " and rising" } else { "" };
        format!("{:.2} requests/s{rising}", self.arrivals_per_s)
    }
}

/// Time to the first token to aim at, in milliseconds.
pub(super) fn ttft_ms(load: &Load, service: &Service, objectives: &Objectives) -> f64 {
    let usual = DEFAULT_TTFT_MS.max(DEFAULT_TTFT_TIMES * load.reading_s(service) * 1e3);
    objectives.ttft_ms.unwrap_or(usual)
}

/// Prefill workers with which a request that arrives rarely waits too long for its prompt to be read; `None` if nobody knows how
/// long that takes. The fewest, where decode workers read all prompts.
///
/// Each reads one prompt at a time, so they are servers with one queue. What waits already has to be read while a new worker
/// starts, or within the objective if that is longer.
pub(super) fn prefill(
    load: &Load,
    demand: &Demand,
    service: &Service,
    objectives: &Objectives,
    bounds: Bounds,
) -> Option<Need> {
    if service.prefill_ms_per_token <= 0.0 && demand.handed_over_tokens != Some(0.0) {
        return None;
    }
    let (reading_s, aim_s) = (
        load.reading_s(service),
        ttft_ms(load, service, objectives) / 1e3,
    );
    let waiting = (demand.unanswered - demand.queued - f64::from(bounds.ready)).max(0.0);
    let offered = (load.arrivals_per_s + waiting / service.start_s.max(aim_s)) * reading_s;
    // Longer prompts than the mean take longer themselves.
    let own_s = reading_s * (1.0 + load.prompt_cv2.max(0.0).sqrt().min(1.0));
    let limit_s = (aim_s - own_s).max(aim_s * LEAST_TO_WAIT);
    let missed = |workers| waits_longer(workers, offered, reading_s, load.prompt_cv2, limit_s);
    let replicas = bounds.least(|workers| missed(workers) <= MAY_MISS);
    let percent = |workers| missed(workers) * 100.0;
    let now = bounds.replicas;
    let why = format!(
        "{} of {:.0} tokens take {:.2} s each to read, and {waiting:.0} wait: {:.0} % would wait longer than {limit_s:.1} s \
         with {now}, {:.0} % with {replicas}",
        load.words(),
        load.prompt_tokens,
        reading_s,
        percent(now),
        percent(replicas),
    );
    Some(Need { replicas, why })
}

/// Decode workers with which a request rarely waits for a slot, and steps are as short as the objective; `None` while no
/// answer has ended, or if nobody knows how long a step takes.
///
/// A slot is taken while the prompt is read, too.
pub(super) fn decode(
    load: &Load,
    demand: &Demand,
    service: &Service,
    objectives: &Objectives,
    bounds: Bounds,
) -> Option<Need> {
    if service.step.at(1.0) <= 0.0 {
        return None;
    }
    let tokens = match load.output_tokens {
        Some(tokens) => tokens,
        None if load.arrivals_per_s == 0.0 => 0.0,
        None => return None,
    };
    let aim_s = ttft_ms(load, service, objectives) / 1e3;
    let limit_s = (aim_s - load.reading_s(service)).max(0.0) * SLOT_SHARE;
    let arrivals_per_s = load.arrivals_per_s + demand.queued / service.start_s.max(aim_s);
    let reading = arrivals_per_s * load.reading_s(service);
    let step = service.step;
    // No number of workers makes a step shorter than that of one stream.
    let tpot_ms = objectives.tpot_ms.filter(|aim| step.at(1.0) <= *aim);
    let streams = |workers| step.streams(workers, arrivals_per_s, tokens);
    // On fewer workers there are no fewer at a time than are measured now: clients that wait for their answers ask no sooner.
    let at_least = |workers: u32| match demand.running {
        Some(running) if workers < bounds.replicas => running,
        _ => 0.0,
    };
    let held = |workers: u32, streams: f64| at_least(workers).max(streams + reading);
    let suffices = |workers: u32| {
        let Some(streams) = streams(workers) else {
            return false;
        };
        let slots = workers.saturating_mul(service.slots_per_worker);
        let held = held(workers, streams);
        let held_s = held / arrivals_per_s.max(f64::MIN_POSITIVE);
        let streams = streams.max(at_least(workers));
        waits_longer(slots, held, held_s, 1.0, limit_s) <= MAY_MISS
            && tpot_ms.is_none_or(|aim| high_step_ms(step, streams, workers) <= aim)
            && (workers >= bounds.replicas
                || !service.is_chunked
                || !would_be_late(demand, bounds, workers, aim_s * 1e3))
    };
    let replicas = bounds.least(suffices);
    let told = |workers: u32| match streams(workers) {
        Some(streams) => format!(
            "{:.1} of {} slots busy and steps of {:.0} ms with {workers}",
            held(workers, streams),
            workers * service.slots_per_worker,
            high_step_ms(step, streams.max(at_least(workers)), workers)
        ),
        None => format!("more and more streams with {workers}"),
    };
    let why = format!(
        "{} of {tokens:.0} tokens, and {:.0} wait for a slot: {}, {}",
        load.words(),
        demand.queued,
        told(bounds.replicas),
        told(replicas),
    );
    Some(Need { replicas, why })
}

/// Time to the first token of nine of ten requests, if each had a worker that reads the prompts to itself, by what is measured now, in
/// milliseconds.
pub(super) fn alone_ttft_ms(demand: &Demand, bounds: Bounds) -> Option<f64> {
    Some(demand.ttft_p90_ms? / sharing(demand, bounds.replicas)?)
}

/// Requests that share one of that many workers, itself among them.
fn sharing(demand: &Demand, workers: u32) -> Option<f64> {
    Some((demand.running? / f64::from(workers.max(1))).max(1.0))
}

/// Whether requests that share that many workers would miss the time to the first token, and not each of them alone.
fn would_be_late(demand: &Demand, bounds: Bounds, workers: u32, aim_ms: f64) -> bool {
    let alone_ms = alone_ttft_ms(demand, bounds);
    let (Some(alone_ms), Some(sharing)) = (alone_ms, sharing(demand, workers)) else {
        return false;
    };
    alone_ms <= aim_ms && alone_ms * sharing > aim_ms
}

/// Step of a worker in nine of ten moments, in milliseconds.
fn high_step_ms(step: StepTime, streams: f64, workers: u32) -> f64 {
    let high = streams + DEVIATIONS * streams.sqrt();
    step.at((high / f64::from(workers.max(1))).max(1.0))
}
