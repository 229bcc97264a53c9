//! The step loop: commands, schedule, forward pass, sampler, events, and again.

mod flights;
mod group;

use std::{
    any::Any,
    collections::{BTreeMap, HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver as Inbox, TryRecvError},
    },
    time::{Duration, Instant},
};

use hearth_kernels::KvLayout;
use hearth_kernels::trace::Trace;
use hearth_kvcache::KvCache;
use hearth_schedule::{
    Admission, Phase, Request, Sampled, ScheduleError, Scheduler, SchedulerOptions, SequenceId,
    Step, StepResult, Work,
};

use crate::{
    EngineError, EngineOptions, EngineStats, FinishReason, GenerateEvent, Health, PrefillEvent,
    RequestId,
    forward::{Forward, Output},
    import::{Import, ImportBudget, ImportCommand, ImportQueue, KvChunk},
    request::{EngineRequest, Export, SampledToken, SamplerState},
    shared::Shared,
    work::StepWork,
};
use flights::FlyingStep;
use group::GroupLosses;

/// Number of forward passes that fail in a row before the engine reports itself unhealthy.
const FAILURES_UNTIL_UNHEALTHY: u32 = 3;

/// Commands from handles to the loop.
pub(crate) enum Command {
    Submit(EngineRequest),
    Cancel(RequestId),
    Import(RequestId, ImportCommand),
    FailAll(EngineError),
    /// Bytes of exports were taken by their receivers.
    Unread,
    Shutdown,
}

/// The engine's thread.
pub(crate) struct StepLoop<F> {
    forward: F,
    layout: KvLayout,
    scheduler: Scheduler,
    inbox: Inbox<Command>,
    shared: Arc<Shared>,
    requests: BTreeMap<SequenceId, EngineRequest>,
    sequences: HashMap<RequestId, SequenceId>,
    /// Exports that wait until receivers of others have taken more, the first one first.
    held_exports: VecDeque<Box<Export>>,
    imports: ImportQueue,
    /// Steps that were started, the first one first; the result of none of them is known.
    in_flight: VecDeque<FlyingStep>,
    /// Most steps in flight that the caller wants.
    max_in_flight: usize,
    /// Receives the steps.
    trace: Option<Arc<Trace>>,
    /// When the last step that has landed did so.
    landed_at: Instant,
    counters: Counters,
    failures_in_a_row: u32,
    /// See [`EngineOptions::whole_prompts`].
    whole_prompts: bool,
    /// See [`EngineOptions::group_patience`].
    group_patience: Duration,
    /// What became of the group of ranks that run the model.
    group: GroupLosses,
    /// Set if the last schedule had nothing to compute and nothing has happened since.
    idle: bool,
    stopping: bool,
}

#[derive(Clone, Copy, Default)]
struct Counters {
    prompt_tokens: u64,
    generated_tokens: u64,
    kv_bytes_moved: u64,
    steps: u64,
    step_time: Duration,
}

impl<F: Forward> StepLoop<F> {
    pub(crate) fn new(
        forward: F,
        blocks: usize,
        options: &EngineOptions,
        inbox: Inbox<Command>,
        shared: Arc<Shared>,
    ) -> Result<Self, EngineError> {
        let refused = |reason: String| EngineError::Options {
            field: "kv",
            value: format!("{blocks} blocks of {} tokens", options.block_tokens),
            remedy: reason,
        };
        let kv = KvCache::new(blocks, options.block_tokens).map_err(|e| refused(e.to_string()))?;
        let limits = SchedulerOptions {
            max_batch: options.max_batch,
            chunk_tokens: options.chunk_tokens,
            idle_chunk_tokens: options.idle_chunk_tokens,
            whole_prompts: options.whole_prompts,
            // The handle limits the number of requests.
            max_waiting: usize::MAX,
        };
        Ok(Self {
            layout: forward.layout(),
            scheduler: Scheduler::new(limits, kv).map_err(|e| refused(e.to_string()))?,
            forward,
            inbox,
            shared,
            requests: BTreeMap::new(),
            sequences: HashMap::new(),
            held_exports: VecDeque::new(),
            imports: ImportQueue::default(),
            in_flight: VecDeque::new(),
            max_in_flight: options.steps_in_flight,
            trace: options.trace.clone(),
            landed_at: Instant::now(),
            counters: Counters::default(),
            failures_in_a_row: 0,
            whole_prompts: options.whole_prompts,
            group_patience: options.group_patience,
            group: GroupLosses::default(),
            idle: true,
            stopping: false,
        })
    }

