# The two commands of the README are `make demo` and `make test`; everything else serves them.
SHELL := /bin/bash
PYTHON ?= python3
# RAY=2.52.0 is another version of Ray than the lock's, in a virtual environment of its own.
RAY ?=
# TORCH=cpu is PyTorch's own build for CPUs; cu130 and others are PyTorch's builds for a CUDA. Empty: what pip finds.
TORCH ?=
# TORCH_INDEX=URL takes PyTorch from that index, such as a mirror, in place of PyTorch's own.
TORCH_INDEX ?=
define TORCH_HINT
PyTorch was not installed from $(or $(TORCH_INDEX),its own index for TORCH=$(TORCH)): see the error of uv above. \
If the index is out of reach, give a mirror by 'make install TORCH_INDEX=URL', or run 'make install' without TORCH \
for the build that pip finds, which is larger.
endef
TORCH_FROM := $(if $(TORCH_INDEX),--index $(TORCH_INDEX),--torch-backend $(TORCH))
VENV := .venv$(if $(RAY),-ray-$(RAY))
LOCK := $(if $(RAY),$(VENV)/requirements.lock,requirements.lock)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := proto/v1/inference.proto proto/v1/cluster.proto proto/v1/admin.proto proto/v1/session.proto
MINUTES ?= 30
SEED ?=
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest
PIP := $(BIN)/pip --disable-pip-version-check
# Without --quiet, which hides the warnings that its strict mode counts.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
CLIENTS := guidellm==0.8.1 langchain-openai==1.7.4 litellm==1.110.2 openai-agents==0.24.0 'lm-eval[api]==0.4.13' 'transformers>=5.17'
NODE_CLIENTS := ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
# Without them each process of the tests compiles every source anew.
unexport PYTHONDONTWRITEBYTECODE

# Many tests wait for timers, so there are more processes than cores. The tests of tests/system share one cluster, and
# those of tests/nightly start clusters of their own: one after the other.
UNIT := $(PYTEST) --no-loadscope-reorder -n $(JOBS) --dist loadfile
# tools/slowest_tests.py reads these.
REPORT_OF = --junitxml .pytest_cache/$@.xml

.PHONY: demo test unit system nightly nightly-slice test-clients faults soak fuzz check site format proto lock sbom install clean \
	gpu-check gpu-check-kernels gpu-check-worker gpu-bench gpu-bench-kernels \
	gpu-bench-profile gpu-bench-profile-8b gpu-bench-profile-0.6b \
	gpu-bench-engine gpu-bench-engine-nano gpu-bench-engine-mixed

demo: install
	$(BIN)/python -m blockyard.deploy.demo $(if $(KEEP),--keep)

# TESTS=tests/unit/worker runs a part.
test: install
	@failed=0; \
	$(if $(TESTS),$(PYTEST) $(TESTS) || failed=1;,$(MAKE) --no-print-directory unit || failed=1; \
	$(MAKE) --no-print-directory system || failed=1;) \
	exit $$failed

unit: install
	$(UNIT) $(REPORT_OF) tests/unit

system: install
	$(PYTEST) $(REPORT_OF) tests/system

# Everything: each combination of parameters and more random examples of tests/unit, the fault matrix, mutants, peers.
nightly: install
	@failed=0; \
	$(UNIT) --every-case tests/unit || failed=1; \
	$(PYTEST) tests/system || failed=1; \
	$(PYTEST) tests/nightly --write-seconds || failed=1; \
	exit $$failed

# The part of tests/nightly that CI runs: COMMIT chooses it.
COMMIT ?= $(shell git rev-parse HEAD)
nightly-slice: install
	$(PYTEST) $(REPORT_OF) tests/nightly --slice $(COMMIT)

# Real clients of OpenAI's API, in a virtual environment of their own: 2 GB. Those of JavaScript need Node.js 20 with npm.
test-clients: install
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip --disable-pip-version-check install --quiet --progress-bar off $(CLIENTS)
	npm install --prefix .venv-clients/node --no-audit --no-fund --loglevel error $(NODE_CLIENTS)
	BLOCKYARD_CLIENTS=$(CURDIR)/.venv-clients/bin/python $(PYTEST) tests/nightly/openai/test_clients.py

# Every row of the fault matrix; bench/reports/faults.md keeps what it measured. The other folders have some of the rows.
FAULT_ROWS := tests/nightly/faults tests/nightly/cluster tests/nightly/router tests/unit/faults tests/unit/router tests/unit/worker
faults: install
	$(PYTEST) $(FAULT_ROWS) -m fault -rs --faults-report bench/reports/faults.md

# Random faults under load, one after another; the seed is printed. REPORT=bench/reports/soak.md keeps the tables.
soak: install
	$(BIN)/python -m tests.nightly.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

# Guided by coverage, one target after another; inputs that reach new code stay in tests/nightly/hostile/corpus.
fuzz: install
	for target in body head message session; do \
		$(BIN)/python -m tests.nightly.hostile.coverage_fuzz $$target --minutes $(MINUTES) --keep || exit 1; \
	done

check: install .typing/blockyard
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typing $(BIN)/mypy
	$(BIN)/python -m proto.generate --check
	$(BIN)/python -m tools.api_reference --check
	$(BIN)/python -m tools.cli_reference docs/cli.md --check
	$(BIN)/python -m tools.prose
	$(BIN)/python -m tools.blocking_client --check
	$(BIN)/python -m supply_chain.sbom --check
	$(BIN)/python -m supply_chain.advisories
	$(SITE)

# The documentation with a search box, as pages under .site/.
site: install
	$(SITE)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python -m proto.generate
	$(BIN)/python -m tools.api_reference

