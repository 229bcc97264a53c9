//! Faulty config.json files: each fault is reported with field, value and remedy.

use hearth_formats::{FormatError, ModelConfig};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::config::{DEEPSEEK, LLAMA, QWEN3_MOE, edited, message, parse, value};

#[test]
fn missing_fields_are_named() {
    let required = [
        (
            LLAMA,
            "hidden_size vocab_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings model_type",
        ),
        (
            DEEPSEEK,
            "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts num_experts_per_tok moe_intermediate_size",
        ),
        (
            QWEN3_MOE,
            "num_experts num_experts_per_tok moe_intermediate_size",
        ),
    ];
    for (base, fields) in required {
        for field in fields.split(' ') {
            let text = message(base, &json!({ field: "REMOVE" }));
            assert!(
                text.starts_with(&format!("config.json: {field} is missing\n  ")),
                "{text}"
            );
        }
    }
}

#[test]
#[allow(clippy::too_many_lines)] // a table of cases
fn faults_name_field_value_and_remedy() {
    let rope = |scaling: Value| json!({ "rope_scaling": scaling });
    let cases = [
        (
            LLAMA,
            json!({"model_type": "mamba"}),
            "model_type \"mamba\" is not supported\n  supported: deepseek_v3, kimi_k2, qwen3_moe, qwen3, qwen2, llama",
        ),
        (
            LLAMA,
            json!({"hidden_size": 0}),
            "hidden_size is 0\n  it must be at least 1",
        ),
        (
            LLAMA,
            json!({"hidden_size": -5}),
            "hidden_size is -5, not a whole number",
        ),
        (
            LLAMA,
            json!({"hidden_size": "big"}),
            "hidden_size is \"big\", not a whole number",
        ),
        (
            LLAMA,
            json!({"hidden_size": 1.5}),
            "hidden_size is 1.5, not a whole number",
        ),
        (
            LLAMA,
            json!({"hidden_size": u64::MAX}),
            "hidden_size is 18,446,744,073,709,551,615, more than 1,048,576",
        ),
        (
            LLAMA,
            json!({"num_attention_heads": 16384, "num_key_value_heads": 1, "head_dim": 16384}),
            "num_attention_heads and head_dim give 268435456, more than",
        ),
        (
            LLAMA,
            json!({"num_key_value_heads": 3}),
            "num_attention_heads is 10, no multiple of num_key_value_heads 3",
        ),
        (
            LLAMA,
            json!({"hidden_size": 201}),
            "hidden_size is 201, which makes no head_dim with num_attention_heads 10",
        ),
        (
            LLAMA,
            json!({"head_dim": 7}),
            "head_dim is 7, and rotary embedding needs pairs",
        ),
        (
            LLAMA,
            json!({"hidden_act": "gelu"}),
            "hidden_act is \"gelu\", which is not supported\n  supported: silu",
        ),
        (
            LLAMA,
            json!({"mlp_bias": true}),
            "mlp_bias is true, which is not supported",
        ),
        (LLAMA, json!({"rms_norm_eps": 0}), "rms_norm_eps is 0"),
        (
            LLAMA,
            json!({"tie_word_embeddings": "yes"}),
            "tie_word_embeddings is \"yes\", not true or false",
        ),
        (
            LLAMA,
            json!({"eos_token_id": [1, "x"]}),
            "eos_token_id is \"x\", not a token id",
        ),
        (LLAMA, json!({"rope_theta": 0}), "rope_theta is 0"),
        (
            LLAMA,
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor is 0.5, and partial rotary embedding is not supported",
        ),
        (
            LLAMA,
            rope(json!({"rope_type": "spiral", "factor": 2})),
            "rope_scaling.rope_type is \"spiral\", which is unknown\n  supported: default, linear, llama3, yarn",
        ),
        (
            LLAMA,
            rope(json!({"type": "dynamic", "factor": 2})),
            "rope_scaling.rope_type is \"dynamic\": angles would change",
        ),
        (
            LLAMA,
            rope(json!({"factor": 2})),
            "rope_scaling.rope_type is missing",
        ),
        (
            LLAMA,
            rope(json!({"type": "linear"})),
            "rope_scaling.factor is missing",
        ),
        (
            LLAMA,
            rope(json!({"type": "linear", "factor": -1})),
            "rope_scaling.factor is -1",
        ),
        (
            LLAMA,
            rope(
                json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}),
            ),
            "rope_scaling.high_freq_factor is 1, not more than low_freq_factor 4",
        ),
        (
            LLAMA,
            rope(json!({"rope_type": "yarn"})),
            "rope_scaling.factor is missing",
        ),
        (
            LLAMA,
            rope(json!([1])),
            "rope_scaling is [1], not an object",
        ),
        (
            LLAMA,
            json!({"rope_scaling": null, "rope_parameters": {"full_attention": {"rope_theta": 1}}}),
            "rope_parameters.full_attention gives each layer its own angles",
        ),
        (
            LLAMA,
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            "quantization_config.quant_method is \"gptq\", which is not supported\n  take the model's BF16",
        ),
        (
            LLAMA,
            json!({"quantization_config": {"quant_method": "compressed-tensors"}}),
            "quant_method is \"compressed-tensors\"",
        ),
        (
            LLAMA,
            json!({"quantization_config": {"quant_method": "fp8"}}),
            "quantization_config.weight_block_size is missing: FP8 with one scale a tensor",
        ),
        (
            LLAMA,
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}),
            "weight_block_size is [64, 128]; only [128, 128]",
        ),
        (
            LLAMA,
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}}),
            "quantization_config.fmt is \"e5m2\"",
        ),
        (
            QWEN3_MOE,
            json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 2}),
            "use_sliding_window is true, and sliding windows are not supported\n  set it to false",
        ),
        (
            QWEN3_MOE,
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            "layer_types holds \"sliding_attention\"",
        ),
        (
            QWEN3_MOE,
            json!({"num_experts_per_tok": 200}),
            "num_experts_per_tok is 200, more than num_experts 128",
        ),
        (
            QWEN3_MOE,
            json!({"mlp_only_layers": [6]}),
            "mlp_only_layers names layer 6, but num_hidden_layers is 6",
        ),
        (
            QWEN3_MOE,
            json!({"num_experts": 65536, "num_hidden_layers": 4096}),
            "experts and num_hidden_layers give 268435456, more than 1000000",
        ),
        (
            DEEPSEEK,
            json!({"n_routed_experts": 250}),
            "n_routed_experts is 250, no multiple of n_group 8",
        ),
        (
            DEEPSEEK,
            json!({"n_group": 256}),
            "n_group is 256 for 256 experts",
        ),
        (
            DEEPSEEK,
            json!({"topk_group": 9}),
            "topk_group is 9, more than n_group 8",
        ),
        (
            DEEPSEEK,
            json!({"num_experts_per_tok": 129}),
            "num_experts_per_tok is 129, more than the 128 experts",
        ),
        (
            DEEPSEEK,
            json!({"num_key_value_heads": 8}),
            "num_key_value_heads is 8, but num_attention_heads is 128",
        ),
        (
            DEEPSEEK,
            json!({"qk_rope_head_dim": 63}),
            "qk_rope_head_dim is 63, and rotary",
        ),
        (
            DEEPSEEK,
            json!({"scoring_func": "softmax"}),
            "scoring_func is \"softmax\"",
        ),
        (
            DEEPSEEK,
            json!({"topk_method": "greedy"}),
            "topk_method is \"greedy\"",
        ),
        (
            DEEPSEEK,
            json!({"attention_bias": true}),
            "attention_bias is true, which is not supported",
        ),
    ];
    for (base, edits, expected) in cases {
        let text = message(base, &edits);
        assert!(
            text.starts_with("config.json: ") && text.contains(expected),
            "{edits}\n gives {text}\n not {expected}"
        );
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}

