//! `POST /v1/chat/completions`.

use std::sync::Arc;

use futures::StreamExt;
use hearth_transport::v1::{Grammar, grammar};
use serde_json::Value;

use super::create::{Asked, Endpoint, Head};
use super::prepare_limiter::Work;
use super::stream::ChunkWriter;
use crate::app::App;
use crate::choice::{ChoiceOptions, Delta};
use crate::error::ApiError;
use crate::generation::{self, ChoiceEvent, ChoiceStream, Submission};
use crate::metrics::Operation;
use crate::model::Room;
use crate::schema::{self, Schemas};
use crate::tools::{GrammarInput, tool_grammar};
use crate::wire::response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta,
    ChatLogprobs, FinishReason, FunctionCall, ToolCall, ToolCallDelta, Usage,
};
use crate::wire::{self, ChatRequest, GenerationOptions, ResponseFormat, Tool, ToolChoice};

/// The route.
pub(super) struct Chat;

impl Endpoint for Chat {
    const ID: &'static str = "chatcmpl";
    const SPAN: &'static str = "POST /v1/chat/completions";
    type Request = ChatRequest;
    type Writer = ChatWriter;
    type Answer = ChatCompletion;

    fn parse(body: &[u8]) -> Result<ChatRequest, ApiError> {
        wire::parse_chat(body)
    }

    fn asks(request: &ChatRequest) -> (&str, &GenerationOptions) {
        (&request.model, &request.options)
    }

    fn schema_bytes(request: &ChatRequest) -> usize {
        let answer = match &request.response_format {
            ResponseFormat::JsonSchema(schema) => schema::text_bytes(schema),
            _ => 0,
        };
        let tools = held_tools(request).map(|(_, tool)| schema::text_bytes(&tool.parameters));
        answer + tools.sum::<usize>()
    }

    fn prepare(
        app: &App,
        asked: Asked<'_, ChatRequest>,
        head: Head,
    ) -> Result<(Submission, ChatWriter), ApiError> {
        let submission = prepare(app, &asked, head.id.clone())?;
        let wants_logprobs = asked.request.logprobs.is_some();
        Ok((
            submission,
            ChatWriter {
                head,
                wants_logprobs,
            },
        ))
    }

    async fn collect(
        events: ChoiceStream,
        writer: ChatWriter,
        choices: u32,
    ) -> Result<ChatCompletion, ApiError> {
        collect(events, writer, choices).await
    }
}

fn prepare(app: &App, asked: &Asked<'_, ChatRequest>, id: String) -> Result<Submission, ApiError> {
    let (model, request) = (&app.model, asked.request);
    let room = Room {
        context_length: app.context_length(),
        param: "messages",
        work: asked.work,
    };
    let uses_tools = request.tool_choice != ToolChoice::None;
    if request.tool_choice == ToolChoice::Auto && !model.shows_tools {
        return Err(ApiError::parameter(
            "tools",
            format!(
                "model '{}' has a chat template that does not show tools, so it would not know of them: leave 'tools' out, or force a call by 'tool_choice'",
                model.name
            ),
        )
        .with_code("tools_unsupported"));
    }
    check_tools(&request.tools)?;
    let definitions: Vec<Value> = request
        .tools
        .iter()
        .map(|tool| tool.definition.clone())
        .collect();
    let shown = (uses_tools && model.shows_tools).then_some(definitions.as_slice());
    let template_arguments = &request.template_arguments;
    let prompt = model.encode_chat(&request.messages, shown, template_arguments, &room)?;
    let options = &request.options;
    let max_tokens = model.max_tokens(options.max_tokens, prompt.len(), &room)?;
    let seed = options.seed.unwrap_or_else(generation::random_seed);
    let stop_tokens = if options.ignore_eos {
        Arc::default()
    } else {
        model.stop_tokens.clone()
    };
    Ok(Submission {
        id,
        operation: Operation::Chat,
        prompts: vec![(prompt.into(), max_tokens)],
        n: options.n,
        sampling: Arc::new(model.sampling(options, seed)?),
        grammar: grammar_of(app, request, asked.work)?.map(Arc::new),
        logprobs: request.logprobs,
        choice: Arc::new(ChoiceOptions {
            tokenizer: model.tokenizer.clone(),
            stop: options.stop.as_slice().into(),
            stop_tokens,
            logprobs: request.logprobs.is_some(),
            tools: uses_tools.then(|| {
                let names = request.tools.iter().map(|tool| tool.name.clone()).collect();
                (model.tool_format, names)
            }),
            single_call: !request.parallel_tool_calls
                || matches!(request.tool_choice, ToolChoice::Named(_)),
            is_calls_alone: matches!(
                request.tool_choice,
                ToolChoice::Required | ToolChoice::Named(_)
            ),
        }),
        span: asked.span.clone(),
        arrived: asked.arrived,
        room: None,
    })
}

