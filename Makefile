# Every target makes .venv by itself where it is missing, or older than pyproject.toml or constraints.txt.
# A machine without a GPU can save a large download: make quickstart PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SERVICES := .venv/.services
PEERS := .venv-peers/.ready
TRL := .venv-trl/.ready
TRACKIO := .venv-trackio/.ready

.PHONY: quickstart test test-all peers quality style bench pages docs

quickstart: $(READY) ## a small model learns arithmetic, in three minutes
	$(BIN)/whet quickstart

test: $(READY) ## the CPU suite, in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

test-all: $(SERVICES) $(PEERS) $(TRL) $(TRACKIO) ## with the slow tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow"

peers: $(SERVICES) $(PEERS) $(TRL) $(TRACKIO) ## what only the slow tests need: clients of services; verl, TRL and Trackio in environments of their own

quality: $(SERVICES) ## what a commit must pass
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py

style: $(READY) ## mends what can be mended
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## writes docs/benchmarks.md
	$(BIN)/python -m benchmarks

pages: $(READY) ## writes the pages that are made from code (algorithms, config, migrating)
	$(BIN)/python -m docs.generate

docs: $(READY) ## builds the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whet needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(SERVICES): $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev-services]'
	@touch $@

# verl alone, and of what it asks for only what importing its functions needs.
$(PEERS): tests/peers/constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -c $< torch
	.venv-peers/bin/pip install --quiet -c $< --no-deps verl
	.venv-peers/bin/pip install --quiet -c $< codetiming hydra-core numpy omegaconf packaging pandas ray tensordict transformers
	@touch $@

$(TRL): benchmarks/constraints-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet -c $< torch
	.venv-trl/bin/pip install --quiet -c $< trl
	@touch $@

# Trackio wants an older pillow: laid over .venv, whose packages it sees where it has none of its own.
$(TRACKIO): tests/tracking/constraints-trackio.txt $(SERVICES)
	$(PYTHON) -m venv .venv-trackio
	$(CURDIR)/$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(.venv-trackio/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/whet.pth
	.venv-trackio/bin/pip install --quiet -c $< trackio
	@touch $@
