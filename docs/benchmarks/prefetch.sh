#!/usr/bin/env bash
# What a plan predicts for weights that do not fit, and what a client then measures: a random Qwen3-MoE of 1.4 GiB and a random Qwen3 of
# 1.3 GiB, without a memory limit and under two. Warm: the files are cached by others, all servers run at once, and each
# round measures the machine, predicts and asks each of them in turn, so that the ratios hold on a machine whose pace changes. Cold: the
# files come from the disk as far as the limit's page cache does not keep them, one server after the other.
# Needs root and a memory controller: cgroup v2, or v1. `prefetch.sh ROUNDS [warm]`: without the cold rows where they are not
# wanted. `BIN` names a folder of binaries (default: a release build).
set -euo pipefail
cd "$(dirname "$0")/../.."
rounds=${1:-9} only=${2:-}
bin=${BIN:-}
if [ -z "$bin" ]; then
    cargo build --release -q --bins
    bin=$(realpath "${CARGO_TARGET_DIR:-target}")/release
fi
work=$(mktemp -d /var/tmp/hearth-prefetch.XXXX)
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    groups=/sys/fs/cgroup/hearth-prefetch-$$ limit=memory.max
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    mkdir "$groups"
    echo +memory >"$groups/cgroup.subtree_control"
else
    groups=/sys/fs/cgroup/memory/hearth-prefetch-$$ limit=memory.limit_in_bytes
    mkdir "$groups"
fi
declare -A server
trap 'kill "${server[@]}" 2>/dev/null || true; wait; sleep 1; rmdir "$groups"/*/ "$groups" || true; rm -rf "$work"' EXIT

within() { # GROUP LIMIT_MIB COMMAND...
    local group=$groups/$1
    mkdir -p "$group"
    if [ "$2" != none ]; then echo $(($2 << 20)) >"$group/$limit"; fi
    shift 2
    exec bash -c 'echo $$ >"$1/cgroup.procs"; shift; exec "$@"' bash "$group" "$@"
}

field() { sed -n "s/.*\"$1\": *\([0-9.]*\).*/\1/p" | head -1; }

start() { # LIMIT_MIB PORT
    rm -rf "$work/state-$1"
    (within "up-$1" "$1" "$bin/hearth" up -f "$work/deployment.yaml" --port "$2" --state-dir "$work/state-$1") >"$work/log-$1" 2>&1 &
    server[$1]=$!
    until grep -q 'ready in' "$work/log-$1"; do
        kill -0 "${server[$1]}" || { cat "$work/log-$1" >&2 && return 1; }
        sleep 0.2
    done
}

stop() { # LIMIT_MIB
    kill "${server[$1]}"
    wait "${server[$1]}" || true
    unset "server[$1]"
}

ask_s() { # PORT SEED TOKENS
    curl -s -o /dev/null -w '%{time_total}' "http://127.0.0.1:$1/v1/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"model\", \"prompt\": \"a b c d\", \"max_tokens\": $3, \"temperature\": 1, \"seed\": $2, \"ignore_eos\": true}"
}

tpot_ms() { # PORT SEED: of 32 tokens after the first
    local first all
    first=$(ask_s "$1" "$2" 1)
    all=$(ask_s "$1" "$2" 33)
    awk -v first="$first" -v all="$all" 'BEGIN { print (all - first) / 32 * 1e3 }'
}

predicted_ms() { # LIMIT_MIB: at this moment
    (within "plan-$1" "$1" "$bin/hearth" plan --measure -o json -f "$work/deployment.yaml" --state-dir "$work/state-plan") 2>/dev/null | field tpotMs
}

row() { # MODEL LIMIT FILES: of "predicted measured" lines
    awk '{ print $1, $2, $1 / $2 }' | sort -n -k3 >"$work/rows"
    local median=$(((rounds + 1) / 2))
    of() { sort -n -k"$1" "$work/rows" | awk -v n="$2" -v k="$1" 'NR == n { printf "%.2f", $k }'; }
    printf '| %s | %s | %s | %s ms | %s ms | %s (%s to %s) |\n' "$@" "$(of 1 $median)" "$(of 2 $median)" \
        "$(of 3 $median)" "$(of 3 1)" "$(of 3 "$rounds")"
}

measure() { # MODEL LIMITS_MIB...
    local model=$1 mib port
    shift
    cat "$work"/model/*.safetensors >/dev/null
    port=8110
    for mib in "$@"; do start "$mib" $((port++)); done
    for round in $(seq "$rounds"); do
        port=8110
        for mib in "$@"; do
            echo "$(predicted_ms "$mib") $(tpot_ms $((port++)) "$round")" >>"$work/warm-$mib"
        done
    done
    for mib in "$@"; do stop "$mib"; row "$model" "$mib" warm <"$work/warm-$mib"; done
    for mib in "${@:2}"; do
        if [ "$only" = warm ]; then continue; fi
        for round in $(seq "$rounds"); do
            sync
            for file in "$work"/model/*.safetensors; do dd if="$file" iflag=nocache count=0 status=none; done
            start "$mib" 8110
            for seed in 1 2 3; do tpot_ms 8110 $seed >/dev/null; done
            echo "$(field tpotMs <"$work/state-$mib/prefetch/plan.json") $(tpot_ms 8110 4)" >>"$work/cold-$mib"
            stop "$mib"
        done
        row "$model" "$mib" cold <"$work/cold-$mib"
    done
    rm -rf "$work"/warm-* "$work"/cold-* "$work/model"
}

cat >"$work/deployment.yaml" <<END
apiVersion: hearth.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: prefetch}
spec:
  model: {source: {hostPath: {path: $work/model}}, contextLength: 512}
  prefill: {mode: Chunked}
  decode: {maxBatch: 1}
END
printf '| model | limit, MiB | files | predicted | measured | predicted of measured |\n| --- | --- | --- | --- | --- | --- |\n'
for model in qwen3-moe qwen3; do
    "$bin/hearth-worker" random --config "docs/benchmarks/configs/$model.json" --dtype fp8 --out "$work/model" >/dev/null
    cp models/hearth-demo/tokenizer* "$work/model/"
    case $model in
    qwen3-moe) measure "$model" none 1600 1300 ;;
    qwen3) measure "$model" none 1300 1000 ;;
    esac
done
