#!/usr/bin/env bash
# Upgrades a test cluster from the programs of another version, built from its commit, to those of the working tree, and back.
#   scripts/test-upgrade.sh REF    REF is a tag or commit whose chart and API this version's can replace
set -euo pipefail
cd "$(dirname "$0")/.."
ref=${1:?write make test-upgrade FROM=REF, with a tag or commit to upgrade from}
commit=$(git rev-parse --verify --quiet --end-of-options "$ref^{commit}") || {
    echo "test-upgrade: there is no tag or commit $ref here: fetch it, or see git log" >&2
    exit 2
}

scripts/bootstrap.sh cluster cargo build --workspace --bins --test cluster_serving
export PATH="$HOME/.cargo/bin:$PATH"
earlier=${CARGO_TARGET_DIR:-$PWD/target}/earlier/$commit
if [ ! -e "$earlier/hearth-worker" ]; then
    rm -rf "$earlier/source"
    mkdir -p "$earlier/source"
    git archive "$commit" | tar -x -C "$earlier/source"
    # In a directory of its own: cargo takes crates at the same place in another tree, with older files, for those that it has built.
    (cd "$earlier/source" && CARGO_TARGET_DIR=$earlier/target cargo build --bin hearth --bin hearth-worker)
    # The worker last: it tells that all is there.
    mv "$earlier"/target/debug/hearth "$earlier/"
    mv "$earlier"/target/debug/hearth-worker "$earlier/"
    rm -r "$earlier/target"
fi
said=$(mktemp)
trap 'rm -f "$said"' EXIT
HEARTH_TEST_EARLIER=$earlier cargo test --workspace --test cluster_serving -- --ignored --exact --nocapture \
    versions::programs_of_an_earlier_version_are_upgraded_and_come_back 2>&1 | tee "$said"
if grep -q '^SKIPPED' "$said"; then
    echo "test-upgrade: nothing was upgraded, or not all: see SKIPPED above" >&2
    exit 1
fi
