#!/usr/bin/env bash
# Every test of what is built, in lanes that run beside each other, since most of them mostly wait: those on Kubernetes; those of
# several processes, devices and emulated machines that compute together; those of the CUDA backend, which compute on one core and
# give way to the others; and the rest. What each of them comes to is said as it ends; the output of all lanes but the last one comes
# in one piece when all are done, and then once more what the failed tests said.
set -uo pipefail
cd "$(dirname "$0")/.."

# A program that hangs must not take with it what the others found.
triple=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
runner=CARGO_TARGET_${triple}_RUNNER
export "$runner=${!runner:-$PWD/scripts/watched.sh}"

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

# Runs tests by patterns of their names, in a session of their own, which ends as one.
run_beside() {
    local name=$1 priority=$2 pattern tests=()
    shift 2
    for pattern in "$@"; do
        tests+=(--test "$pattern")
    done
    setsid nice -n "$priority" bash -o pipefail -c '
        log=$0 name=$1 priority=$2
        shift 2
        echo "$priority" >/proc/self/autogroup # where priorities hold within a session only
        cargo test --workspace --no-fail-fast "$@" 2>&1 | tee "$log" |
            { grep --line-buffered -E "^test .*(ok|FAILED|ignored)$|^SKIPPED" || true; } | sed -u "s/^/$name: /"
    ' "$logs/$name" "$name" "$priority" "${tests[@]}" 2>/dev/null &
    beside+=($!)
}

kubernetes=('cluster_*')
machines=(memory_limits mixed_devices peers pinning ring ring_network virtual_device)
cuda=('cuda_*')

# Cargo has patterns for the names that are meant, and none for those that are not.
is_beside() {
    local pattern
    for pattern in "${kubernetes[@]}" "${machines[@]}" "${cuda[@]}"; do
        # shellcheck disable=SC2053 # it is a pattern
        [[ $1 != $pattern ]] || return 0
    done
    return 1
}
others=(--lib --bins)
for name in $(cargo metadata --no-deps --format-version 1 | grep -o '"kind":\["test"\],"crate_types":\["bin"\],"name":"[^"]*"' |
    cut -d '"' -f 12 | sort -u); do
    is_beside "$name" || others+=(--test "$name")
done
[ ${#others[@]} -gt 2 ] || { echo "test: cargo metadata names no tests as this script reads it" >&2; exit 1; }

run_beside Kubernetes 0 "${kubernetes[@]}"
run_beside Machines 0 "${machines[@]}"
run_beside CUDA 15 "${cuda[@]}"
failed=0
rest=$logs/.rest
cargo test --workspace --no-fail-fast "${others[@]}" 2>&1 | tee "$rest" || failed=1
cargo test --workspace --no-fail-fast --doc 2>&1 | tee -a "$rest" || failed=1
for lane in "${beside[@]}"; do
    if kill -0 "$lane" 2>/dev/null; then
        echo "test: waiting for tests that run beside the others"
    fi
    wait "$lane" || failed=1
done
beside=()
cat "$logs"/*
# Between these words are the messages of a program's failed tests.
[ "$failed" = 0 ] || awk 'FNR == 1 { on = 0 } /^failures:$/ { on = 1 } on { print } /^test result: FAILED/ { on = 0 }' "$rest" "$logs"/*
exit "$failed"
