#!/usr/bin/env bash
# Every test of what is built. Those on Kubernetes run beside the others, for a cluster mostly waits, and so do those of the CUDA
# backend, which compute on one core and give way to the others. What each of them comes to is said as it ends; their whole
# output comes in one piece when all are done.
set -uo pipefail
cd "$(dirname "$0")/.."

logs=$(mktemp -d)
beside=()
# A shell's background jobs ignore Ctrl-C.
end() {
    trap - EXIT
    for lane in "${beside[@]}"; do
        kill -TERM -- "-$lane" 2>/dev/null
    done
    rm -rf "$logs"
}
trap end EXIT
trap 'end; exit 130' INT
trap 'end; exit 143' TERM

# Runs tests by the pattern of their names, in a session of their own, which ends as one.
run_beside() {
    local name=$1 pattern=$2 priority=$3
    setsid nice -n "$priority" bash -o pipefail -c '
        echo "$3" >/proc/self/autogroup # where priorities hold within a session only
        cargo test --workspace --no-fail-fast --test "$2" 2>&1 | tee "$0" |
            { grep --line-buffered -E "^test .*(ok|FAILED|ignored)$|^SKIPPED" || true; } | sed -u "s/^/$1: /"
    ' "$logs/$name" "$name" "$pattern" "$priority" 2>/dev/null &
    beside+=($!)
}

# Cargo has patterns for the names that are meant, and none for those that are not.
others=(--lib --bins)
for name in $(cargo metadata --no-deps --format-version 1 | grep -o '"kind":\["test"\],"crate_types":\["bin"\],"name":"[^"]*"' |
    cut -d '"' -f 12 | sort -u); do
    case $name in
    cluster_* | cuda_*) ;;
    *) others+=(--test "$name") ;;
    esac
done
[ ${#others[@]} -gt 2 ] || { echo "test: cargo metadata names no tests as this script reads it" >&2; exit 1; }

run_beside Kubernetes 'cluster_*' 0
run_beside CUDA 'cuda_*' 15
failed=0
cargo test --workspace --no-fail-fast "${others[@]}" || failed=1
cargo test --workspace --no-fail-fast --doc || failed=1
for lane in "${beside[@]}"; do
    if kill -0 "$lane" 2>/dev/null; then
        echo "test: waiting for tests that run beside the others"
    fi
    wait "$lane" || failed=1
done
beside=()
cat "$logs"/*
exit "$failed"
