# Every target makes .venv by itself where it is missing, or older than pyproject.toml or constraints.txt.
# A machine without a GPU can save a large download: make quickstart PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: quickstart test test-all quality style bench

quickstart: $(READY) ## a small model learns arithmetic, in three minutes
	$(BIN)/whet quickstart

test: $(READY) ## the CPU suite
	$(BIN)/pytest

test-all: $(READY) ## with the slow tests
	$(BIN)/pytest -m "slow or not slow"

quality: $(READY) ## what a commit must pass
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

style: $(READY) ## mends what can be mended
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## writes docs/benchmarks.md
	$(BIN)/python -m benchmarks

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whet needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
