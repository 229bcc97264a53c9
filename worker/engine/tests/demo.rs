//! The demo model with its own tokenizer under grammars.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::{
    path::Path,
    sync::{Arc, mpsc::channel},
    time::Duration,
};

use hearth_engine::{
    Engine, EngineOptions, FinishReason, GenerateEvent, GenerateInput, Grammar, GrammarTokenizer,
    KvBudget, SamplingParams,
};
use hearth_formats::{Checkpoint, ModelConfig, Tokenizer};
use hearth_kernels::{CpuBackend, CpuOptions, KvDType};
use hearth_model::{Model, modules};
use hearth_residency::Resident;

fn demo() -> (Engine, Tokenizer, Vec<u32>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/hearth-demo");
    let backend = CpuBackend::new(CpuOptions {
        isa: None,
        threads: 1,
        numa_cpus: Vec::new(),
    });
    let backend = Arc::new(backend.unwrap());
    let config = ModelConfig::read(&dir).unwrap();
    let tokenizer = Tokenizer::open(&dir).unwrap();
    let eos = config.eos_token_ids.clone();
    let grammar = GrammarTokenizer::new(&tokenizer, config.vocab_size, &eos).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let specs = modules(&config).unwrap();
    let residency = Arc::new(Resident::open(&checkpoint, specs, backend.clone()).unwrap());
    let options = EngineOptions {
        kv: KvBudget::Blocks(64),
        block_tokens: 16,
        kv_dtype: KvDType::Bf16,
        context_length: 256,
        grammar_tokenizer: Some(Arc::new(grammar)),
        ..EngineOptions::default()
    };
    let model = Model::new(config, backend, residency).unwrap();
    (Engine::start(model, options).unwrap(), tokenizer, eos)
}

#[test]
fn the_demo_model_answers_in_json_when_told_to() {
    let (engine, tokenizer, eos) = demo();
    let schema = r#"{"type":"object","properties":{"name":{"type":"string","maxLength":8},
        "nodes":{"type":"integer","minimum":1,"maximum":64},"gpu":{"type":"boolean"}},
        "required":["name","nodes","gpu"],"additionalProperties":false}"#;
    for (seed, temperature) in [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.5)] {
        let input = GenerateInput {
            prompt: tokenizer.encode("Describe your cluster.", false).unwrap(),
            max_tokens: 200,
            stop_tokens: eos.clone(),
            grammar: Some(Grammar::JsonSchema(schema.to_owned())),
            sampling: SamplingParams {
                temperature,
                seed,
                ..SamplingParams::default()
            },
            ..GenerateInput::default()
        };
        let (tx, events) = channel();
        let sink = Box::new(move |event| tx.send(event).is_ok());
        let _handle = engine.generate(input, sink).unwrap();
        let mut ids = Vec::new();
        let reason = loop {
            match events.recv_timeout(Duration::from_secs(60)).unwrap() {
                GenerateEvent::Token { id, .. } => ids.push(id),
                GenerateEvent::Finished { reason } => break reason,
                GenerateEvent::Failed(error) => panic!("{error}"),
                GenerateEvent::Started { .. } | GenerateEvent::NeedsKv { .. } => {}
            }
        };
        assert_eq!(reason, FinishReason::Stop);
        let text = tokenizer.decode(&ids, true);
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(
            json["name"].as_str().unwrap().chars().count() <= 8,
            "{text}"
        );
        assert!(
            (1..=64).contains(&json["nodes"].as_i64().unwrap()),
            "{text}"
        );
        assert!(json["gpu"].is_boolean(), "{text}");
    }
}
