//! The scheduler.

mod in_flight;

use std::collections::{BTreeMap, BTreeSet};

use hearth_kvcache::{CacheStats, KvCache, KvToken, Provenance, SequenceBlocks};

use crate::{
    Admission, FinishReason, Finished, ImportTarget, Phase, Request, Sampled, ScheduleError,
    SequenceId, SpanKind, Step, StepResult, StepSpan, Update, Work,
};
use in_flight::InFlight;

/// Limits, fixed at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// Sequences that may hold a place for decoding; exports need none.
    pub max_batch: usize,
    /// Prompt tokens per step, over all sequences.
    pub chunk_tokens: usize,
    /// The same for a step that no answer waits for, if that is more.
    pub idle_chunk_tokens: Option<usize>,
    /// Whether a prompt is never cut: as many share a step as `chunk_tokens` allows, and at least one.
    pub whole_prompts: bool,
    /// Requests in the queue. Preempted sequences do not count: an accepted request is never dropped.
    pub max_waiting: usize,
}

/// Gauges, and counters since creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Sequences in the queue.
    pub waiting: usize,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Number of times that a sequence gave up its blocks.
    pub preemptions: u64,
    /// Block usage and prefix hits.
    pub kv: CacheStats,
}

#[derive(Debug)]
struct Sequence {
    work: Work,
    /// Prompt and answer, each token with its provenance.
    tokens: Vec<KvToken>,
    prompt_tokens: usize,
    /// Length of `tokens` at which the answer is cut off.
    limit_tokens: usize,
    phase: Phase,
    /// `Some` in every phase but `Waiting`.
    kv: Option<SequenceBlocks>,
    /// Whether it was admitted before.
    again: bool,
}

impl Sequence {
    /// Largest number of tokens whose KV is stored: the last sampled one is never fed back.
    fn stored_tokens_max(&self) -> usize {
        match self.work {
            Work::Export => self.tokens.len(),
            Work::Generate | Work::ImportThenGenerate(_) => self.limit_tokens - 1,
        }
    }

    fn computed_tokens(&self) -> usize {
        self.kv.as_ref().map_or(0, SequenceBlocks::tokens)
    }

    /// Whether another worker must compute the missing part of the prompt. If an imported KV with the same bits
    /// was lost, it is recomputed here.
    fn needs_import(&self) -> bool {
        let imports = match self.work {
            Work::ImportThenGenerate(provenance) => provenance != Provenance::OWN || !self.again,
            Work::Generate | Work::Export => false,
        };
        imports && self.computed_tokens() < self.prompt_tokens
    }

    /// Whether it may lose its blocks: no one else reads or writes them, and it would not end soon anyway.
    fn is_preemptible(&self) -> bool {
        self.work != Work::Export && matches!(self.phase, Phase::Prefilling | Phase::Decoding)
    }
}

/// Continuous batching with chunked prefill over a [`KvCache`].
///
/// Call [`schedule`](Self::schedule), compute the step, call [`update`](Self::update), and repeat. A device that queues
/// operations may be given the next step before that, by [`schedule_ahead`](Self::schedule_ahead). A step that
/// failed needs no update: none of it is recorded, and the next `schedule` decides afresh.
#[derive(Debug)]
pub struct Scheduler {
    options: SchedulerOptions,
    kv: KvCache,
    sequences: BTreeMap<SequenceId, Sequence>,
    waiting: BTreeSet<SequenceId>,
    running: BTreeSet<SequenceId>,
    next_id: u64,
    step: u64,
    in_flight: InFlight,
    preemptions: u64,
}

