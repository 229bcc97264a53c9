//! The engine's handle: checks requests on the caller's thread and passes them to the engine's thread.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
use hearth_kernels::{Backend, KvLayout};
use hearth_model::Model;
use hearth_schedule::{Provenance, Work};

use crate::{
    DrainReport, EngineError, EngineOptions, EngineStats, FinishReason, GenerateEvent,
    GenerateInput, Health, KvBudget, PrefillEvent, PrefillInput, PrefillLocation, RequestId,
    forward::{Forward, ModelForward},
    grammar::{GrammarError, GrammarState},
    import::{ImportCommand, KvChunk},
    progress::Progress,
    request::{Answer, Cancelled, EngineRequest, Export, Receiver, SamplerState},
    sampler::{History, MAX_TOP_LOGPROBS},
    shared::{Shared, Slot},
    step::{Command, StepLoop},
    unread::Unread,
};

/// A running engine; clones are handles to the same engine. Its thread ends when the last handle is dropped.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    unread: Unread,
    options: EngineOptions,
    progress: Progress,
    /// All numerics seen so far, the engine's own first; a [`Provenance`] is an index into this list.
    numerics: Mutex<Vec<String>>,
    vocab: usize,
    layout: KvLayout,
    next_id: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Handle to a request: dropping it cancels the request and frees its KV before the next step. A step in
/// flight is abandoned between two blocks of the model, unless finishing it costs the rest of its batch less.
/// Has no effect once the request has ended.
#[must_use = "dropping the handle cancels the request"]
pub struct RequestHandle {
    id: RequestId,
    cancelled: Cancelled,
    commands: Sender<Command>,
}

