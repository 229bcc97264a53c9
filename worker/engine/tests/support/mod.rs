//! Helpers for tests of whole engines, on any device.

#![allow(dead_code)] // each test file uses only a part

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use hearth_engine::{
    Engine, EngineOptions, FinishReason, GenerateEvent, GenerateInput, KvBudget, PrefillEvent,
    PrefillInput, PrefillLocation, RequestHandle, SamplingParams,
};
use hearth_kernels::KvDType;

const PATIENCE: Duration = Duration::from_secs(60);

/// Every checkpoint of the goldens.
pub(crate) fn checkpoints() -> Vec<PathBuf> {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(goldens)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|dir| dir.join("config.json").exists())
        .collect();
    dirs.sort();
    assert!(dirs.len() > 10, "{dirs:?}");
    dirs
}

/// Options with small caches and steps, so that every path is taken.
pub(crate) fn options(change: &dyn Fn(&mut EngineOptions)) -> EngineOptions {
    let mut options = EngineOptions {
        kv: KvBudget::Blocks(32),
        block_tokens: 8,
        kv_dtype: KvDType::Bf16,
        max_batch: 8,
        chunk_tokens: 64,
        context_length: 64,
        ..EngineOptions::default()
    };
    change(&mut options);
    options
}

/// Tokens and the bits of their log-probabilities.
pub(crate) type Answer = Vec<(u32, u32)>;

pub(crate) fn ask(prompt: &[u32], max_tokens: usize) -> GenerateInput {
    GenerateInput {
        prompt: prompt.to_vec(),
        max_tokens,
        logprobs: Some(0),
        sampling: SamplingParams {
            temperature: 1.3,
            seed: 11,
            ..SamplingParams::default()
        },
        ..GenerateInput::default()
    }
}

pub(crate) fn start(
    engine: &Engine,
    input: GenerateInput,
) -> (Receiver<GenerateEvent>, RequestHandle) {
    let (tx, events) = channel();
    let sink = Box::new(move |event| tx.send(event).is_ok());
    let handle = engine.generate(input, sink).unwrap();
    (events, handle)
}

pub(crate) fn finish((events, _handle): (Receiver<GenerateEvent>, RequestHandle)) -> Answer {
    let mut answer = Vec::new();
    loop {
        match events.recv_timeout(PATIENCE).unwrap() {
            GenerateEvent::Token { id, logprob, .. } => {
                answer.push((id, logprob.unwrap().to_bits()))
            }
            GenerateEvent::Finished { reason } => {
                assert_eq!(reason, FinishReason::Length);
                return answer;
            }
            GenerateEvent::Failed(error) => panic!("{error}"),
            GenerateEvent::Started { .. } | GenerateEvent::NeedsKv { .. } => {}
        }
    }
}

pub(crate) fn answer(engine: &Engine, input: GenerateInput) -> Answer {
    finish(start(engine, input))
}

