# The two commands of the README are `make demo` and `make test`; everything else serves them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROTOS := proto/v1/inference.proto proto/v1/cluster.proto proto/v1/admin.proto proto/v1/session.proto
MINUTES ?= 30
SEED ?=
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: demo test test-all faults soak check format proto install clean gpu-check

demo: install
	$(BIN)/python -m blockyard.deploy.demo $(if $(KEEP),--keep)

test: install
	$(BIN)/python -m pytest $(TESTS)

# The same and what takes long: more seeds, more of each fault, mutants of the simulation.
test-all: install
	$(BIN)/python -m pytest -m "" $(TESTS)

# Every row of the fault matrix, the slow ones too; docs/faults.md keeps what it measured.
faults: install
	$(BIN)/python -m pytest tests/faults tests/cluster tests/router tests/worker -m fault -rs --faults-report docs/faults.md

# Random faults under load, one after another; the seed is printed. REPORT=docs/soak.md keeps the tables.
soak: install
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT))

check: install .typing/blockyard
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=.typing $(BIN)/mypy
	$(BIN)/python -m proto.generate --check

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: install
	$(BIN)/python -m proto.generate

gpu-check: .typing/blockyard
	PYTHONPATH=.typing $(PYTHON) -m pytest -rs tests/kernels \
		tests/worker/test_decoder.py tests/worker/test_model_variants.py tests/worker/test_host_blocks.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch, ray, grpc and the rest into $(VENV): a minute or two, once"
	@$(PIP) install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

# For tools that do not follow setuptools' package-dir: the same tree under its import name.
.typing/blockyard:
	@mkdir -p .typing && ln -sfn .. .typing/blockyard

clean:
	rm -rf $(VENV) .typing build *.egg-info .pytest_cache .mypy_cache .ruff_cache
