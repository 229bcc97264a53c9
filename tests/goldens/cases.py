"""The golden cases: one config.json and one way of storing the weights each.

Dimensions are odd where the architecture allows it, so that every kernel meets its remainder blocks.
"""

from dataclasses import dataclass, field


@dataclass
class Case:
    """One tiny checkpoint and what is recorded of it."""

    name: str
    config: dict
    # Storage of the matrices: f32, f16, bf16 or fp8 (128x128 block scales; norms, embeddings and router stay bf16).
    dtype: str
    # Length of the prompt; past the original context length where the case scales RoPE.
    prompt_tokens: int = 40
    # Files of the checkpoint; more than one brings model.safetensors.index.json.
    shards: int = 1
    # Whether named intermediates of every layer are recorded.
    intermediates: bool = False
    # Storage of weight_scale_inv: DeepSeek publishes f32, Qwen bf16.
    scale_dtype: str = "f32"
    # Fields of config.json that transformers does not know and is not shown.
    transformers_overrides: dict = field(default_factory=dict)


FP8 = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}


def deepseek(**changed) -> dict:
    """A DeepSeek-V3 config.json in the published style."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 173,
        "hidden_size": 76,
        "intermediate_size": 131,
        "moe_intermediate_size": 21,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "n_shared_experts": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "q_lora_rank": 43,
        "kv_lora_rank": 37,
        "qk_nope_head_dim": 21,
        "qk_rope_head_dim": 10,
        "v_head_dim": 19,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changed


def decoder(model_type: str, architecture: str, **changed) -> dict:
    """What the Llama and Qwen families share of a config.json."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 187,
        "hidden_size": 66,
        "intermediate_size": 107,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changed


def qwen3_moe(**changed) -> dict:
    """A Qwen3-MoE config.json."""
    return decoder(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **{
            "rms_norm_eps": 1e-6,
            "head_dim": 14,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 19,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
        }
        | changed,
    )


CASES = [
    Case(
        "deepseek_v3",
        deepseek(n_shared_experts=2, n_routed_experts=9, num_experts_per_tok=3),
        "bf16",
        prompt_tokens=17,
        intermediates=True,
    ),
    Case(
        "deepseek_v3_no_q_lora",
        deepseek(
            q_lora_rank=None, num_hidden_layers=2, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, norm_topk_prob=False
        ),
        "f32",
        shards=2,
    ),
    Case(
        "deepseek_v3_yarn",
        deepseek(
            # Its norm's epsilon tells the layer norms from those of the latents, which keep 1e-6.
            rms_norm_eps=1e-3,
            n_shared_experts=1,
            first_k_dense_replace=2,
            max_position_embeddings=64,
            rope_scaling={
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        ),
        "bf16",
        prompt_tokens=52,
    ),
    Case(
        "deepseek_v3_fp8",
        deepseek(
            vocab_size=113,
            hidden_size=168,
            intermediate_size=200,
            moe_intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=3,
            q_lora_rank=136,
            kv_lora_rank=144,
            qk_nope_head_dim=40,
            qk_rope_head_dim=16,
            v_head_dim=36,
            **FP8,
        ),
        "fp8",
    ),
    Case(
        "kimi_k2",
        deepseek(
            model_type="kimi_k2",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            n_routed_experts=9,
            max_position_embeddings=128,
            rope_theta=50000.0,
            rope_scaling={
                "type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 1.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        ),
        "bf16",
        prompt_tokens=36,
        transformers_overrides={"model_type": "deepseek_v3"},
    ),
    Case(
        "qwen3_moe",
        qwen3_moe(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
        "bf16",
        prompt_tokens=17,
        intermediates=True,
    ),
    Case(
        "qwen3_moe_sparse_step",
        qwen3_moe(
            num_hidden_layers=4,
            intermediate_size=83,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            num_experts=7,
            num_experts_per_tok=2,
            rope_theta=10000.0,
            rope_scaling=None,
        ),
        "f16",
        prompt_tokens=33,
    ),
    Case(
        "qwen3_moe_fp8",
        qwen3_moe(
            vocab_size=113,
            hidden_size=136,
            moe_intermediate_size=28,
            num_hidden_layers=2,
            num_attention_heads=8,
            head_dim=20,
            num_experts=8,
            rope_theta=1000000.0,
            **FP8,
        ),
        "fp8",
        prompt_tokens=33,
        scale_dtype="bf16",
    ),
    Case(
        "qwen3",
        decoder(
            "qwen3",
            "Qwen3ForCausalLM",
            head_dim=18,
            rope_theta=1000000.0,
            attention_bias=False,
            tie_word_embeddings=True,
        ),
        "bf16",
        prompt_tokens=80,
    ),
    Case(
        "qwen3_yarn",
        decoder(
            "qwen3",
            "Qwen3ForCausalLM",
            head_dim=16,
            max_position_embeddings=96,
            attention_bias=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        ),
        "f16",
        prompt_tokens=70,
    ),
    Case(
        "qwen2",
        decoder(
            "qwen2",
            "Qwen2ForCausalLM",
            hidden_size=90,
            num_attention_heads=9,
            num_key_value_heads=3,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            use_sliding_window=False,
            sliding_window=131072,
            max_window_layers=3,
        ),
        "bf16",
        prompt_tokens=64,
    ),
    Case(
        "llama2",
        decoder("llama", "LlamaForCausalLM", num_attention_heads=3, num_key_value_heads=3, rope_scaling=None),
        "f16",
    ),
    Case(
        "llama3",
        decoder(
            "llama",
            "LlamaForCausalLM",
            hidden_size=70,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=14,
            rope_theta=500000.0,
            max_position_embeddings=256,
            rope_scaling={
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            tie_word_embeddings=True,
            eos_token_id=[1, 2, 3],
        ),
        "bf16",
        prompt_tokens=80,
    ),
    Case(
        "llama_linear",
        decoder(
            "llama",
            "LlamaForCausalLM",
            num_hidden_layers=2,
            head_dim=10,
            attention_bias=True,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "f32",
    ),
]