# What `make install` and the images install: resolved anew from plain PyPI; needs the network.
lock: install
	$(BIN)/python -m supply_chain.lock
	$(BIN)/python -m supply_chain.sbom

# Every package and bundled program of it, in CycloneDX: supply_chain/sbom.cdx.json.
sbom: install
	$(BIN)/python -m supply_chain.sbom

# One GPU is shared by all these processes. Each takes half a gigabyte of it, and the tests' tensors are small.
GPU_JOBS ?= $(shell n=$$(nproc); echo $$((n < 12 ? n : 12)))
GPU_CHECK_SECONDS ?= 285
GPU_CHECK_KERNELS := tests/unit/kernels
GPU_CHECK_WORKER := tests/unit/device
# Without pytest-xdist there is one process. SIGINT past the time: pytest then prints the failures until there.
define gpu_check
	parallel=$$($(PYTHON) -c "import xdist" 2> /dev/null && echo "-n $(GPU_JOBS) --dist worksteal"); \
	PYTHONPATH=.typing env --default-signal=INT timeout --foreground --signal INT --kill-after 20 $(GPU_CHECK_SECONDS) \
		$(PYTHON) -m pytest -rfEs --maxfail 60 --durations 10 $$parallel $(1)
endef

gpu-check: .typing/blockyard
	$(MAKE) -j1 --keep-going gpu-check-kernels gpu-check-worker

gpu-check-kernels: .typing/blockyard
	$(call gpu_check,$(GPU_CHECK_KERNELS))

gpu-check-worker: .typing/blockyard
	$(call gpu_check,$(GPU_CHECK_WORKER))

GPU_PROOF := tests/unit/device/test_decoder.py tests/unit/device/test_step_graphs.py tests/unit/device/test_overlap.py
# Options of each benchmark here: GPU_OPTIONS=--skip-proof after `make gpu-check`, or --output FOLDER.
GPU_OPTIONS ?=
# SIGTERM past the time: a benchmark then reports what it has measured.
GPU_BENCH_SECONDS ?= 550
GPU_BENCH = PYTHONPATH=.typing timeout --foreground --kill-after 25 $(GPU_BENCH_SECONDS) $(PYTHON) -m
GPU_PROFILE = $(GPU_BENCH) bench.profile --device cuda --dtype bfloat16 --kv-gib 20 --proof-seconds 150 \
	--prove $(GPU_PROOF) $(GPU_OPTIONS)
# Of transformers only its continuous batching: nothing bounds the cache of its static batches.
GPU_ENGINE = $(GPU_BENCH) bench.engine --device cuda --dtypes bfloat16 --model qwen3-0.6b --transformers continuous \
	--kv-gib 20 --memory-gib 60 --proof-seconds 120 --prove $(GPU_PROOF) $(GPU_OPTIONS)

# On a machine with a GPU that has only torch, triton, numpy, pytest and transformers; the reports are in bench/reports.
# There is one GPU: one part after the other, and a part that fails does not keep the others from being measured.
gpu-bench: .typing/blockyard
	$(MAKE) -j1 --keep-going gpu-bench-kernels gpu-bench-profile gpu-bench-engine

gpu-bench-kernels: .typing/blockyard
	$(GPU_BENCH) bench.kernels --device cuda --proof-seconds 200 $(GPU_OPTIONS)

gpu-bench-profile: .typing/blockyard
	$(MAKE) -j1 --keep-going gpu-bench-profile-8b gpu-bench-profile-0.6b

# The goal of whole decode steps is Llama-3.1-8B's: 16 GB of weights, and a pool of 73 GB for 256 sequences of 2,160 tokens.
# A GPU of 80 GB has no room for these, and measures the other decodes.
gpu-bench-profile-8b: .typing/blockyard
	$(GPU_PROFILE) --model llama-3.1-8b --name profile-gpu-8b

gpu-bench-profile-0.6b: .typing/blockyard
	$(GPU_PROFILE) --model qwen3-0.6b --name profile-gpu

gpu-bench-engine: .typing/blockyard
	$(MAKE) -j1 --keep-going gpu-bench-engine-nano gpu-bench-engine-mixed

# By itself, and without a row that shares nothing, since its prompts do not: a repeat has some 140,000 tokens of each system.
gpu-bench-engine-nano: .typing/blockyard
	$(GPU_ENGINE) --name engine-gpu-nano --workloads nano

gpu-bench-engine-mixed: .typing/blockyard
	$(GPU_ENGINE) --name engine-gpu --workloads mixed,prefix,long --repeats 5 --workload-seconds 80 --unshared

install: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch, ray, grpc and the rest into $(VENV): some minutes, once; pip's own words are in $(VENV)/install.log"
	@$(if $(RAY),sed 's/^ray==.*/ray==$(RAY)/' requirements.lock > $(LOCK))
	@$(if $(TORCH)$(TORCH_INDEX),$(PIP) install --quiet --progress-bar off -c $(LOCK) uv)
	@$(if $(TORCH)$(TORCH_INDEX),$(BIN)/uv pip install --python $(BIN)/python $(TORCH_FROM) -c $(LOCK) torch || { echo "$(TORCH_HINT)" >&2; exit 1; })
	@$(BIN)/python -P tools/quiet_run.py $(VENV)/install.log \
		$(PIP) install --progress-bar off -c $(LOCK) -e '.[serve,otel,plots,dev]'
	@touch $@

# For tools that do not follow setuptools' package-dir: the same tree under its import name.
.typing/blockyard:
	@mkdir -p .typing && ln -sfn .. .typing/blockyard

clean:
	rm -rf .venv .venv-ray-* .venv-clients .typing build *.egg-info .pytest_cache .mypy_cache .ruff_cache
