#!/usr/bin/env bash
# Experts that exceed memory, read by the page cache or past it: milliseconds of a pass of one token through a random Qwen3-MoE whose experts
# (1.1 GiB) are computed by CPUs beside a virtual device, within a budget and a memory limit, the two ways by turns.
# Needs root and a memory controller: cgroup v2, or v1. `expert_reads.sh ROUNDS BUDGET_MIB LIMIT_MIB`. `BIN` names a folder of
# binaries (default: a release build).
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-5} budget_mib=${2:-500} limit_mib=${3:-1000}
bin=${BIN:-}
if [ -z "$bin" ]; then
    cargo build --release -q --bin hearth-worker
    bin=$(realpath "${CARGO_TARGET_DIR:-target}")/release
fi
work=$(mktemp -d /var/tmp/hearth-reads.XXXX)
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    group=/sys/fs/cgroup/hearth-reads-$$ limit=memory.max
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
else
    group=/sys/fs/cgroup/memory/hearth-reads-$$ limit=memory.limit_in_bytes
fi
mkdir "$group"
trap 'sleep 1; rmdir "$group"; rm -rf "$work"' EXIT
echo $((limit_mib << 20)) >"$group/$limit"
"$bin/hearth-worker" random --config docs/benchmarks/configs/qwen3-moe.json --dtype fp8 --out "$work/model" >/dev/null

ids=$(seq -s, 5 132)
passes_s() { # WAY TOKENS: of one token each, from files that are not in the page cache
    sync
    for file in "$work"/model/*.safetensors; do dd if="$file" iflag=nocache count=0 status=none; done
    local begin=$EPOCHREALTIME
    bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' bash "$group" "$bin/hearth-worker" logits --tokens "$2" --chunk 1 \
        --out "$work/logits" --model "$work/model" --device virtual:memory=512Mi --residency host-experts \
        --residency-budget $((budget_mib << 20)) --expert-reads "$1" >"$work/log" 2>&1 || {
        tail -n 3 "$work/log" >&2
        echo "$1 failed: LIMIT_MIB holds the budget, the device's 512 MiB and the process" >&2
        return 1
    }
    awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }'
}
step_ms() { # WAY: of the tokens after the first
    local first all
    first=$(passes_s "$1" 5) || return 1
    all=$(passes_s "$1" "$ids") || return 1
    awk -v first="$first" -v all="$all" 'BEGIN { print (all - first) / 127 * 1e3 }'
}

printf '| round | cached | direct | direct of cached |\n| --- | --- | --- | --- |\n'
for round in $(seq "$rounds"); do
    cached=$(step_ms cached)
    direct=$(step_ms direct)
    awk -v n="$round" -v c="$cached" -v d="$direct" 'BEGIN { printf "| %d | %.1f ms | %.1f ms | %.2f |\n", n, c, d, d / c }'
done
