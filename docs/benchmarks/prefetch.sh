#!/usr/bin/env bash
# What a plan predicts for weights that do not fit, and what the gateway then measures: a random Qwen3-MoE of 1.4 GiB under memory
# limits, with its files cold (read from the disk as far as the limit's page cache does not keep them) and warm (cached by others).
# Needs root and a memory controller: cgroup v2, or v1.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release -q --bins
bin=$(realpath "${CARGO_TARGET_DIR:-target}")/release
work=$(mktemp -d)
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    group=/sys/fs/cgroup/hearth-prefetch-$$ limit=memory.max
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
else
    group=/sys/fs/cgroup/memory/hearth-prefetch-$$ limit=memory.limit_in_bytes
fi
mkdir "$group"
trap 'rm -rf "$work"; rmdir "$group"' EXIT

"$bin/hearth-worker" random --config docs/benchmarks/configs/qwen3-moe.json --dtype fp8 --out "$work/model" >/dev/null
cp models/hearth-demo/tokenizer* "$work/model/"
cat >"$work/deployment.yaml" <<END
apiVersion: hearth.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: prefetch}
spec:
  model: {source: {hostPath: {path: $work/model}}, contextLength: 512}
  prefill: {mode: Chunked}
  decode: {maxBatch: 1}
END

field() { sed -n "s/.*\"$1\": *\([0-9.]*\).*/\1/p" | head -1; }

run() { # LIMIT_MIB cold|warm
    if [ "$2" = cold ]; then
        sync
        for file in "$work"/model/*.safetensors; do dd if="$file" iflag=nocache count=0 status=none; done
    else
        cat "$work"/model/*.safetensors >/dev/null
    fi
    rm -rf "$work/state"
    echo $(($1 << 20)) >"$group/$limit"
    bash -c "echo \$\$ >$group/cgroup.procs; exec $bin/hearth up -f $work/deployment.yaml --port 8099 --state-dir $work/state" \
        >"$work/log" 2>&1 &
    local up=$! predicted measured
    until grep -q 'ready in' "$work/log"; do
        kill -0 $up || { cat "$work/log" && return 1; }
        sleep 0.2
    done
    for seed in 1 2 3 4 5 6; do
        curl -s "http://127.0.0.1:8099/v1/completions" -H 'Content-Type: application/json' \
            -d "{\"model\": \"model\", \"prompt\": \"a b c d\", \"max_tokens\": 48, \"temperature\": 1, \"seed\": $seed}" >/dev/null
    done
    predicted=$(field tpotMs <"$work/state/prefetch/plan.json")
    measured=$("$bin/hearth" status -o json --state-dir "$work/state" | field tpotMs)
    printf '| %s MiB | %s | %s ms | %s ms |\n' "$1" "$2" "$predicted" "$measured"
    kill -INT $up
    wait $up || true
}

printf '| limit | files | predicted | measured |\n| --- | --- | --- | --- |\n'
for mib in 1600 1300; do
    run $mib warm
    run $mib cold
done
