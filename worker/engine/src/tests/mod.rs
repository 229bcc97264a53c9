//! The engine over a fake model: its answers, and that it neither loses nor keeps anything.

mod ahead;
mod answers;
mod choices;
mod exports;
mod fake;
mod faults;
mod grammars;
mod kv_moves;
mod random;

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    time::{Duration, Instant},
};

use fake::{BLOCK_TOKENS, Controls, Fake};
use hearth_kernels::KvDType;

use crate::{
    Engine, EngineError, EngineOptions, FinishReason, GenerateEvent, GenerateInput, KvBudget,
    PrefillEvent, PrefillInput, RequestHandle, SamplingParams,
};

const VOCAB: usize = 48;
/// Numerics of the engines here.
const OWN: &str = "this device";
const PATIENCE: Duration = Duration::from_secs(20);

fn options(blocks: usize) -> EngineOptions {
    EngineOptions {
        kv: KvBudget::Blocks(blocks),
        block_tokens: BLOCK_TOKENS,
        kv_dtype: KvDType::F32,
        max_batch: 4,
        chunk_tokens: 8,
        idle_chunk_tokens: None,
        whole_prompts: false,
        context_length: (blocks * BLOCK_TOKENS).min(64),
        max_queue: 100,
        steps_in_flight: 2,
        numerics: OWN.to_owned(),
        ..EngineOptions::default()
    }
}

fn engine_with(options: EngineOptions) -> (Engine, Controls) {
    let KvBudget::Blocks(blocks) = options.kv else {
        panic!("tests count blocks");
    };
    let controls = Controls::default();
    let fake = Fake::new(VOCAB, blocks, controls.clone());
    (Engine::start_forward(fake, options).unwrap(), controls)
}

fn engine(blocks: usize) -> Engine {
    engine_with(options(blocks)).0
}

fn ask(prompt: &[u32], max_tokens: usize) -> GenerateInput {
    GenerateInput {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: warm(3),
        ..GenerateInput::default()
    }
}

fn warm(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        seed,
        frequency_penalty: 0.2,
        repetition_penalty: 1.1,
        ..SamplingParams::default()
    }
}

/// An answer in progress.
struct Stream {
    events: Receiver<GenerateEvent>,
    handle: RequestHandle,
}

/// An answer's tokens and its end.
#[derive(Debug, PartialEq)]
struct Outcome {
    tokens: Vec<u32>,
    end: Result<FinishReason, EngineError>,
}

fn start(engine: &Engine, input: GenerateInput) -> Stream {
    let (tx, events) = channel();
    let sink = Box::new(move |event| tx.send(event).is_ok());
    let handle = engine.generate(input, sink).unwrap();
    Stream { events, handle }
}

impl Stream {
    fn next(&self) -> GenerateEvent {
        self.events.recv_timeout(PATIENCE).unwrap()
    }

    /// All tokens until the end; indices must be gapless from `first_index`.
    fn finish_from(self, first_index: usize) -> Outcome {
        let mut tokens = Vec::new();
        loop {
            match self.next() {
                GenerateEvent::Started { .. } | GenerateEvent::NeedsKv { .. } => {
                    assert!(tokens.is_empty());
                }
                GenerateEvent::Token { id, index, .. } => {
                    assert_eq!(index, first_index + tokens.len());
                    tokens.push(id);
                }
                GenerateEvent::Finished { reason } => {
                    return Outcome {
                        tokens,
                        end: Ok(reason),
                    };
                }
                GenerateEvent::Failed(error) => {
                    return Outcome {
                        tokens,
                        end: Err(error),
                    };
                }
            }
        }
    }

    fn finish(self) -> Outcome {
        self.finish_from(0)
    }
}

fn answer(engine: &Engine, input: GenerateInput) -> Outcome {
    let first = input.generated.len();
    start(engine, input).finish_from(first)
}

/// Starts a prefill; its events but for the first, that it has started.
fn prefill(
    engine: &Engine,
    tokens: &[u32],
    first_token: usize,
) -> (Receiver<PrefillEvent>, RequestHandle) {
    let (tx, events) = channel();
    let input = PrefillInput {
        request_id: String::new(),
        tokens: tokens.to_vec(),
        first_token,
        alone: false,
    };
    let sink = Box::new(move |event| match event {
        PrefillEvent::Started { .. } => true,
        event => tx.send(event).is_ok(),
    });
    let handle = engine.prefill(input, sink).unwrap();
    (events, handle)
}

/// Waits until nothing is running and nothing is held.
fn assert_all_freed(engine: &Engine) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let stats = engine.stats();
        if (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0) {
            return;
        }
        assert!(Instant::now() < deadline, "not freed: {stats:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stops the first forward pass with this many sequences before `layer`, until told to continue.
fn stopped_before(
    controls: &Controls,
    layer: usize,
    sequences: usize,
) -> (Receiver<()>, Sender<()>) {
    let (at, arrived) = channel();
    let (go, going) = channel();
    let batches = controls.batches.clone();
    let mut is_over = false;
    *controls.before_layer.lock().unwrap() = Some(Box::new(move |now| {
        let is_there = batches.lock().unwrap().last().unwrap().len() == sequences;
        if now == layer && is_there && !is_over {
            is_over = true;
            let _ = at.send(());
            let _ = going.recv_timeout(PATIENCE);
        }
    }));
    (arrived, go)
}
