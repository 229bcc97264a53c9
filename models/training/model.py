"""The deepseek_v3 architecture for training: MLA, sigmoid router with correction bias, shared and routed experts.

It computes in float32 what transformers' DeepseekV3 computes; the experts of a layer are one stack of matrices, so that a
batched product runs them all.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ModelConfig:
    """Field names and meanings of a published DeepSeek-V3 config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 96
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    n_shared_experts: int = 1
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 1
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict:
        return asdict(self)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension: [..., d] -> [..., d]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., k] x [n, k] -> [..., n]."""
    return F.linear(x, weight)


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), …: [..., t, d] with cos and sin [t, d/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = nn.Parameter(torch.empty(c.q_lora_rank, c.hidden_size))
        self.q_a_layernorm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.q_b_proj = nn.Parameter(torch.empty(heads * qk, c.q_lora_rank))
        self.kv_a_proj_with_mqa = nn.Parameter(torch.empty(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size))
        self.kv_a_layernorm = nn.Parameter(torch.ones(c.kv_lora_rank))
        self.kv_b_proj = nn.Parameter(torch.empty(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank))
        self.o_proj = nn.Parameter(torch.empty(c.hidden_size, heads * c.v_head_dim))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [b, t, hidden], normalised -> [b, t, hidden]."""
        c, (b, t, _) = self.c, x.shape
        heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        q = linear(rms_norm(linear(x, self.q_a_proj), self.q_a_layernorm, c.rms_norm_eps), self.q_b_proj)
        q_nope, q_rope = q.view(b, t, heads, nope + rope).transpose(1, 2).split([nope, rope], dim=-1)
        latent, k_rope = linear(x, self.kv_a_proj_with_mqa).split([c.kv_lora_rank, rope], dim=-1)
        kv = linear(rms_norm(latent, self.kv_a_layernorm, c.rms_norm_eps), self.kv_b_proj)
        k_nope, v = kv.view(b, t, heads, nope + c.v_head_dim).transpose(1, 2).split([nope, c.v_head_dim], dim=-1)
        q_rope = rotate_interleaved(q_rope, cos, sin)
        k_rope = rotate_interleaved(k_rope[:, None], cos, sin).expand(-1, heads, -1, -1)
        query, key = torch.cat([q_nope, q_rope], dim=-1), torch.cat([k_nope, k_rope], dim=-1)
        scores = (query @ key.transpose(-1, -2)) * (nope + rope) ** -0.5
        mask = torch.full((t, t), float("-inf"), device=x.device).triu(1)
        probabilities = torch.softmax(scores + mask, dim=-1)
        out = (probabilities @ v).transpose(1, 2).reshape(b, t, heads * c.v_head_dim)
        return linear(out, self.o_proj)


class Mlp(nn.Module):
    """SwiGLU feed-forward block; gate and up are one stacked matrix [2 * width, hidden]."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, self.gate_up_proj.flatten(0, 1)).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down_proj)


class Moe(nn.Module):
    """Shared expert plus routed experts chosen by a sigmoid router with group-limited top-k (DeepSeek-V3)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        experts, width = c.n_routed_experts, c.moe_intermediate_size
        self.gate = nn.Parameter(torch.empty(experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)
        self.experts_gate_up_proj = nn.Parameter(torch.empty(experts, 2, width, c.hidden_size))
        self.experts_down_proj = nn.Parameter(torch.empty(experts, c.hidden_size, width))
        self.shared_experts = Mlp(c.hidden_size, width * c.n_shared_experts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, hidden] -> (weights [n, k], experts [n, k])."""
        c = self.c
        scores = linear(x, self.gate).sigmoid()
        with torch.no_grad():
            choice = scores + self.e_score_correction_bias
            grouped = choice.view(-1, c.n_group, c.n_routed_experts // c.n_group)
            groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(c.topk_group, dim=-1)[1]
            allowed = torch.zeros_like(grouped[..., 0]).scatter_(1, groups, 1.0).bool()
            masked = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
            chosen = masked.topk(c.num_experts_per_tok, dim=-1)[1]
        weights = scores.gather(1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling_factor, chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, t, hidden], normalised -> [b, t, hidden]."""
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat)
        return (self._routed(flat, weights, chosen) + self.shared_experts(flat)).view_as(x)

    def _routed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Sorts (token, expert) pairs by expert into [experts, capacity] slots and runs all experts by batched products."""
        experts, k = self.c.n_routed_experts, self.c.num_experts_per_tok
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        if self.training:
            self.load += counts
        # Few distinct capacities, so that the library's kernel cache is hit.
        capacity = -(-int(counts.max()) // 64) * 64
        expert = chosen.flatten()[order]
        slot = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[expert] + expert * capacity
        token = order // k
        slots = torch.zeros(experts * capacity, x.shape[-1]).index_copy(0, slot, x[token]).view(experts, capacity, -1)
        gate, up = torch.bmm(slots, self.experts_gate_up_proj.flatten(1, 2).transpose(1, 2)).chunk(2, dim=-1)
        out = torch.bmm(F.silu(gate) * up, self.experts_down_proj.transpose(1, 2)).flatten(0, 1)
        weighted = out[slot] * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, weighted)


class Layer(nn.Module):
    """One decoder layer: attention, then a dense or a mixture-of-experts block."""

    def __init__(self, c: ModelConfig, index: int):
        super().__init__()
        self.eps = c.rms_norm_eps
        self.input_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.mlp = Mlp(c.hidden_size, c.intermediate_size) if index < c.first_k_dense_replace else Moe(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, noise: float) -> torch.Tensor:
        x = x + self.self_attn(_disturb(rms_norm(x, self.input_layernorm, self.eps), noise), cos, sin)
        return x + self.mlp(_disturb(rms_norm(x, self.post_attention_layernorm, self.eps), noise))


class DemoModel(nn.Module):
    """Embedding, layers, final norm and an untied head; logits for every position."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(Layer(c, index) for index in range(c.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size))
        self.initialise()

    def initialise(self) -> None:
        """Normal weights of variance 1/fan_in; what writes to the residual stream is damped by depth."""
        damping = (2 * self.c.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            std = parameter.shape[-1] ** -0.5
            if "down_proj" in name or "o_proj" in name:
                std *= damping
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: torch.Tensor, noise: float = 0.0, select: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [b, t] -> float32 logits [b, t, vocab], or [m, vocab] of the m positions that the mask `select` names.

        `noise` is the relative size of Gaussian disturbances of every block's input: it widens the margins between the
        best and the second token, so that engines with other rounding answer alike.
        """
        c, t = self.c, tokens.shape[1]
        steps = torch.arange(0, c.qk_rope_head_dim, 2, dtype=torch.float32) / c.qk_rope_head_dim
        angles = torch.arange(t, dtype=torch.float32)[:, None] * c.rope_theta**-steps
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embed_tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, noise)
        if select is not None:
            x = x[select]
        x = _disturb(rms_norm(x, self.norm, c.rms_norm_eps), noise)
        return linear(x, self.lm_head)


def _disturb(x: torch.Tensor, noise: float) -> torch.Tensor:
    return x * (1.0 + noise * torch.randn_like(x)) if noise > 0 else x
