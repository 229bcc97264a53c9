//! Numbers of workers that follow the load (`scaling.mode: Auto`): from what gateways measured to a number for each pool.
//!
//! [`advise`] is pure: the time is a field, and what it has to remember from one call to the next, a [`Memory`], is a value
//! that its caller keeps. A model predicts which numbers keep the objectives: prefill workers are servers that read one prompt at a
//! time, decode workers have slots whose steps grow with their batch ([`queueing`]). More workers are asked for at once, with the
//! arrivals that are expected when they are ready; fewer only when they would have sufficed for a while, with a
//! margin.

mod need;
pub mod queueing;
#[cfg(test)]
mod tests;

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use self::need::{Load, Need, load, ttft_ms};
use self::queueing::StepTime;
use crate::observed::Demand;

/// The shortest and the longest time in seconds for which fewer workers must have sufficed before a pool shrinks. Between them it is
/// the time that a worker takes to start: a worker that nobody needs costs as much then as starting it again does.
const PATIENCE_S: [f64; 2] = [60.0, 300.0];
/// Arrivals that fewer workers must bear, as a multiple of those measured: the band between growing and shrinking. A wait that has
/// begun ends only where they would not bear those measured.
const MARGIN: f64 = 1.2;
/// Age in seconds of a measurement from which it says nothing about now.
const STALE_S: f64 = 30.0;
/// Shortest span in seconds that arrivals are counted over, to grow and to shrink by.
const LEAST_SPAN_S: f64 = 10.0;
const LEAST_SPAN_TO_SHRINK_S: f64 = 50.0;
/// Arrivals in a span from which measured latencies say something.
const LEAST_ARRIVALS: f64 = 5.0;
/// Part of a pool that must be busy for measured latencies to call for more workers: long prompts on idle workers take long
/// with any number.
const BUSY: f64 = 0.5;

/// A pool that scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Workers that read prompts.
    Prefill,
    /// Workers that generate tokens.
    Decode,
}

/// Numbers of workers of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Workers that are planned now.
    pub replicas: u32,
    /// Those of them that are ready.
    pub ready: u32,
    /// The fewest; at least 1.
    pub min: u32,
    /// The most.
    pub max: u32,
}

impl Bounds {
    /// The least number for which `suffices`; the most if none does.
    fn least(self, suffices: impl Fn(u32) -> bool) -> u32 {
        let mut numbers = self.min..self.max;
        numbers.find(|it| suffices(*it)).unwrap_or(self.max)
    }

    fn keep(self, replicas: u32) -> u32 {
        replicas.max(self.min).min(self.max.max(self.min))
    }
}

/// What workers do in which time: as measured, else as the plan predicts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Service {
    /// Milliseconds per prompt token of whichever workers read the prompts.
    pub prefill_ms_per_token: f64,
    /// Whether these are the decode workers, between their steps: of nearly all prompts.
    pub is_chunked: bool,
    /// Step of a decode worker.
    pub step: StepTime,
    /// Streams that a decode worker runs at once.
    pub slots_per_worker: u32,
    /// Seconds from asking for a worker until it is ready.
    pub start_s: f64,
}

impl Service {
    /// Seconds for which fewer workers must have sufficed before a pool shrinks.
    pub fn patience_s(&self) -> f64 {
        self.start_s.clamp(PATIENCE_S[0], PATIENCE_S[1])
    }

    /// The same, with what was measured in place of what was predicted. Of a decode worker's step one point is measured at a time:
    /// the whole line is moved through it.
    #[must_use]
    pub fn measured(self, demand: &Demand) -> Self {
        let step = match (demand.step_ms, demand.step_tokens) {
            (Some(step_ms), Some(tokens)) if step_ms > 0.0 && self.step.at(tokens) > 0.0 => {
                self.step.scaled(step_ms / self.step.at(tokens))
            }
            _ => self.step,
        };
        let predicted = self.prefill_ms_per_token;
        // Only prefill workers measure how long they read. Both count per token of all prompts.
        let prefill_ms = match (self.is_chunked, demand.prefill_ms_per_token) {
            (true, _) => predicted,
            (false, Some(measured)) => measured,
            (false, None) => predicted * demand.handed_over_tokens.unwrap_or(1.0),
        };
        Self {
            prefill_ms_per_token: prefill_ms,
            step,
            ..self
        }
    }
}

