# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whet.algorithms.calls import call
from whet.algorithms.value_loss import bradley_terry, calibration, explained_variance, step_cross_entropy
from whet.registry import VALUE_LOSSES


def one_row(values: list[float], old_values: list[float], returns: list[float]) -> dict[str, Tensor]:
    return {
        "values": torch.tensor([values], requires_grad=True),
        "old_values": torch.tensor([old_values]),
        "returns": torch.tensor([returns]),
        "response_mask": torch.ones(1, len(values)),
    }


def test_clipped_by_hand() -> None:
    # v = 2, v_old = 1, so the clipped one is 1.5. R = 0: max(4, 2.25) / 2; R = 3: max(1, 2.25) / 2, and no gradient
    # since the clip is what counts; v = 1.2 is not clipped: 1.44 / 2
    batch = one_row([2.0, 2.0, 1.2], [1.0, 1.0, 1.0], [0.0, 3.0, 0.0])
    loss, diagnostics = call(VALUE_LOSSES["clipped"], batch, {})
    torch.testing.assert_close(loss.detach(), torch.tensor([[2.0, 1.125, 0.72]]))
    assert diagnostics["vf_clipfrac"].tolist() == [[0.0, 1.0, 0.0]]
    torch.testing.assert_close(diagnostics["vpred_mean"], torch.tensor([[2.0, 2.0, 1.2]]))
    loss.sum().backward()
    torch.testing.assert_close(batch["values"].grad, torch.tensor([[2.0, 0.0, 1.2]]))


def test_mse_is_the_loss_without_a_clip() -> None:
    batch = one_row([2.0, -1.0], [1.0, 9.0], [3.0, 0.0])
    mse = VALUE_LOSSES["mse"]
    loss, diagnostics = call(mse, batch, mse.resolve_options({}, "critic.loss_options"))
    expected = torch.nn.functional.mse_loss(batch["values"], batch["returns"], reduction="none") / 2
    torch.testing.assert_close(loss, expected)
    assert set(diagnostics) == {"vpred_mean"}


@pytest.mark.parametrize("c", [0.1, 0.5])
def test_clipped_equals_the_slow_loop(make_batch: Callable[..., dict[str, Tensor]], c: float) -> None:
    batch = make_batch(3, poison=True)
    loss, _ = call(VALUE_LOSSES["clipped"], batch, {"cliprange_value": c})
    for row, t in batch["response_mask"].nonzero().tolist():
        value, old, target = (float(batch[name][row, t]) for name in ("values", "old_values", "returns"))
        near = min(max(value, old - c), old + c)
        assert float(loss[row, t]) == pytest.approx(max((value - target) ** 2, (near - target) ** 2) / 2)


def test_the_implicit_reward_is_told_right_from_wrong() -> None:
    # beta sum(l - b): .5 * (1 + 3) = 2 in a right row, .5 * 1 in a wrong one
    columns = {
        "log_probs": torch.tensor([[-1.0, -1.0, torch.nan], [-1.0, torch.nan, torch.nan]], dtype=torch.float64),
        "ref_log_probs": torch.tensor([[-2.0, -4.0, 0.0], [-2.0, 0.0, 0.0]], dtype=torch.float64),
        "accuracy": torch.tensor([1.0, 0.0], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
    }
    loss, diagnostics = call(VALUE_LOSSES["implicit_reward"], columns, {"beta": 0.5})
    expected = [math.log1p(math.exp(-2.0)), math.log1p(math.exp(0.5))]  # -log sigmoid(2), -log sigmoid(-.5)
    assert loss[:, 0].tolist() == pytest.approx(expected)
    assert torch.equal(loss[:, 0], loss[:, 1])  # one number a row
    assert diagnostics["prm_accuracy"][:, 0].tolist() == [1.0, 0.0]


def test_the_share_of_the_variance_that_values_explain() -> None:
    # R = 1, 2, 3 (variance 1), R - V = 0, 1, 0 (mean 1/3, variance 1/3): 1 - (1/3) / (1 + 1e-5)
    returns, values = torch.tensor([[1.0, 2.0, 3.0, 9.0]]).double(), torch.tensor([[1.0, 1.0, 3.0, -9.0]]).double()
    mask = torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(1 - 1 / 3 / (1 + 1e-5))
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.full_like(returns, 5.0), returns, mask).item() == pytest.approx(0, abs=1e-4)


def test_by_hand() -> None:
    # -log sigmoid(x) = log(1 + e^-x): x = 2 - 1, then 2 - 1 - 1 = 0, then 0 - 3 = -3
    chosen, rejected = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    loss = bradley_terry(chosen, rejected, torch.tensor([0.0, 1.0, 0.0]))
    expected = [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(3))]
    assert loss.tolist() == pytest.approx(expected)


def test_the_centre_by_hand() -> None:
    # 0.01 times the squares of 3, 3 and 3 on top
    chosen, rejected = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    zero = torch.zeros(3)
    apart = bradley_terry(chosen, rejected, zero, center_coef=0.01) - bradley_terry(chosen, rejected, zero)
    assert apart.tolist() == pytest.approx([0.09] * 3, rel=1e-4)


def test_scores_far_apart_stay_finite() -> None:
    loss = bradley_terry(torch.tensor([-1e4, 1e4]), torch.zeros(2), torch.zeros(2))
    assert loss.tolist() == [1e4, 0.0]


def test_the_gradient_is_that_of_finite_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(3))
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda one, other: bradley_terry(one, other, margin, center_coef=0.1), (chosen, rejected)
    )


def test_steps_by_hand() -> None:
    # sigmoid(log 3) is 3/4: a right step costs -log 3/4, a wrong one -log 1/4, one with the label 1/2 their mean
    found = step_cross_entropy(torch.full((3,), math.log(3)), torch.tensor([1.0, 0.0, 0.5])).tolist()
    assert found == pytest.approx([math.log(4 / 3), math.log(4), 0.5 * math.log(16 / 3)])


def test_calibration_by_hand() -> None:
    """Three of confidence 0.9, one of them wrong, and a 0 of confidence 0.75, in other bins: 3 (0.9 - 2/3) and 0.25."""
    logits = torch.tensor([9.0, 9.0, 9.0, 1 / 3]).log()
    found = calibration(logits, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert found["brier"].item() == pytest.approx((0.01 + 0.01 + 0.81 + 0.0625) / 4)
    assert found["calibration_error"].item() == pytest.approx((0.7 + 0.25) / 4)
    sure = calibration(torch.tensor([99.0, -99.0]), torch.tensor([1.0, 0.0]))
    assert sure["brier"].item() == sure["calibration_error"].item() == 0.0


def test_a_label_between_0_and_1_is_a_share_of_right_answers() -> None:
    labels = torch.tensor([0.7, 0.7, 0.2])
    assert calibration(labels.logit(), labels)["calibration_error"].item() == pytest.approx(0.0, abs=1e-6)
    assert calibration(labels.logit(), labels + 0.1)["calibration_error"].item() == pytest.approx(0.1, abs=1e-6)