impl RequestHandle {
    /// Returns the request's identifier, for imports.
    pub fn id(&self) -> RequestId {
        self.id
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.cancelled.set();
        // The engine may be gone already, and the request with it.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl Engine {
    /// Allocates the KV cache and starts the engine's thread.
    ///
    /// # Errors
    /// [`EngineError::Options`] for limits that contradict each other or the model, or when the cache cannot be
    /// allocated.
    pub fn start<B: Backend>(model: Model<B>, options: EngineOptions) -> Result<Self, EngineError> {
        let block_tokens = options.block_tokens;
        if !block_tokens.is_power_of_two() {
            return Err(option(
                "block_tokens",
                block_tokens,
                "give a power of two, as 16",
            ));
        }
        let layout = model.kv_layout(block_tokens, options.kv_dtype);
        let blocks = kv_blocks(&options, &layout)?;
        let kv = model.kv_alloc(layout, blocks).map_err(|e| {
            let remedy = format!("{e}; lower the KV memory");
            option("kv", format!("{blocks} blocks"), remedy)
        })?;
        Self::start_forward(ModelForward::new(model, kv), options)
    }

    /// Starts the engine on any [`Forward`].
    pub(crate) fn start_forward<F: Forward + 'static>(
        forward: F,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let (vocab, layout) = (forward.vocab(), forward.layout());
        let progress = forward.progress();
        check_options(&options)?;
        let blocks = kv_blocks(&options, &layout)?;
        let shared = Arc::new(Shared::new(EngineStats {
            kv_blocks_total: blocks,
            ..EngineStats::default()
        }));
        let (commands, inbox) = channel();
        let token_bytes = layout.layers * layout.token_layer_bytes();
        let unread = Unread::new(options.context_length * token_bytes, commands.clone());
        let steps = StepLoop::new(forward, blocks, &options, inbox, shared.clone())?;
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || steps.run())
            .map_err(|e| option("engine", "no thread", e))?;
        Ok(Self {
            inner: Arc::new(Inner {
                commands,
                shared,
                unread,
                numerics: Mutex::new(vec![options.numerics.clone()]),
                options,
                progress,
                vocab,
                layout,
                next_id: AtomicU64::new(1),
                thread: Mutex::new(Some(thread)),
            }),
        })
    }

    /// Takes a request for an answer. Events go to `sink` on the engine's thread, so it must not block;
    /// returning false cancels the request. If `generated` already completes the answer, its end is
    /// reported before this returns.
    ///
    /// # Errors
    /// Any error for which [`EngineError::is_request_fault`] is true, [`EngineError::QueueFull`],
    /// [`EngineError::Draining`] and [`EngineError::Stopped`].
    pub fn generate(
        &self,
        input: GenerateInput,
        sink: Box<dyn FnMut(GenerateEvent) -> bool + Send>,
    ) -> Result<RequestHandle, EngineError> {
        let GenerateInput {
            request_id,
            prompt,
            generated,
            sampling,
            max_tokens,
            stop_tokens,
            grammar,
            logprobs,
            prefill,
        } = input;
        self.check_prompt("prompt", &prompt, &generated)?;
        self.check_tokens("generated", &generated)?;
        if max_tokens == 0 {
            return Err(EngineError::MaxTokensZero);
        }
        sampling.check(self.inner.vocab)?;
        check_logprobs(logprobs)?;
        let mut grammar = match grammar {
            None => None,
            Some(grammar) => Some(self.grammar_tokenizer()?.compile(&grammar)?),
        };
        let reason =
            self.finished_by(&prompt, &generated, max_tokens, &stop_tokens, &mut grammar)?;
        let slot = Slot::take(&self.inner.shared, self.limit())?;
        let mut receiver = Receiver::new(sink);
        let handle = self.handle();
        if let Some(reason) = reason {
            receiver.send(GenerateEvent::Started { cached_tokens: 0 });
            receiver.send(GenerateEvent::Finished { reason });
            return Ok(handle);
        }
        let index = generated.len();
        let history = History::new(&prompt, &generated);
        let tokens = prompt.len() + generated.len();
        let room = self.inner.options.context_length - tokens;
        tracing::debug!(request_id, tokens, index, "request accepted");
        let answer = Answer {
            id: handle.id,
            cancelled: handle.cancelled.clone(),
            receiver,
            max_new_tokens: room.min(max_tokens - index),
            prompt,
            generated,
            sampler: SamplerState {
                params: sampling,
                index,
                history,
                stop_tokens,
                grammar,
                logprobs,
            },
            work: self.work(prefill),
            import: None,
            _slot: slot,
        };
        self.send(Command::Submit(EngineRequest::Answer(Box::new(answer))))?;
        Ok(handle)
    }

    /// Takes a request for the KV of a prompt; events are delivered as by [`Engine::generate`].
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn prefill(
        &self,
        input: PrefillInput,
        sink: Box<dyn FnMut(PrefillEvent) -> bool + Send>,
    ) -> Result<RequestHandle, EngineError> {
        let PrefillInput {
            request_id,
            tokens,
            first_token,
            alone,
        } = input;
        self.check_prompt("tokens", &tokens, &[])?;
        if first_token >= tokens.len() {
            return Err(EngineError::NothingToExport {
                first_token,
                tokens: tokens.len(),
            });
        }
        let slot = Slot::take(&self.inner.shared, self.limit())?;
        let handle = self.handle();
        tracing::debug!(
            request_id,
            tokens = tokens.len(),
            first_token,
            "prefill accepted"
        );
        let export = Export {
            id: handle.id,
            cancelled: handle.cancelled.clone(),
            receiver: Receiver::new(sink),
            tokens,
            sent_to: first_token,
            alone,
            handed: HashSet::new(),
            cached_tokens: 0,
            unread: self.inner.unread.clone(),
            owed: None,
            _slot: slot,
        };
        self.send(Command::Submit(EngineRequest::Export(Box::new(export))))?;
        Ok(handle)
    }

    /// Imports KV of one layer, starting at `first_token`, as carried by a prefill's [`PrefillEvent::Kv`]. Returns
    /// immediately; the bytes are dropped once they have been copied, so a caller that limits data in flight may
    /// count by the bytes' owner (`Bytes::from_owner`). KV that does not fit fails the request.
    pub fn import_kv(&self, id: RequestId, layer: usize, first_token: usize, data: Bytes) {
        let chunk = KvChunk {
            layer,
            first_token,
            data,
        };
        self.import(id, ImportCommand::Chunk(chunk));
    }

    /// Signals that all KV was imported; `logits` `[vocab]` of the prompt's last token yield the first answer token,
    /// unless one was delivered before.
    pub fn import_done(&self, id: RequestId, logits: Vec<f32>) {
        self.import(id, ImportCommand::Done(logits));
    }

    /// Signals that the prefill worker did not deliver; the request ends with this error.
    pub fn import_failed(&self, id: RequestId, error: EngineError) {
        self.import(id, ImportCommand::Failed(error));
    }

    /// Returns counters and gauges.
    pub fn stats(&self) -> EngineStats {
        self.inner.shared.stats()
    }

    /// Time that the running forward pass has spent at its current layer; `None` if no pass is running. It grows
    /// without bound when the compute threads hang.
    pub fn at_layer_for(&self) -> Option<Duration> {
        self.inner.progress.at_layer_for()
    }

    /// Whether the engine can serve.
    pub fn health(&self) -> Health {
        self.inner.shared.health()
    }

    /// What became of the group of ranks that run the model, in words: that it is not complete, or that it has been. Empty: it
    /// has lost no member, or there is none.
    pub fn group(&self) -> String {
        self.inner.shared.group()
    }

    /// Time for which requests have waited for the group of ranks that run the model to be complete again; `None` if none does.
    pub fn group_apart_for(&self) -> Option<Duration> {
        self.inner.shared.apart_for()
    }

    /// Layout of the KV cache; importing and exporting engines compare its fingerprint.
    pub fn kv_layout(&self) -> KvLayout {
        self.inner.layout
    }

    /// Number of logits per token.
    pub fn vocab(&self) -> usize {
        self.inner.vocab
    }

    /// The limits that the engine was started with.
    pub fn options(&self) -> &EngineOptions {
        &self.inner.options
    }

    /// Refuses new requests and waits up to `grace` for those in flight to end, but no longer than until they have waited for
    /// the group of ranks that run the model for `group_patience` without a break; the rest fail with
    /// [`EngineError::Draining`], so that their callers retry them elsewhere. Blocks.
    pub fn drain(&self, grace: Duration, group_patience: Duration) -> DrainReport {
        let shared = &self.inner.shared;
        shared.begin_drain();
        let (open, ended_before) = shared.counts();
        let mut cut_off = 0;
        if !shared.wait_until_idle(grace, group_patience) {
            cut_off = shared.counts().0;
            // Repeated: a request accepted just before may reach the thread just after.
            while self.send(Command::FailAll(EngineError::Draining)).is_ok()
                && !shared.wait_until_idle(Duration::from_millis(100), Duration::MAX)
            {}
        }
        let ended = shared.counts().1 - ended_before;
        tracing::info!(open, ended, cut_off, "drained");
        DrainReport {
            ended: ended.saturating_sub(cut_off),
            cut_off,
        }
    }

    /// Fails everything in flight, ends the engine's thread and waits for it.
    pub fn shutdown(&self) {
        self.inner.shared.begin_drain();
        let _ = self.send(Command::Shutdown);
        let mut thread = self
            .inner
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            // The loop itself has caught and reported any panic of the thread.
            let _ = thread.join();
        }
    }

    fn limit(&self) -> usize {
        self.inner.options.max_batch + self.inner.options.max_queue
    }

    /// The scheduler's work for a prefill location, its numerics given as an index.
    fn work(&self, prefill: PrefillLocation) -> Work {
        let PrefillLocation::Remote { numerics } = prefill else {
            return Work::Generate;
        };
        let known = &self.inner.numerics;
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let index = known.iter().position(|other| *other == numerics);
        let index = index.unwrap_or_else(|| {
            known.push(numerics);
            known.len() - 1
        });
        Work::ImportThenGenerate(Provenance(index as u32))
    }

    fn handle(&self) -> RequestHandle {
        RequestHandle {
            cancelled: Cancelled::default(),
            id: RequestId(self.inner.next_id.fetch_add(1, Ordering::Relaxed)),
            commands: self.inner.commands.clone(),
        }
    }

    fn import(&self, id: RequestId, command: ImportCommand) {
        // A stopped engine has already failed the request.
        let _ = self.send(Command::Import(id, command));
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        let reason = || match self.health() {
            Health::Unhealthy(reason) | Health::Apart(reason) | Health::DeviceLost(reason) => {
                reason
            }
            Health::Healthy => "it was shut down".to_owned(),
        };
        self.inner
            .commands
            .send(command)
            .map_err(|_| EngineError::Stopped { reason: reason() })
    }

    fn grammar_tokenizer(&self) -> Result<&crate::GrammarTokenizer, EngineError> {
        let tokenizer = self.inner.options.grammar_tokenizer.as_deref();
        Ok(tokenizer.ok_or(GrammarError::NoTokenizer)?)
    }

    /// Checks that the prompt has only the model's tokens and leaves room for one more; a replay may fill the context.
    fn check_prompt(
        &self,
        field: &'static str,
        prompt: &[u32],
        generated: &[u32],
    ) -> Result<(), EngineError> {
        if prompt.is_empty() {
            return Err(EngineError::PromptEmpty);
        }
        self.check_tokens(field, prompt)?;
        let context_length = self.inner.options.context_length;
        let tokens = prompt.len() + generated.len();
        let filled = if generated.is_empty() {
            tokens + 1
        } else {
            tokens
        };
        if filled > context_length {
            return Err(EngineError::PromptTooLong {
                tokens,
                context_length,
            });
        }
        Ok(())
    }

    fn check_tokens(&self, field: &'static str, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab = self.inner.vocab;
        match tokens.iter().position(|t| *t as usize >= vocab) {
            None => Ok(()),
            Some(index) => Err(EngineError::UnknownToken {
                field,
                index,
                token: tokens[index],
                vocab,
            }),
        }
    }

    /// Reason the answer is already complete with `generated`:
    /// the worker that delivered it died before it could report that.
    fn finished_by(
        &self,
        prompt: &[u32],
        generated: &[u32],
        max_tokens: usize,
        stop_tokens: &[u32],
        grammar: &mut Option<GrammarState>,
    ) -> Result<Option<FinishReason>, EngineError> {
        let Some((last, before)) = generated.split_last() else {
            return Ok(None);
        };
        if stop_tokens.contains(last) {
            return Ok(Some(FinishReason::Stop));
        }
        if let Some(grammar) = grammar {
            grammar.replay(before)?;
            if grammar.accept(*last)? {
                return Ok(Some(FinishReason::Stop));
            }
        }
        let tokens = prompt.len() + generated.len();
        let full = generated.len() >= max_tokens || tokens >= self.inner.options.context_length;
        Ok(full.then_some(FinishReason::Length))
    }
}

