#!/usr/bin/env bash
# Every test of what is built. Those on Kubernetes run beside the others, for a cluster mostly waits. What each of them comes to
# is said as it ends; their whole output comes in one piece when both are done.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
clusters=''
# A shell's background jobs ignore Ctrl-C.
end() {
    trap - EXIT
    [ -z "$clusters" ] || kill -TERM -- "-$clusters" 2>/dev/null
    rm -f "$log"
}
trap end EXIT
trap 'end; exit 130' INT
trap 'end; exit 143' TERM

# Patterns of names, since cargo has none for what is left out: all that do not begin with `clu`.
others=(--lib --bins --test '[!c]*' --test 'c[!l]*' --test 'cl[!u]*')

# In a session of its own, which ends as one.
setsid bash -o pipefail -c '
    cargo test --workspace --no-fail-fast --test "cluster_*" 2>&1 | tee "$0" |
        { grep --line-buffered -E "^test .*(ok|FAILED|ignored)$|^SKIPPED" || true; } | sed -u "s/^/on Kubernetes: /"
' "$log" &
clusters=$!
failed=0
cargo test --workspace --no-fail-fast "${others[@]}" || failed=1
cargo test --workspace --no-fail-fast --doc || failed=1
if kill -0 "$clusters" 2>/dev/null; then
    echo "test: waiting for the tests on Kubernetes"
fi
wait "$clusters" || failed=1
clusters=''
cat "$log"
exit "$failed"
