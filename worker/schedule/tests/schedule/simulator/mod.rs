//! Drives the scheduler over a trace of arrivals without any device, in virtual time.
//!
//! Costs are a model ([`CostModel`]); answers are computed by a [`device`] that keeps KV in blocks as a real one
//! does, so a wrong block, a lost token or a repeated one changes the answer
//! ([`SimulationReport::requests`] against [`device::expected_answer`]).

pub(crate) mod device;
mod report;

use std::collections::{BTreeMap, VecDeque};

use hearth_kvcache::{KvCache, KvCacheError};

use device::{Device, DeviceError};
use hearth_schedule::{
    Request, Sampled, ScheduleError, Scheduler, SchedulerOptions, SequenceId, SpanKind, Step,
    StepResult, StepSpan, Work,
};
pub(crate) use report::{Distribution, Outcome, SimulationReport};

/// Time of a step in microseconds: `step + prefill_token * chunk tokens + decode_sequence * decode rows +
/// context_token * KV tokens read`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CostModel {
    /// Time of the host before a step that could not be launched ahead, while the device has nothing to do.
    pub(crate) host_us: f64,
    /// Fixed cost of a step.
    pub(crate) step_us: f64,
    /// Cost of a prompt token.
    pub(crate) prefill_token_us: f64,
    /// Cost of a decode row.
    pub(crate) decode_sequence_us: f64,
    /// Cost of a KV token that a row reads.
    pub(crate) context_token_us: f64,
    /// Cost of a token that a prefill worker computes and sends, for [`Work::ImportThenGenerate`]; one prompt at a
    /// time.
    pub(crate) remote_token_us: f64,
}

/// Rows that extend an answer.
pub(crate) fn decode_rows(step: &Step) -> usize {
    rows_of(step, SpanKind::Decode) + rows_of(step, SpanKind::Ahead)
}

/// Rows of one kind.
pub(crate) fn rows_of(step: &Step, kind: SpanKind) -> usize {
    let spans = step.spans.iter().filter(|s| s.kind == kind);
    spans.map(StepSpan::rows).sum()
}

impl CostModel {
    /// Cost of a step in microseconds.
    pub(crate) fn step_cost_us(&self, step: &Step) -> f64 {
        let context: usize = step
            .spans
            .iter()
            .map(|s| s.rows() * (s.start + s.rows()))
            .sum();
        self.step_us
            + self.prefill_token_us * rows_of(step, SpanKind::Prefill) as f64
            + self.decode_sequence_us * decode_rows(step) as f64
            + self.context_token_us * context as f64
    }
}

/// A request of the trace.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Arrival {
    /// Time of arrival, in microseconds from the start.
    pub(crate) at_us: f64,
    /// The request.
    pub(crate) request: Request,
    /// Number of tokens after which the answer stops by itself (at most `max_new_tokens` are generated in any case).
    pub(crate) answer_tokens: usize,
    /// Time at which the client disconnects, in microseconds from the start.
    pub(crate) cancel_at_us: Option<f64>,
}

/// Parameters of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SimulationOptions {
    /// Limits of the scheduler.
    pub(crate) scheduler: SchedulerOptions,
    /// KV blocks.
    pub(crate) blocks: usize,
    /// Tokens of one block.
    pub(crate) block_tokens: usize,
    /// Steps that may be in flight at once.
    pub(crate) depth: usize,
    /// Costs of steps.
    pub(crate) costs: CostModel,
}

/// Reason a simulation ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimulationError {
    /// The cache cannot be created.
    #[error(transparent)]
    KvCache(#[from] KvCacheError),
    /// The scheduler rejected the result of its own step.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The scheduler made an invalid request to the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Requests are left, and neither a step nor an event can advance them.
    #[error("{left} requests are left and nothing moves them")]
    Stuck {
        /// Requests that have not ended.
        left: usize,
    },
    /// A time in the trace is negative or not a number.
    #[error("arrival {index} has the time {at_us} µs: times count from 0")]
    Time {
        /// Index of the arrival.
        index: usize,
        /// Its time.
        at_us: f64,
    },
}

