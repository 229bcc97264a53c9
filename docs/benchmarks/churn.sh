#!/usr/bin/env bash
# Deployments that come, change and go on simulated nodes: how long plans take, and how much they book against first fit.
# `churn.sh [STEPS] [DEPLOYMENTS] [NODES] [SEED] [RINGS_PER_MILLE] [RESTS] [BROKEN_PERCENT]`; RESTS 1: some of them may scale to zero, of
# which some keep their workers, and some start them without a request;
# BROKEN_PERCENT of the changes cannot serve and are given up. Needs cargo alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec cargo run --quiet --release -p hearth-controller-core --features testing --example churn -- "$@"