fn check_logprobs(logprobs: Option<u32>) -> Result<(), EngineError> {
    match logprobs {
        Some(asked) if asked > MAX_TOP_LOGPROBS => Err(EngineError::TooManyLogprobs {
            asked: asked as usize,
            limit: MAX_TOP_LOGPROBS as usize,
        }),
        _ => Ok(()),
    }
}

fn check_options(options: &EngineOptions) -> Result<(), EngineError> {
    for (field, value, least) in [
        ("max_batch", options.max_batch, 1),
        ("chunk_tokens", options.chunk_tokens, 1),
        ("context_length", options.context_length, 2),
        ("steps_in_flight", options.steps_in_flight, 1),
    ] {
        if value < least {
            return Err(option(field, value, format!("give at least {least}")));
        }
    }
    if options.whole_prompts && options.chunk_tokens < options.context_length {
        let context = options.context_length;
        let remedy = format!(
            "prompts are computed whole, so a step needs room for the context of {context} tokens"
        );
        return Err(option("chunk_tokens", options.chunk_tokens, remedy));
    }
    Ok(())
}

/// Number of KV blocks in the budget; at least one whole context, or a long request could never run.
fn kv_blocks(options: &EngineOptions, layout: &KvLayout) -> Result<usize, EngineError> {
    let blocks = match options.kv {
        KvBudget::Blocks(blocks) => blocks,
        KvBudget::Bytes(bytes) => (bytes / layout.block_bytes().max(1) as u64) as usize,
    };
    let context = options.context_length;
    let needed = layout.blocks_for(context);
    if blocks >= needed && u32::try_from(blocks).is_ok() {
        return Ok(blocks);
    }
    let block_bytes = layout.block_bytes();
    let remedy = format!(
        "a context of {context} tokens needs {needed} blocks of {block_bytes} bytes ({} bytes); give the KV cache that much, or lower the context length to {}",
        needed * block_bytes,
        blocks * layout.block_tokens
    );
    Err(option("kv", format!("{blocks} blocks"), remedy))
}

fn option(field: &'static str, value: impl ToString, remedy: impl ToString) -> EngineError {
    EngineError::Options {
        field,
        value: value.to_string(),
        remedy: remedy.to_string(),
    }
}