/// Runs a trace to its end. Arrivals may be in any order.
///
/// # Errors
/// [`SimulationError`]; all but `KvCache`, `Time` and `Schedule` with an option of 0 are bugs in the scheduler.
pub(crate) fn simulate(
    options: &SimulationOptions,
    arrivals: &[Arrival],
) -> Result<SimulationReport, SimulationError> {
    let mut simulation = Simulation::new(options, arrivals)?;
    while simulation.advance()? {}
    Ok(simulation.report)
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Arrive(usize),
    Cancel(usize),
    Imported(usize),
}

struct Simulation<'a> {
    arrivals: &'a [Arrival],
    costs: CostModel,
    depth: usize,
    in_flight: VecDeque<Step>,
    scheduler: Scheduler,
    device: Device,
    /// Future events by time; ties are broken by order of creation.
    events: BTreeMap<(u64, usize), Event>,
    made_events: usize,
    by_sequence: BTreeMap<SequenceId, usize>,
    sequence_of: BTreeMap<usize, SequenceId>,
    remote_free_at_us: f64,
    now_us: f64,
    report: SimulationReport,
}

impl<'a> Simulation<'a> {
    fn new(options: &SimulationOptions, arrivals: &'a [Arrival]) -> Result<Self, SimulationError> {
        let kv = KvCache::new(options.blocks, options.block_tokens)?;
        let mut simulation = Self {
            arrivals,
            costs: options.costs,
            depth: options.depth,
            in_flight: VecDeque::new(),
            scheduler: Scheduler::new(options.scheduler, kv)?,
            device: Device::new(options.blocks, options.block_tokens),
            events: BTreeMap::new(),
            made_events: 0,
            by_sequence: BTreeMap::new(),
            sequence_of: BTreeMap::new(),
            remote_free_at_us: 0.0,
            now_us: 0.0,
            report: SimulationReport::new(arrivals),
        };
        for (index, arrival) in arrivals.iter().enumerate() {
            for at_us in [Some(arrival.at_us), arrival.cancel_at_us]
                .into_iter()
                .flatten()
            {
                if !at_us.is_finite() || at_us < 0.0 {
                    return Err(SimulationError::Time { index, at_us });
                }
            }
            simulation.plan(arrival.at_us, Event::Arrive(index));
            if let Some(at_us) = arrival.cancel_at_us {
                simulation.plan(at_us.max(arrival.at_us), Event::Cancel(index));
            }
        }
        Ok(simulation)
    }

    fn plan(&mut self, at_us: f64, event: Event) {
        // The bit patterns of non-negative floats sort like their values.
        self.events
            .insert((at_us.to_bits(), self.made_events), event);
        self.made_events += 1;
    }

    /// Handles due events, then computes a step; returns false at the end.
    fn advance(&mut self) -> Result<bool, SimulationError> {
        while let Some(entry) = self.events.first_entry()
            && f64::from_bits(entry.key().0) <= self.now_us
        {
            let event = entry.remove();
            self.handle(event)?;
        }
        if self.in_flight.is_empty() {
            let step = self.scheduler.schedule();
            self.note_step(&step);
            if step.is_empty() {
                return self.skip();
            }
            self.now_us += self.costs.host_us;
            self.in_flight.push_back(step);
        }
        while self.in_flight.len() < self.depth
            && let Some(step) = self.scheduler.schedule_ahead()
        {
            self.note_step(&step);
            self.in_flight.push_back(step);
        }
        if let Some(step) = self.in_flight.pop_front() {
            self.now_us += self.costs.step_cost_us(&step);
            self.compute(step)?;
        }
        Ok(true)
    }

