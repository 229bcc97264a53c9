# `make demo` serves the demo model and asks it a question; `make test` runs every test.
SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)
HEARTH_CACHE ?= $(HOME)/.cache/hearth
export HEARTH_CACHE
export HEARTH_MODELS ?= $(CURDIR)/models
export CARGO_DENY_VERSION := 0.20.2

# The demo is built optimised; the tests run what `cargo test` builds (PROFILE=dev).
PROFILE ?= release
TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)
BIN = $(TARGET_DIR)/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))
QUESTION ?= What is Hearth?

# Where the images would be pushed to.
REGISTRY ?= hearth.dev

.PHONY: demo build programs test test-oldest test-upgrade test-gpu bench-gpu test-long test-cluster cluster check fmt bench images release manifests crds clean help

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

demo: build ## Serve the demo model, ask it a question, stay up until Ctrl-C (CI=1: end after the answer)
	@exec $(BIN)/hearth up -f manifests/examples/demo.yaml --ask "$(QUESTION)" $(if $(CI),--once)

build: ## Build both binaries
	@scripts/bootstrap.sh build
	@cargo build --profile $(PROFILE) --bin hearth --bin hearth-worker

# Programs and tests are built by one call: by two, everything above tokio would be built twice, with and without its test features.
programs: ## All that `make test` runs
	@scripts/bootstrap.sh test cargo build --workspace --bins --tests

test: programs ## Every test
	@scripts/test.sh

# Not part of `make test`: it builds another API server, for minutes.
test-oldest: export HEARTH_TEST_OLDEST = 1
test-oldest: ## Upgrades, rollbacks and the manifest, on the oldest Kubernetes that the chart allows
	@scripts/bootstrap.sh oldest cargo build --workspace --bins --tests
	@cargo test --workspace --no-fail-fast --test releases --test install_manifest

# Not part of `make test`: it builds another version, for minutes.
test-upgrade: ## Upgrade from the programs of FROM, a tag or commit, to these and back, under streams
	@scripts/test-upgrade.sh $(FROM)

# On the GPU of this machine: the cases of `make test`, the sanitizer's short list, and no pass without a GPU.
test-gpu: ## The CUDA backend's tests on this machine's GPU
	@scripts/test-gpu.sh

bench-gpu: ## Measure the CUDA backend on this machine's GPU
	@scripts/bootstrap.sh gpu
	@docs/benchmarks/gpu.sh

# Not part of `make test`: ten minutes of streams through scaling, and first tokens of a large model from zero.
test-long: ## Tests on Kubernetes that take minutes, or measure
	@scripts/bootstrap.sh cluster cargo build --workspace --bins --tests
	@cargo test --workspace --test cluster_serving -- --ignored --nocapture --test-threads 1

# Somebody's cluster is used only when it is named here: never one that the environment happens to name.
test-cluster: export HEARTH_TEST_KUBECONFIG = $(if $(filter command,$(origin KUBECONFIG)),$(abspath $(KUBECONFIG)))
test-cluster: ## The tests on Kubernetes: on a cluster of their own, or with KUBECONFIG=FILE on that one
	@scripts/bootstrap.sh cluster cargo build --workspace --bins --tests
	@cargo test --workspace --no-fail-fast --test 'cluster_*'

cluster: ## A two-node cluster to try things on, until Ctrl-C
	@scripts/bootstrap.sh cluster
	@cargo build -q -p hearth-tests --bins
	@$(TARGET_DIR)/debug/hearth-cluster up

check: ## Format, lints, layering, licences
	@scripts/bootstrap.sh check
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets -- -D warnings
	@cargo test -q --workspace --test layering --test chart --test requirements
	@$(HEARTH_CACHE)/tools/bin/cargo-deny --log-level error check bans licenses sources

fmt: ## Format everything
	@cargo fmt --all

bench: ## Measure the models of docs/benchmarks.md on this machine
	@docs/benchmarks/run.sh

# What GPUs people own: RTX 30, 40 and 50, A100, H100 and H200.
GPU_ARCHITECTURES = sm_80,sm_86,sm_89,sm_90a,sm_120a

images: ## The container images of both programs, as archives in target/images
	@scripts/bootstrap.sh images
	@cargo build --profile image-operator --bin hearth
	@cargo build --profile image --bin hearth-worker
	@$(TARGET_DIR)/image/hearth-worker cuda-compile --arch $(GPU_ARCHITECTURES) --out $(TARGET_DIR)/images/kernels \
		--nvrtc $$(echo $(HEARTH_CACHE)/py/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib)
	@cargo run -q -p hearth-release -- images --operator $(TARGET_DIR)/image-operator/hearth --worker $(TARGET_DIR)/image/hearth-worker \
		--kernels $(TARGET_DIR)/images/kernels --registry $(REGISTRY) --output $(TARGET_DIR)/images

release: ## A release of VERSION in dist/: images for amd64 and arm64, chart, install.yaml, SBOMs, checksums
	@scripts/release.sh $(VERSION)

manifests: crds ## Regenerate manifests/install.yaml from the chart
	@scripts/manifests.sh

crds: ## Regenerate crds/yaml
	@UPDATE=1 cargo test -q -p hearth-crds --features kube --test schema

clean: ## Remove build outputs
	@cargo clean
