# SPDX-License-Identifier: Apache-2.0
"""The example files of one's own functions, each in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.trainers.build import train

FOLDER = Path(__file__).parents[2] / "examples" / "algorithms"


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm.adv_estimator": f"{FOLDER}/estimator.py:over_median", "algorithm.adv_options": {"scale": 2.0}},
        {"algorithm.policy_loss": f"{FOLDER}/loss.py:bounded", "actor.mini_batch_size": 2},
        {
            "algorithm.adv_estimator": "cpo",
            "algorithm.adv_options": {"wrap_method": f"{FOLDER}/wrapper.py:surprised"},
            "teacher.hint": "reference",
            "teacher.hint_template": "{{ content }}{{ hint }}",
        },
        {"algorithm.adv_estimator": f"{FOLDER}/provider.py:cautious"},
    ],
    ids=["estimator", "loss", "wrapper", "provider"],
)
def test_examples_train(
    overrides: dict[str, Any], train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    history = train(
        train_config(overrides), reward=lambda solution_str: float(len(solution_str) % 2), data=additions
    ).history
    assert all(step["actor/grad_norm"] > 0 for step in history)