/// Refuses tools that are too large in total for a template to show.
fn check_tools(tools: &[Tool]) -> Result<(), ApiError> {
    let sizes = tools
        .iter()
        .map(|tool| schema::text_bytes(&tool.definition));
    let bytes: usize = sizes.sum();
    if bytes <= schema::MAX_BYTES {
        return Ok(());
    }
    Err(ApiError::parameter(
        "tools",
        format!(
            "'tools' has {bytes} bytes of JSON, and {} are accepted: write fewer or shorter values",
            schema::MAX_BYTES
        ),
    ))
}

/// Tools whose schemas constrain their calls, with their indices.
fn held_tools(request: &ChatRequest) -> impl Iterator<Item = (usize, &Tool)> {
    let is_held = |tool: &Tool| match request.tool_choice {
        ToolChoice::None => false,
        ToolChoice::Auto => tool.strict,
        ToolChoice::Required | ToolChoice::Named(_) => true,
    };
    let tools = request.tools.iter().enumerate();
    tools.filter(move |(_, tool)| is_held(tool))
}

/// Builds the grammar that the workers constrain the answer to.
fn grammar_of(app: &App, request: &ChatRequest, work: &Work) -> Result<Option<Grammar>, ApiError> {
    let is_wanted = || work.is_wanted();
    let mut schemas = Schemas::new(&is_wanted);
    if let ResponseFormat::JsonSchema(schema) = &request.response_format {
        schemas.check(schema, schema::PARAM)?;
    }
    for (i, tool) in held_tools(request) {
        work.go_on()?;
        schemas.check(&tool.parameters, &format!("tools[{i}].function.parameters"))?;
    }
    let lark = tool_grammar(&GrammarInput {
        format: app.model.tool_format,
        tools: &request.tools,
        choice: &request.tool_choice,
        parallel: request.parallel_tool_calls,
        response_format: &request.response_format,
        mark: &|mark| app.model.mark(mark),
    });
    let kind = match (lark, &request.response_format) {
        (Some(lark), _) => grammar::Kind::Lark(lark),
        (None, ResponseFormat::Text) => return Ok(None),
        (None, ResponseFormat::JsonObject) => grammar::Kind::JsonObject(true),
        (None, ResponseFormat::JsonSchema(schema)) => {
            grammar::Kind::JsonSchema(schema::closed(schema).to_string())
        }
    };
    Ok(Some(Grammar { kind: Some(kind) }))
}

/// Collects the whole answer.
async fn collect(
    mut events: ChoiceStream,
    mut writer: ChatWriter,
    n: u32,
) -> Result<ChatCompletion, ApiError> {
    let mut choices: Vec<ChoiceAccumulator> =
        (0..n).map(|_| ChoiceAccumulator::default()).collect();
    let mut usage = Usage::default();
    while let Some(event) = events.next().await {
        match event? {
            ChoiceEvent::Started { fingerprint, .. } => writer.head.note_fingerprint(fingerprint),
            ChoiceEvent::Delta { index, delta } => choices[index as usize].push(delta),
            ChoiceEvent::Finished {
                index,
                delta,
                reason,
            } => {
                choices[index as usize].push(delta);
                choices[index as usize].reason = Some(reason);
            }
            ChoiceEvent::Done(total) => usage = total,
        }
    }
    let wants_logprobs = writer.wants_logprobs;
    Ok(ChatCompletion {
        id: writer.head.id,
        object: "chat.completion",
        created: writer.head.created,
        model: writer.head.model,
        choices: choices
            .into_iter()
            .enumerate()
            .map(|(index, whole)| whole.into_choice(index as u32, wants_logprobs))
            .collect(),
        usage,
        system_fingerprint: writer.head.fingerprint,
    })
}

