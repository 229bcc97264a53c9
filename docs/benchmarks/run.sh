#!/usr/bin/env bash
# Reproduces the figures of docs/benchmarks.md on this machine: random checkpoints of about 1.5 GiB, each measured
# beside the read bandwidth of the same threads in the same run. Needs 8 GiB of disk in ${TMPDIR:-/tmp}.
#   docs/benchmarks/run.sh            the models
#   docs/benchmarks/run.sh kernels    single kernels
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ "${1:-models}" = kernels ]; then
    exec cargo bench -q -p hearth-kernels
fi
cargo build --release -q --bin hearth-worker
worker=${CARGO_TARGET_DIR:-target}/release/hearth-worker
directory=$(mktemp -d "${TMPDIR:-/tmp}/hearth-bench.XXXXXX")
trap 'rm -rf "$directory"' EXIT
cores=$(nproc)
for model in qwen3-moe deepseek-v3; do
    for dtype in fp8 bf16; do
        out=$directory/$model-$dtype
        "$worker" random --config docs/benchmarks/configs/$model.json --dtype $dtype --out "$out"
        for isa in auto avx2; do
            for threads in $(printf '1\n%s\n' "$cores" | sort -nu); do
                for batch in 1 8; do
                    echo "== $model $dtype, isa $isa, $threads threads, batch $batch"
                    "$worker" bench --model "$out" --isa $isa --threads "$threads" --batch $batch --prefill 256 --decode 12
                done
            done
        done
        rm -rf "$out"
    done
done