#[test]
fn windows_that_no_layer_uses_are_fine() {
    parse(&edited(
        QWEN3_MOE,
        &json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 6}),
    ));
    parse(&edited(
        QWEN3_MOE,
        &json!({"use_sliding_window": true, "sliding_window": null}),
    ));
    parse(&edited(
        QWEN3_MOE,
        &json!({"layer_types": ["full_attention"]}),
    ));
}

#[test]
fn a_byte_order_mark_in_front_is_no_part_of_the_text() {
    let text = format!("\u{feff}{LLAMA}");
    assert_eq!(ModelConfig::parse(&text).unwrap(), parse(&value(LLAMA)));
    let dir = tempfile::tempdir().unwrap();
    crate::files::write(dir.path(), "config.json", text);
    assert_eq!(ModelConfig::read(dir.path()).unwrap(), parse(&value(LLAMA)));
}

#[test]
fn text_that_is_no_config_is_told() {
    let text = |json: &str| ModelConfig::parse(json).unwrap_err().to_string();
    assert!(text("{").starts_with("config.json is not valid JSON: "));
    assert!(text("[]").starts_with("config.json is not a JSON object"));
    let dir = tempfile::tempdir().unwrap();
    let missing = ModelConfig::read(dir.path()).unwrap_err();
    assert!(matches!(missing, FormatError::Io { .. }));
    assert!(
        missing.to_string().contains("config.json: No such file"),
        "{missing}"
    );
    crate::files::write(dir.path(), "config.json", [b'{', 0xFF]);
    let text = ModelConfig::read(dir.path()).unwrap_err().to_string();
    assert!(
        text.starts_with("config.json is not UTF-8 (at byte 1)"),
        "{text}"
    );
}

proptest! {
    /// Whatever value a field gets, parsing returns a config or an error.
    #[test]
    fn no_value_of_a_field_panics(base in 0_usize..3, field in any::<prop::sample::Index>(), new in 0_usize..12) {
        let base = [LLAMA, DEEPSEEK, QWEN3_MOE][base];
        let mut config = value(base);
        let fields: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        let values = [json!(0), json!(1), json!(-1), json!(u64::MAX), json!(3), json!(1e300), json!(null), json!("x"), json!([]), json!({}), json!(true), json!([[1]])];
        config[field.get(&fields)] = values[new].clone();
        let _ = ModelConfig::parse(&config.to_string());
    }
}
