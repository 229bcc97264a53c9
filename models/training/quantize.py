"""FP8 E4M3 weights with one float32 scale per 128x128 block, as DeepSeek-V3 publishes them.

A weight `w` of shape [n, k] is stored as `fp8` [n, k] and `scale_inv` [ceil(n/128), ceil(k/128)] with
`w = fp8 * scale_inv` blockwise. Scales are powers of two here, so every product is exact in BF16 and float32 alike:
an engine that dequantises to either type computes with the same weights.
"""

import torch

BLOCK = 128
E4M3_MAX = 448.0


def block_scale_inv(weight: torch.Tensor) -> torch.Tensor:
    """Smallest power of two per block that keeps the block within E4M3: [n, k] -> [ceil(n/128), ceil(k/128)]."""
    padded = _pad(weight)
    rows, columns = padded.shape[0] // BLOCK, padded.shape[1] // BLOCK
    peak = padded.abs().view(rows, BLOCK, columns, BLOCK).amax(dim=(1, 3)).clamp_min(1e-12)
    return torch.exp2(torch.ceil(torch.log2(peak / E4M3_MAX))).float()


def expand_scale(scale_inv: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeats each block's scale over its elements and cuts to `shape` [n, k]."""
    full = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return full[: shape[0], : shape[1]]


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, k] -> (float8_e4m3fn [n, k], float32 scale_inv)."""
    scale_inv = block_scale_inv(weight)
    scaled = weight / expand_scale(scale_inv, weight.shape)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale_inv


def dequantize(fp8: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """(float8_e4m3fn [n, k], scale_inv) -> float32 [n, k]."""
    return fp8.float() * expand_scale(scale_inv, fp8.shape)


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """What remains of `weight` [n, k] after storage in FP8; stacks [e, n, k] are handled matrix by matrix."""
    if weight.dim() == 3:
        return torch.stack([round_trip(matrix) for matrix in weight])
    return dequantize(*quantize(weight))


def _pad(weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    return torch.nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % BLOCK))
