"""Peers of the CUDA backend: torch's kernels at the shapes of worker/cuda/benches/device.rs, and decode steps of transformers on the
checkpoints in the directories that are named."""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

RUNS, LAUNCHES = 9, 8
PROMPT, STEPS, FIRST_STEPS = 512, 64, 4


def seconds(call):
    """Median seconds of one call."""
    times = []
    for _ in range(RUNS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / LAUNCHES)
    return sorted(times[1:])[RUNS // 2]


def attention():
    for name, heads, kv_heads, k_dim, v_dim in [("GQA 32/8 x 128", 32, 8, 128, 128), ("MLA 192/128", 32, 32, 192, 128)]:
        for context in (8192, 32768):
            q = torch.randn(1, heads, context, k_dim, device="cuda", dtype=torch.bfloat16)
            k = torch.randn(1, kv_heads, context, k_dim, device="cuda", dtype=torch.bfloat16)
            v = torch.randn(1, kv_heads, context, v_dim, device="cuda", dtype=torch.bfloat16)
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                try:
                    with sdpa_kernel(backend):
                        t = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads))
                except RuntimeError as error:
                    print(f"torch attention {name} at {context}, {backend.name}: {str(error).splitlines()[0]}")
                    continue
                tflops = heads * context * (context + 1) * (k_dim + v_dim) / t / 1e12
                print(f"torch attention {name}, whole prompt of {context}, {backend.name}: {t * 1e3:.2f} ms, {tflops:.0f} TFLOPS")


def fp8():
    """cuBLASLt's FP8 with 1x128 and 128x128 scales, where this torch and GPU have it."""
    tokens = 4096
    for rows, cols in [(24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]:
        x = torch.randn(tokens, cols, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(rows, cols, device="cuda").to(torch.float8_e4m3fn).t()
        scale_x = torch.ones(cols // 128, tokens, device="cuda").t()
        scale_w = torch.ones(rows // 128, cols // 128, device="cuda").t()
        try:
            t = seconds(lambda: torch._scaled_mm(x, w, scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16))
        except (RuntimeError, ValueError) as error:
            print(f"cuBLASLt FP8 128x128 [{rows}, {cols}]: {str(error).splitlines()[0]}")
            continue
        print(f"cuBLASLt FP8 128x128 [{rows}, {cols}] x {tokens}: {t * 1e3:.2f} ms, {2 * tokens * rows * cols / t / 1e12:.0f} TFLOPS")


@torch.inference_mode()
def decode(directory, device="cuda"):
    """Greedy steps after a prompt of PROMPT tokens, as `hearth-worker bench` measures them; the first FIRST_STEPS do not count."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        print(f"SKIPPED: transformers on {directory}: {error}")
        return
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    for batch in (1, 8):
        tokens = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=device)
        out = model(tokens, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        median = statistics.median(times[FIRST_STEPS:])
        print(f"transformers {model.config.model_type}, batch {batch}: {median * 1e3:.2f} ms a decode step")


if __name__ == "__main__":
    attention()
    fp8()
    for directory in sys.argv[1:]:
        try:
            decode(directory)
        except torch.OutOfMemoryError as error:
            print(f"SKIPPED: transformers on {directory}: {str(error).splitlines()[0]}")
