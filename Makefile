# `make quickstart` and `make test` are all that a fresh machine needs: Python 3.10+, a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers
SOURCES := $(wildcard csrc/*.* csrc/*/*.*)

.PHONY: quickstart test test-all real cubins bench lint clean

quickstart: $(INSTALLED)
	rm -rf runs/quickstart
	$(BIN)/python examples/quickstart/prepare.py runs/quickstart/model --seed $(SEED)
	$(BIN)/grpo train examples/quickstart/run.yaml --train.seed $(SEED)

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 tests --ignore=tests/peers

# Also the proof against TRL and Liger-Kernel themselves.
test-all: test $(PEERS)
	$(BIN)/python -m pytest -n 2 tests/peers

# A real model through every command and the library, in bfloat16 and float32: MODEL=FOLDER.
real: $(INSTALLED)
	$(BIN)/python tests/real/check.py "$(MODEL)"

# Every Triton kernel, compiled for sm_80 ... sm_120 without a GPU; fails on a spilled register.
cubins: $(INSTALLED)
	$(BIN)/python -m grpo_engine.benchmarks.cubins

bench: $(PEERS)
	$(BIN)/grpo bench

lint: $(INSTALLED)
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

# Reinstalled, and so rebuilt, whenever a source of the extension or a pin changes.
$(INSTALLED): setup.py pyproject.toml requirements-dev.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

$(PEERS): requirements-peers.txt $(INSTALLED)
	$(BIN)/python -m pip install -q -r requirements-dev.txt -r requirements-peers.txt
	touch $@

clean:
	rm -rf $(VENV) build dist runs *.egg-info grpo_engine/*.so
