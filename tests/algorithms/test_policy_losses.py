# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import with_mini_batch_columns
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.calls import call
from whet.registry import POLICY_LOSSES

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]


def loss_of(name: str, batch: Batch, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    result: tuple[Tensor, dict[str, Tensor]] = call(POLICY_LOSSES[name], batch, options)
    return result


def tokens(ratios: list[float], advantages: list[float]) -> Batch:
    """One row whose tokens have these probability ratios and advantages, in float64."""
    log_ratios = torch.tensor([ratios], dtype=torch.float64).log()
    return {
        "log_probs": (log_ratios - 1.0).requires_grad_(),
        "old_log_probs": torch.full_like(log_ratios, -1.0),
        "advantages": torch.tensor([advantages], dtype=torch.float64),
        "response_mask": torch.ones(1, len(ratios)),
    }


# ---- ppo_clip


def test_ppo_clip_by_hand() -> None:
    # A = 1: rho 1.5 counts as 1.2, .5 as itself; A = -1: .5 counts as .8, 5 as itself; in between nothing is clipped
    batch = tokens([1.5, 0.5, 0.5, 5.0, 1.1], [1.0, 1.0, -1.0, -1.0, 2.0])
    loss, diagnostics = loss_of("ppo_clip", batch)
    expected = torch.tensor([[-1.2, -0.5, 0.8, 5.0, -2.2]], dtype=torch.float64)
    torch.testing.assert_close(loss.detach(), expected)
    assert diagnostics["pg_clipfrac"].tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0]]
    assert "pg_clipfrac_lower" not in diagnostics

    loss.sum().backward()
    # d(-A rho)/dl = -A rho where the ratio counts, 0 where the clip does
    expected = torch.tensor([[0.0, -0.5, 0.0, 5.0, -2.2]], dtype=torch.float64)
    torch.testing.assert_close(batch["log_probs"].grad, expected)


