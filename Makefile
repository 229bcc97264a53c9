# `make demo` serves the demo model and asks it a question; `make test` runs every test.
SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)
HEARTH_CACHE ?= $(HOME)/.cache/hearth
export HEARTH_CACHE
export CARGO_DENY_VERSION := 0.20.2

# The demo is built optimised; the tests run what `cargo test` builds (PROFILE=dev).
PROFILE ?= release
TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)
BIN = $(TARGET_DIR)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
QUESTION ?= What is Hearth?

.PHONY: demo build test check fmt bench crds clean help

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: build ## Serve the demo model, ask it a question, stay up until Ctrl-C (CI=1: end after the answer)
	@exec $(BIN)/hearth up -f manifests/examples/demo.yaml --ask "$(QUESTION)" $(if $(CI),--once)

build: ## Build both binaries
	@scripts/bootstrap.sh build
	@cargo build --profile $(PROFILE) --bin hearth --bin hearth-worker

test: ## Every test
	@scripts/bootstrap.sh test
	@cargo build --workspace --bins
	@cargo test --workspace --no-fail-fast

check: ## Format, lints, layering, licences
	@scripts/bootstrap.sh check
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings
	@cargo test -q -p hearth-tests --test layering
	@$(HEARTH_CACHE)/tools/bin/cargo-deny --log-level error check bans licenses sources

fmt: ## Format everything
	@cargo fmt --all

bench: ## Measure the models of docs/benchmarks.md on this machine
	@docs/benchmarks/run.sh

crds: ## Regenerate crds/yaml
	@UPDATE=1 cargo test -q -p hearth-crds --features kube --test schema

clean: ## Remove build outputs
	@cargo clean