/// Latencies to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Objectives {
    /// Time to the first token in milliseconds. `None`: 2 s, or three times what reading the mean prompt takes.
    pub ttft_ms: Option<f64>,
    /// Time per token after the first in milliseconds. `None`: whatever full batches give.
    pub tpot_ms: Option<f64>,
}

/// What the next decision about a pool has to know of earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Time at which the number last changed.
    pub changed_at: Option<Timestamp>,
    /// Time since which fewer workers would have sufficed, with the margin at its beginning.
    pub fewer_since: Option<Timestamp>,
    /// The most that were needed since then.
    pub fewer: u32,
}

/// Everything that a decision about one pool looks at.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The clock.
    pub now: Timestamp,
    /// The pool.
    pub role: Role,
    /// Its numbers.
    pub bounds: Bounds,
    /// The load; `None` if nothing was measured.
    pub demand: Option<&'a Demand>,
    /// Times of the workers.
    pub service: &'a Service,
    /// Latencies to keep.
    pub objectives: Objectives,
    /// See [`Memory`].
    pub memory: Memory,
}

/// A decision about one pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// Number of workers.
    pub replicas: u32,
    /// The figures that decided, in one sentence; `None` if the number stays.
    pub why: Option<String>,
    /// What to remember.
    pub memory: Memory,
    /// Time after which to decide again even if no new load is measured.
    pub look_again: Option<Duration>,
}

/// Decides how many workers a pool should have.
pub fn advise(input: &Input<'_>) -> Advice {
    let Bounds { replicas, .. } = input.bounds;
    let kept = input.bounds.keep(replicas);
    if kept != replicas {
        let why = format!(
            "the bounds are {} to {}",
            input.bounds.min, input.bounds.max
        );
        return input.change(kept, why);
    }
    let demand = input.demand.filter(|demand| demand.age_s <= STALE_S);
    let Some(demand) = demand.filter(|demand| demand.span_s >= LEAST_SPAN_S) else {
        // Without sight of the load nothing shrinks, nor is anything forgotten: whoever decides may have just started.
        return input.keep();
    };
    let Some(load) = load(demand, input.service.start_s) else {
        return input.keep();
    };
    let Some(needed) = input.need(&load, demand) else {
        return input.keep();
    };
    if needed.replicas > replicas {
        return input.change(needed.replicas, needed.why);
    }
    let missed = input.missed(&load, demand);
    if let Some(missed) = &missed
        && replicas < input.bounds.max
        && input.bounds.ready >= replicas
        && input.has_settled()
    {
        return input.change(replicas + 1, missed.clone());
    }
    let suffices = |need: &Need| need.replicas < replicas && missed.is_none();
    let fewer = input.need(&load.times(MARGIN), demand);
    match fewer.filter(suffices) {
        Some(_) if demand.span_s < LEAST_SPAN_TO_SHRINK_S => input.keep(),
        Some(fewer) => input.fewer(&fewer),
        None if suffices(&needed) => input.waver(&needed),
        None => input.stay(None, 0),
    }
}