/// Output of one choice so far.
#[derive(Default)]
struct ChoiceAccumulator {
    text: String,
    calls: Vec<ToolCall>,
    logprobs: Vec<wire::response::TokenLogprob>,
    reason: Option<FinishReason>,
}

impl ChoiceAccumulator {
    fn push(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        self.logprobs
            .extend(delta.logprobs.into_iter().map(|logged| logged.logprob));
        for call in delta.calls {
            self.push_call(call);
        }
    }

    fn push_call(&mut self, call: ToolCallDelta) {
        let ToolCallDelta {
            index,
            id,
            function,
            ..
        } = call;
        if self.calls.len() <= index as usize {
            self.calls.push(ToolCall {
                id: id.unwrap_or_default(),
                kind: "function",
                function: FunctionCall {
                    name: function.name.unwrap_or_default(),
                    arguments: function.arguments,
                },
            });
        } else if let Some(call) = self.calls.get_mut(index as usize) {
            call.function.arguments.push_str(&function.arguments);
        }
    }

    fn into_choice(self, index: u32, wants_logprobs: bool) -> ChatChoice {
        let is_call_alone = self.text.is_empty() && !self.calls.is_empty();
        ChatChoice {
            index,
            message: AssistantMessage {
                role: "assistant",
                content: (!is_call_alone).then_some(self.text),
                refusal: None,
                tool_calls: self.calls,
            },
            logprobs: wants_logprobs.then_some(ChatLogprobs {
                content: self.logprobs,
                refusal: None,
            }),
            finish_reason: self.reason.unwrap_or(FinishReason::Stop),
        }
    }
}

/// Writes chunks.
pub(super) struct ChatWriter {
    head: Head,
    wants_logprobs: bool,
}

impl ChatWriter {
    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        ChatChunk {
            id: self.head.id.clone(),
            object: "chat.completion.chunk",
            created: self.head.created,
            model: self.head.model.clone(),
            system_fingerprint: self.head.fingerprint.clone(),
            choices,
            usage: self.head.usage(usage),
        }
    }

    fn delta(&self, index: u32, delta: Delta) -> ChatChunk {
        let logprobs = self.wants_logprobs.then(|| ChatLogprobs {
            content: delta
                .logprobs
                .into_iter()
                .map(|logged| logged.logprob)
                .collect(),
            refusal: None,
        });
        let choice = ChatChunkChoice {
            index,
            delta: ChatDelta {
                role: None,
                content: (!delta.text.is_empty()).then_some(delta.text),
                tool_calls: delta.calls,
            },
            logprobs,
            finish_reason: None,
        };
        self.chunk(vec![choice], None)
    }
}

impl ChunkWriter for ChatWriter {
    type Chunk = ChatChunk;

    fn chunks(&mut self, event: ChoiceEvent) -> Vec<ChatChunk> {
        match event {
            ChoiceEvent::Started { index, fingerprint } => {
                self.head.note_fingerprint(fingerprint);
                let choice = ChatChunkChoice {
                    index,
                    delta: ChatDelta {
                        role: Some("assistant"),
                        content: Some(String::new()),
                        tool_calls: Vec::new(),
                    },
                    logprobs: None,
                    finish_reason: None,
                };
                vec![self.chunk(vec![choice], None)]
            }
            ChoiceEvent::Delta { index, delta } => vec![self.delta(index, delta)],
            ChoiceEvent::Finished {
                index,
                delta,
                reason,
            } => {
                let mut chunks = Vec::new();
                if !delta.is_empty() {
                    chunks.push(self.delta(index, delta));
                }
                let last = ChatChunkChoice {
                    index,
                    delta: ChatDelta::default(),
                    logprobs: None,
                    finish_reason: Some(reason),
                };
                chunks.push(self.chunk(vec![last], None));
                chunks
            }
            ChoiceEvent::Done(usage) if self.head.include_usage => {
                vec![self.chunk(Vec::new(), Some(usage))]
            }
            ChoiceEvent::Done(_) => Vec::new(),
        }
    }
}
