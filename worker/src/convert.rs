//! Conversions between wire messages and the engine's own types.

use hearth_engine::{
    EngineError, FinishReason, GenerateEvent, GenerateInput, Grammar, PrefillLocation,
    SamplingParams,
};
use hearth_transport::v1;
use tonic::{Code, Status};

/// Converts a wire request to the engine's input.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the field.
pub(crate) fn generate_input(request: v1::GenerateRequest) -> Result<GenerateInput, Status> {
    let prefill = if request.prefill_endpoint.is_empty() {
        PrefillLocation::Local
    } else {
        PrefillLocation::Remote {
            numerics: request.prompt_numerics,
        }
    };
    Ok(GenerateInput {
        request_id: request.request_id,
        prompt: request.prompt_tokens,
        generated: request.generated_tokens,
        sampling: sampling(request.sampling.unwrap_or_default()),
        max_tokens: request.max_tokens as usize,
        stop_tokens: request.stop_token_ids,
        grammar: request.grammar.map(grammar).transpose()?,
        logprobs: request.logprobs.then_some(request.top_logprobs),
        prefill,
    })
}

fn sampling(wire: v1::Sampling) -> SamplingParams {
    SamplingParams {
        temperature: wire.temperature,
        top_p: wire.top_p,
        top_k: wire.top_k,
        min_p: wire.min_p,
        frequency_penalty: wire.frequency_penalty,
        presence_penalty: wire.presence_penalty,
        repetition_penalty: if wire.repetition_penalty == 0.0 {
            1.0
        } else {
            wire.repetition_penalty
        },
        seed: wire.seed,
        logit_bias: wire
            .logit_bias
            .into_iter()
            .map(|bias| (bias.token, bias.bias))
            .collect(),
    }
}

fn grammar(wire: v1::Grammar) -> Result<Grammar, Status> {
    match wire.kind {
        Some(v1::grammar::Kind::JsonObject(true)) => Ok(Grammar::JsonObject),
        Some(v1::grammar::Kind::JsonSchema(schema)) => Ok(Grammar::JsonSchema(schema)),
        Some(v1::grammar::Kind::Lark(grammar)) => Ok(Grammar::Lark(grammar)),
        Some(v1::grammar::Kind::JsonObject(false)) | None => Err(Status::invalid_argument(
            "a grammar was given without its kind",
        )),
    }
}

/// Converts an engine event for the wire; `None` for events that concern only this worker.
pub(crate) fn generate_event(event: GenerateEvent) -> Result<Option<v1::GenerateEvent>, Status> {
    use v1::generate_event::Event;
    let event = match event {
        GenerateEvent::Started { cached_tokens } => Event::Started(v1::Started {
            cached_tokens: cached_tokens as u32,
        }),
        GenerateEvent::NeedsKv { .. } => return Ok(None),
        GenerateEvent::Token {
            id,
            index,
            logprob,
            top,
        } => Event::Token(v1::Token {
            id,
            index: index as u32,
            logprob: logprob.unwrap_or_default(),
            top_logprobs: top
                .into_iter()
                .map(|top| v1::TopLogprob {
                    id: top.id,
                    logprob: top.logprob,
                })
                .collect(),
        }),
        GenerateEvent::Finished { reason } => {
            let reason = match reason {
                FinishReason::Stop => v1::FinishReason::Stop,
                FinishReason::Length => v1::FinishReason::Length,
            };
            Event::Finished(v1::Finished {
                reason: reason.into(),
            })
        }
        GenerateEvent::Failed(error) => return Err(status(&error)),
    };
    Ok(Some(v1::GenerateEvent { event: Some(event) }))
}

/// Returns the status that tells the caller whether to try another worker: the request is at fault, the queue is full,
/// or this worker cannot continue.
pub(crate) fn status(error: &EngineError) -> Status {
    let code = match error {
        error if error.is_request_fault() => Code::InvalidArgument,
        EngineError::QueueFull { .. } => Code::ResourceExhausted,
        EngineError::Forward { .. } | EngineError::Sampling(_) | EngineError::Internal { .. } => {
            Code::Internal
        }
        _ => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}
