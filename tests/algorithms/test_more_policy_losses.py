# SPDX-License-Identifier: Apache-2.0
"""Losses worked by hand: value and gradient, each at ratios below, at and above one and for both signs of A."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import with_mini_batch_columns
from whet.algorithms.calls import call
from whet.algorithms.policy_losses import covariances
from whet.registry import POLICY_LOSSES

Batch = dict[str, Tensor]
E = math.e


def loss_of(name: str, batch: Batch, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    entry = POLICY_LOSSES[name]
    result: tuple[Tensor, dict[str, Tensor]] = call(entry, with_mini_batch_columns(entry, batch, options), options)
    return result


def rows(log_ratios: list[list[float]], advantages: list[list[float]], mask: list[list[int]] | None = None) -> Batch:
    """Rows whose tokens had log-probability -1 and have moved by these."""
    moved = torch.tensor(log_ratios, dtype=torch.float64)
    return {
        "log_probs": (moved - 1.0).requires_grad_(),
        "old_log_probs": torch.full_like(moved, -1.0),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "response_mask": torch.ones(moved.shape, dtype=torch.long) if mask is None else torch.tensor(mask),
    }


def close(got: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def gradient(loss: Tensor, batch: Batch) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), batch["log_probs"])
    return found


def test_delta_bounds_the_ratio_of_a_wrong_token() -> None:
    # A = -1: 4 counts as 2, 1.5 as itself, .5 as .8; A = 1: 4 counts as 1.2
    batch = rows([[math.log(4), math.log(1.5), math.log(0.5), math.log(4)]], [[-1.0, -1.0, -1.0, 1.0]])
    loss, diagnostics = loss_of("delta", batch)
    close(loss, [[2.0, 1.5, 0.8, -1.2]])
    close(gradient(loss, batch), [[0.0, 1.5, 0.0, 0.0]])
    assert diagnostics["pg_clipfrac"].tolist() == [[1, 0, 1, 1]]


def test_luspo_pays_a_sequence_by_its_length() -> None:
    # row 0: mean log-ratio (.1 + .3) / 2, clipped at 1.25; row 1 moves -.1
    batch = rows([[0.1, 0.3, 9.0], [-0.1, -0.1, -0.1]], [[1.0] * 3, [2.0] * 3], [[1, 1, 0], [1, 1, 1]])
    loss, _ = loss_of("luspo", batch, clip_ratio_low=0.2, clip_ratio_high=0.3)
    ratios = [math.exp(0.2), math.exp(-0.1)]
    close(loss[:, :2], [[-ratios[0]] * 2, [-2 * ratios[1]] * 2])
    # each of the three terms has the gradient -A s / 3 for each of the three tokens
    close(gradient(loss[1], batch)[1:], [[-2 * ratios[1]] * 3])
    clipped, _ = loss_of("luspo", batch, clip_ratio_low=0.2, clip_ratio_high=0.1)
    close(clipped[0, :2][None], [[-1.1, -1.1]])
    assert POLICY_LOSSES["luspo"].marks["aggregation"] == "seq-mean-token-sum"


@pytest.mark.parametrize(
    ("bounds", "weights"),
    [("relative", [0.8, 1.1, 1.2]), ("cap", [0.5, 0.2, 0.2]), ("absolute", [0.5, 0.2, 0.2])],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(bounds: str, weights: list[float]) -> None:
    if bounds == "cap":  # high = .9 is the cap itself, and nothing is below
        batch = rows([[math.log(0.5), math.log(1.1), math.log(3)]], [[1.0, -2.0, 1.0]])
        loss, _ = loss_of("cispo", batch, clip_ratio_high=0.9, bounds="cap")
        weights = [0.5, 0.9, 0.9]
    elif bounds == "absolute":
        batch = rows([[math.log(0.5), math.log(1.1), math.log(3)]], [[1.0, -2.0, 1.0]])
        loss, _ = loss_of("cispo", batch, clip_ratio_low=0.7, clip_ratio_high=2.0, bounds="absolute")
        weights = [0.7, 1.1, 2.0]
    else:
        batch = rows([[math.log(0.5), math.log(1.1), math.log(3)]], [[1.0, -2.0, 1.0]])
        loss, diagnostics = loss_of("cispo", batch)
        assert diagnostics["pg_clipfrac"].tolist() == [[1, 0, 1]]
    advantages = [1.0, -2.0, 1.0]
    log_probs = [math.log(0.5) - 1, math.log(1.1) - 1, math.log(3) - 1]
    close(loss, [[-w * a * logp for w, a, logp in zip(weights, advantages, log_probs, strict=True)]])
    close(gradient(loss, batch), [[-w * a for w, a in zip(weights, advantages, strict=True)]])


def test_sapo_closes_smoothly_and_is_the_plain_gradient_on_policy() -> None:
    batch = rows([[0.0, 0.0, math.log(2), math.log(2)]], [[1.0, -1.0, 1.0, -1.0]])
    loss, _ = loss_of("sapo", batch)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    close(loss, [[-2.0, 2 / 1.05, -4 * sigmoid(1.0), 4 / 1.05 * sigmoid(1.05)]])
    # d/dl of (4/tau) sigmoid(tau (rho - 1)) is 4 rho s (1 - s): 1 at rho = 1
    s, t = sigmoid(1.0), sigmoid(1.05)
    close(gradient(loss, batch), [[-1.0, 1.0, -4 * 2 * s * (1 - s), 4 * 2 * t * (1 - t)]])


def test_geo_mean_takes_the_mean_of_clipped_logs() -> None:
    # A > 0: .6 counts as .4, -.6 as itself: mean -.1. A < 0: .6 as itself, -.6 as -.4: mean .1
    batch = rows([[0.6, -0.6, 5.0], [0.6, -0.6, 0.0]], [[2.0] * 3, [-1.0] * 3], [[1, 1, 0], [1, 1, 0]])
    loss, diagnostics = loss_of("geo_mean", batch)
    close(loss, [[-2 * math.exp(-0.1)] * 3, [math.exp(0.1)] * 3])
    close(gradient(loss[:, 0], batch), [[0.0, -math.exp(-0.1), 0.0], [math.exp(0.1) / 2, 0.0, 0.0]])
    assert diagnostics["pg_clipfrac"].tolist() == [[1, 0, 0], [0, 1, 0]]
    assert POLICY_LOSSES["gmpo"].alias_of == "geo_mean"


def test_sppo_is_a_square() -> None:
    # moved .3 - .1 = .2, wanted 2 * .25
    batch = rows([[0.3, -0.1, 7.0]], [[0.25, 0.25, 7.0]], [[1, 1, 0]])
    loss, _ = loss_of("sppo", batch, eta=2.0)
    close(loss, [[0.09] * 3])
    close(gradient(loss[:, 0], batch), [[-0.6, -0.6, 0.0]])


def test_tis_never_counts_more_than_once() -> None:
    batch = rows([[math.log(0.5), math.log(2)]], [[3.0, -1.0]])
    loss, _ = loss_of("tis", batch)
    close(loss, [[-0.5 * 3 * (math.log(0.5) - 1), math.log(2) - 1]])
    close(gradient(loss, batch), [[-1.5, 1.0]])


def test_topr_tapers_what_is_unlearnt() -> None:
    batch = rows([[math.log(0.5), math.log(0.5)], [math.log(0.5), math.log(4)]], [[1.0, 1.0], [-1.0, -1.0]])
    batch["accuracy"] = torch.tensor([1.0, 0.0])
    loss, _ = loss_of("topr", batch, right_weight=2.0, wrong_weight=3.0)
    # row 1 as a whole: .5 * 4 = 2, at most 1; by token .5 and 1
    close(gradient(loss, batch), [[-2.0, -2.0], [3.0, 3.0]])
    loss, _ = loss_of("topr", batch, level="token")
    close(gradient(loss, batch), [[-1.0, -1.0], [0.5, 1.0]])
    batch["log_probs"] = (torch.tensor([[0.0, 0.0], [math.log(0.5), 0.0]], dtype=torch.float64) - 1).requires_grad_()
    close(gradient(loss_of("topr", batch)[0], batch), [[-1.0, -1.0], [0.5, 0.5]])


def test_dppo_allows_what_moves_little_probability() -> None:
    # p_o = 1/e = .3679. Ratios 1.5 and 1.6 are .18 and .22 more; .5 and .4 are .18 and .22 less
    moves = [math.log(r) for r in (1.5, 1.6, 0.5, 0.4, 1.6, 0.4)]
    batch = rows([moves], [[1.0, 1.0, -1.0, -1.0, -1.0, 1.0]])
    loss, diagnostics = loss_of("dppo_tv", batch)
    assert diagnostics["pg_clipfrac"].tolist() == [[0, 1, 0, 1, 0, 0]]  # the last two move against A
    close(gradient(loss, batch), [[-1.5, 0.0, 0.5, 0.0, 1.6, -0.4]])
    loss, _ = loss_of("dppo_tv", batch, cap=1.2)
    close(gradient(loss, batch), [[-1.2, 0.0, 0.5, 0.0, 1.2, -0.4]])


def test_dppo_kl_by_hand() -> None:
    def divergence(p: float, q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    p = 1 / E
    near, far = divergence(p, 1.2 * p), divergence(p, 1.5 * p)
    assert near < 0.02 < far
    batch = rows([[math.log(1.2), math.log(1.5), math.log(0.5), math.log(0.5)]], [[1.0, 1.0, 1.0, -1.0]])
    loss, _ = loss_of("dppo_kl", batch, threshold=0.02)
    close(gradient(loss, batch), [[-1.2, 0.0, -0.5, 0.0]])
    certain = rows([[0.0]], [[1.0]])
    certain["log_probs"], certain["old_log_probs"] = (torch.zeros(1, 1, dtype=torch.float64) for _ in range(2))
    certain["log_probs"].requires_grad_()
    close(gradient(loss_of("dppo_kl", certain)[0], certain), [[-1.0]])


def test_dro_ties_the_token_or_the_sequence() -> None:
    batch = rows([[0.2, -0.5, 9.0]], [[1.0, 1.0, 1.0]], [[1, 1, 0]])
    loss, _ = loss_of("dro", batch, beta=2.0)
    close(loss[:, :2], [[0.8 + 0.04, 1.5 + 0.25]])
    close(gradient(loss[:, :2], batch), [[-1 + 2 * 0.2, -1 - 2 * 0.5, 0.0]])
    loss, _ = loss_of("dro", batch, beta=2.0, level="sequence")
    close(loss[:, :2], [[0.8 + 0.09 / 2, 1.5 + 0.09 / 2]])
    close(gradient(loss[:, :2], batch), [[-1 - 2 * 0.3, -1 - 2 * 0.3, 0.0]])
    assert POLICY_LOSSES["kimi15"].alias_of == "dro"


def test_vespo_weighs_a_sequence_by_a_gamma_density() -> None:
    # w = e^(.5 - .2); for A >= 0 k = 2, lambda = 3, else 3 and 2; 1 where nothing moved
    batch = rows([[0.5, -0.2], [0.5, -0.2], [0.0, 0.0]], [[1.0, 1.0], [-1.0, -1.0], [1.0, 1.0]])
    loss, _ = loss_of("vespo", batch)
    w = math.exp(0.3)
    right, wrong = math.exp(3) * w**2 * math.exp(-3 * w), math.exp(2) * w**3 * math.exp(-2 * w)
    close(gradient(loss, batch), [[-right, -right], [wrong, wrong], [-1.0, -1.0]])


# ---- chosen by covariance


def covarying() -> Batch:
    # A - mean: 3, 1, -1, -3; o - mean: 1.5, .5, -1.5, -.5: cov 4.5, .5, 1.5, 1.5
    batch = rows([[0.1, 0.1, 0.1, 0.1, 9.0]], [[3.0, 1.0, -1.0, -3.0, 99.0]], [[1, 1, 1, 1, 0]])
    batch["old_log_probs"] = torch.tensor([[-1.0, -2.0, -4.0, -3.0, -99.0]], dtype=torch.float64)
    batch["log_probs"] = (batch["old_log_probs"] + 0.1).requires_grad_()
    batch["draws"] = torch.tensor([[0.1, 0.2, 0.9, 0.3, 0.0]], dtype=torch.float64)
    return batch


def test_covariance_by_hand() -> None:
    batch = covarying()
    zeroed = {name: batch[name].detach().masked_fill(batch["response_mask"] == 0, 0.0) for name in batch}
    found = covariances(zeroed["advantages"], zeroed["old_log_probs"], batch["response_mask"])
    close(found[:, :4], [[4.5, 0.5, 1.5, 1.5]])


def test_clip_cov_takes_the_gradient_of_a_random_share_within_the_bounds() -> None:
    batch = covarying()
    # within (1, 4): the third and the fourth token; of four tokens a share of .25 is one: the smaller draw
    loss, diagnostics = loss_of("clip_cov", batch, share=0.25, lower=1.0, upper=4.0)
    assert diagnostics["clip_cov_share"].tolist() == [[0, 0, 0, 1, 0]]
    rho = math.exp(0.1)
    close(loss[:, :4], [[-3 * rho, -rho, rho, 3 * rho]])
    close(gradient(loss[:, :4], batch)[:, :4], [[-3 * rho, -rho, rho, 0.0]])
    _, diagnostics = loss_of("clip_cov", batch, share=0.5, lower=1.0, upper=4.0)
    assert diagnostics["clip_cov_share"].tolist() == [[0, 0, 1, 1, 0]]
    assert loss_of("clip_cov", batch, share=1.0, lower=5.0, upper=6.0)[1]["clip_cov_share"].sum() == 0
    assert loss_of("clip_cov", batch, share=0.0, lower=1.0)[1]["clip_cov_share"].sum() == 1  # at least one


def test_kl_cov_charges_the_largest() -> None:
    batch = covarying()
    loss, diagnostics = loss_of("kl_cov", batch, share=0.25, coef=2.0)
    assert diagnostics["kl_cov_share"].tolist() == [[1, 0, 0, 0, 0]]
    rho = math.exp(0.1)
    close(loss[:, :4], [[-3 * rho + 2 * 0.1, -rho, rho, 3 * rho]])
    close(gradient(loss[:, :4], batch)[:, :4], [[-3 * rho + 2, -rho, rho, 3 * rho]])


def test_what_is_chosen_depends_on_the_whole_mini_batch() -> None:
    """A micro-batch uses the choice that was made for the mini-batch."""
    batch = covarying()
    entry = POLICY_LOSSES["kl_cov"]
    two = {name: torch.cat([column, column * (0.1 if name == "advantages" else 1)]) for name, column in batch.items()}
    settled = with_mini_batch_columns(entry, two, {"share": 0.125})
    assert settled["chosen"].int().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    part = {name: column[1:] for name, column in settled.items()}
    loss, _ = call(entry, part, {})
    assert torch.equal(
        loss[:, :4], -part["advantages"][:, :4] * (part["log_probs"] - part["old_log_probs"])[:, :4].exp()
    )


def test_decoupled_ppo_weighs_by_what_the_sampler_was() -> None:
    # o - u = log 4 and -log 2: weights 2 (cut) and 1/2, on PPO's loss around o
    batch = rows([[0.1, 0.5]], [[3.0, 3.0]])
    batch["rollout_log_probs"] = batch["old_log_probs"] - torch.tensor(
        [[math.log(4), -math.log(2)]], dtype=torch.float64
    )
    loss, diagnostics = loss_of("decoupled_ppo", batch)
    close(loss, [[-2 * 3 * math.exp(0.1), -0.5 * 3 * 1.2]])
    close(diagnostics["behaviour_weight"], [[2.0, 0.5]])
