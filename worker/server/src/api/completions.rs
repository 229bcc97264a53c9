//! `POST /v1/completions`.

use std::sync::Arc;

use futures::StreamExt;
use serde_json::{Map, Value};

use super::create::{Asked, Endpoint, Head};
use super::stream::ChunkWriter;
use crate::app::App;
use crate::choice::{ChoiceOptions, Delta, LoggedToken};
use crate::error::ApiError;
use crate::generation::{self, ChoiceEvent, ChoiceStream, Submission};
use crate::metrics::Operation;
use crate::model::Room;
use crate::wire::response::{
    Completion, CompletionChoice, CompletionLogprobs, FinishReason, Usage,
};
use crate::wire::{self, CompletionRequest, GenerationOptions, Prompt};

/// The route.
pub(super) struct Completions;

impl Endpoint for Completions {
    const ID: &'static str = "cmpl";
    const SPAN: &'static str = "POST /v1/completions";
    type Request = CompletionRequest;
    type Writer = CompletionWriter;
    type Answer = Completion;

    fn parse(body: &[u8]) -> Result<CompletionRequest, ApiError> {
        wire::parse_completion(body)
    }

    fn asks(request: &CompletionRequest) -> (&str, &GenerationOptions) {
        (&request.model, &request.options)
    }

    fn schema_bytes(_: &CompletionRequest) -> usize {
        0
    }

    fn prepare(
        app: &App,
        asked: Asked<'_, CompletionRequest>,
        head: Head,
    ) -> Result<(Submission, CompletionWriter), ApiError> {
        let (submission, echoes) = prepare(app, &asked, head.id.clone())?;
        let writer = CompletionWriter {
            head,
            logprobs: asked.request.logprobs,
            n: asked.request.options.n,
            echoes,
        };
        Ok((submission, writer))
    }

    async fn collect(
        events: ChoiceStream,
        writer: CompletionWriter,
        choices: u32,
    ) -> Result<Completion, ApiError> {
        collect(events, writer, choices).await
    }
}

/// Builds the submission, and the text that each prompt's choices begin with.
fn prepare(
    app: &App,
    asked: &Asked<'_, CompletionRequest>,
    id: String,
) -> Result<(Submission, Vec<String>), ApiError> {
    let (model, request) = (&app.model, asked.request);
    let room = Room {
        context_length: app.context_length(),
        param: "prompt",
        work: asked.work,
    };
    let options = &request.options;
    let mut prompts = Vec::with_capacity(request.prompts.len());
    let mut echoes = Vec::new();
    for prompt in &request.prompts {
        let tokens = model.encode_prompt(prompt, &room)?;
        let bound = model.max_tokens(options.max_tokens, tokens.len(), &room)?;
        if request.echo {
            echoes.push(match prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(tokens) => model.tokenizer.decode(tokens, true),
            });
        }
        prompts.push((Arc::from(tokens), bound));
    }
    let seed = options.seed.unwrap_or_else(generation::random_seed);
    let stop_tokens = if options.ignore_eos {
        Arc::default()
    } else {
        model.stop_tokens.clone()
    };
    let submission = Submission {
        id,
        operation: Operation::TextCompletion,
        prompts,
        n: options.n,
        sampling: Arc::new(model.sampling(options, seed)?),
        grammar: None,
        logprobs: request.logprobs,
        choice: Arc::new(ChoiceOptions {
            tokenizer: model.tokenizer.clone(),
            stop: options.stop.as_slice().into(),
            stop_tokens,
            logprobs: request.logprobs.is_some(),
            tools: None,
            single_call: false,
            is_calls_alone: false,
        }),
        span: asked.span.clone(),
        arrived: asked.arrived,
        room: None,
    };
    Ok((submission, echoes))
}

