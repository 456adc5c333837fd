# SPDX-License-Identifier: Apache-2.0
"""SGLang's server against the model's own forward, and as a stream of requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers

from whet.models.load import load_tokenizer
from whet.plugins.inference.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLING: tuple[dict[str, Any], ...] = (
    *suite.SAMPLING,
    {"temperature": 0.7, "top_k": 6},
    {"min_p": 0.05, "top_k": 9, "top_p": 0.9},
)


@pytest.mark.parametrize(
    ("victim", "answer_seconds"),
    [("scheduler", 20.0), (servers.SERVER, 20.0), ("detokenizer", 5.0)],  # the last is missed by its tokens alone
)
def test_a_killed_process_is_heard_of_within_seconds(
    start: servers.Start, tmp_path: Path, victim: str, answer_seconds: float
) -> None:
    servers.check_kill(start, tmp_path, victim, answer_seconds)


@pytest.mark.parametrize("check", servers.CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: SGLangEngine, model: PreTrainedModel, check: servers.Check) -> None:
    servers.reset(engine, model)
    check(engine, model)


@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_log_probs_and_tokens(engine: SGLangEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    """Log-probs are the model's own, and tokens the draws of `sample` and the native engine."""
    servers.reset(engine, model)
    suite.check_log_probs(engine, model, suite.requests(**params))
    suite.check_choices(engine, model, suite.requests(seed=1, **params))
    servers.check_native_tokens(engine, model, **params)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_the_likeliest_tokens(engine: SGLangEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    servers.reset(engine, model)
    suite.check_likeliest(engine, model, suite.requests(**params), servers.ROUNDING)


def test_different_sampling_in_one_batch(engine: SGLangEngine, model: PreTrainedModel) -> None:
    servers.reset(engine, model)
    servers.check_mixed(engine)


def test_rules_are_kept(engine: SGLangEngine, model: PreTrainedModel) -> None:
    servers.reset(engine, model)
    suite.check_rules(engine, suite.requests(longest=60, stop_token_ids=(), **suite.SAMPLING[6]))


def test_an_aborted_request_under_rules(engine: SGLangEngine, model: PreTrainedModel) -> None:
    servers.reset(engine, model)
    servers.check_abort(engine, model, groups=2, **servers.RULES)


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings(engine: SGLangEngine, model: PreTrainedModel, length: int) -> None:
    """Of any text, as the native engine."""
    servers.reset(engine, model)
    tokenizer = load_tokenizer(model.config._name_or_path)
    made = suite.requests(groups=6, longest=30, stop_token_ids=(9,))
    suite.check_stop_strings(engine, tokenizer, made, length, servers.ROUNDING)
