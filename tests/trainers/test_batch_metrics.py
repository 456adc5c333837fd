# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

from whet.metrics import Metrics
from whet.trainers.batch_metrics import OWN, measure_groups
from whet.types import Group, Prompt, Trajectory

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
PROMPT = Prompt("0:0", 0, (), (), "", None)


def measured(scores: list[float], **parts: float) -> dict[str, float]:
    metrics = Metrics()
    group = [
        Trajectory(f"0:0:{n}", PROMPT, (), n, reward=score, accuracy=0.5, parts=parts) for n, score in enumerate(scores)
    ]
    measure_groups(metrics, [Group(PROMPT, tuple(group))])
    return metrics.reduce()


def test_a_part_named_like_a_metric_is_not_averaged_into_it() -> None:
    named = measured([1.0, 2.0], **dict.fromkeys(OWN, 7.0), format=3.0)
    assert named["reward/accuracy"] == 0.5 and named["reward/groups_all_equal"] == 0.0 and named["reward/format"] == 3.0
    assert {name: named[f"reward/part/{name}"] for name in OWN} == dict.fromkeys(OWN, 7.0)
    assert {f"reward/{name}" for name in OWN} & {*named} == {"reward/accuracy", "reward/groups_all_equal"}


def test_every_metric_of_the_area_is_known() -> None:
    # A reward model's score is a part of the reward.
    assert {*re.findall(r"^\| `reward/(\w+)` ", PAGE, re.MULTILINE)} - {"reward_model"} == OWN


@pytest.mark.parametrize(
    ("scores", "share"),
    [([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1], 1.0), ([0.1 + 0.2 - 0.3, 0.0], 1.0), ([0.6, 0.601], 0.0), ([0.6], 1.0)],
)
def test_scores_that_differ_by_rounding_are_equal(scores: list[float], share: float) -> None:
    assert measured(scores)["reward/groups_all_equal"] == share