impl Input<'_> {
    fn need(&self, load: &Load, demand: &Demand) -> Option<Need> {
        let (service, objectives, bounds) = (self.service, &self.objectives, self.bounds);
        match self.role {
            Role::Prefill => need::prefill(load, demand, service, objectives, bounds),
            Role::Decode => need::decode(load, demand, service, objectives, bounds),
        }
    }

    fn change(&self, replicas: u32, why: String) -> Advice {
        Advice {
            replicas,
            why: Some(why),
            memory: Memory {
                changed_at: Some(self.now),
                ..Memory::default()
            },
            look_again: None,
        }
    }

    /// Nothing is known that would change anything.
    fn keep(&self) -> Advice {
        self.stay(self.memory.fewer_since, self.memory.fewer)
    }

    fn stay(&self, fewer_since: Option<Timestamp>, fewer: u32) -> Advice {
        Advice {
            replicas: self.bounds.replicas,
            why: None,
            memory: Memory {
                changed_at: self.memory.changed_at,
                fewer_since,
                fewer,
            },
            look_again: None,
        }
    }

    /// Fewer would suffice: the number falls once that has been so for long enough, to the most that was needed meanwhile.
    fn fewer(&self, need: &Need) -> Advice {
        let since = self.memory.fewer_since.unwrap_or(self.now);
        let fewer = match self.memory.fewer_since {
            Some(_) => need.replicas.max(self.memory.fewer),
            None => need.replicas,
        };
        let lasted = seconds(self.now.duration_since(since));
        let patience_s = self.service.patience_s();
        let left_s = patience_s - lasted;
        // Those that stay must be able to bear the load: one that does not start is none of them.
        if left_s <= 0.0 && self.has_settled() && self.bounds.ready >= fewer {
            let why = format!("{fewer} sufficed for {patience_s:.0} s: {}", need.why);
            return self.change(fewer, why);
        }
        Advice {
            look_again: (left_s > 0.0).then(|| Duration::from_secs_f64(left_s)),
            ..self.stay(Some(since), fewer)
        }
    }

    /// Fewer suffice for what is measured, and not with the margin: a wait goes on, and none begins or ends.
    fn waver(&self, need: &Need) -> Advice {
        match self.memory.fewer_since {
            Some(since) => self.stay(Some(since), need.replicas.max(self.memory.fewer)),
            None => self.keep(),
        }
    }

    /// Whether the last change shows in what is measured: its workers have had time to start, and the span is past.
    fn has_settled(&self) -> bool {
        let span_s = self.demand.map_or(0.0, |demand| demand.span_s);
        let settled =
            |at: Timestamp| seconds(self.now.duration_since(at)) >= self.service.start_s + span_s;
        self.memory.changed_at.is_none_or(settled)
    }

    /// The objective that is measured to be missed although the model sees no reason, if more workers of this pool can help.
    fn missed(&self, load: &Load, demand: &Demand) -> Option<String> {
        if demand.arrivals < LEAST_ARRIVALS {
            return None;
        }
        match self.role {
            Role::Prefill => {
                let workers = f64::from(self.bounds.replicas);
                let busy = load.arrivals_per_s * load.reading_s(self.service) / workers;
                self.missed_ttft(load, demand, busy >= BUSY)
            }
            Role::Decode => {
                let missed = self.missed_tpot(demand);
                missed.or_else(|| self.missed_ttft(load, demand, self.reads_several(demand)))
            }
        }
    }

    /// Whether decode workers read prompts, each beside others.
    fn reads_several(&self, demand: &Demand) -> bool {
        let workers = f64::from(self.bounds.replicas);
        let running = demand.running.unwrap_or(0.0) / workers;
        self.service.is_chunked && running - 1.0 >= BUSY
    }

    /// Whether requests wait for a slot all the time, and those that have one are answered: not if they wait for their prompts to be
    /// read themselves.
    fn lacks_slots(&self, demand: &Demand) -> bool {
        let slots = self
            .bounds
            .replicas
            .saturating_mul(self.service.slots_per_worker);
        let answered = demand.running.unwrap_or(0.0);
        demand.queued_least >= 1.0 && answered >= f64::from(slots) * BUSY
    }

    fn missed_ttft(&self, load: &Load, demand: &Demand, is_busy: bool) -> Option<String> {
        let (measured_ms, aim_ms) = (
            demand.ttft_p90_ms?,
            ttft_ms(load, self.service, &self.objectives),
        );
        // What one request alone takes is the same with any number; waiting for a slot is not.
        let measured_alone_ms = need::alone_ttft_ms(demand, self.bounds);
        let measured_alone_ms = measured_alone_ms.filter(|_| self.service.is_chunked);
        let alone_ms = (load.reading_s(self.service) * 1e3).max(measured_alone_ms.unwrap_or(0.0));
        let waits = self.role == Role::Decode && self.lacks_slots(demand);
        let beside = match waits {
            true => format!(", {:.0} or more waited for a slot", demand.queued_least),
            false => String::new(),
        };
        let can_help = waits || (is_busy && alone_ms <= aim_ms);
        (can_help && measured_ms > aim_ms).then(|| {
            format!(
                "a tenth of the requests had a time to the first token above {measured_ms:.0} ms{beside}, and the objective is \
                 {aim_ms:.0} ms"
            )
        })
    }

    fn missed_tpot(&self, demand: &Demand) -> Option<String> {
        let (measured_ms, aim_ms) = (demand.tpot_p90_ms?, self.objectives.tpot_ms?);
        // With one stream a step, more workers make no step shorter.
        let is_busy = demand.step_tokens.map_or(0.0, |tokens| tokens - 1.0) >= BUSY;
        let can_help = is_busy && self.service.step.at(1.0) <= aim_ms;
        (can_help && measured_ms > aim_ms).then(|| {
            format!(
                "a tenth of the requests had a time per token above {measured_ms:.0} ms, and the objective is {aim_ms:.0} ms"
            )
        })
    }
}

fn seconds(duration: SignedDuration) -> f64 {
    duration.as_secs_f64()
}
