//! Steps in flight: scheduled, and not recorded yet.
//!
//! A step may be launched on top of others whose tokens are not known yet, as long as everyone gets a token from the last
//! of them: the device feeds that token to the next row by itself. Nothing else is decided meanwhile: whoever comes,
//! needs a chunk, or finds no block waits until all steps have landed, which is one step later.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Scheduler;
use crate::{
    Phase, Sampled, ScheduleError, SequenceId, SpanKind, Step, StepResult, StepSpan, Work,
};

/// Rows of a sequence in a step in flight.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) sequence: SequenceId,
    pub(super) rows: usize,
    pub(super) wants_logits: bool,
}

/// A step in flight.
#[derive(Debug)]
struct Flight {
    number: u64,
    rows: Vec<Row>,
}

/// All steps in flight, in the order in which they were launched.
#[derive(Debug, Default)]
pub(super) struct InFlight(VecDeque<Flight>);

impl InFlight {
    pub(super) fn push(&mut self, step: &Step) {
        let row = |span: &StepSpan| Row {
            sequence: span.sequence,
            rows: span.rows(),
            wants_logits: span.wants_logits,
        };
        self.0.push_back(Flight {
            number: step.number,
            rows: step.spans.iter().map(row).collect(),
        });
    }

    /// Takes the first step out.
    pub(super) fn pop(&mut self) -> Vec<Row> {
        self.0
            .pop_front()
            .map_or_else(Vec::new, |flight| flight.rows)
    }

    /// Forgets all steps.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Rows of a step, if it is the first one.
    fn first(&self, number: u64) -> Option<&[Row]> {
        let first = self.0.front().filter(|flight| flight.number == number);
        first.map(|flight| &flight.rows[..])
    }

    /// Whether the last step computes a token of a sequence.
    fn last_gives_token(&self, id: SequenceId) -> bool {
        let mut rows = self.0.back().into_iter().flat_map(|flight| &flight.rows);
        rows.any(|row| row.sequence == id && row.wants_logits)
    }

    /// Number of tokens of a sequence that are still to come.
    fn tokens_to_come(&self, id: SequenceId) -> usize {
        let rows = self.0.iter().flat_map(|flight| &flight.rows);
        rows.filter(|row| row.sequence == id && row.wants_logits)
            .count()
    }
}

impl Scheduler {
    /// Decides a step on top of those in flight, before their tokens are known: a row for each sequence whose answer goes
    /// on after the token that the last of them gives it ([`SpanKind::Ahead`]). `None` if there is nothing to compute
    /// ahead, or [`Scheduler::schedule`] would do more than that: admit a sequence, add a chunk, or take blocks away.
    pub fn schedule_ahead(&mut self) -> Option<Step> {
        if self
            .waiting
            .first()
            .is_some_and(|id| self.room_for(*id).is_some())
        {
            return None;
        }
        let ids: Vec<SequenceId> = self.running.iter().copied().collect();
        if !ids.iter().all(|id| self.needs_no_other_step(*id)) {
            return None;
        }
        let mut step = Step::default();
        for id in ids {
            let ahead = self.in_flight.tokens_to_come(id);
            let Some(sequence) = self.sequences.get_mut(&id).filter(|_| ahead > 0) else {
                continue;
            };
            let tokens = sequence.tokens.len() + ahead;
            if tokens >= sequence.limit_tokens {
                continue; // The token to come is the last one.
            }
            let kv = sequence.kv.as_mut()?;
            self.kv.reserve(kv, tokens).ok()?;
            step.spans.push(StepSpan {
                sequence: id,
                kind: SpanKind::Ahead,
                tokens: Vec::new(),
                start: tokens - 1,
                blocks: kv.ids_for(tokens),
                wants_logits: true,
            });
        }
        if step.is_empty() {
            return None;
        }
        self.step += 1;
        step.number = self.step;
        self.launched(&step);
        Some(step)
    }

    /// Records that a step is in flight.
    pub(super) fn launched(&mut self, step: &Step) {
        self.in_flight.push(step);
        self.kv.launched(step.number);
    }

    /// Whether a running sequence gets a token from the last step in flight, or waits for somebody else.
    fn needs_no_other_step(&self, id: SequenceId) -> bool {
        match self.sequences.get(&id) {
            Some(sequence) if sequence.work == Work::Export => sequence.phase == Phase::Exporting,
            Some(sequence) => {
                sequence.phase == Phase::WaitingKv || self.in_flight.last_gives_token(id)
            }
            None => false,
        }
    }

    /// Returns a result's tokens by sequence, if it matches the first step in flight.
    pub(super) fn check_result(
        &self,
        result: &StepResult,
    ) -> Result<BTreeMap<SequenceId, Sampled>, ScheduleError> {
        let step = result.step;
        let stale = ScheduleError::StaleStep {
            step,
            last: self.step,
        };
        let rows = self.in_flight.first(step).ok_or(stale)?;
        let alive = |id: &SequenceId| self.sequences.contains_key(id);
        let mut open: BTreeSet<SequenceId> = rows
            .iter()
            .filter(|row| row.wants_logits)
            .map(|row| row.sequence)
            .filter(|id| {
                self.sequences
                    .get(id)
                    .is_some_and(|s| s.work != Work::Export)
            })
            .collect();
        let mut tokens = BTreeMap::new();
        for sampled in &result.sampled {
            let sequence = sampled.sequence;
            if open.remove(&sequence) {
                tokens.insert(sequence, *sampled);
            } else if alive(&sequence) {
                return Err(ScheduleError::UnexpectedToken { step, sequence });
            }
        }
        match open.first() {
            Some(&sequence) => Err(ScheduleError::MissingToken { step, sequence }),
            None => Ok(tokens),
        }
    }
}
