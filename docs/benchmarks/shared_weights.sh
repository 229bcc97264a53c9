#!/usr/bin/env bash
# Shows that the prefill and the decode worker of a deployment map one copy of the weights: RSS counts shared pages
# for each process, PSS divides them among the processes that map them.
# A random DeepSeek-V3 of 1.3 GiB with the demo model's tokenizer. Needs 2 GiB of disk in ${TMPDIR:-/tmp}.
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release -q --bins
bin=${CARGO_TARGET_DIR:-target}/release
directory=$(mktemp -d "${TMPDIR:-/tmp}/hearth-pss.XXXXXX")
up=
trap '[ -z "$up" ] || kill "$up" 2>/dev/null || true; wait; rm -rf "$directory"' EXIT
"$bin/hearth-worker" random --config docs/benchmarks/configs/deepseek-v3.json --dtype fp8 --out "$directory/model"
cp models/hearth-demo/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$directory/model/"
cat > "$directory/random.yaml" <<YAML
apiVersion: hearth.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: random}
spec:
  model: {source: {hostPath: {path: $directory/model}}, contextLength: 2048}
YAML
"$bin/hearth" up -f "$directory/random.yaml" --port "${PORT:-8099}" --state-dir "$directory/state" &
up=$!
until "$bin/hearth" status --state-dir "$directory/state" 2>/dev/null | grep -q True; do sleep 0.2; done
# A prompt long enough for the prefill worker, so that both have computed with the weights.
"$bin/hearth" chat --state-dir "$directory/state" --message "$(printf 'Say it again. %.0s' {1..20})" > "$directory/answer" &
chat=$!
sleep 20
kill "$chat" 2>/dev/null || true
printf '%-10s %10s %10s %10s %10s   MiB\n' process RSS PSS shared private
for rank in prefill-0 decode-0; do
    pid=$(python3 -c "import json,sys; print(next(p['pid'] for p in json.load(open(sys.argv[1]))['processes'] if p['rank']==sys.argv[2]))" "$directory/state/random/running.json" $rank)
    awk -v name=$rank '/^Rss:/{r=$2} /^Pss:/{p=$2} /^Shared_Clean:/{s=$2} /^Private_/{v+=$2}
        END{printf "%-10s %10.1f %10.1f %10.1f %10.1f\n", name, r/1024, p/1024, s/1024, v/1024}' "/proc/$pid/smaps_rollup"
done
