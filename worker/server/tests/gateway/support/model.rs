//! A model's directory without weights: a tokenizer of bytes, and a chat template that shows tools.

use serde_json::{Value, json};

/// Name under which it is served.
pub(crate) const MODEL: &str = "fake-model";
/// Maximum tokens of prompt and answer together.
pub(crate) const CONTEXT: usize = 512;
/// Special tokens, from id 256.
pub(crate) const SPECIAL: [&str; 7] = [
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<tool_call>",
    "</tool_call>",
];
/// Id of `<|end|>`.
pub(crate) const END: u32 = 257;
/// Vocabulary size: the model has a few rows more than the tokenizer has tokens.
pub(crate) const VOCAB: usize = 272;

/// Writes the directory.
pub(crate) fn model_dir() -> tempfile::TempDir {
    model_dir_with(
        TEMPLATE,
        json!({"do_sample": true, "temperature": 0.5, "top_k": 20, "top_p": 0.9}),
    )
}

pub(crate) fn model_dir_with(template: &str, generation: Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
    write("config.json", config().to_string());
    write("tokenizer.json", tokenizer().to_string());
    write("generation_config.json", generation.to_string());
    if !template.is_empty() {
        write("chat_template.jinja", template.to_owned());
    }
    dir
}

pub(crate) const TEMPLATE: &str = "<|begin|>\
{%- if tools %}<|system|>tools:{{ tools | tojson }}{% endif -%}\
{%- for message in messages -%}\
{%- if message.role == 'tool' -%}<|user|>result:{{ message.content }}\
{%- elif message.tool_calls -%}<|assistant|>{{ message.content or '' }}\
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>\
{%- else -%}<|{{ message.role }}|>{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif %}\
{%- endif -%}{%- endfor -%}\
{%- if mood is defined %}({{ mood }}){% endif -%}\
{%- if add_generation_prompt %}<|assistant|>{% endif %}";

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false,
        "bos_token_id": 256, "eos_token_id": END, "torch_dtype": "bfloat16",
    })
}

fn tokenizer() -> Value {
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255u8 {
        vocab.insert(letter(byte).to_string(), json!(byte));
    }
    let added: Vec<Value> = SPECIAL
        .iter()
        .enumerate()
        .map(|(i, token)| {
            json!({"id": 256 + i, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": i < 5})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []},
    })
}

/// Letter that stands for a byte in GPT-2's alphabet.
fn letter(byte: u8) -> char {
    let is_printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !is_printable(*b)).count() as u32;
    char::from_u32(0x100 + before).unwrap()
}

/// Tokens of a text: its bytes, with each mark as one.
pub(crate) fn encode(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match SPECIAL
            .iter()
            .position(|mark| rest.starts_with(mark.as_bytes()))
        {
            Some(at) => {
                tokens.push(256 + at as u32);
                rest = &rest[SPECIAL[at].len()..];
            }
            None => {
                tokens.push(u32::from(rest[0]));
                rest = &rest[1..];
            }
        }
    }
    tokens
}

/// Text of tokens, with marks spelt out.
pub(crate) fn decode(tokens: &[u32]) -> String {
    let mut bytes = Vec::new();
    for token in tokens {
        match SPECIAL.get((*token as usize).wrapping_sub(256)) {
            Some(mark) => bytes.extend(mark.as_bytes()),
            None => bytes.push(*token as u8),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
