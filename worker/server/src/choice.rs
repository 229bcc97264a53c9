//! One choice of an answer: tokens become text, text ends at stop strings, calls are separated from content.

use std::collections::VecDeque;
use std::sync::Arc;

use hearth_formats::{StreamDecoder, Tokenizer};
use hearth_transport::v1::{self, Token};
use uuid::Uuid;

use crate::stop::StopMatcher;
use crate::tools::{AnswerPart, ToolFormat, ToolParser};
use crate::wire::response::{FinishReason, FunctionDelta, TokenLogprob, ToolCallDelta, TopLogprob};

/// Options of the choices of one request.
pub(crate) struct ChoiceOptions {
    /// The model's tokenizer.
    pub(crate) tokenizer: Tokenizer,
    /// Strings that end the answer.
    pub(crate) stop: Arc<[String]>,
    /// Tokens that end the answer; they produce no text.
    pub(crate) stop_tokens: Arc<[u32]>,
    /// Whether log-probabilities are wanted.
    pub(crate) logprobs: bool,
    /// Form of the tool calls to look for, and the names of the tools; `None` if none are looked for.
    pub(crate) tools: Option<(ToolFormat, Vec<String>)>,
    /// Whether the answer ends after its first call.
    pub(crate) single_call: bool,
    /// Whether the answer is constrained to calls: anything else is a call that was cut off, and not text.
    pub(crate) is_calls_alone: bool,
}

/// New output of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Text.
    pub(crate) text: String,
    /// Calls.
    pub(crate) calls: Vec<ToolCallDelta>,
    /// Log-probabilities of the tokens whose text is released.
    pub(crate) logprobs: Vec<LoggedToken>,
}

/// A token's log-probability and its place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LoggedToken {
    /// Log-probability in the chat format.
    pub(crate) logprob: TokenLogprob,
    /// Number of characters of the choice's text before it.
    pub(crate) offset_chars: usize,
}

impl Delta {
    /// Whether nothing is new.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.calls.is_empty() && self.logprobs.is_empty()
    }
}

/// The state of one choice.
pub(crate) struct Choice {
    options: Arc<ChoiceOptions>,
    decoder: Option<StreamDecoder>,
    stop: StopMatcher,
    parser: Option<Box<dyn ToolParser>>,
    /// Tokens whose text is not released yet, with the number of bytes of text before each.
    pending: VecDeque<(usize, LoggedToken)>,
    decoded_bytes: usize,
    decoded_chars: usize,
    released_bytes: usize,
    calls: u32,
}

impl Choice {
    /// Creates a choice that has received no token yet.
    pub(crate) fn new(options: Arc<ChoiceOptions>) -> Self {
        let tokenizer = &options.tokenizer;
        // In some vocabularies the marks of calls are special tokens.
        let decoder = match options.tools {
            Some(_) => tokenizer.decoder_with_special(),
            None => tokenizer.decoder(),
        };
        Self {
            decoder: Some(decoder),
            stop: StopMatcher::new(options.stop.clone()),
            parser: options
                .tools
                .as_ref()
                .map(|(format, names)| format.parser(names.clone())),
            pending: VecDeque::new(),
            decoded_bytes: 0,
            decoded_chars: 0,
            released_bytes: 0,
            calls: 0,
            options,
        }
    }

    /// Takes the next token. Returns a reason if the answer ends here, whatever the worker would continue with.
    pub(crate) fn push(&mut self, token: &Token) -> (Delta, Option<FinishReason>) {
        if self.options.stop_tokens.contains(&token.id) {
            return (Delta::default(), None);
        }
        if self.options.logprobs {
            let logged = LoggedToken {
                logprob: self.token_logprob(token),
                offset_chars: self.decoded_chars,
            };
            self.pending.push_back((self.decoded_bytes, logged));
        }
        let text = self
            .decoder
            .as_mut()
            .and_then(|decoder| decoder.push(token.id));
        self.text(&text.unwrap_or_default())
    }