/// Prefills on one engine and decodes on the other.
pub(crate) fn disaggregated(decode: &Engine, helper: &Engine, input: GenerateInput) -> Answer {
    let tokens = input.prompt.clone();
    let (events, handle) = start(
        decode,
        GenerateInput {
            prefill: PrefillLocation::Remote {
                numerics: String::new(),
            },
            ..input
        },
    );
    let first_token = loop {
        if let GenerateEvent::NeedsKv { first_token } = events.recv_timeout(PATIENCE).unwrap() {
            break first_token;
        }
    };
    let (tx, exported) = channel();
    let input = PrefillInput {
        tokens,
        first_token,
        ..PrefillInput::default()
    };
    let sink = Box::new(move |event| tx.send(event).is_ok());
    let _prefill = helper.prefill(input, sink).unwrap();
    loop {
        match exported.recv_timeout(PATIENCE).unwrap() {
            PrefillEvent::Started { .. } => {}
            PrefillEvent::Kv {
                layer,
                first_token,
                data,
                ..
            } => decode.import_kv(handle.id(), layer, first_token, data),
            PrefillEvent::Done { logits, .. } => {
                decode.import_done(handle.id(), logits);
                return finish((events, handle));
            }
            PrefillEvent::Failed(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn prompt(tokens: u32, salt: u32) -> Vec<u32> {
    (0..tokens).map(|t| (t * 37 + salt * 11) % 101).collect()
}

/// Checks all the ways to one answer, on engines of one model and one kind of kernels that `make` starts.
pub(crate) fn every_way_gives_the_same_bits(
    name: &str,
    make: impl Fn(&dyn Fn(&mut EngineOptions)) -> Engine,
) {
    let question = prompt(29, 1);
    let plain = make(&|_| {});
    let expected = answer(&plain, ask(&question, 12));
    assert_eq!(expected.len(), 12);

    let again = answer(&plain, ask(&question, 12));
    assert_eq!(again, expected, "{name}: prefix reuse");
    assert!(plain.stats().prefix_hit_tokens >= 24);

    for chunk_tokens in [1, 7] {
        let chunked = make(&|o| o.chunk_tokens = chunk_tokens);
        let got = answer(&chunked, ask(&question, 12));
        assert_eq!(got, expected, "{name}: chunks of {chunk_tokens}");
    }

    let crowded = make(&|o| o.chunk_tokens = 16);
    let mut company: Vec<_> = (2..6)
        .map(|i| start(&crowded, ask(&prompt(5 * i, i), 10)))
        .collect();
    company.insert(2, start(&crowded, ask(&question, 12)));
    let got = finish(company.remove(2));
    assert_eq!(got, expected, "{name}: a batch of five");
    company.into_iter().for_each(|c| drop(finish(c)));

    // Prompts cancelled at any point: their passes end early, including recorded steps on a GPU.
    let left = make(&|o| o.chunk_tokens = 48);
    for round in 0..4 {
        let survivor = start(&left, ask(&question, 12));
        for i in 0..6 {
            let (events, handle) = start(&left, ask(&prompt(50, 10 + i), 4));
            std::thread::sleep(Duration::from_micros(u64::from(round * 400 * i)));
            drop((events, handle));
        }
        let got = finish(survivor);
        assert_eq!(got, expected, "{name}: beside prompts that are cancelled");
    }

    let tight = make(&|o| o.kv = KvBudget::Blocks(8));
    let long = answer(&plain, ask(&question, 30));
    // Streams compete for memory only while they run at the same time, which a busy machine may prevent.
    for _ in 0..20 {
        let company: Vec<_> = (0..3).map(|_| start(&tight, ask(&question, 30))).collect();
        for stream in company {
            assert_eq!(finish(stream), long, "{name}: little memory");
        }
        if tight.stats().preemptions > 0 {
            break;
        }
    }
    assert!(tight.stats().preemptions > 0, "{name}: nobody had to yield");

    for delivered in [1, 6, 11] {
        let input = || GenerateInput {
            generated: expected[..delivered].iter().map(|t| t.0).collect(),
            ..ask(&question, 12)
        };
        let fresh = make(&|_| {});
        let got = answer(&fresh, input());
        assert_eq!(
            got,
            expected[delivered..],
            "{name}: replay behind {delivered} tokens"
        );
        let far = make(&|o| o.chunk_tokens = 9);
        let got = disaggregated(&far, &fresh, input());
        assert_eq!(
            got,
            expected[delivered..],
            "{name}: replay prefilled elsewhere"
        );
    }

    let (decode, helper) = (make(&|_| {}), make(&|o| o.chunk_tokens = 10));
    for _ in 0..2 {
        let got = disaggregated(&decode, &helper, ask(&question, 12));
        assert_eq!(got, expected, "{name}: prefilled elsewhere");
    }
    assert!(decode.stats().kv_bytes_moved > 0);
}
