# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from whet.config import TrainConfig
from whet.config.schema import TrainerConfig
from whet.planning.planner import Counts
from whet.planning.units import plural
from whet.plugins.planner import forecast
from whet.plugins.planner.forecast import data_line, introduce, model_lines
from whet.plugins.planner.memory import outlines_of
from whet.plugins.planner.speed import Speed
from whet.trainers import build

MakeConfig = Callable[..., TrainConfig]


def test_the_first_lines_of_a_run(train_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    setup = build.setup(train_config({"algorithm.kl.where": "loss"}), [16])
    with caplog.at_level(logging.INFO, "whet"):
        introduce(setup, Counts(train=7000, val=12, steps=2, first_step=1))
    *models, data, time = caplog.messages
    threads = plural(torch.get_num_threads(), "thread")
    assert (
        models
        == list(model_lines(setup))
        == [
            f"actor: 402 k parameters, all trained, float32, 1 process on the CPU with {threads}",
            f"ref: 402 k parameters, not trained, float32, 1 process on the CPU with {threads}",
        ]
    )
    assert data == "7,000 prompts to train on, 12 to validate on; 2 steps of 4 prompts x 4 responses, 1 done"
    assert time.startswith("estimated total time: ") and time.endswith("(accurate to a factor of two)")


def test_the_share_that_an_adapter_is(train_config: MakeConfig) -> None:
    setup = build.setup(train_config({"model.lora.rank": 2, "model.dtype": "bfloat16"}), [16])
    outlines = outlines_of(setup)
    trained = sum(weight.numel() for weight in outlines["actor"].model.parameters() if weight.requires_grad)
    (line,) = model_lines(setup)
    assert f", {trained / outlines['actor'].num_weights:.2%} trained, bfloat16 over float32 weights, " in line


@pytest.mark.parametrize(
    ("trainer", "first_step", "validations"),
    [
        ({"val_freq": 0}, 0, 2),  # before and after
        ({"val_freq": 0, "val_before_train": False}, 0, 1),
        ({"val_freq": 4}, 0, 4),  # before, after 4, 8 and 10
        ({"val_freq": 5}, 0, 3),  # before, after 5 and 10
        ({"val_freq": 4}, 8, 1),  # a run that goes on
    ],
)
def test_a_run_takes_its_steps_and_its_validations(trainer: dict[str, int], first_step: int, validations: int) -> None:
    speed = Speed({}, {"rollout": 2.0, "update": 1.0}, validation=100.0)
    config = TrainerConfig(**trainer)
    assert speed.whole(config, 10, first_step) == 3.0 * (10 - first_step) + 100.0 * validations
    assert speed.whole(config, 10, first_step, step=5.0) == 5.0 * (10 - first_step) + 100.0 * validations


def test_the_data_of_a_run_without_validation(train_config: MakeConfig) -> None:
    setup = build.setup(train_config(), [16])
    assert data_line(setup, Counts(20, 0, 1)) == "20 prompts to train on; 1 step of 4 prompts x 4 responses"


def test_a_run_that_may_stop_early_is_estimated_to_its_likely_end(
    train_config: MakeConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 s a step: 370 of at most 1,000 steps take 10.3 hours, all of them 27.8."""
    monkeypatch.setattr(forecast, "plan_speed", lambda setup, **_: Speed({}, {"update": 100.0}))
    setup = build.setup(train_config(), [16])
    with caplog.at_level(logging.INFO, "whet"):
        introduce(setup, Counts(20, 0, 1000, likely=370))
        introduce(setup, Counts(20, 0, 1000))
    _, data, time, _, whole, all_of_it = caplog.messages
    assert "at most 1,000 steps" in data and "10.3 h" in time and "370" in time
    assert "at most" not in whole and "27.8 h" in all_of_it
