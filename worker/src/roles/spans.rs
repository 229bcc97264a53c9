//! Spans of a worker's part in a request: `queue`, then `prompt`, and `generation` where it writes the answer.
//!
//! Both are none where nobody records them: then no event of a request costs anything.

use hearth_engine::{FinishReason, GenerateEvent, PrefillEvent};
use hearth_transport::spans::Span;
use hearth_transport::v1;

/// What log lines of a request begin with: its id and its trace.
pub(super) fn request_log(id: &str, span: &Span) -> tracing::Span {
    let trace = span.trace_id().map(tracing::field::display);
    tracing::info_span!("request", id, trace)
}

/// Spans of an answer, or of a part of one that an earlier worker began.
pub(super) struct AnswerSpans {
    /// The part that it is in; ends before the whole does.
    part: Span,
    tokens: usize,
    whole: Span,
}

impl AnswerSpans {
    /// `whole` is the span of the call.
    pub(super) fn begin(whole: Span, request: &v1::GenerateRequest) -> Option<Self> {
        if !whole.is_recording() {
            return None;
        }
        whole.set("hearth.request.id", request.request_id.clone());
        whole.set(
            "gen_ai.usage.input_tokens",
            request.prompt_tokens.len() as i64,
        );
        whole.set("hearth.tokens_kept", request.generated_tokens.len() as i64);
        Some(Self {
            part: whole.part("queue"),
            tokens: 0,
            whole,
        })
    }

    /// The part that it is in now.
    pub(super) fn part(&self) -> &Span {
        &self.part
    }

    pub(super) fn note(&mut self, event: &GenerateEvent) {
        match event {
            GenerateEvent::Token { .. } if self.tokens > 0 => self.tokens += 1,
            GenerateEvent::Token { .. } => {
                self.tokens = 1;
                self.part = self.whole.part("generation");
            }
            GenerateEvent::Started { cached_tokens } => {
                self.part = self.whole.part("prompt");
                self.part.set("hearth.cached_tokens", *cached_tokens as i64);
            }
            GenerateEvent::NeedsKv { .. } => {}
            GenerateEvent::Finished { reason } => {
                let word = match reason {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                };
                self.whole.set("gen_ai.response.finish_reasons", word);
            }
            GenerateEvent::Failed(error) => {
                self.part.fail("failed", error);
                self.whole.fail("failed", error);
            }
        }
    }
}

impl Drop for AnswerSpans {
    fn drop(&mut self) {
        if self.tokens > 0 {
            self.part
                .set("gen_ai.usage.output_tokens", self.tokens as i64);
        }
    }
}

/// Spans of a prompt whose KV goes to another worker.
pub(super) struct PromptSpans {
    /// The part that it is in; ends before the whole does.
    part: Span,
    bytes: usize,
    whole: Span,
}

impl PromptSpans {
    /// `whole` is the span of the call.
    pub(super) fn begin(whole: Span, request: &v1::PrefillRequest) -> Option<Self> {
        if !whole.is_recording() {
            return None;
        }
        whole.set("hearth.request.id", request.request_id.clone());
        whole.set("gen_ai.usage.input_tokens", request.tokens.len() as i64);
        whole.set("hearth.first_token", i64::from(request.first_token));
        Some(Self {
            part: whole.part("queue"),
            bytes: 0,
            whole,
        })
    }

    pub(super) fn note(&mut self, event: &PrefillEvent) {
        match event {
            PrefillEvent::Started { cached_tokens } => {
                self.part = self.whole.part("prompt");
                self.part.set("hearth.cached_tokens", *cached_tokens as i64);
            }
            PrefillEvent::Kv { data, .. } => {
                if self.bytes == 0 {
                    self.part.event("first KV", || []);
                }
                self.bytes += data.len();
            }
            PrefillEvent::Done { .. } => {}
            PrefillEvent::Failed(error) => {
                self.part.fail("failed", error);
                self.whole.fail("failed", error);
            }
        }
    }
}

impl Drop for PromptSpans {
    fn drop(&mut self) {
        self.whole.set("hearth.kv.bytes", self.bytes as i64);
    }
}

/// Spans of the KV that a prefill worker sends: the call, and in it the time in which KV arrives.
pub(super) struct ImportSpans {
    transfer: Option<Span>,
    bytes: usize,
    call: Span,
}

impl ImportSpans {
    /// `call` is the span of the call.
    pub(super) fn begin(call: Span, endpoint: &hearth_transport::Endpoint) -> Self {
        if call.is_recording() {
            call.set("rpc.system", "grpc");
            call.set("server.address", endpoint.to_string());
        }
        Self {
            transfer: None,
            bytes: 0,
            call,
        }
    }

    /// Notes a piece.
    pub(super) fn arrived(&mut self, bytes: usize) {
        if !self.call.is_recording() {
            return;
        }
        if self.transfer.is_none() {
            self.transfer = Some(self.call.part("KV transfer"));
        }
        self.bytes += bytes;
    }

    /// The call.
    pub(super) fn call(&self) -> &Span {
        &self.call
    }
}

impl Drop for ImportSpans {
    fn drop(&mut self) {
        if let Some(transfer) = &self.transfer {
            transfer.set("hearth.kv.bytes", self.bytes as i64);
        }
    }
}
