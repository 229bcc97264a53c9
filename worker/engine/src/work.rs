//! One step's work: its batch, the sequences that own the rows, and the choices of their tokens.

use std::collections::BTreeMap;

use hearth_kernels::{SampleSpec, Span};
use hearth_model::Batch;
use hearth_schedule::{SequenceId, Step};

use crate::{EngineError, export::ExportRange, forward::Output, request::EngineRequest};

/// A forward pass and the sequences it serves.
#[derive(Default)]
pub(crate) struct StepWork {
    pub(crate) batch: Batch,
    /// If the rows' tokens are those that the device chooses in the step before, which may still run: for each row, the
    /// index of its token among them. The batch then has no tokens.
    pub(crate) picked: Option<Vec<u32>>,
    /// All sequences with rows in the batch.
    pub(crate) sequences: Vec<SequenceId>,
    /// Sequences whose token the device chooses, in the order of `batch.logit_rows`, of which they have the first.
    pub(crate) on_device: Vec<SequenceId>,
    /// Specifications of the device's choices, one for each of `on_device`.
    pub(crate) choices: Vec<SampleSpec>,
    /// Sequences whose logits come to the host; theirs are the remaining rows of `batch.logit_rows`.
    pub(crate) on_host: Vec<SequenceId>,
    pub(crate) exports: Vec<ExportRange>,
    /// Whether a rank that has peers computes it without them, if it can.
    pub(crate) alone: bool,
}

impl StepWork {
    /// Builds a step's batch, without sequences that were cancelled since it was scheduled; `can_sample`: the device
    /// chooses if the request allows it. Requests whose next token cannot be chosen
    /// are left out and returned with the reason.
    pub(crate) fn new(
        step: &Step,
        requests: &mut BTreeMap<SequenceId, EngineRequest>,
        can_sample: bool,
    ) -> (Self, Vec<(SequenceId, EngineError)>) {
        let mut work = Self::default();
        let mut refused = Vec::new();
        let mut host_rows = Vec::new();
        for span in &step.spans {
            let Some(request) = requests.get_mut(&span.sequence) else {
                continue;
            };
            let choice = match request {
                EngineRequest::Answer(answer) if can_sample && span.wants_logits => {
                    answer.sampler.for_device()
                }
                _ => Ok(None),
            };
            let choice = match choice {
                Ok(choice) => choice,
                Err(error) => {
                    refused.push((span.sequence, error));
                    continue;
                }
            };
            let (first_row, rows) = (work.batch.tokens.len(), span.tokens.len());
            let last_row = || (first_row + rows - 1) as u32;
            work.sequences.push(span.sequence);
            work.batch.tokens.extend(&span.tokens);
            work.batch.spans.push(Span {
                first_row,
                rows,
                start: span.start,
                blocks: span.blocks.clone(),
            });
            if let Some(choice) = choice {
                work.on_device.push(span.sequence);
                work.choices.push(choice);
                work.batch.logit_rows.push(last_row());
            } else if span.wants_logits {
                work.on_host.push(span.sequence);
                host_rows.push(last_row());
            }
            if let EngineRequest::Export(export) = request {
                work.alone |= export.alone;
                work.exports.push(ExportRange {
                    sequence: span.sequence,
                    blocks: span.blocks.clone(),
                    from: export.sent_to,
                    to: span.start + rows,
                });
            }
        }
        work.batch.logit_rows.append(&mut host_rows);
        (work, refused)
    }

    /// Builds a step on top of `before`, which is in flight and chooses all its tokens on the device: every row takes up one
    /// of those. `pending`: steps in flight, each of which owes every row a token.
    pub(crate) fn ahead(
        step: &Step,
        before: &Self,
        pending: usize,
        requests: &BTreeMap<SequenceId, EngineRequest>,
    ) -> Self {
        let mut work = Self::default();
        let mut picked = Vec::new();
        for span in &step.spans {
            let sequence = span.sequence;
            let index = before.on_device.iter().position(|id| *id == sequence);
            let Some((index, EngineRequest::Answer(answer))) = index.zip(requests.get(&sequence))
            else {
                continue;
            };
            let row = work.sequences.len();
            picked.push(index as u32);
            work.sequences.push(sequence);
            work.batch.spans.push(Span {
                first_row: row,
                rows: 1,
                start: span.start,
                blocks: span.blocks.clone(),
            });
            work.batch.logit_rows.push(row as u32);
            work.on_device.push(sequence);
            work.choices.push(answer.sampler.ahead(pending));
        }
        work.picked = Some(picked);
        work
    }

    /// What it computes, for a trace.
    pub(crate) fn describe(&self) -> String {
        let rows: usize = self.batch.spans.iter().map(|span| span.rows).sum();
        format!("step: sequences {}, rows {rows}", self.sequences.len())
    }

    /// Whether the device chooses a token for each of its rows, and the tokens after those depend on nothing that the
    /// host would have to know first.
    pub(crate) fn leads_on(&self, requests: &BTreeMap<SequenceId, EngineRequest>) -> bool {
        let runs_ahead = |sequence: &SequenceId| match requests.get(sequence) {
            Some(EngineRequest::Answer(answer)) => answer.sampler.runs_ahead(),
            Some(EngineRequest::Export(_)) => false,
            None => true, // It has ended.
        };
        self.on_host.is_empty() && self.exports.is_empty() && self.on_device.iter().all(runs_ahead)
    }

    /// Returns the forward pass's output, or the reason it does not match this step.
    pub(crate) fn checked(&self, output: Output, vocab: usize) -> Result<Output, String> {
        let (chosen, choices) = (output.chosen.len(), self.choices.len());
        if chosen != choices {
            return Err(format!("{chosen} tokens came for {choices}"));
        }
        let (logits, expected) = (output.logits.len(), self.on_host.len() * vocab);
        if logits != expected {
            return Err(format!("{logits} logits came for {expected}"));
        }
        Ok(output)
    }
}