    /// Ends the choice, after the worker has ended the answer.
    pub(crate) fn finish(&mut self, reason: v1::FinishReason) -> (Delta, FinishReason) {
        let rest = self
            .decoder
            .take()
            .map(StreamDecoder::finish)
            .unwrap_or_default();
        let (mut delta, ended) = self.text(&rest);
        if let Some(reason) = ended {
            return (delta, reason);
        }
        let held = self.stop.finish();
        self.released_bytes += held.len();
        let mut pieces = Vec::new();
        match &mut self.parser {
            Some(parser) => {
                parser.push(&held, &mut pieces);
                parser.finish(&mut pieces);
            }
            None => pieces.push(AnswerPart::Content(held)),
        }
        self.collect(pieces, &mut delta);
        delta
            .logprobs
            .extend(self.pending.drain(..).map(|(_, logged)| logged));
        let reason = match reason {
            v1::FinishReason::Length => FinishReason::Length,
            _ => self.stop_reason(),
        };
        (delta, reason)
    }

    fn text(&mut self, text: &str) -> (Delta, Option<FinishReason>) {
        self.decoded_bytes += text.len();
        self.decoded_chars += text.chars().count();
        let released = self.stop.push(text);
        self.released_bytes += released.text.len();
        let mut delta = Delta::default();
        let mut pieces = Vec::new();
        match &mut self.parser {
            Some(parser) => {
                parser.push(&released.text, &mut pieces);
                if released.stopped {
                    parser.finish(&mut pieces);
                }
            }
            None => pieces.push(AnswerPart::Content(released.text)),
        }
        let is_last_call = self.collect(pieces, &mut delta);
        while let Some((start, _)) = self.pending.front()
            && *start < self.released_bytes
            && let Some((_, logged)) = self.pending.pop_front()
        {
            delta.logprobs.push(logged);
        }
        let ended = released.stopped || is_last_call;
        (delta, ended.then(|| self.stop_reason()))
    }

    /// Puts pieces into a delta; true if the only allowed call is complete.
    fn collect(&mut self, pieces: Vec<AnswerPart>, delta: &mut Delta) -> bool {
        for piece in pieces {
            match piece {
                AnswerPart::Content(_) if self.options.is_calls_alone => {}
                AnswerPart::Content(text) => delta.text.push_str(&text),
                AnswerPart::Call { index, id, name } => {
                    self.calls = index + 1;
                    delta.calls.push(ToolCallDelta {
                        index,
                        id: Some(id.unwrap_or_else(|| format!("call_{}", Uuid::new_v4().simple()))),
                        kind: Some("function"),
                        function: FunctionDelta {
                            name: Some(name),
                            arguments: String::new(),
                        },
                    });
                }
                AnswerPart::Arguments { index, text } => add_arguments(delta, index, text),
                AnswerPart::CallEnd { .. } if self.options.single_call => return true,
                AnswerPart::CallEnd { .. } => {}
            }
        }
        false
    }

    fn stop_reason(&self) -> FinishReason {
        if self.calls > 0 {
            FinishReason::ToolCalls
        } else {
            FinishReason::Stop
        }
    }

    fn token_logprob(&self, token: &Token) -> TokenLogprob {
        let (text, bytes) = self.token_text(token.id);
        TokenLogprob {
            token: text,
            logprob: finite(token.logprob),
            bytes,
            top_logprobs: token
                .top_logprobs
                .iter()
                .map(|top| {
                    let (token, bytes) = self.token_text(top.id);
                    TopLogprob {
                        token,
                        logprob: finite(top.logprob),
                        bytes,
                    }
                })
                .collect(),
        }
    }

    fn token_text(&self, id: u32) -> (String, Option<Vec<u8>>) {
        match self.options.tokenizer.token_bytes(id) {
            Some(bytes) => (String::from_utf8_lossy(&bytes).into_owned(), Some(bytes)),
            // Vocabulary padding has no text.
            None => (format!("<token {id}>"), None),
        }
    }
}

/// Appends to the same call's last delta, so that a piece of text yields one.
fn add_arguments(delta: &mut Delta, index: u32, text: String) {
    match delta.calls.last_mut().filter(|call| call.index == index) {
        Some(call) => call.function.arguments.push_str(&text),
        None => delta.calls.push(ToolCallDelta {
            index,
            id: None,
            kind: None,
            function: FunctionDelta {
                name: None,
                arguments: text,
            },
        }),
    }
}

/// Replaces infinity, which JSON lacks, with the value that OpenAI shows for it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob
    } else {
        -9999.0
    }
}
