//! A request inside the engine: its callback, and the choice of its next token.

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hearth_kernels::{SampleFault, SampleSpec};
use hearth_schedule::Work;

use crate::{
    EngineError, GenerateEvent, PrefillEvent, RequestId, SamplingError, SamplingParams,
    grammar::GrammarState,
    import::Import,
    sampler::{self, History, Sampled},
    shared::Slot,
    unread::{Owed, Unread},
};

/// Receives events; returns false if the receiver is gone.
pub(crate) type Sink<E> = Box<dyn FnMut(E) -> bool + Send>;

/// A callback that is never called again once its receiver is gone.
pub(crate) struct Receiver<E> {
    sink: Option<Sink<E>>,
}

impl<E> Receiver<E> {
    pub(crate) fn new(sink: Sink<E>) -> Self {
        Self { sink: Some(sink) }
    }

    /// Delivers an event; returns false if the receiver is gone. A callback that panics counts as gone, and must not
    /// take down the engine's thread.
    pub(crate) fn send(&mut self, event: E) -> bool {
        let Some(sink) = &mut self.sink else {
            return false;
        };
        let there = catch_unwind(AssertUnwindSafe(|| sink(event))).unwrap_or(false);
        if !there {
            self.sink = None;
        }
        there
    }

    /// Whether the receiver wants no more events.
    pub(crate) fn is_gone(&self) -> bool {
        self.sink.is_none()
    }
}

/// Flag that a request's handle is gone: visible at once, whereas a command waits for the end of a forward pass.
#[derive(Clone, Default)]
pub(crate) struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A request for an answer.
pub(crate) struct Answer {
    pub(crate) id: RequestId,
    pub(crate) cancelled: Cancelled,
    pub(crate) receiver: Receiver<GenerateEvent>,
    /// Moved to the scheduler when the request starts.
    pub(crate) prompt: Vec<u32>,
    /// Replayed tokens; moved to the scheduler when the request starts.
    pub(crate) generated: Vec<u32>,
    /// Tokens that may still be chosen.
    pub(crate) max_new_tokens: usize,
    pub(crate) sampler: SamplerState,
    /// The engine that computes the prompt.
    pub(crate) work: Work,
    pub(crate) import: Option<Import>,
    /// Released when the request is dropped.
    pub(crate) _slot: Slot,
}

/// A request for a prompt's KV.
pub(crate) struct Export {
    pub(crate) id: RequestId,
    pub(crate) cancelled: Cancelled,
    pub(crate) receiver: Receiver<PrefillEvent>,
    pub(crate) tokens: Vec<u32>,
    /// KV of tokens before this one has been sent or is not wanted.
    pub(crate) sent_to: usize,
    /// See [`PrefillInput::alone`](crate::PrefillInput::alone).
    pub(crate) alone: bool,
    /// Pieces that were handed over, by layer, first token and length: a pass that is computed again gives the same.
    pub(crate) handed: HashSet<(usize, usize, usize)>,
    pub(crate) cached_tokens: usize,
    pub(crate) unread: Unread,
    /// What its receiver will get; `None` until it may begin.
    pub(crate) owed: Option<Owed>,
    /// Released when the request is dropped.
    pub(crate) _slot: Slot,
}

impl Export {
    /// Takes note that it has left the queue.
    pub(crate) fn started(&mut self, cached_tokens: usize) {
        self.cached_tokens = cached_tokens;
        self.receiver.send(PrefillEvent::Started { cached_tokens });
    }

    pub(crate) fn kv(
        &mut self,
        layer: usize,
        first_token: usize,
        tokens: usize,
        data: Vec<u8>,
    ) -> bool {
        if !self.handed.insert((layer, first_token, tokens)) {
            return true;
        }
        let data = match &mut self.owed {
            Some(owed) => owed.hand_over(data),
            None => data.into(),
        };
        self.receiver.send(PrefillEvent::Kv {
            layer,
            first_token,
            tokens,
            data,
        })
    }
}

/// A request of either kind.
pub(crate) enum EngineRequest {
    Answer(Box<Answer>),
    Export(Box<Export>),
}

impl EngineRequest {
    pub(crate) fn id(&self) -> RequestId {
        match self {
            Self::Answer(r) => r.id,
            Self::Export(r) => r.id,
        }
    }

    /// Whether the request's handle is gone.
    pub(crate) fn is_cancelled(&self) -> bool {
        match self {
            Self::Answer(r) => r.cancelled.is_set() || r.receiver.is_gone(),
            Self::Export(r) => r.cancelled.is_set() || r.receiver.is_gone(),
        }
    }

