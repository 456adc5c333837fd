# SPDX-License-Identifier: Apache-2.0
"""Tests new weights of vLLM, by the checks of every server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers

from whet.plugins.inference.vllm.engine import VLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("first_weights")]


@pytest.mark.parametrize("check", servers.WEIGHT_CHECKS, ids=lambda check: check.__name__)
def test_as_every_server(engine: VLLMEngine, model: PreTrainedModel, check: servers.Check) -> None:
    check(engine, model)
