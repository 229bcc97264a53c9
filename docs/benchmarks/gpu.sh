#!/usr/bin/env bash
# The GPU rows of docs/benchmarks.md on the GPU of this machine: kernels beside the device's own limits, decode steps of random
# models, and in the same run torch's kernels and transformers on the same weights where a Python has them (PYTHON=... names it). Models
# take 30 GiB of the temporary directory; those that the GPU has no room for are said and passed over.
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

failed=0
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
bench() { # MODEL ACTIVATIONS
    for batch in 1 8; do
        echo "== ${1##*/}, $2 activations, batch $batch"
        if ! said=$("$worker" bench --device cuda --activations "$2" --model "$1" --prefill 512 --decode 64 --batch "$batch" 2>&1); then
            grep -q 'too little memory' <<<"$said" || failed=1
        fi
        echo "$said"
    done
}
for name in qwen3-moe deepseek-v3; do
    for dtype in fp8 bf16; do
        model=$models/$name-$dtype
        "$worker" random --config "docs/benchmarks/configs/$name-gpu.json" --dtype "$dtype" --out "$model"
        bench "$model" f32
        bench "$model" bf16
    done
    bench "$models/$name-fp8" fp8
done

if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    "$python" docs/benchmarks/gpu_peers.py "$models"/*-bf16
else
    echo "SKIPPED: $python has no torch with CUDA, so its kernels and transformers were not measured" >&2
fi
exit $failed
