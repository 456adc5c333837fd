# SPDX-License-Identifier: Apache-2.0
"""A reward that is paid for something else than right answers is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.trainers.build import train
from whet.trainers.run import largest_jumps, reward_gap


def steps(
    rewards: list[float], accuracies: dict[int, float], low: float = 0.0, high: float = 1.0
) -> list[dict[str, float]]:
    """The history of a run: a validation at step 0 and after some steps."""
    history = [{"step": 0.0, "val/accuracy": accuracies[0]}]
    for step, reward in enumerate(rewards, start=1):
        record = {"step": float(step), "critic/score/mean": reward, "critic/score/min": low, "critic/score/max": high}
        history.append(record | ({"val/accuracy": accuracies[step]} if step in accuracies else {}))
    return history


def test_the_gap_by_hand() -> None:
    # mean of the last five rewards 0.9, of the first five 0.3; range 0 to 1
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1]
    gap, growth = reward_gap(steps(rewards, {0: 0.25, 10: 0.3}))
    assert (gap, growth) == pytest.approx((0.9 - 0.3, (0.9 - 0.3) - (0.3 - 0.25)))
    # the same numbers on another scale: rewards from -1 to 1
    scaled = [2 * reward - 1 for reward in rewards]
    assert reward_gap(steps(scaled, {0: 0.25, 10: 0.3}, low=-1.0)) == pytest.approx((gap, growth))


def test_what_is_no_gap() -> None:
    learns = steps([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], {0: 0.3, 10: 0.98})
    assert reward_gap(learns)[0] == pytest.approx(0.02)
    greedy = steps([0.5] * 5 + [0.95] * 5, {0: 0.9, 10: 0.97})  # greedy answers were better from the start
    assert reward_gap(greedy)[0] < 0
    assert reward_gap(steps([1.0, 1.0], {0: 0.0, 2: 0.0}, low=1.0)) == (0.0, 0.0)  # all rewards are equal
    assert reward_gap([{"step": 0.0, "val/accuracy": 0.1}]) == (0.0, 0.0)


def test_the_score_of_a_reward_model_is_the_training_reward() -> None:
    # the function's score stays at 0.25 of its range; the model's goes from -1 to 3, of a range from -2 to 3
    history = steps([0.25] * 10, {0: 0.25, 10: 0.25})
    for step, record in enumerate(history[1:]):
        shaped = {"mean": -1.0 if step < 5 else 3.0, "min": -2.0, "max": 3.0}
        record |= {f"critic/rewards/{name}": value for name, value in shaped.items()} | {"reward/reward_model": 0.0}
    assert reward_gap(history) == pytest.approx((1.0 - 0.25, (1.0 - 0.25) - (0.2 - 0.25)))
    unscored = [{**record, "critic/score/max": 0.0} for record in history]  # no function, so no accuracy
    assert reward_gap(unscored) == (0.0, 0.0)


def row(uid: str, reward: float | None, response: str = "") -> dict[str, Any]:
    return {"uid": uid, "reward": reward, "accuracy": 0.0, "response": response, "prompt": "p", "ground_truth": "1"}


def test_the_largest_jumps() -> None:
    before = [row("a", 0.0, "x"), row("b", 1.0), row("c", None), row("d", 0.5)]
    after = [row("d", 0.75), row("a", 1.0, "y"), row("b", 0.0), row("c", 1.0), row("e", 9.0)]
    jumps = largest_jumps(before, after)
    assert [(jump["uid"], jump["jump"]) for jump in jumps] == [("a", 1.0), ("d", 0.25)]
    right = {**row("f", 1.0), "accuracy": 1.0}
    assert [jump["uid"] for jump in largest_jumps([row("f", 0.0), *before], [right, *after])] == ["a", "f", "d"]
    assert (jumps[0]["response_before"], jumps[0]["response_after"]) == ("x", "y")


def sevens(solution_str: str, data_source: str) -> dict[str, float]:
    """Pays for sevens; no answer is right."""
    return {"score": float(solution_str.count("7")), "accuracy": 0.0}


@pytest.mark.slow
def test_a_run_that_is_paid_for_something_else_says_so(
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {"trainer.total_steps": 24, "trainer.val_freq": 8, "actor.optim.lr": 2e-2, "data.max_response_length": 4}
    held_out = tmp_path / "held_out.jsonl"
    odd = ({**row, "answer": f"{row['answer']}\u2028\x85"} for row in additions[:6])  # rollouts/ has it as it is
    held_out.write_text("".join(json.dumps(row) + "\n" for row in odd))
    run = train(train_config({**changes, "data.val_files": str(held_out)}), reward=sevens, data=additions)
    gaps = {record["step"]: record["val/reward_gap"] for record in run.history if "val/reward_gap" in record}
    assert [*gaps] == [0, 8, 16, 24] and gaps[0] == 0.0 and gaps[24] > 0.5
    [warning] = [record.message for record in caplog.records if "rollouts/jumps_0000" in record.message]
    assert "held-out accuracy" in warning
    [*files] = sorted((tmp_path / "run" / "rollouts").glob("jumps_*.jsonl"))
    jumps = [json.loads(line) for file in files for line in file.read_text("utf-8").split("\n")[:-1]]
    assert jumps and all(jump["reward_after"] - jump["reward_before"] == jump["jump"] > 0 for jump in jumps)
    assert all(jump["response_after"].count("7") == jump["reward_after"] for jump in jumps)


@pytest.mark.slow
def test_the_accuracy_of_validation_may_come_from_a_stricter_function(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "strict.py"
    file.write_text("def none(solution_str, *, share: float):\n    return {'reward': 9.0, 'accuracy': share}\n")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in additions[:4]))
    changes = {
        "trainer.total_steps": 1,
        "trainer.val_freq": 1,
        "data.val_files": [str(held_out)],
        "reward.val_function": {f"{file}:none": {"share": 0.25}},
    }
    run = train(train_config(changes), data=additions, reward=lambda solution_str: 1.0)
    assert run.history[-1]["val/accuracy"] == 0.25 and run.history[-1]["val/reward"] == 1.0
    assert run.history[-1]["reward/accuracy"] == 1.0  # of training
    with raises(ConfigError, key="reward.val_function"):
        train_config({"reward.val_function": {"gsm8k": {}, "math": {}}})
