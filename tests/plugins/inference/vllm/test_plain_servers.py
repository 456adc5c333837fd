# SPDX-License-Identifier: Apache-2.0
"""Promises of vLLM in plain mode: the version of `make vllm` without whet's additions, and another one that
$WHET_VLLM_OTHER_PYTHON names. Without seeds, as on a CPU, only greedy requests have the same tokens again."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers

from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.rollout.protocol import Request, generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
OTHER = os.environ.get("WHET_VLLM_OTHER_PYTHON")
OPTIONS: dict[str, dict[str, Any]] = {"pinned": {"plain": True}} | ({"other": {"python": OTHER}} if OTHER else {})
APART = (servers.check_kept_cache, servers.check_memory, servers.check_twenty_updates, suite.check_frequencies)
CHECKS = [each for each in servers.CHECKS if each not in APART]
plain_requests = suite.requests


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """With a tied head, and with a head of its own. The tokenizer knows all texts: vLLM 0.32 and newer encode some of
    their own at the start."""
    return servers.random_model(tmp_path_factory.mktemp("m"), request.param, is_bpe=True, hidden_size=192, num_layers=6)


@pytest.fixture(scope="module", params=OPTIONS)
def engine(request: pytest.FixtureRequest, model: PreTrainedModel, start: servers.Start) -> Iterator[VLLMEngine]:
    """A server that samples from `model`, by public means."""
    made: VLLMEngine = start(Path(model.config._name_or_path), **OPTIONS[request.param])
    assert made.plain is not None
    yield made
    made.close()


@pytest.fixture(autouse=True)
def first_weights(engine: VLLMEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with the model's own weights, and with nothing under way. Tokens are counted by the server."""
    servers.reset(engine, model)
    at_reset = [0.0]

    def reset(engine: ServerEngine, model: PreTrainedModel, version: int = 0, plain: Any = servers.reset) -> None:
        plain(engine, model, version)
        at_reset[0] = told(engine, "generation_tokens_total")

    def counts(engine: ServerEngine) -> list[int]:
        """As many as the server works on, each the mean of their tokens since the reset."""
        running = int(told(engine, "num_requests_running") + told(engine, "num_requests_waiting"))
        each = (told(engine, "generation_tokens_total") - at_reset[0]) / max(1, running)
        return [int(each)] * running

    monkeypatch.setattr(servers, "reset", reset)
    monkeypatch.setitem(servers.COUNTS, "vLLM", counts)
    servers.reset(engine, model)


def told(engine: ServerEngine, name: str) -> float:
    """A number of the server's /metrics."""
    return sum(map(float, re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", engine.call("GET", "/metrics"), re.MULTILINE)))


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests take the likeliest token: on a CPU they have no seed, and a resend draws others."""

    def requests(*args: Any, **params: Any) -> list[Request]:
        return plain_requests(*args, **{"temperature": 0.0, **params})

    monkeypatch.setattr(suite, "requests", requests)


@pytest.mark.usefixtures("greedy")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: VLLMEngine, model: PreTrainedModel, check: servers.Check) -> None:
    check(engine, model)


def test_draws_have_the_models_frequencies(engine: VLLMEngine, model: PreTrainedModel) -> None:
    suite.check_frequencies(engine, model, is_cut=False)


@pytest.mark.usefixtures("greedy")
def test_twenty_updates(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Memory stays where batches repeat; oneDNN keeps a program for each new size of a batch."""
    suite.check_twenty_updates(engine, model, lambda engine: 0)
    made, memory = suite.requests(groups=2), list[int]()
    for version in range(21, 33):
        engine.load(servers.named(model), version)
        generate(engine, made)
        memory.append(servers.server_bytes(engine))
    log.info("memory over 12 updates: %.0f to %.0f MiB", memory[1] / 2**20, memory[-1] / 2**20)
    assert memory[-1] - memory[1] < 16 * 2**20


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 1.3}, {"temperature": 0.0}], ids=str)
def test_log_probs_are_the_models_own(engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    """log_softmax(logits / temperature), as from every engine."""
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", [{"temperature": 0.0}], ids=str)
def test_the_likeliest_tokens(engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.check_likeliest(engine, model, suite.requests(**params), servers.ROUNDING)


def test_a_seed_makes_the_same_tokens_in_any_company(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """As on a GPU; prompts are short enough here to be computed at once."""
    engine.has_seeds = True
    try:
        made = suite.requests(groups=8, n=4, longest=40)
        suite.check_company_does_not_matter(engine, made, servers.ROUNDING)
        tokens = [each.token_ids for each in generate(engine, made)]
        others = [each.token_ids for each in generate(engine, suite.requests(groups=8, n=4, seed=1, longest=40))]
        assert len({*tokens}) > 24 and not {each for each in tokens if len(each) > 8} & {*others}
    finally:
        engine.has_seeds = False
