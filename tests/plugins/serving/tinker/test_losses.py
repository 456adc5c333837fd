# SPDX-License-Identifier: Apache-2.0
"""Rows as the engine reads them, and losses by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.plugins.serving.tinker.rows import datum, request
from tests.raising import raises
from whet.errors import DataError, WhetError
from whet.plugins.serving.tinker.losses import DatumRows, SumObjective, objective_of


def rows(loss: str, *data: bytes) -> DatumRows:
    return DatumRows.of(request("m", data, loss).data, loss, 100, 50)


def test_rows_that_are_imitated_begin_with_one_token() -> None:
    made = rows(
        "cross_entropy",
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=np.float32([0, 0.5, 2])),
        datum([5], target_tokens=[6], weights=np.float32([1])),
    )
    assert made.batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert made.batch["response_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert made.batch["token_weights"].tolist() == [[0, 0.5, 2], [1, 0, 0]]
    assert made.with_all_places()["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    outputs = made.outputs({0: torch.tensor([-1.0, -2.0, -3.0]), 1: torch.tensor([-4.0, 0.0, 0.0])})
    assert [each.tolist() for each in outputs] == [[-1, -2, -3], [-4]]


def test_rows_of_a_policy_loss_have_their_prompts_on_the_left() -> None:
    """The cookbook's rows: targets of the prompt are 0, and so are its advantages and log-probs."""
    made = rows(
        "ppo",
        datum(
            [1, 2, 3, 7],
            target_tokens=[0, 0, 7, 8],
            logprobs=np.float32([0, 0, -1, -2]),
            advantages=np.float32([0, 0, 1, 1]),
        ),
        datum([4, 9], target_tokens=[9, 9], logprobs=np.float32([-3, 0]), advantages=np.float32([2, 2])),
    )
    assert not made.is_picked and made.starts == [-2, 0]
    assert made.batch["input_ids"].tolist() == [[1, 2, 3, 7, 8], [0, 0, 4, 9, 9]]
    assert made.batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert made.batch["response_mask"].tolist() == [[1, 1], [1, 1]]
    assert made.batch["old_log_probs"].tolist() == [[-1, -2], [-3, 0]]
    outputs = made.outputs({0: torch.tensor([-1.0, -2.0])})
    assert [each.tolist() for each in outputs] == [[0, 0, -1, -2], [0, 0]]


# log-probs l = -1, -2; sampled o = -1.5, -1; A = 2, -3: rho = e^0.5 = 1.6487, e^-1 = 0.3679
BY_HAND = {
    "importance_sampling": -(math.exp(0.5) * 2 - math.exp(-1) * 3),
    "ppo": -(1.2 * 2) - min(math.exp(-1) * -3, 0.8 * -3),
    "cispo": -(1.2 * 2 * -1) - (0.8 * -3 * -2),
    "dro": -(2 * -1 - 0.5 * 0.25) - (-3 * -2 - 0.5 * 1),
}


@pytest.mark.parametrize("loss", BY_HAND)
def test_losses_by_hand(loss: str) -> None:
    made = rows(
        loss, datum([1, 2], target_tokens=[2, 3], logprobs=np.float32([-1.5, -1]), advantages=np.float32([2, -3]))
    )
    objective = objective_of(loss, {}, is_picked=made.is_picked)
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    total, _ = objective.loss({"log_probs": log_probs}, made.batch.columns(), {})
    assert float(total.detach()) == pytest.approx(BY_HAND[loss], rel=1e-5)
    assert objective.seen[0].tolist() == [-1, -2]


def plain(name: str, options: dict[str, float | str]) -> SumObjective:
    return objective_of(name, options, is_picked=False)


def test_options_of_the_sdk() -> None:
    ppo = {"clip_ratio_low": 0.5, "clip_ratio_high": 1.0, "clip_ratio_c": None}
    assert plain("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}).options == ppo
    cispo = {"bounds": "absolute", "clip_ratio_low": 0.25, "clip_ratio_high": 4.0}
    assert plain("cispo", {"clip_low_threshold": 0.25, "clip_high_threshold": 4.0}).options == cispo
    assert plain("dro", {"beta": 0.05}).options["beta"] == 0.05
    assert plain("whet:cispo", {}).options["bounds"] == "relative" and plain("sapo", {}).loss_name == "sapo"
    for name, options in (("ppo", {"clip": 1.0}), ("cross_entropy", {"beta": 1.0}), ("stable_reinforce", {})):
        with pytest.raises(WhetError):
            plain(name, options)


def test_a_sequence_ratio_is_of_the_marked_tokens() -> None:
    """GSPO of the SDK: rows [-1, -2] - [-2, -2] have the mean 0.5 over two marked tokens."""
    mask = np.float32([0, 1, 1])
    values = np.float32([0, -2, -2]), np.float32([0, 1, 1])
    made = rows(
        "gspo",
        datum([1, 2, 3], target_tokens=[0, 3, 4], logprobs=values[0], advantages=values[1], sequence_ratio_mask=mask),
    )
    options = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    objective = objective_of("gspo", options, is_picked=made.is_picked)
    total, _ = objective.loss({"log_probs": torch.tensor([[-1.0, -2.0]])}, made.batch.columns(), {})
    assert float(total) == pytest.approx(-2 * math.exp(0.5), rel=1e-5)


def test_an_input_that_only_some_rows_have_is_refused() -> None:
    with raises(DataError, "input 'weights'"):
        rows("cross_entropy", datum([1], target_tokens=[2], weights=np.float32([2])), datum([1], target_tokens=[2]))


def test_targets_of_several_widths_are_refused() -> None:
    with pytest.raises(DataError):
        rows("cross_entropy", datum([1], target_tokens=[[1, 2]]), datum([1], target_tokens=[[1, 2, 3]]))
