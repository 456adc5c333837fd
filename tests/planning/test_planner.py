# SPDX-License-Identifier: Apache-2.0
"""The answers to a run where the plugin that plans was deleted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.raising import raises
from whet.batch import Batch
from whet.config import TrainConfig
from whet.config.schema import KV_CACHE_BYTES
from whet.errors import RegistryError
from whet.planning.planner import Counts, planner
from whet.registry import PARTS
from whet.trainers import build


@pytest.fixture(autouse=True)
def deleted(monkeypatch: pytest.MonkeyPatch, no_manifests: None) -> None:
    assert "planner" in PARTS
    monkeypatch.setitem(vars(PARTS), "shipped", {})
    monkeypatch.setitem(vars(PARTS), "_live", {})


def test_a_run_starts_without_advice_and_with_fixed_sizes(
    train_config: Callable[..., TrainConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    setup, answers = build.setup(train_config(), [16]), planner()
    with caplog.at_level("INFO", "whet"):
        answers.introduce(setup, Counts(20, 0, 1))
    [message] = caplog.messages
    assert "whet/plugins/planner" in message
    assert answers.check_fits(setup, tmp_path, lambda other: setup, 0) == 0
    sized = answers.sized(setup.roles["actor"], setup, "actor")
    assert [sized.micro_batch_tokens(each) for each in ("cpu", "cuda")] == [2048, 16_384]
    room = answers.cache_room(setup)
    assert room is not None and room.bytes(2**40) == room.bytes(2**20) == KV_CACHE_BYTES
    assert answers.update_flops(sized)(Batch.of({"input_ids": torch.ones(2, 3)})) == 0.0
    [finding] = answers.findings(setup.config)
    assert finding.status == "note" and "planner" in finding.advice


def test_what_needs_a_plan_names_the_plugin(train_config: Callable[..., TrainConfig]) -> None:
    with raises(RegistryError, "part planner", expected=re.compile("planner"), change=re.compile("plugins/planner")):
        build.dry_run_elsewhere(train_config(), 80.0, None)
