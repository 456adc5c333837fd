# SPDX-License-Identifier: Apache-2.0
"""vLLM as a stream of requests, like every server."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers

from whet.errors import EngineError
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.rollout.protocol import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("first_weights")]


@pytest.mark.parametrize("check", servers.REQUEST_CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: VLLMEngine, model: PreTrainedModel, check: servers.Check) -> None:
    check(engine, model)


def test_an_aborted_request_under_rules(engine: VLLMEngine, model: PreTrainedModel) -> None:
    servers.check_abort(engine, model, groups=2, **servers.RULES)


def test_what_vllm_would_change_is_refused(engine: VLLMEngine) -> None:
    [request] = suite.requests(groups=1, n=1)
    tokens = replace(request.params, allowed_token_ids=(5, 10**6))
    with raises(EngineError, key=re.compile("^allowed_token_ids"), found=re.compile(f"{10**6}")):
        engine.submit(replace(request, params=tokens))
    with raises(EngineError, re.compile("^temperature"), found=0.001, expected=re.compile(r"0\.01")):
        engine.submit(replace(request, params=SamplingParams(4, temperature=0.001)))


# -- what vLLM's own answers would hide


def test_a_plain_id_aborts_nothing(engine: VLLMEngine, model: PreTrainedModel) -> None:
    [request] = servers.long_requests(engine, 1, 1)

    def abort() -> None:
        [live] = engine._live.values()
        assert engine.call("POST", "/abort_requests", {"request_ids": [live.name]})["status"] == "aborted"

    assert servers.in_mid_answer(engine, model, [request], 1, abort) == []
    [completion] = servers.completions(servers.drain(engine)).values()
    assert completion.finish_reason == "length" and len(completion.token_ids) == servers.length_of(engine)
