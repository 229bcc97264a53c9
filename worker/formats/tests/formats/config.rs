//! config.json of each architecture, in both generations of the format.

use hearth_formats::{Architecture, AttentionConfig, ModelConfig, RopeScaling, ScoreFunction};
use serde_json::{Value, json};

pub(crate) const LLAMA: &str = r#"{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 200,
  "intermediate_size": 300, "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2,
  "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3],
  "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024, "rope_type": "llama3"}
}"#;

/// A config in the published style, with DeepSeek-V3's own numbers.
pub(crate) const DEEPSEEK: &str = r#"{
  "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": false,
  "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
  "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
  "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
  "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
  "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
  "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
  "v_head_dim": 128, "vocab_size": 129280,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"}
}"#;

pub(crate) const QWEN3_MOE: &str = r#"{
  "model_type": "qwen3_moe", "attention_bias": false, "bos_token_id": 151643, "decoder_sparse_step": 2,
  "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
  "max_window_layers": 48, "mlp_only_layers": [3], "moe_intermediate_size": 768, "norm_topk_prob": true,
  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 6,
  "num_key_value_heads": 4, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
  "use_sliding_window": false, "vocab_size": 151936
}"#;

pub(crate) fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Returns `base` with fields set, or removed if the value is the string "REMOVE".
pub(crate) fn edited(base: &str, edits: &Value) -> Value {
    let mut config = value(base);
    for (field, new) in edits.as_object().unwrap() {
        match new.as_str() {
            Some("REMOVE") => {
                config.as_object_mut().unwrap().remove(field);
            }
            _ => config[field] = new.clone(),
        }
    }
    config
}

pub(crate) fn parse(config: &Value) -> ModelConfig {
    ModelConfig::parse(&config.to_string()).unwrap()
}

pub(crate) fn message(base: &str, edits: &Value) -> String {
    ModelConfig::parse(&edited(base, edits).to_string())
        .unwrap_err()
        .to_string()
}

#[test]
fn deepseek_v3_in_the_published_style() {
    let config = ModelConfig::parse(DEEPSEEK).unwrap();
    assert_eq!(config.architecture, Architecture::DeepseekV3);
    assert_eq!(
        (config.layers, config.hidden_size, config.vocab_size),
        (61, 7168, 129_280)
    );
    let expected = AttentionConfig::Mla {
        heads: 128,
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        qk_nope_head_dim: 128,
        qk_rope_head_dim: 64,
        v_head_dim: 128,
        interleaved_rope: true,
    };
    assert_eq!(config.attention, expected);
    assert_eq!(config.rope.theta, 10_000.0);
    let expected = RopeScaling::Yarn {
        factor: 40.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: Some(1.0),
        mscale_all_dim: Some(1.0),
        attention_factor: None,
        truncate: true,
        original_max_position_embeddings: 4096,
    };
    assert_eq!(config.rope.scaling, expected);
    let moe = config.moe.as_ref().unwrap();
    assert_eq!(
        (
            moe.experts,
            moe.experts_per_token,
            moe.groups,
            moe.top_groups
        ),
        (256, 8, 8, 4)
    );
    assert_eq!(
        (moe.shared_experts, moe.intermediate_size, moe.scaling),
        (1, 2048, 2.5)
    );
    assert!(moe.normalize && moe.correction_bias && moe.score == ScoreFunction::Sigmoid);
    assert_eq!(
        (0..5).map(|l| config.is_moe_layer(l)).collect::<Vec<_>>(),
        [false, false, false, true, true]
    );
    assert_eq!(
        (config.eos_token_ids.as_slice(), config.bos_token_id),
        (&[1][..], Some(0))
    );
    assert!(config.fp8.is_some() && !config.tie_word_embeddings);
}

#[test]
fn the_newer_style_reads_the_same() {
    let newer = edited(
        DEEPSEEK,
        &json!({"rope_theta": "REMOVE", "rope_scaling": "REMOVE", "dtype": "bfloat16",
            "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn"}}),
    );
    assert_eq!(parse(&newer), ModelConfig::parse(DEEPSEEK).unwrap());
    let plain = parse(&edited(
        LLAMA,
        &json!({"rope_theta": "REMOVE", "rope_scaling": "REMOVE", "rope_parameters": {"rope_theta": 250.0, "rope_type": "default"}}),
    ));
    assert_eq!(
        (plain.rope.theta, plain.rope.scaling),
        (250.0, RopeScaling::None)
    );
}

#[test]
fn kimi_k2_keeps_its_name() {
    let edits = json!({"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
        "q_lora_rank": null, "n_shared_experts": null, "first_k_dense_replace": 0, "rope_interleave": false});
    let config = parse(&edited(DEEPSEEK, &edits));
    assert_eq!(
        (config.architecture, config.model_type.as_str()),
        (Architecture::DeepseekV3, "kimi_k2")
    );
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.experts, moe.groups, moe.shared_experts), (384, 1, 0));
    assert!(config.is_moe_layer(0));
    assert!(matches!(
        config.attention,
        AttentionConfig::Mla {
            q_lora_rank: None,
            interleaved_rope: false,
            ..
        }
    ));
}

