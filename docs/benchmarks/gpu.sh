#!/usr/bin/env bash
# The GPU rows of docs/benchmarks.md on the GPU of this machine: kernels beside the device's own limits, decode steps of random
# models, and torch's kernels where a Python with torch is there (PYTHON=... names it).
# The log is kept beside this script.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${HEARTH_CACHE:-$HOME/.cache/hearth}
python=${PYTHON:-python3}
nvrtc=$(ls -d "$cache"/py/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib 2>/dev/null | head -1 || true)
export LD_LIBRARY_PATH=${nvrtc:+$nvrtc:}${LD_LIBRARY_PATH:-}

log=docs/benchmarks/gpu-$(date +%F).txt
exec > >(tee "$log") 2>&1

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv
cargo build --release -q --bin hearth-worker
worker=${CARGO_TARGET_DIR:-target}/release/hearth-worker
cargo bench -p hearth-cuda

models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
for name in qwen3-moe deepseek-v3; do
    "$worker" random --config "docs/benchmarks/configs/$name-gpu.json" --dtype fp8 --out "$models/$name"
    for activations in f32 bf16 fp8; do
        for batch in 1 8; do
            echo "== $name, $activations activations, batch $batch"
            "$worker" bench --device cuda --activations "$activations" --model "$models/$name" --prefill 512 --decode 64 --batch "$batch"
        done
    done
done

if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    "$python" docs/benchmarks/gpu_peers.py
else
    echo "SKIPPED: $python has no torch with CUDA, so its kernels were not measured" >&2
fi
