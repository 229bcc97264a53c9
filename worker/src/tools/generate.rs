//! `hearth-worker generate`: continues a prompt with the same engine that serves, without a server.

use std::sync::mpsc;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;
use hearth_engine::{
    Engine, EngineOptions, FinishReason, GenerateEvent, GenerateInput, Health, KvBudget,
    SamplingParams,
};
use hearth_formats::{GenerationConfig, ModelConfig, Tokenizer};
use serde::Serialize;

use crate::cli::{ModelArgs, ResidencyArg};
use crate::device::on_device;
use crate::environment::Environment;
use crate::load::{self, LoadOptions};
use crate::logging::{print_data, say};
use crate::lost::DeviceLost;

/// Tokens per KV block.
const BLOCK_TOKENS: usize = 16;
/// Prompt tokens per step.
const CHUNK_TOKENS: usize = 512;

/// Arguments of `generate`.
#[derive(Args)]
#[command(group = clap::ArgGroup::new("input").required(true))]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue, used as it is (no chat template)
    #[arg(long, group = "input", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Token ids to continue, comma separated; needs no tokenizer
    #[arg(long, group = "input", value_delimiter = ',')]
    tokens: Option<Vec<u32>>,
    /// Maximum number of tokens to generate
    #[arg(long, default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Continue past the model's end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample from the smallest set of tokens with this much probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Sample from this many most likely tokens; 0: all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Seed that makes sampling reproducible
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Steps that are in flight at once on a device that queues them; 1: each waits for the token before it
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u32).range(1..=2))]
    steps_in_flight: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    tokens: Vec<u32>,
    /// Generated text; `null` without a tokenizer.
    text: Option<String>,
    finish_reason: &'static str,
    timings: Timings,
}

#[derive(Serialize)]
struct Timings {
    load_ms: f64,
    prompt_tokens: usize,
    /// Milliseconds to the first token.
    prefill_ms: f64,
    decode_tokens: usize,
    decode_ms: f64,
    decode_tokens_per_s: f64,
}

/// Generates and prints the answer.
pub(crate) fn run(args: &GenerateArgs, environment: &Environment) -> anyhow::Result<()> {
    args.model.must_compute("generate")?;
    let began = Instant::now();
    let directory = &args.model.model;
    let tokenizer = match &args.prompt {
        None if !directory.join("tokenizer.json").exists() => None,
        _ => Some(Tokenizer::open(directory)?),
    };
    let prompt = match (&args.prompt, &args.tokens, &tokenizer) {
        (Some(text), _, Some(tokenizer)) => tokenizer.encode(text, true)?,
        (_, Some(tokens), _) => tokens.clone(),
        _ => bail!("give --prompt or --tokens"),
    };
    let config = ModelConfig::read(directory)?;
    if let Some(tokenizer) = &tokenizer {
        tokenizer.check_vocab(&config)?;
    }
    let stop_tokens = if args.ignore_eos {
        Vec::new()
    } else {
        stop_tokens(args, &config.eos_token_ids)?
    };
    let loaded = load::open(
        directory,
        LoadOptions::from_args(&args.model, environment)?,
        &mut |_| {},
    )?;
    let options = engine_options(args, prompt.len(), config.max_position_embeddings);
    let engine = on_device!(loaded, loaded => Engine::start(loaded.model, options))?;
    let load_ms = milliseconds_since(began);

    let prompt_tokens = prompt.len();
    let input = input(args, prompt, stop_tokens.clone());
    let streamed = if args.json { None } else { tokenizer.as_ref() };
    let (tokens, finish_reason, timings) =
        collect(&engine, input, streamed, load_ms, prompt_tokens)?;
    let answer = Answer {
        text: tokenizer
            .as_ref()
            .map(|tokenizer| tokenizer.decode(without_stop(&tokens, &stop_tokens), true)),
        tokens,
        finish_reason,
        timings,
    };
    print(args, &answer)
}

/// Prints the part that was not streamed.
fn print(args: &GenerateArgs, answer: &Answer) -> anyhow::Result<()> {
    if args.json {
        return print_data(&format!("{}\n", serde_json::to_string(answer)?));
    }
    if answer.text.is_none() {
        let tokens: Vec<String> = answer.tokens.iter().map(u32::to_string).collect();
        return print_data(&format!("{}\n", tokens.join(",")));
    }
    print_data("\n")?;
    let timings = &answer.timings;
    say(format_args!(
        "{} prompt tokens in {:.0} ms, {} tokens at {:.1} tokens/s",
        timings.prompt_tokens,
        timings.prefill_ms,
        timings.decode_tokens,
        timings.decode_tokens_per_s
    ));
    Ok(())
}