impl Scheduler {
    /// Creates a scheduler over an empty cache.
    ///
    /// # Errors
    /// [`ScheduleError::Option`] for a limit of 0.
    pub fn new(options: SchedulerOptions, kv: KvCache) -> Result<Self, ScheduleError> {
        let SchedulerOptions {
            max_batch,
            chunk_tokens,
            idle_chunk_tokens: _,
            whole_prompts: _,
            max_waiting,
        } = options;
        for (field, value) in [
            ("max_batch", max_batch),
            ("chunk_tokens", chunk_tokens),
            ("max_waiting", max_waiting),
        ] {
            if value == 0 {
                return Err(ScheduleError::Option { field });
            }
        }
        Ok(Self {
            options,
            kv,
            sequences: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            next_id: 1,
            step: 0,
            in_flight: InFlight::default(),
            preemptions: 0,
        })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`ScheduleError::EmptyPrompt`], [`ScheduleError::NothingToGenerate`], [`ScheduleError::TooLong`] for a
    /// request that would not fit into an empty cache, [`ScheduleError::QueueFull`].
    pub fn submit(&mut self, request: Request) -> Result<SequenceId, ScheduleError> {
        let Request {
            prompt,
            generated,
            max_new_tokens,
            work,
        } = request;
        if prompt.is_empty() {
            return Err(ScheduleError::EmptyPrompt);
        }
        if max_new_tokens == 0 && work != Work::Export {
            return Err(ScheduleError::NothingToGenerate);
        }
        let prompt_tokens = prompt.len();
        let provenance = work.prompt();
        let prompt = prompt.into_iter().map(|id| KvToken { id, provenance });
        let tokens: Vec<KvToken> = prompt
            .chain(generated.into_iter().map(KvToken::own))
            .collect();
        let sequence = Sequence {
            work,
            prompt_tokens,
            limit_tokens: tokens.len().saturating_add(max_new_tokens),
            tokens,
            phase: Phase::Waiting,
            kv: None,
            again: false,
        };
        let stored = sequence.stored_tokens_max();
        let (needed_blocks, blocks) = (self.kv.blocks_for(stored), self.kv.pool().total_blocks());
        if needed_blocks > blocks {
            return Err(ScheduleError::TooLong {
                tokens: stored,
                needed_blocks,
                blocks,
            });
        }
        let waiting = self.waiting_new();
        if waiting >= self.options.max_waiting {
            return Err(ScheduleError::QueueFull {
                waiting,
                limit: self.options.max_waiting,
            });
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, sequence);
        self.waiting.insert(id);
        Ok(id)
    }

