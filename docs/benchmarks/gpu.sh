#!/usr/bin/env bash
# The GPU rows of docs/benchmarks.md on the GPU of this machine: kernels beside the device's own limits, decode steps of random
# models, prompts that stream and experts on the CPUs, and in the same run torch's kernels and transformers on the same weights
# where a Python has them (PYTHON=... names it). Models take 30 GiB of the temporary directory, and then what is free there and
# in memory; those that the GPU has no room for are said and passed over.
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
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [ -n "$nvcc" ]; then
    "$nvcc" -O3 -arch=native worker/cuda/benches/hand_over.cu -lcuda -o "${CARGO_TARGET_DIR:-target}/hand_over"
    "${CARGO_TARGET_DIR:-target}/hand_over"
else
    echo "SKIPPED: no nvcc, so ways to hand rows to the host were not measured (it comes with the CUDA toolkit)" >&2
fi

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

# Layers of DeepSeek-V3's shapes, 11 GiB each with their experts: as many as the free memory and the temporary directory hold,
# whose prompts stream and whose experts the CPUs compute, beside the rates of device, link and memory.
"$worker" profile --json
free_gib() {
    local memory disk
    memory=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
    disk=$(df --output=avail -B1G "$models" | tail -1)
    echo $((memory < disk ? memory : disk))
}
rm -rf "${models:?}"/*-fp8
with_experts=$((($(free_gib) - 16) / 11))
if ((with_experts > 0)); then
    layers=$((3 + (with_experts < 58 ? with_experts : 58)))
    sed "s/\"num_hidden_layers\": 61/\"num_hidden_layers\": $layers/" docs/benchmarks/configs/deepseek-v3-full.json >"$models/full.json"
    model=$models/full
    "$worker" random --config "$models/full.json" --dtype fp8 --out "$model"
    experts() {
        echo "== $layers of DeepSeek-V3's 61 layers: $*"
        "$worker" bench --device cuda --model "$model" "$@" 2>&1 || failed=1
    }
    for tokens in 2048 8192 32768; do
        for form in absorbed expanded; do
            experts --residency stream-loading --mla-form "$form" --prefill "$tokens" --chunk "$tokens" --decode 1 --prompts 2
        done
    done
    experts --residency stream-loading --stream-dense --mla-form expanded --prefill 8192 --chunk 8192 --decode 1 --prompts 2
    experts --residency host-experts --prefill 64 --decode 300 --batch 1
    experts --residency host-experts --prefill 512 --decode 64 --batch 4
    experts --residency host-experts --prefill 512 --decode 64 --batch 4 --dual-batch
    experts --residency host-experts --prefill 64 --decode 300 --batch 1 --cache-slots 192
    # Steps of one stream, before and while prompts stream beside it.
    "$worker" bench --device cuda --model "$model" --residency host-experts --prefill 128 --decode 900 --json >"$models/beside.json" &
    beside=$!
    sleep 8
    experts --residency stream-loading --mla-form expanded --prefill 8192 --chunk 8192 --decode 1 --prompts 4
    wait "$beside" || failed=1
    echo "ms a step, medians of 100 in turn:"
    python3 -c 'import json, statistics, sys
steps = json.load(open(sys.argv[1]))["decode_steps_ms"]
print([round(statistics.median(steps[i : i + 100]), 2) for i in range(0, len(steps), 100)])' "$models/beside.json" || failed=1
    for ((threads = 1; threads <= $(nproc); threads *= 2)); do
        echo "== CPU alone, $threads threads"
        "$worker" bench --device cpu --threads $threads --model "$model" --prefill 4 --decode 6
    done
else
    echo "SKIPPED: neither memory nor the temporary directory has room for a layer of DeepSeek-V3's experts" >&2
fi

if "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
    "$python" docs/benchmarks/gpu_peers.py "$models"/*-bf16
else
    echo "SKIPPED: $python has no torch with CUDA, so its kernels and transformers were not measured" >&2
fi
exit $failed