fn input(args: &GenerateArgs, prompt: Vec<u32>, stop_tokens: Vec<u32>) -> GenerateInput {
    GenerateInput {
        request_id: "generate".to_owned(),
        prompt,
        max_tokens: args.max_tokens as usize,
        stop_tokens,
        sampling: SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: args.seed,
            ..SamplingParams::default()
        },
        ..GenerateInput::default()
    }
}

fn without_stop<'a>(tokens: &'a [u32], stop_tokens: &[u32]) -> &'a [u32] {
    match tokens.split_last() {
        Some((last, rest)) if stop_tokens.contains(last) => rest,
        _ => tokens,
    }
}

fn stop_tokens(args: &GenerateArgs, from_config: &[u32]) -> anyhow::Result<Vec<u32>> {
    let generation = GenerationConfig::read(&args.model.model)?.unwrap_or_default();
    let mut tokens = generation.eos_token_ids;
    tokens.extend(from_config);
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

fn engine_options(args: &GenerateArgs, prompt_tokens: usize, limit: usize) -> EngineOptions {
    let wanted = prompt_tokens + args.max_tokens as usize;
    let context_length = wanted.min(limit);
    let whole_prompts = args.model.residency == ResidencyArg::StreamLoading;
    EngineOptions {
        numerics: String::new(),
        kv: KvBudget::Blocks(context_length.div_ceil(BLOCK_TOKENS) + 1),
        block_tokens: BLOCK_TOKENS,
        kv_dtype: args.model.kv_dtype(),
        max_batch: 1,
        chunk_tokens: if whole_prompts {
            context_length
        } else {
            CHUNK_TOKENS
        },
        idle_chunk_tokens: None,
        whole_prompts,
        context_length,
        max_queue: 0,
        steps_in_flight: args.steps_in_flight as usize,
        ..EngineOptions::default()
    }
}

fn collect(
    engine: &Engine,
    input: GenerateInput,
    tokenizer: Option<&Tokenizer>,
    load_ms: f64,
    prompt_tokens: usize,
) -> anyhow::Result<(Vec<u32>, &'static str, Timings)> {
    let stop_tokens = input.stop_tokens.clone();
    let (sender, events) = mpsc::channel();
    let began = Instant::now();
    // Take the time when events happen, not when they are printed.
    let sink = move |event| sender.send((began.elapsed(), event)).is_ok();
    let _handle = engine.generate(input, Box::new(sink))?;
    let mut decoder = tokenizer.map(Tokenizer::decoder);
    let mut tokens = Vec::new();
    let mut prefill_ms = 0.0;
    loop {
        let (elapsed, event) = events
            .recv()
            .context("the engine ended without an answer")?;
        let elapsed_ms = elapsed.as_secs_f64() * 1e3;
        match event {
            GenerateEvent::Token { id, .. } => {
                if tokens.is_empty() {
                    prefill_ms = elapsed_ms;
                }
                tokens.push(id);
                if let Some(decoder) = decoder.as_mut().filter(|_| !stop_tokens.contains(&id))
                    && let Some(piece) = decoder.push(id)
                {
                    print_data(&piece)?;
                }
            }
            GenerateEvent::Finished { reason } => {
                let decode_ms = elapsed_ms - prefill_ms;
                let decode_tokens = tokens.len().saturating_sub(1);
                let timings = Timings {
                    load_ms,
                    prompt_tokens,
                    prefill_ms,
                    decode_tokens,
                    decode_ms,
                    decode_tokens_per_s: decode_tokens as f64 / decode_ms.max(1e-6) * 1e3,
                };
                let reason = match reason {
                    FinishReason::Stop => "stop",
                    FinishReason::Length => "length",
                };
                return Ok((tokens, reason, timings));
            }
            GenerateEvent::Failed(error) => {
                return Err(match engine.health() {
                    Health::DeviceLost(why) => DeviceLost(why).into(),
                    Health::Healthy | Health::Unhealthy(_) | Health::Apart(_) => error.into(),
                });
            }
            GenerateEvent::Started { .. } | GenerateEvent::NeedsKv { .. } => {}
        }
    }
}

fn milliseconds_since(instant: Instant) -> f64 {
    instant.elapsed().as_secs_f64() * 1e3
}
