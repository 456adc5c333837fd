# SPDX-License-Identifier: Apache-2.0
"""Log-probs and choices of vLLM against the model's own forward, also under rules."""

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
from whet.plugins.inference.vllm.engine import VLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("first_weights")]


@pytest.mark.parametrize("params", suite.SAMPLING, ids=str)
def test_log_probs_are_the_models_own(engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.check_log_probs(engine, model, suite.requests(**params))


@pytest.mark.parametrize("params", suite.SAMPLING, ids=str)
def test_tokens_are_those_that_sampling_draws(
    engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]
) -> None:
    suite.check_choices(engine, model, suite.requests(seed=1, **params))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}], ids=str)
def test_the_likeliest_tokens(engine: VLLMEngine, model: PreTrainedModel, params: dict[str, Any]) -> None:
    suite.check_likeliest(engine, model, suite.requests(**params), servers.ROUNDING)


def test_different_sampling_in_one_batch(engine: VLLMEngine) -> None:
    servers.check_mixed(engine)


def test_rules_are_kept(engine: VLLMEngine) -> None:
    suite.check_rules(engine, suite.requests(longest=60, stop_token_ids=(), **suite.SAMPLING[6]))


@pytest.mark.parametrize("length", [1, 3])
def test_stop_strings(engine: VLLMEngine, model: PreTrainedModel, length: int) -> None:
    """Stop strings of whole characters: at bytes that are no characters, vLLM's text lags behind the text of all
    tokens."""
    tokenizer = load_tokenizer(model.config._name_or_path)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    whole = tuple(token for token, text in enumerate(texts) if "\N{REPLACEMENT CHARACTER}" not in text)
    made = suite.requests(groups=6, longest=30, stop_token_ids=(9,), allowed_token_ids=whole)
    suite.check_stop_strings(engine, tokenizer, made, length, servers.ROUNDING)