    /// Ends a sequence in any phase, and returns whether it existed. Steps in flight may still write to its blocks: these
    /// are free once all of those have landed, at the latest for the next [`Scheduler::schedule`].
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        self.remove(id)
    }

    /// Destination of the KV of a sequence in [`Phase::WaitingKv`]; `None` in any other phase. Call this before each
    /// write: a cancelled sequence must not be written to.
    pub fn import_target(&self, id: SequenceId) -> Option<ImportTarget> {
        let sequence = self.sequences.get(&id)?;
        match (&sequence.kv, sequence.phase) {
            (Some(kv), Phase::WaitingKv) => Some(ImportTarget {
                blocks: kv.ids_for(sequence.prompt_tokens),
                first_token: kv.tokens(),
                tokens: sequence.prompt_tokens,
            }),
            _ => None,
        }
    }

    /// Records that the KV of the whole prompt has been imported. `sampled` is the first answer token, which follows
    /// from the logits that came with it; `None` if the answer already has tokens, which are then computed here.
    ///
    /// # Errors
    /// [`ScheduleError::UnknownSequence`], [`ScheduleError::NotImporting`], [`ScheduleError::ImportedToken`].
    pub fn import_done(
        &mut self,
        id: SequenceId,
        sampled: Option<Sampled>,
    ) -> Result<Option<Finished>, ScheduleError> {
        let sequence = self
            .sequences
            .get_mut(&id)
            .ok_or(ScheduleError::UnknownSequence(id))?;
        let Some(kv) = sequence
            .kv
            .as_mut()
            .filter(|_| sequence.phase == Phase::WaitingKv)
        else {
            return Err(ScheduleError::NotImporting(id));
        };
        let generated = sequence.tokens.len() - sequence.prompt_tokens;
        if sampled.is_some() != (generated == 0) {
            return Err(ScheduleError::ImportedToken {
                sequence: id,
                sampled: sampled.is_some(),
                generated,
            });
        }
        let imported = &sequence.tokens[kv.tokens()..sequence.prompt_tokens];
        self.kv
            .commit(kv, imported)
            .map_err(|e| blocks_error(id, &e))?;
        sequence.phase = Phase::Prefilling;
        Ok(sampled.and_then(|s| self.push_token(id, s)))
    }

    /// Records that an export's KV was read: its blocks are released, and it ends.
    ///
    /// # Errors
    /// [`ScheduleError::UnknownSequence`], [`ScheduleError::NotExporting`].
    pub fn export_done(&mut self, id: SequenceId) -> Result<(), ScheduleError> {
        match self.phase(id) {
            None => Err(ScheduleError::UnknownSequence(id)),
            Some(Phase::Exporting) => {
                self.remove(id);
                Ok(())
            }
            Some(_) => Err(ScheduleError::NotExporting(id)),
        }
    }

    /// Decides the next step, by what is known of all sequences. Steps still in flight are abandoned: none of them is
    /// recorded, and no device may be computing them any more.
    pub fn schedule(&mut self) -> Step {
        self.in_flight.clear();
        self.kv.landed(self.step);
        self.step += 1;
        let mut step = Step {
            number: self.step,
            ..Step::default()
        };
        self.add_decodes(&mut step);
        self.admit(&mut step);
        self.add_chunks(&mut step);
        self.launched(&step);
        step
    }

    /// Records a computed step, the first of those in flight.
    ///
    /// # Errors
    /// [`ScheduleError::StaleStep`], [`ScheduleError::MissingToken`], [`ScheduleError::UnexpectedToken`]; then
    /// nothing is recorded, and the step is still in flight.
    pub fn update(&mut self, result: StepResult) -> Result<Update, ScheduleError> {
        let tokens = self.check_result(&result)?;
        self.kv.landed(result.step);
        let mut update = Update::default();
        for span in self.in_flight.pop() {
            let id = span.sequence;
            let Some(sequence) = self.sequences.get_mut(&id) else {
                continue; // Cancelled while it was computed.
            };
            let Some(kv) = sequence.kv.as_mut() else {
                continue;
            };
            let start = kv.tokens();
            self.kv
                .commit(kv, &sequence.tokens[start..start + span.rows])
                .map_err(|e| blocks_error(id, &e))?;
            if !span.wants_logits {
                continue;
            }
            if sequence.work == Work::Export {
                sequence.phase = Phase::Exporting;
                update.exported.push(id);
            } else if let Some(sampled) = tokens.get(&id) {
                update.finished.extend(self.push_token(id, *sampled));
            }
        }
        Ok(update)
    }

    /// Records that all KV is lost: nothing is cached, and every sequence that was running is computed again, its prompt and its
    /// answer so far. No device may be computing a step any more.
    pub fn forget_kv(&mut self) {
        self.in_flight.clear();
        self.kv.landed(self.step);
        for id in std::mem::take(&mut self.running) {
            if let Some(sequence) = self.sequences.get_mut(&id) {
                sequence.phase = Phase::Waiting;
                if let Some(kv) = sequence.kv.take() {
                    self.kv.release(kv);
                }
                self.waiting.insert(id);
                self.preemptions += 1;
            }
        }
        self.kv.clear_cached();
    }

    /// Phase of a sequence; `None` if it has ended.
    pub fn phase(&self, id: SequenceId) -> Option<Phase> {
        self.sequences.get(&id).map(|s| s.phase)
    }

    /// Tokens of a sequence, prompt and answer; `None` if it has ended.
    pub fn tokens(&self, id: SequenceId) -> Option<Vec<u32>> {
        let sequence = self.sequences.get(&id)?;
        Some(sequence.tokens.iter().map(|token| token.id).collect())
    }

    /// Whether no sequences are left.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Gauges and counters.
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            preemptions: self.preemptions,
            kv: self.kv.stats(),
        }
    }

    /// Appends a sampled token; ends the sequence if it is the last one.
    fn push_token(&mut self, id: SequenceId, sampled: Sampled) -> Option<Finished> {
        let sequence = self.sequences.get_mut(&id)?;
        sequence.tokens.push(KvToken::own(sampled.token));
        sequence.phase = Phase::Decoding;
        let reason = if sampled.last {
            FinishReason::Stop
        } else if sequence.tokens.len() >= sequence.limit_tokens {
            FinishReason::Length
        } else {
            return None;
        };
        self.remove(id);
        Some(Finished {
            sequence: id,
            reason,
        })
    }

    /// Adds a row for each decoding sequence, oldest first. A sequence that finds neither a block nor a younger
    /// sequence to take one from keeps what it has and sits the step out.
    fn add_decodes(&mut self, step: &mut Step) {
        let ids: Vec<SequenceId> = self.running.iter().copied().collect();
        for id in ids {
            // Checked again: an older sequence may just have taken its blocks.
            if self.phase(id) != Some(Phase::Decoding) || !self.make_room(id, step) {
                continue;
            }
            if let Some(span) = self.span(id, 1, SpanKind::Decode) {
                step.spans.push(span);
            }
        }
    }

    /// Makes room for all tokens of a decoding sequence, at the expense of younger ones.
    fn make_room(&mut self, id: SequenceId, step: &mut Step) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&id) else {
                return false;
            };
            let Some(kv) = sequence.kv.as_mut() else {
                return false;
            };
            if self.kv.reserve(kv, sequence.tokens.len()).is_ok() {
                return true;
            }
            let younger = self.running.iter().rev().take_while(|other| **other > id);
            let victim = younger.copied().find(|other| {
                self.sequences
                    .get(other)
                    .is_some_and(Sequence::is_preemptible)
            });
            match victim {
                Some(victim) => self.preempt(victim, step),
                None => return false,
            }
        }
    }

    fn preempt(&mut self, id: SequenceId, step: &mut Step) {
        if let Some(sequence) = self.sequences.get_mut(&id) {
            sequence.phase = Phase::Waiting;
            if let Some(kv) = sequence.kv.take() {
                self.kv.release(kv);
            }
            self.running.remove(&id);
            self.waiting.insert(id);
            self.preemptions += 1;
            step.preempted.push(id);
        }
    }

    /// Admits sequences from the head of the queue while they fit.
    fn admit(&mut self, step: &mut Step) {
        while let Some(&id) = self.waiting.first() {
            let Some(room) = self.room_for(id) else {
                return;
            };
            let Some(sequence) = self.sequences.get_mut(&id) else {
                return;
            };
            let mut kv = self.kv.begin(&sequence.tokens);
            if self.kv.reserve(&mut kv, room).is_err() {
                self.kv.release(kv);
                return;
            }
            let cached_tokens = kv.tokens();
            sequence.kv = Some(kv);
            sequence.phase = if sequence.needs_import() {
                Phase::WaitingKv
            } else {
                Phase::Prefilling
            };
            let again = std::mem::replace(&mut sequence.again, true);
            let tokens = sequence.tokens.len();
            self.waiting.remove(&id);
            self.running.insert(id);
            step.admitted.push(Admission {
                sequence: id,
                tokens,
                cached_tokens,
                import: self.import_target(id),
                again,
            });
        }
    }

    /// Number of tokens to reserve for a sequence if it can be admitted now: all it has and one to decode.
    fn room_for(&self, id: SequenceId) -> Option<usize> {
        let sequence = self.sequences.get(&id)?;
        if sequence.work == Work::Export {
            // Exports have no limit of their own: the next one is admitted when the chunk can reach it.
            if self.pending_prefill_tokens() >= self.chunk_tokens() {
                return None;
            }
        } else if self.decoders().count() >= self.options.max_batch {
            return None;
        }
        let tokens = (sequence.tokens.len() + 1).min(sequence.stored_tokens_max());
        let left = self.kv.room_after(&sequence.tokens, tokens)?;
        // Every decoding sequence may soon need a block: without this margin the newcomer would be preempted.
        (left >= self.decoders().count()).then_some(tokens)
    }

    /// Adds chunks of prompts, oldest first, up to the budget; or whole prompts, of which the first has no budget.
    fn add_chunks(&mut self, step: &mut Step) {
        let chunk_tokens = self.chunk_tokens();
        let mut budget = chunk_tokens;
        let ids: Vec<SequenceId> = self.running.iter().copied().collect();
        for id in ids {
            if budget == 0 {
                return;
            }
            let Some(sequence) = self.sequences.get_mut(&id) else {
                continue;
            };
            if sequence.phase != Phase::Prefilling {
                continue;
            }
            if let Some(kv) = sequence.kv.as_mut() {
                // Another sequence may have computed the same prefix while this one waited.
                self.kv.extend_from_cache(kv, &sequence.tokens);
            }
            let whole = self.options.whole_prompts;
            let first = budget == chunk_tokens;
            let rows = if whole && first { usize::MAX } else { budget };
            if let Some(span) = self.span(id, rows, SpanKind::Prefill) {
                if whole && !span.wants_logits {
                    return; // It is the next step's.
                }
                budget = budget.saturating_sub(span.tokens.len());
                step.spans.push(span);
            }
        }
    }

    /// Prompt tokens of the next step: more where no answer waits for it to end.
    fn chunk_tokens(&self) -> usize {
        let least = self.options.chunk_tokens;
        match self.options.idle_chunk_tokens {
            Some(most) if !self.decoders().any(|s| s.phase == Phase::Decoding) => least.max(most),
            _ => least,
        }
    }

    /// Returns the next rows of a sequence, at most `rows`.
    fn span(&self, id: SequenceId, rows: usize, kind: SpanKind) -> Option<StepSpan> {
        let sequence = self.sequences.get(&id)?;
        let kv = sequence.kv.as_ref()?;
        let start = kv.tokens();
        let end = sequence.tokens.len().min(start.saturating_add(rows));
        Some(StepSpan {
            sequence: id,
            kind,
            tokens: sequence
                .tokens
                .get(start..end)?
                .iter()
                .map(|t| t.id)
                .collect(),
            start,
            blocks: kv.ids_for(end),
            wants_logits: end == sequence.tokens.len(),
        })
    }

    /// Requests in the queue that were never admitted.
    fn waiting_new(&self) -> usize {
        let waiting = self.waiting.iter().filter_map(|id| self.sequences.get(id));
        waiting.filter(|s| !s.again).count()
    }

    /// Sequences that hold a place in the batch.
    fn decoders(&self) -> impl Iterator<Item = &Sequence> {
        let running = self.running.iter().filter_map(|id| self.sequences.get(id));
        running.filter(|s| s.work != Work::Export)
    }

    fn pending_prefill_tokens(&self) -> usize {
        let running = self.running.iter().filter_map(|id| self.sequences.get(id));
        running
            .filter(|s| s.phase == Phase::Prefilling)
            .map(|s| s.tokens.len() - s.computed_tokens())
            .sum()
    }

    fn remove(&mut self, id: SequenceId) -> bool {
        let Some(sequence) = self.sequences.remove(&id) else {
            return false;
        };
        self.waiting.remove(&id);
        self.running.remove(&id);
        if let Some(kv) = sequence.kv {
            self.kv.release(kv);
        }
        true
    }
}

fn blocks_error(sequence: SequenceId, error: &hearth_kvcache::KvCacheError) -> ScheduleError {
    ScheduleError::Blocks {
        sequence,
        reason: error.to_string(),
    }
}
