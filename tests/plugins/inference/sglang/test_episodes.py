# SPDX-License-Identifier: Apache-2.0
"""Runs with episodes of three turns whose responses SGLang samples, in turn with training and ahead of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers
import server_episodes as episodes

from whet.plugins.inference.sglang.engine import PACKAGE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
ENGINE = episodes.settings("sglang")


def test_a_run_is_that_of_the_native_engine(
    train_config: episodes.MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Every step samples with the weights that the last one trained: the log-probs of both sides agree."""
    servers.require(PACKAGE)
    given = {**ENGINE, **episodes.THREE_TURNS}
    steps = episodes.metrics_of(train_config({**given, "trainer.run_dir": tmp_path / "sglang"}), additions)
    gaps = [line["correction/abs_max"] for line in steps if "correction/abs_max" in line]
    log.info("largest gap of log-probs at each step: %s", ", ".join(f"{each:.1e}" for each in gaps))
    assert len(gaps) == 4 and max(gaps) < servers.ROUNDING
    native = {**given, "rollout.engine.name": "native", "rollout.engine.options": {}}
    others = episodes.metrics_of(train_config({**native, "trainer.run_dir": tmp_path / "native"}), additions)
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm"):
        own, other = ([line[name] for line in lines if name in line] for lines in (steps, others))
        assert len(own) == 4 and own == pytest.approx(other, rel=1e-3)


def test_turns_sampled_ahead_carry_the_version_of_each_token(
    train_config: episodes.MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers.require(PACKAGE)
    apart = {"cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}}
    episodes.check_turns_ahead(train_config, additions, tmp_path, monkeypatch, {**ENGINE, **apart})