def test_dual_clip_by_hand() -> None:
    # A = -1: 5 is more than c = 3, 2 is not; A = 1 is never meant. The gradient of what is capped is 0
    batch = tokens([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    loss, diagnostics = loss_of("ppo_clip", batch, clip_ratio_c=3.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([[3.0, 2.0, -1.2]], dtype=torch.float64))
    assert diagnostics["pg_clipfrac_lower"].tolist() == [[1.0, 0.0, 0.0]]
    loss.sum().backward()
    torch.testing.assert_close(batch["log_probs"].grad, torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64))


def test_vanilla_has_the_dual_clip_of_three() -> None:
    batch = tokens([5.0], [-1.0])
    assert loss_of("vanilla", batch)[0].tolist() == [[3.0]]
    torch.testing.assert_close(loss_of("ppo_clip", batch)[0].detach(), torch.tensor([[5.0]], dtype=torch.float64))


def test_ppo_clip_has_a_low_and_a_high_side() -> None:
    batch = tokens([1.5, 0.5], [1.0, -1.0])
    loss, _ = loss_of("ppo_clip", batch, clip_ratio_low=0.1, clip_ratio_high=0.3)
    torch.testing.assert_close(loss.detach(), torch.tensor([[-1.3, 0.9]], dtype=torch.float64))


def slow_ppo_clip(log_ratio: float, advantage: float, low: float, high: float, c: float | None) -> float:
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(-advantage * c, loss) if c is not None and advantage < 0 else loss


@pytest.mark.parametrize("c", [None, 3.0])
def test_ppo_clip_equals_the_slow_loop(make_batch: MakeBatch, c: float | None) -> None:
    batch = make_batch(4, poison=True)
    batch["log_probs"] = batch["old_log_probs"] + 6 * (batch["log_probs"] - batch["old_log_probs"])
    loss, _ = loss_of("ppo_clip", batch, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=c)
    for row, t in batch["response_mask"].nonzero().tolist():
        log_ratio = float(batch["log_probs"][row, t] - batch["old_log_probs"][row, t])
        expected = slow_ppo_clip(log_ratio, float(batch["advantages"][row, t]), 0.2, 0.28, c)
        assert float(loss[row, t]) == pytest.approx(expected, rel=1e-12)


def test_the_first_update_has_the_gradient_of_reinforce(make_batch: MakeBatch) -> None:
    # rho = 1 lies inside the clip, where both branches of the maximum are equal
    batch = make_batch(6)
    gradients = []
    for name in ("ppo_clip", "reinforce"):
        log_probs = batch["old_log_probs"].clone().requires_grad_()
        loss_of(name, {**batch, "log_probs": log_probs})[0].sum().backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


# ---- gspo


def test_gspo_by_hand() -> None:
    # l - o = .02, (tool), -.01: s = exp(.005) = 1.0050125. A = 1 counts 1.0004 of it, A = -1 the whole
    batch = {
        "log_probs": torch.tensor([[-0.98, torch.nan, -1.01]], dtype=torch.float64).repeat(2, 1),
        "old_log_probs": torch.tensor([[-1.0, torch.nan, -1.0]], dtype=torch.float64).repeat(2, 1),
        "advantages": torch.tensor([[1.0], [-1.0]], dtype=torch.float64).repeat(1, 3),
        "response_mask": torch.tensor([[1, 0, 1]]).repeat(2, 1),
    }
    loss, diagnostics = loss_of("gspo", batch)
    sampled = batch["response_mask"] == 1
    expected = torch.tensor([-1.0004, -1.0004, 1.0050125, 1.0050125], dtype=torch.float64)
    torch.testing.assert_close(loss[sampled], expected, rtol=1e-7, atol=0)
    assert diagnostics["pg_clipfrac"][sampled].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_gspo_has_the_gradient_of_the_sequence_ratio(make_batch: MakeBatch) -> None:
    """With one advantage a row: the mean over rows of the clipped A s (the paper's objective) as it stands."""
    batch = make_batch(7, rows=40)
    batch["advantages"] = batch["advantages"][:, :1].expand_as(batch["log_probs"])
    mask, lengths = batch["response_mask"], batch["response_mask"].sum(-1).clamp(min=1)
    whole = {**counts(mask), "fixed_length": 1}

    of_tokens = batch["log_probs"].clone().requires_grad_()
    loss, _ = loss_of("gspo", {**batch, "log_probs": of_tokens}, clip_ratio_low=0.1, clip_ratio_high=0.1)
    assert POLICY_LOSSES["gspo"].marks == {"aggregation": "seq-mean-token-mean"}
    aggregate("seq-mean-token-mean", loss, mask, **whole).backward()

    of_sequences = batch["log_probs"].clone().requires_grad_()
    s = (((of_sequences - batch["old_log_probs"]) * mask).sum(-1) / lengths).exp()
    a = batch["advantages"][:, 0]
    rows = torch.minimum(a * s, a * s.clamp(0.9, 1.1)) * mask.any(-1)
    (-rows.sum() / mask.any(-1).sum()).backward()
    assert 0 < int((s.detach() > 1.1).sum()) < 40  # some are clipped, some are not
    torch.testing.assert_close(of_tokens.grad, of_sequences.grad)


def test_gspo_bounds_the_logarithm_of_the_ratio() -> None:
    batch = tokens([1.0, 1.0], [-1.0, -1.0])
    batch["log_probs"] = batch["old_log_probs"] + 50.0
    loss, _ = loss_of("gspo", batch)
    torch.testing.assert_close(loss, torch.full((1, 2), math.exp(10.0), dtype=torch.float64))


# ---- reinforce


def test_reinforce_by_hand() -> None:
    # -2 * -1, -(-3) * -.5
    batch = {
        "log_probs": torch.tensor([[-1.0, -0.5]]),
        "advantages": torch.tensor([[2.0, -3.0]]),
        "response_mask": torch.ones(1, 2),
    }
    loss, diagnostics = loss_of("reinforce", batch)
    assert loss.tolist() == [[2.0, -1.5]]
    assert diagnostics == {}


# ---- all


@pytest.mark.parametrize("name", [entry.name for entry in POLICY_LOSSES])
@pytest.mark.parametrize("shift", [-1e6, -200.0, 200.0, 1e6])
def test_huge_log_ratios_stay_finite(make_batch: MakeBatch, name: str, shift: float) -> None:
    batch = {k: v.float() if v.is_floating_point() else v for k, v in make_batch(8).items()}
    log_probs = (batch["old_log_probs"] + shift).requires_grad_()
    batch = with_mini_batch_columns(POLICY_LOSSES[name], batch, {})
    loss, diagnostics = loss_of(name, {**batch, "log_probs": log_probs})
    loss.sum().backward()
    assert log_probs.grad is not None
    assert loss.isfinite().all()
    assert log_probs.grad.isfinite().all()
    assert all(value.isfinite().all() and not value.requires_grad for value in diagnostics.values())


def test_gspo_by_segment() -> None:
    # l - o = log 2, log 2, -, log 4, log 1: segments (log 2, log 2) and (log 4, 0): ratios 2, 2 and 2, 2;
    # with log 8 in the first place the first segment is exp((log 8 + log 2) / 2) = 4
    batch = {
        "log_probs": torch.tensor([[math.log(8.0), math.log(2.0), 7.0, math.log(4.0), 0.0]], dtype=torch.float64),
        "old_log_probs": torch.zeros(1, 5, dtype=torch.float64),
        "advantages": -torch.ones(1, 5, dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0, 1, 1]]),
    }
    loss, diagnostics = loss_of("gspo", batch, level="segment")
    assert loss[0, [0, 1, 3, 4]].tolist() == pytest.approx([4, 4, 2, 2])
    whole, _ = loss_of("gspo", batch)
    assert whole[0, [0, 1, 3, 4]].tolist() == pytest.approx([8**0.5] * 4)  # exp((log 16 + log 4) / 4)
    assert not diagnostics["pg_clipfrac"][0, [0, 1, 3, 4]].any()