    /// With nothing to compute, skips to the next event; returns false at the end.
    fn skip(&mut self) -> Result<bool, SimulationError> {
        match self.events.first_key_value() {
            Some((key, _)) => {
                self.now_us = self.now_us.max(f64::from_bits(key.0));
                Ok(true)
            }
            None if self.scheduler.is_idle() => Ok(false),
            None => Err(SimulationError::Stuck {
                left: self.by_sequence.len(),
            }),
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), SimulationError> {
        match event {
            Event::Arrive(index) => {
                match self.scheduler.submit(self.arrivals[index].request.clone()) {
                    Ok(id) => {
                        self.by_sequence.insert(id, index);
                        self.sequence_of.insert(index, id);
                    }
                    Err(error) => self.report.requests[index].outcome = Outcome::Refused(error),
                }
            }
            Event::Cancel(index) => {
                if let Some(id) = self.sequence_of.get(&index).copied()
                    && self.scheduler.cancel(id)
                {
                    self.end(id, Outcome::Cancelled);
                }
            }
            Event::Imported(index) => self.import(index)?,
        }
        Ok(())
    }

    /// Receives the prefill worker's KV and first token.
    fn import(&mut self, index: usize) -> Result<(), SimulationError> {
        let Some(id) = self.sequence_of.get(&index).copied() else {
            return Ok(());
        };
        let Some(target) = self.scheduler.import_target(id) else {
            return Ok(()); // Cancelled.
        };
        let Request { prompt, work, .. } = &self.arrivals[index].request;
        let token = self.device.import(&target, prompt, work.prompt())?;
        let is_first = self.scheduler.tokens(id).map(|tokens| tokens.len()) == Some(prompt.len());
        let sampled = is_first.then(|| self.sampled(id, token));
        if is_first {
            self.emit(id, token);
        }
        let finished = self.scheduler.import_done(id, sampled)?;
        if finished.is_some() {
            self.end(id, Outcome::Complete);
        }
        Ok(())
    }

    fn note_step(&mut self, step: &Step) {
        for admission in &step.admitted {
            let Some(&index) = self.by_sequence.get(&admission.sequence) else {
                continue;
            };
            let request = &mut self.report.requests[index];
            if !admission.again {
                request.admitted_us = Some(self.now_us);
                request.cached_tokens = admission.cached_tokens;
            }
            if let Some(target) = &admission.import {
                let tokens = target.tokens - target.first_token;
                let begin_us = self.remote_free_at_us.max(self.now_us);
                self.remote_free_at_us = begin_us + self.costs.remote_token_us * tokens as f64;
                self.plan(self.remote_free_at_us, Event::Imported(index));
            }
        }
        let report = &mut self.report;
        report.preemptions += step.preempted.len();
        report.steps += usize::from(!step.is_empty());
        report.peak_batch = report.peak_batch.max(decode_rows(step));
        report.peak_chunk_tokens = report
            .peak_chunk_tokens
            .max(rows_of(step, SpanKind::Prefill));
        let used = self.scheduler.stats().kv.used_blocks;
        report.peak_used_blocks = report.peak_used_blocks.max(used);
    }

    fn compute(&mut self, step: Step) -> Result<(), SimulationError> {
        let mut result = StepResult {
            step: step.number,
            sampled: Vec::new(),
        };
        for span in &step.spans {
            let token = self.device.compute(span)?;
            self.report.computed_tokens += span.rows();
            let index = self.by_sequence.get(&span.sequence);
            let export = index.is_some_and(|i| self.arrivals[*i].request.work == Work::Export);
            if span.wants_logits && !export {
                result.sampled.push(self.sampled(span.sequence, token));
                self.emit(span.sequence, token);
            }
        }
        let update = self.scheduler.update(result)?;
        for finished in update.finished {
            self.end(finished.sequence, Outcome::Complete);
        }
        for id in update.exported {
            self.scheduler.export_done(id)?;
            self.end(id, Outcome::Complete);
        }
        Ok(())
    }

    /// A token as the engine reports it: marked as the last one once the answer has its full length.
    fn sampled(&self, sequence: SequenceId, token: u32) -> Sampled {
        let index = self.by_sequence.get(&sequence);
        let last = index.is_some_and(|&i| {
            self.report.requests[i].answer.len() + 1 >= self.arrivals[i].answer_tokens
        });
        Sampled {
            sequence,
            token,
            last,
        }
    }

    fn emit(&mut self, sequence: SequenceId, token: u32) {
        if let Some(&index) = self.by_sequence.get(&sequence) {
            let request = &mut self.report.requests[index];
            request.answer.push(token);
            request.first_token_us.get_or_insert(self.now_us);
        }
    }

    fn end(&mut self, sequence: SequenceId, outcome: Outcome) {
        if let Some(index) = self.by_sequence.remove(&sequence) {
            self.sequence_of.remove(&index);
            let request = &mut self.report.requests[index];
            request.outcome = outcome;
            request.ended_us = Some(self.now_us);
            self.report.makespan_us = self.now_us;
        }
    }
}