#[test]
fn deepseek_defaults_are_those_of_transformers() {
    let edits = json!({"n_group": "REMOVE", "topk_group": "REMOVE", "n_shared_experts": "REMOVE", "norm_topk_prob": "REMOVE",
        "routed_scaling_factor": "REMOVE", "first_k_dense_replace": "REMOVE", "num_key_value_heads": "REMOVE",
        "tie_word_embeddings": "REMOVE", "rms_norm_eps": "REMOVE", "moe_layer_freq": "REMOVE", "eos_token_id": null});
    let config = parse(&edited(DEEPSEEK, &edits));
    let moe = config.moe.unwrap();
    assert_eq!(
        (
            moe.groups,
            moe.top_groups,
            moe.shared_experts,
            moe.first_dense_layers
        ),
        (8, 4, 1, 3)
    );
    assert_eq!((moe.scaling, config.rms_norm_eps), (2.5, 1e-6));
    assert!(config.eos_token_ids.is_empty());
}

#[test]
fn qwen3_moe_layers_follow_step_and_list() {
    let config = ModelConfig::parse(QWEN3_MOE).unwrap();
    let sparse: Vec<bool> = (0..6).map(|l| config.is_moe_layer(l)).collect();
    assert_eq!(sparse, [false, true, false, false, false, true]);
    let moe = config.moe.unwrap();
    assert!(moe.score == ScoreFunction::Softmax && !moe.correction_bias && moe.normalize);
    assert_eq!((moe.groups, moe.shared_experts, moe.scaling), (1, 0, 1.0));
    let expected = AttentionConfig::Gqa {
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        qkv_bias: false,
        o_bias: false,
        qk_norm: true,
    };
    assert_eq!(config.attention, expected);
    let edits = json!({"num_experts": "REMOVE", "num_local_experts": 64, "norm_topk_prob": "REMOVE", "head_dim": "REMOVE",
        "intermediate_size": "REMOVE", "decoder_sparse_step": 1, "mlp_only_layers": null});
    let config = parse(&edited(QWEN3_MOE, &edits));
    assert!(matches!(
        config.attention,
        AttentionConfig::Gqa { head_dim: 64, .. }
    ));
    assert_eq!(config.intermediate_size, 0);
    let moe = config.moe.unwrap();
    assert_eq!((moe.experts, moe.normalize), (64, false));
}

#[test]
fn dense_architectures_differ_in_biases_norms_and_head_dim() {
    let config = |edits: &Value| parse(&edited(LLAMA, edits)).attention;
    let gqa = |head_dim, qkv_bias, o_bias, qk_norm| AttentionConfig::Gqa {
        heads: 10,
        kv_heads: 2,
        head_dim,
        qkv_bias,
        o_bias,
        qk_norm,
    };
    assert_eq!(config(&json!({})), gqa(20, false, false, false));
    assert_eq!(
        config(&json!({"attention_bias": true, "head_dim": 32})),
        gqa(32, true, true, false)
    );
    assert_eq!(
        config(&json!({"model_type": "qwen2"})),
        gqa(20, true, false, false)
    );
    assert_eq!(
        config(&json!({"model_type": "qwen3"})),
        gqa(128, false, false, true)
    );
    let all_heads = config(&json!({"num_key_value_heads": "REMOVE"}));
    assert!(matches!(
        all_heads,
        AttentionConfig::Gqa { kv_heads: 10, .. }
    ));
}

#[test]
fn llama3_and_linear_scaling_are_read() {
    let config = ModelConfig::parse(LLAMA).unwrap();
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 1024,
    };
    assert_eq!(config.rope.scaling, expected);
    assert_eq!(
        (config.rope.theta, config.eos_token_ids.as_slice()),
        (500_000.0, &[2, 3][..])
    );
    assert!(config.tie_word_embeddings);
    let linear = parse(&edited(
        LLAMA,
        &json!({"rope_scaling": {"type": "linear", "factor": 2}}),
    ));
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

#[test]
fn yarn_defaults_are_those_of_transformers() {
    let config = parse(&edited(
        LLAMA,
        &json!({"rope_scaling": {"rope_type": "yarn", "factor": null, "original_max_position_embeddings": 1024, "beta_fast": 0, "attention_factor": 1.5, "truncate": false}}),
    ));
    let expected = RopeScaling::Yarn {
        factor: 8.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: None,
        mscale_all_dim: None,
        attention_factor: Some(1.5),
        truncate: false,
        original_max_position_embeddings: 1024,
    };
    assert_eq!(config.rope.scaling, expected);
    let config = parse(&edited(
        LLAMA,
        &json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ));
    assert!(matches!(
        config.rope.scaling,
        RopeScaling::Yarn {
            original_max_position_embeddings: 8192,
            ..
        }
    ));
}