/// Collects the whole answer.
async fn collect(
    mut events: ChoiceStream,
    mut writer: CompletionWriter,
    count: u32,
) -> Result<Completion, ApiError> {
    let mut choices: Vec<(String, Vec<LoggedToken>, Option<FinishReason>)> = (0..count)
        .map(|index| (writer.echo(index), Vec::new(), None))
        .collect();
    let mut usage = Usage::default();
    while let Some(event) = events.next().await {
        let (index, delta, reason) = match event? {
            ChoiceEvent::Started { fingerprint, .. } => {
                writer.head.note_fingerprint(fingerprint);
                continue;
            }
            ChoiceEvent::Delta { index, delta } => (index, delta, None),
            ChoiceEvent::Finished {
                index,
                delta,
                reason,
            } => (index, delta, Some(reason)),
            ChoiceEvent::Done(total) => {
                usage = total;
                continue;
            }
        };
        let (text, logged, ended) = &mut choices[index as usize];
        text.push_str(&delta.text);
        logged.extend(delta.logprobs);
        *ended = reason;
    }
    let choices = choices
        .into_iter()
        .enumerate()
        .map(|(index, (text, logged, reason))| CompletionChoice {
            text,
            index: index as u32,
            logprobs: writer.logprobs(logged),
            finish_reason: Some(reason.unwrap_or(FinishReason::Stop)),
        })
        .collect();
    let mut completion = writer.completion(choices);
    completion.usage = Some(Some(usage));
    Ok(completion)
}

/// Writes chunks.
pub(super) struct CompletionWriter {
    head: Head,
    logprobs: Option<u32>,
    n: u32,
    /// Echoes by prompt; empty if no echo is requested.
    echoes: Vec<String>,
}

impl CompletionWriter {
    fn echo(&self, index: u32) -> String {
        self.echoes
            .get((index / self.n) as usize)
            .cloned()
            .unwrap_or_default()
    }

    fn completion(&self, choices: Vec<CompletionChoice>) -> Completion {
        Completion {
            id: self.head.id.clone(),
            object: "text_completion",
            created: self.head.created,
            model: self.head.model.clone(),
            choices,
            usage: self.head.usage(None),
            system_fingerprint: self.head.fingerprint.clone(),
        }
    }

    fn chunk(&self, index: u32, delta: Delta, finish_reason: Option<FinishReason>) -> Completion {
        self.completion(vec![CompletionChoice {
            text: delta.text,
            index,
            logprobs: self.logprobs(delta.logprobs),
            finish_reason,
        }])
    }

    fn logprobs(&self, logged: Vec<LoggedToken>) -> Option<CompletionLogprobs> {
        let top = self.logprobs?;
        let mut all = CompletionLogprobs {
            top_logprobs: (top > 0).then(Vec::new),
            ..CompletionLogprobs::default()
        };
        for LoggedToken {
            logprob,
            offset_chars,
        } in logged
        {
            if let Some(alternatives) = &mut all.top_logprobs {
                let by_text: Map<String, Value> = logprob
                    .top_logprobs
                    .into_iter()
                    .map(|top| (top.token, Value::from(top.logprob)))
                    .collect();
                alternatives.push(by_text);
            }
            all.tokens.push(logprob.token);
            all.token_logprobs.push(logprob.logprob);
            all.text_offset.push(offset_chars);
        }
        Some(all)
    }
}

impl ChunkWriter for CompletionWriter {
    type Chunk = Completion;

    fn chunks(&mut self, event: ChoiceEvent) -> Vec<Completion> {
        match event {
            ChoiceEvent::Started { index, fingerprint } => {
                self.head.note_fingerprint(fingerprint);
                let text = self.echo(index);
                if text.is_empty() {
                    return Vec::new();
                }
                let delta = Delta {
                    text,
                    ..Delta::default()
                };
                vec![self.chunk(index, delta, None)]
            }
            ChoiceEvent::Delta { index, delta } => vec![self.chunk(index, delta, None)],
            ChoiceEvent::Finished {
                index,
                delta,
                reason,
            } => vec![self.chunk(index, delta, Some(reason))],
            ChoiceEvent::Done(usage) if self.head.include_usage => {
                let mut last = self.completion(Vec::new());
                last.usage = Some(Some(usage));
                vec![last]
            }
            ChoiceEvent::Done(_) => Vec::new(),
        }
    }
}
