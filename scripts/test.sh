#!/usr/bin/env bash
# Every test of what is built. Those on Kubernetes run beside the others, for a cluster mostly waits: half an hour becomes twenty
# minutes on two cores. Their output comes in one piece when both are done.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Patterns of names, since cargo has none for what is left out: all that do not begin with `clu`.
others=(--lib --bins --test '[!c]*' --test 'c[!l]*' --test 'cl[!u]*')

cargo test --workspace --no-fail-fast --test 'cluster_*' >"$log" 2>&1 &
clusters=$!
failed=0
cargo test --workspace --no-fail-fast "${others[@]}" || failed=1
cargo test --workspace --no-fail-fast --doc || failed=1
if kill -0 "$clusters" 2>/dev/null; then
    echo "test: waiting for the tests on Kubernetes"
fi
wait "$clusters" || failed=1
cat "$log"
exit "$failed"
