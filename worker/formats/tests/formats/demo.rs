//! The demo model in the repository, through every reader.

use std::path::{Path, PathBuf};

use hearth_formats::{ChatTemplate, Checkpoint, DType, GenerationConfig, ModelConfig, Tokenizer};
use serde_json::{Map, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/hearth-demo")
}

#[test]
fn its_weights_fit_its_config() {
    let config = ModelConfig::read(&folder()).unwrap();
    let checkpoint = Checkpoint::open(&folder()).unwrap();
    assert!(config.fp8.is_some());
    checkpoint
        .matrix(
            "model.embed_tokens.weight",
            config.vocab_size,
            config.hidden_size,
        )
        .unwrap();
    checkpoint
        .vector("model.norm.weight", config.hidden_size)
        .unwrap();
    let mut quantised = 0;
    for name in checkpoint.names() {
        let info = checkpoint.tensor_info(name).unwrap();
        if let ([rows, cols], Some(DType::F8E4m3)) = (info.shape, info.dtype.weight()) {
            checkpoint.matrix(name, *rows, *cols).unwrap();
            quantised += 1;
        }
    }
    assert!(quantised > 100, "{quantised}");
}

#[test]
fn its_prompt_is_made_of_its_special_tokens() {
    let config = ModelConfig::read(&folder()).unwrap();
    let tokenizer = Tokenizer::open(&folder()).unwrap();
    tokenizer.check_vocab(&config).unwrap();
    let template = ChatTemplate::open(&folder()).unwrap().unwrap();
    let messages = [json!({"role": "user", "content": "What is a pod? 😀"})];
    let prompt = template.render(&messages, None, true, &Map::new()).unwrap();
    let ids = tokenizer.encode(&prompt, false).unwrap();
    assert_eq!(ids.first().copied(), config.bos_token_id);
    assert_eq!(ids.last().copied(), tokenizer.token_id("<|assistant|>"));
    assert_eq!(tokenizer.decode(&ids, false), prompt);
    let least = tokenizer.least_tokens(&prompt);
    assert!((1..=ids.len()).contains(&least), "{least} of {}", ids.len());
    assert_eq!(tokenizer.decode(&ids, true), "What is a pod? 😀");
    let generation = GenerationConfig::read(&folder()).unwrap().unwrap();
    assert_eq!(generation.eos_token_ids, config.eos_token_ids);
    assert!(
        generation
            .eos_token_ids
            .iter()
            .all(|id| tokenizer.is_special(*id))
    );
}
