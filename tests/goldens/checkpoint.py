"""Random checkpoints with the published tensor names, and how they are stored."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from cases import Case

STORED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 128
E4M3_MAX = 448.0

# Gain of a matrix's standard deviation over 1/sqrt(columns). Queries and keys are sharp enough that attention prefers
# some positions; the head's logits are far from uniform.
GAINS = {
    "q_proj": 1.1,
    "q_b_proj": 1.1,
    "k_proj": 1.1,
    "kv_a_proj_with_mqa": 1.1,
    "gate": 1.5,
    "lm_head": 2.5,
}


def attention_shapes(config: dict, layer: str) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of one attention block."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    prefix = f"{layer}.self_attn"
    if "kv_lora_rank" in config:
        nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        rank, q_rank = config["kv_lora_rank"], config["q_lora_rank"]
        if q_rank is None:
            yield f"{prefix}.q_proj.weight", [heads * (nope + rope), hidden]
        else:
            yield f"{prefix}.q_a_proj.weight", [q_rank, hidden]
            yield f"{prefix}.q_a_layernorm.weight", [q_rank]
            yield f"{prefix}.q_b_proj.weight", [heads * (nope + rope), q_rank]
        yield f"{prefix}.kv_a_proj_with_mqa.weight", [rank + rope, hidden]
        yield f"{prefix}.kv_a_layernorm.weight", [rank]
        yield f"{prefix}.kv_b_proj.weight", [heads * (nope + v), rank]
        yield f"{prefix}.o_proj.weight", [hidden, heads * v]
        return
    dim = config.get("head_dim", hidden // heads)
    kv_heads = config["num_key_value_heads"]
    for name, rows in (("q_proj", heads * dim), ("k_proj", kv_heads * dim), ("v_proj", kv_heads * dim)):
        yield f"{prefix}.{name}.weight", [rows, hidden]
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            yield f"{prefix}.{name}.bias", [rows]
    yield f"{prefix}.o_proj.weight", [hidden, heads * dim]
    if config.get("attention_bias"):
        yield f"{prefix}.o_proj.bias", [hidden]
    if config["model_type"].startswith("qwen3"):
        yield f"{prefix}.q_norm.weight", [dim]
        yield f"{prefix}.k_norm.weight", [dim]


def feed_forward_shapes(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of one SwiGLU block."""
    yield f"{prefix}.gate_proj.weight", [width, hidden]
    yield f"{prefix}.up_proj.weight", [width, hidden]
    yield f"{prefix}.down_proj.weight", [hidden, width]


def is_moe_layer(config: dict, layer: int) -> bool:
    """Whether a layer routes to experts."""
    if "first_k_dense_replace" in config:
        return layer >= config["first_k_dense_replace"]
    if "num_experts" in config:
        return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0
    return False


def shapes(config: dict) -> Iterator[tuple[str, list[int]]]:
    """Every tensor of a checkpoint by its published name."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", [vocab, hidden]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", [hidden]
        yield from attention_shapes(config, layer)
        yield f"{layer}.post_attention_layernorm.weight", [hidden]
        if not is_moe_layer(config, i):
            yield from feed_forward_shapes(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        experts = config.get("n_routed_experts") or config["num_experts"]
        width = config["moe_intermediate_size"]
        yield f"{layer}.mlp.gate.weight", [experts, hidden]
        if "n_routed_experts" in config:
            yield f"{layer}.mlp.gate.e_score_correction_bias", [experts]
        for e in range(experts):
            yield from feed_forward_shapes(f"{layer}.mlp.experts.{e}", hidden, width)
        if config.get("n_shared_experts"):
            shared = width * config["n_shared_experts"]
            yield from feed_forward_shapes(f"{layer}.mlp.shared_experts", hidden, shared)
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [vocab, hidden]


def draw(name: str, shape: list[int], rng: torch.Generator) -> torch.Tensor:
    """Random float32 values for one tensor."""
    if name.endswith("norm.weight"):
        return 0.6 + 0.8 * torch.rand(shape, generator=rng)
    if name.endswith("e_score_correction_bias"):
        return 0.2 * torch.randn(shape, generator=rng)
    if name.endswith(".bias"):
        return 0.5 * torch.randn(shape, generator=rng)
    if name == "model.embed_tokens.weight":
        return torch.randn(shape, generator=rng)
    kind = name.split(".")[-2]
    values = torch.randn(shape, generator=rng) * GAINS.get(kind, 1.0) / shape[1] ** 0.5
    # Blocks of different size, so that a scale taken from the wrong block shows.
    rows, cols = ((n + BLOCK - 1) // BLOCK for n in shape)
    factors = 2.0 ** (torch.randint(-1, 2, (rows, cols), generator=rng).float() / 2)
    return values * expand(factors, shape)


def expand(blocks: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """One value a 128x128 block -> one value an element."""
    rows = blocks.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantise(values: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 E4M3 codes and one scale for each 128x128 block, partial blocks included."""
    rows, cols = ((n + BLOCK - 1) // BLOCK for n in values.shape)
    padded = torch.zeros(rows * BLOCK, cols * BLOCK)
    padded[: values.shape[0], : values.shape[1]] = values
    peak = padded.view(rows, BLOCK, cols, BLOCK).abs().amax((1, 3))
    scales = (peak.clamp(min=1e-12) / E4M3_MAX).to(scale_dtype)
    codes = values / expand(scales.float(), list(values.shape))
    return codes.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def build(case: Case, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(tensors as stored, the same values in float32 without scales)."""
    rng = torch.Generator().manual_seed(seed)
    stored, exact = {}, {}
    for name, shape in shapes(case.config):
        values = draw(name, shape, rng)
        plain = ("norm.weight", "embed_tokens.weight", "lm_head.weight", ".gate.weight")
        if case.dtype == "fp8" and len(shape) == 2 and not name.endswith(plain):
            codes, scales = quantise(values, STORED[case.scale_dtype])
            stored[name], stored[f"{name}_scale_inv"] = codes, scales
            exact[name] = codes.float() * expand(scales.float(), shape)
            continue
        # DeepSeek keeps the correction bias in float32.
        dtype = "f32" if name.endswith("e_score_correction_bias") else case.dtype
        stored[name] = values.to(STORED["bf16" if dtype == "fp8" else dtype])
        exact[name] = stored[name].float()
    return stored, exact


def write(case: Case, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes config.json and the weights, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=2) + "\n")
    if case.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(case.shards):
        file = f"model-{shard + 1:05}-of-{case.shards:05}.safetensors"
        first, end = (len(names) * n // case.shards for n in (shard, shard + 1))
        save_file({n: tensors[n] for n in names[first:end]}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names[first:end], file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