    /// Ends the request with an error; its slot is free afterwards.
    pub(crate) fn fail(self, error: EngineError) {
        match self {
            Self::Answer(mut r) => r.receiver.send(GenerateEvent::Failed(error)),
            Self::Export(mut r) => r.receiver.send(PrefillEvent::Failed(error)),
        };
    }
}

/// Everything that an answer's next token depends on, besides its logits.
pub(crate) struct SamplerState {
    pub(crate) params: SamplingParams,
    /// Index of the next token.
    pub(crate) index: usize,
    pub(crate) history: History,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) grammar: Option<GrammarState>,
    pub(crate) logprobs: Option<u32>,
}

/// A chosen token.
pub(crate) struct SampledToken {
    pub(crate) event: GenerateEvent,
    pub(crate) token: u32,
    /// Whether it ends the answer.
    pub(crate) last: bool,
}

impl SamplerState {
    /// Chooses from `logits` `[vocab]` and advances by one token.
    pub(crate) fn next(&mut self, logits: &[f32]) -> Result<SampledToken, EngineError> {
        let mask = self.mask()?;
        let sampled = sampler::sample(
            &self.params,
            self.index,
            logits,
            &self.history,
            mask.as_deref(),
            self.logprobs,
        )?;
        self.advance(sampled)
    }

    /// Everything that a device needs to choose in the host's place; `None` if only the host can choose:
    /// log-probabilities need all logits, and a token that is biased twice is rounded twice.
    pub(crate) fn for_device(&mut self) -> Result<Option<SampleSpec>, EngineError> {
        if self.logprobs.is_some() {
            return Ok(None);
        }
        let mut biases = self.params.logit_bias.clone();
        biases.sort_unstable_by_key(|(token, _)| *token);
        if biases.windows(2).any(|pair| pair[0].0 == pair[1].0) {
            return Ok(None);
        }
        let allowed = self.mask()?;
        Ok(Some(SampleSpec {
            used: self.history.used(&self.params),
            allowed,
            ..self.spec(self.index, biases)
        }))
    }

    /// Whether the token after the next one may be chosen before the next one is known: neither a grammar nor a penalty
    /// depends on it.
    pub(crate) fn runs_ahead(&self) -> bool {
        let SamplingParams {
            frequency_penalty,
            presence_penalty,
            repetition_penalty,
            ..
        } = self.params;
        let is_penalised =
            (frequency_penalty, presence_penalty, repetition_penalty) != (0.0, 0.0, 1.0);
        self.grammar.is_none() && !is_penalised
    }

    /// As [`SamplerState::for_device`], for the token after `pending` ones that are not known yet.
    pub(crate) fn ahead(&self, pending: usize) -> SampleSpec {
        let mut biases = self.params.logit_bias.clone();
        biases.sort_unstable_by_key(|(token, _)| *token);
        self.spec(self.index + pending, biases)
    }

    /// The part of a choice that does not depend on the answer so far.
    fn spec(&self, index: usize, biases: Vec<(u32, f32)>) -> SampleSpec {
        let params = &self.params;
        SampleSpec {
            quantile: sampler::uniform(params.seed, index as u64),
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
            used: Vec::new(),
            biases,
            allowed: None,
        }
    }

    /// Takes the token that a device chose by [`SamplerState::for_device`] and advances by one token.
    pub(crate) fn take(
        &mut self,
        chosen: Result<u32, SampleFault>,
    ) -> Result<SampledToken, EngineError> {
        let index = self.index;
        let id = chosen.map_err(|fault| match fault {
            SampleFault::NotFinite { token, value } => SamplingError::NotFinite {
                token: token as usize,
                value: value.to_string(),
                index,
            },
            SampleFault::NothingAllowed => SamplingError::NothingAllowed { index },
        })?;
        self.advance(Sampled {
            id,
            logprob: None,
            top: Vec::new(),
        })
    }

    /// The tokens that the grammar allows next; `None` if all are allowed.
    fn mask(&mut self) -> Result<Option<Vec<u32>>, EngineError> {
        Ok(match &mut self.grammar {
            Some(grammar) => Some(grammar.mask(&self.stop_tokens)?),
            None => None,
        })
    }

    fn advance(&mut self, sampled: Sampled) -> Result<SampledToken, EngineError> {
        let token = sampled.id;
        let last = if self.stop_tokens.contains(&token) {
            true
        } else if let Some(grammar) = &mut self.grammar {
            grammar.accept(token)?
        } else {
            false
        };
        let index = self.index;
        self.index += 1;
        self.history.push(token);
        Ok(SampledToken {
            event: GenerateEvent::Token {
                id: token,
                index,
                logprob: sampled.logprob,
                top: sampled.top,
            },
            token,
            last,
        })
    }
}
