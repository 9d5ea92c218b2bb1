# `make quickstart` and `make test` are all that a fresh machine needs: Python 3.10+, a C++ compiler.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test test-all lint clean

quickstart: $(INSTALLED)
	rm -rf runs/quickstart
	$(BIN)/python examples/quickstart/prepare.py runs/quickstart/model --seed $(SEED)
	$(BIN)/grpo train examples/quickstart/run.yaml --train.seed $(SEED)

test: $(INSTALLED) lint
	$(BIN)/python -m pytest -n 2 tests

test-all: test

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.hpp

# Reinstalled, and so rebuilt, whenever a source of the extension or a pin changes.
$(INSTALLED): setup.py pyproject.toml requirements-dev.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist runs *.egg-info grpo_engine/*.so