    /// Runs until the last handle is gone or a shutdown is requested.
    /// Whatever happens, every request gets its last event.
    pub(crate) fn run(mut self) {
        if let Err(reason) = self.forward.bind_thread() {
            tracing::warn!(
                reason,
                "the engine's thread could not be bound to its device"
            );
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| self.steps()));
        let mut reason = "it was shut down".to_owned();
        if let Err(panic) = outcome {
            reason = format!("a fault of the engine itself: {}", panic_text(&*panic));
            tracing::error!(reason, "the engine stops");
        }
        self.shared.begin_drain();
        self.shared.set_health(Health::Unhealthy(reason.clone()));
        let error = EngineError::Stopped { reason };
        self.fail_held(&error);
        for (_, request) in std::mem::take(&mut self.requests) {
            request.fail(error.clone());
        }
        while let Ok(command) = self.inbox.try_recv() {
            if let Command::Submit(request) = command {
                request.fail(error.clone());
            }
        }
    }

    fn steps(&mut self) {
        while self.take_commands() {
            if !self.is_together() {
                self.publish();
                continue;
            }
            if self.in_flight.is_empty() {
                self.take_imports();
                let step = self.scheduler.schedule();
                // With nothing to compute, only a command can change that; a request's end resets this.
                self.idle = step.is_empty();
                self.announce(&step);
                self.start(&step);
            }
            while self.start_ahead() {}
            self.land();
            self.publish();
        }
        self.wait_for_all();
    }

    /// Takes all pending commands, and waits for one if there is nothing else to do. Returns false to stop.
    fn take_commands(&mut self) -> bool {
        while !self.stopping {
            let nothing_to_do = self.idle && self.imports.is_empty() && self.in_flight.is_empty();
            let command = match nothing_to_do && self.group.apart.is_none() {
                false => self.inbox.try_recv(),
                true => self.wait_for_command(),
            };
            match command {
                Ok(command) => self.take_command(command),
                Err(TryRecvError::Empty) => return true,
                // All handles are gone, including those of requests: no one is waiting for anything.
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        false
    }

    fn take_command(&mut self, command: Command) {
        self.idle = false;
        match command {
            Command::Submit(EngineRequest::Export(export)) => {
                self.held_exports.push_back(export);
                self.begin_exports();
            }
            Command::Submit(request) => self.submit(request),
            Command::Unread => self.begin_exports(),
            Command::Import(id, command) => self.imports.push(id, command),
            Command::Cancel(id) => {
                if let Some(&sequence) = self.sequences.get(&id) {
                    self.remove(sequence);
                }
                self.held_exports.retain(|export| export.id != id);
                // A shorter one behind it may have room.
                self.begin_exports();
            }
            Command::FailAll(error) => self.fail_all(&error),
            Command::Shutdown => self.stopping = true,
        }
    }

    /// Submits the exports for whose KV there is room.
    fn begin_exports(&mut self) {
        while let Some(export) = self.held_exports.front_mut() {
            let tokens = export.tokens.len().saturating_sub(export.sent_to);
            let bytes = tokens * self.layout.layers * self.layout.token_layer_bytes();
            export.owed = export.unread.reserve(bytes);
            if export.owed.is_none() {
                return;
            }
            if let Some(export) = self.held_exports.pop_front() {
                self.submit(EngineRequest::Export(export));
            }
        }
    }

    fn fail_all(&mut self, error: &EngineError) {
        self.fail_held(error);
        let all: Vec<SequenceId> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|s| self.fail(s, error.clone()));
    }

    fn fail_held(&mut self, error: &EngineError) {
        for export in std::mem::take(&mut self.held_exports) {
            EngineRequest::Export(export).fail(error.clone());
        }
    }

    fn submit(&mut self, mut request: EngineRequest) {
        let ask = match &mut request {
            EngineRequest::Export(r) => Request {
                prompt: std::mem::take(&mut r.tokens),
                generated: Vec::new(),
                max_new_tokens: 0,
                work: Work::Export,
            },
            EngineRequest::Answer(r) => Request {
                prompt: std::mem::take(&mut r.prompt),
                generated: std::mem::take(&mut r.generated),
                max_new_tokens: r.max_new_tokens,
                work: r.work,
            },
        };
        match self.scheduler.submit(ask) {
            Err(e) => request.fail(internal(&e)),
            Ok(sequence) => {
                self.sequences.insert(request.id(), sequence);
                self.requests.insert(sequence, request);
            }
        }
    }

    /// Removes a request and frees its KV.
    fn remove(&mut self, sequence: SequenceId) -> Option<EngineRequest> {
        let request = self.requests.remove(&sequence)?;
        self.sequences.remove(&request.id());
        self.group.of_sequences.remove(&sequence);
        self.imports.forget(request.id());
        self.scheduler.cancel(sequence);
        self.idle = false;
        Some(request)
    }

    fn fail(&mut self, sequence: SequenceId, error: EngineError) {
        if let Some(request) = self.remove(sequence) {
            tracing::debug!(%error, "request failed");
            request.fail(error);
        }
    }

    /// Sends an event to an answer's receiver; an answer without a receiver is cancelled.
    fn send(&mut self, sequence: SequenceId, event: GenerateEvent) -> bool {
        let there = match self.requests.get_mut(&sequence) {
            Some(EngineRequest::Answer(r)) => r.receiver.send(event),
            _ => false,
        };
        if !there {
            self.remove(sequence);
        }
        there
    }

    fn finish(&mut self, finished: hearth_schedule::Finished) {
        let reason = match finished.reason {
            hearth_schedule::FinishReason::Stop => FinishReason::Stop,
            hearth_schedule::FinishReason::Length => FinishReason::Length,
        };
        self.send(finished.sequence, GenerateEvent::Finished { reason });
        self.remove(finished.sequence);
    }

    /// Copies imported KV, within the budget that decoding sequences allow.
    fn take_imports(&mut self) {
        let decodes = |id: &SequenceId| self.scheduler.phase(*id) == Some(Phase::Decoding);
        let mut budget = ImportBudget::new(self.requests.keys().any(decodes));
        while let Some((id, command)) = self.imports.pop(&mut budget) {
            self.idle = false;
            let Some(&sequence) = self.sequences.get(&id) else {
                continue;
            };
            if let Err(error) = self.import(sequence, command) {
                self.note_lost_device();
                self.fail(sequence, error);
            }
        }
    }

    /// Reports a device that is lost, which does not come back; returns whether it is.
    fn note_lost_device(&self) -> bool {
        let lost = self.forward.device_lost();
        let is_lost = lost.is_some();
        if let Some(why) = lost {
            self.shared.set_health(Health::DeviceLost(why));
        }
        is_lost
    }

    fn import(&mut self, sequence: SequenceId, command: ImportCommand) -> Result<(), EngineError> {
        let Some(EngineRequest::Answer(answer)) = self.requests.get_mut(&sequence) else {
            return Ok(());
        };
        // A late message for an import that was given up.
        let (Some(import), Some(target)) =
            (&mut answer.import, self.scheduler.import_target(sequence))
        else {
            return Ok(());
        };
        match command {
            ImportCommand::Chunk(chunk) => {
                import.check(&chunk, &self.layout)?;
                let KvChunk {
                    layer,
                    first_token,
                    data,
                } = &chunk;
                self.forward
                    .write(*layer, &target.blocks, *first_token, data)
                    .map_err(|detail| EngineError::Import {
                        layer: *layer,
                        first_token: *first_token,
                        detail,
                    })?;
                import.stored(&chunk, &self.layout);
                self.counters.kv_bytes_moved += data.len() as u64;
            }
            ImportCommand::Done(logits) => {
                import.check_complete()?;
                if logits.len() != self.forward.vocab() {
                    let (got, vocab) = (logits.len(), self.forward.vocab());
                    let detail = format!("it sent {got} logits of {vocab}");
                    return Err(EngineError::Prefill { detail });
                }
                answer.import = None;
                // The token after replayed ones is computed here.
                let sampled = match answer.sampler.index {
                    0 => match self.choose(sequence, |state| state.next(&logits)) {
                        None => return Ok(()),
                        sampled => sampled,
                    },
                    _ => None,
                };
                let done = self.scheduler.import_done(sequence, sampled);
                if let Some(finished) = done.map_err(|e| internal(&e))? {
                    self.finish(finished);
                }
            }
            ImportCommand::Failed(error) => return Err(error),
        }
        Ok(())
    }

    /// Advances an answer by a token and sends it; `None` if the answer ended with an error or is no longer wanted.
    fn choose(
        &mut self,
        sequence: SequenceId,
        next: impl FnOnce(&mut SamplerState) -> Result<SampledToken, EngineError>,
    ) -> Option<Sampled> {
        let Some(EngineRequest::Answer(answer)) = self.requests.get_mut(&sequence) else {
            return None;
        };
        let chosen = match next(&mut answer.sampler) {
            Ok(chosen) => chosen,
            Err(error) => {
                self.fail(sequence, error);
                return None;
            }
        };
        self.counters.generated_tokens += 1;
        self.group.of_sequences.remove(&sequence);
        self.send(sequence, chosen.event).then_some(Sampled {
            sequence,
            token: chosen.token,
            last: chosen.last,
        })
    }

    /// Tells requests that they have left the queue, and asks for the KV that they need.
    fn announce(&mut self, step: &Step) {
        for admission in &step.admitted {
            let Admission {
                sequence,
                tokens,
                cached_tokens,
                import,
                again,
            } = admission;
            if !again {
                self.counters.prompt_tokens += *tokens as u64;
            }
            let cached_tokens = *cached_tokens;
            match self.requests.get_mut(sequence) {
                Some(EngineRequest::Export(export)) if !again => export.started(cached_tokens),
                Some(EngineRequest::Answer(answer)) => {
                    answer.import = import
                        .as_ref()
                        .map(|t| Import::new(self.layout.layers, t.first_token, t.tokens));
                    let started = GenerateEvent::Started { cached_tokens };
                    if (*again || self.send(*sequence, started))
                        && let Some(target) = import
                    {
                        let first_token = target.first_token;
                        self.send(*sequence, GenerateEvent::NeedsKv { first_token });
                    }
                }
                Some(EngineRequest::Export(_)) | None => {}
            }
        }
    }

    /// Handles a pass that was ended because requests in it were cancelled: the others are rescheduled.
    fn give_up(&mut self, work: &StepWork) {
        for sequence in &work.sequences {
            let request = self.requests.get(sequence);
            if request.is_some_and(EngineRequest::is_cancelled) {
                self.remove(*sequence);
            }
        }
    }

    /// Samples, sends the step's results, and records them.
    fn deliver(&mut self, number: u64, work: &StepWork, output: Output) {
        for range in &work.exports {
            if let Some(EngineRequest::Export(export)) = self.requests.get_mut(&range.sequence) {
                export.sent_to = range.to.max(range.from);
            }
        }
        let mut result = StepResult {
            step: number,
            sampled: Vec::new(),
        };
        for (sequence, token) in work.on_device.iter().zip(output.chosen) {
            let sampled = self.choose(*sequence, |state| state.take(token));
            result.sampled.extend(sampled);
        }
        let rows = output.logits.chunks_exact(self.forward.vocab());
        for (sequence, row) in work.on_host.iter().zip(rows) {
            match self.requests.get_mut(sequence) {
                Some(EngineRequest::Answer(_)) => {
                    let sampled = self.choose(*sequence, |state| state.next(row));
                    result.sampled.extend(sampled);
                }
                Some(EngineRequest::Export(export)) => {
                    export.receiver.send(PrefillEvent::Done {
                        logits: row.to_vec(),
                        cached_tokens: export.cached_tokens,
                    });
                }
                None => {}
            }
        }
        match self.scheduler.update(result) {
            Err(e) => {
                let sequences = work.sequences.iter();
                sequences.for_each(|s| self.fail(*s, internal(&e)));
            }
            Ok(update) => {
                update.finished.into_iter().for_each(|f| self.finish(f));
                for sequence in update.exported {
                    // The last event has been sent; whatever the scheduler says, the request is over.
                    let _ = self.scheduler.export_done(sequence);
                    self.remove(sequence);
                }
            }
        }
        self.drop_unwanted_exports(work);
    }

    /// Removes exports whose receiver is gone.
    fn drop_unwanted_exports(&mut self, work: &StepWork) {
        for range in &work.exports {
            let unwanted = match self.requests.get(&range.sequence) {
                Some(EngineRequest::Export(export)) => export.receiver.is_gone(),
                _ => false,
            };
            if unwanted {
                self.remove(range.sequence);
            }
        }
    }

    fn succeeded(&mut self) {
        if std::mem::take(&mut self.failures_in_a_row) >= FAILURES_UNTIL_UNHEALTHY {
            self.shared.set_health(Health::Healthy);
        }
    }

    /// Ends the requests of a batch that could not be computed with the reason; the others continue.
    fn failed(&mut self, work: &StepWork, reason: String) {
        tracing::error!(
            reason,
            requests = work.sequences.len(),
            "a forward pass failed"
        );
        self.failures_in_a_row += 1;
        if !self.note_lost_device() && self.failures_in_a_row >= FAILURES_UNTIL_UNHEALTHY {
            let count = self.failures_in_a_row;
            let text =
                format!("{count} forward passes failed in a row, the last one with: {reason}");
            self.shared.set_health(Health::Unhealthy(text));
        }
        let error = EngineError::Forward { reason };
        let sequences = work.sequences.iter();
        sequences.for_each(|s| self.fail(*s, error.clone()));
    }

    fn publish(&self) {
        let scheduler = self.scheduler.stats();
        let weights = self.forward.weights();
        let Counters {
            prompt_tokens,
            generated_tokens,
            kv_bytes_moved,
            steps,
            step_time,
        } = self.counters;
        self.shared.set_stats(EngineStats {
            running: scheduler.running,
            waiting: scheduler.waiting + self.held_exports.len(),
            kv_blocks_total: scheduler.kv.total_blocks,
            kv_blocks_used: scheduler.kv.used_blocks,
            prefix_hit_tokens: scheduler.kv.hit_tokens,
            prefix_query_tokens: scheduler.kv.lookup_tokens,
            prompt_tokens,
            generated_tokens,
            weight_bytes_read: weights.read_bytes,
            kv_bytes_moved,
            sent_kv: self.forward.sent_kv(),
            steps,
            step_seconds: step_time.as_secs_f64(),
            preemptions: scheduler.preemptions,
            resident_bytes: weights.resident_bytes,
            streamed: weights.streamed,
            device: weights.device.unwrap_or_default(),
            draining: false,
        });
    }
}

fn internal(error: &ScheduleError) -> EngineError {
    EngineError::Internal {
        reason: error.to_string(),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "unknown panic payload".to_owned())
}
