# SPDX-License-Identifier: Apache-2.0
"""KL divergence to the reference policy: estimators per token, and the penalty in the reward.

l is `log_probs`, b `ref_log_probs`, o `old_log_probs`; d = l - b (o - b in the reward) is the log-ratio of the policy
to the reference at the sampled token. A + form, such as `k3+`, has the value of `k3` and the gradient of `k2`. As a
loss, on-policy and summed over the sequence, `k1` has zero expected gradient, `k2` and every + form have the gradient
of the per-token KL with the state distribution held fixed, and `k3` is biased. On samples of an older policy all of
these are biased; the `_ratio` forms and `full` are not. In the reward, `k1` gives the gradient of the sequence KL if it
is neither discounted nor divided by a group's deviation; `k3` does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from whet.algorithms.calls import Bound
from whet.algorithms.statistics import log_ratio
from whet.registry import KL_FORMS, register_kl


def kl_form(form: str) -> Bound:
    """Binds the registered `form` of the KL. Called on columns, it returns the KL per token [B, R], differentiable in
    the policy's log-probs.

    Forms read `log_probs`, `ref_log_probs`, `old_log_probs`, or [B, R, V] `vocab_log_probs` and `ref_vocab_log_probs`.
    Values where `response_mask` is 0 affect neither result nor gradient.  Raises: RegistryError."""
    return Bound(KL_FORMS[form], {})


def kl_columns(form: str, policy: str = "") -> list[str]:
    """Lists the columns that a `form` reads. `policy` is the prefix of the policy's columns: "" or "old_".  Raises:
    RegistryError."""
    return [name if name.startswith(("ref_", "old_")) else policy + name for name in KL_FORMS[form].columns]


def apply_kl_to_reward(
    rewards: Tensor, columns: Mapping[str, Tensor], *, form: Bound, coef: float
) -> tuple[Tensor, Tensor]:
    """Returns (token_level_rewards, KL), both [B, R], 0 where `response_mask` is 0: r_t = rewards_t - coef k(o, b)_t.

    The KL is of the policy before the update, with the columns `kl_columns(form, "old_")`. It is returned for the
    controller and the metrics. Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""
    outside = columns["response_mask"] == 0
    before = {name.removeprefix("old_"): column for name, column in columns.items() if name.startswith("old_")}
    with torch.no_grad():
        penalty = form({**columns, **before}).masked_fill(outside, 0.0)
        return rewards.masked_fill(outside, 0.0) - coef * penalty, penalty


@register_kl("k1", aliases={"k1+": {"gradient": "k2"}})
def k1(log_probs: Tensor, ref_log_probs: Tensor, *, gradient: Literal["own", "k2"] = "own") -> Tensor:
    """d = log_probs - ref_log_probs: unbiased for KL(pi || ref), positive or negative. For the reward, not as a loss.

    As a loss its expected gradient is zero. Schulman 2020, http://joschu.net/blog/kl-approx.html."""
    return _with_gradient(gradient, log_probs - ref_log_probs, log_probs, ref_log_probs)


@register_kl("k2", aliases=("k2+",))
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2, d = log_probs - ref_log_probs: biased in value, with low variance; on-policy unbiased in gradient.

    On-policy its gradient is the gradient of the per-token KL. Schulman 2020, http://joschu.net/blog/kl-approx.html."""
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("k3", aliases={"k3+": {"gradient": "k2"}})
def k3(log_probs: Tensor, ref_log_probs: Tensor, *, gradient: Literal["own", "k2"] = "own") -> Tensor:
    """exp(-d) + d - 1, d = log_probs - ref_log_probs: never negative, unbiased in value, biased as a loss.

    d is clamped to [-20, 20], and the result to at most 10. Schulman 2020, http://joschu.net/blog/kl-approx.html;
    GRPO's choice, https://arxiv.org/abs/2402.03300."""
    x = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    # expm1: exp(x) - 1 - x would be 0 for a small x
    return _with_gradient(gradient, (x.expm1() - x).clamp(max=10.0), log_probs, ref_log_probs)


@register_kl("abs", aliases={"abs+": {"gradient": "k2"}})
def absolute(log_probs: Tensor, ref_log_probs: Tensor, *, gradient: Literal["own", "k2"] = "own") -> Tensor:
    """abs(log_probs - ref_log_probs)."""
    return _with_gradient(gradient, (log_probs - ref_log_probs).abs(), log_probs, ref_log_probs)


@register_kl("k1_ratio")
def k1_ratio(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """rho d with rho = exp(clamp(l - o, -20, 20)): the KL per token and its gradient, for samples of any policy.

    d is l - b; l, b, o are `log_probs`, `ref_log_probs`, `old_log_probs`. As a loss it is unbiased, unlike k1, because
    the ratio rho has a gradient. It has more variance than `k3_ratio`."""
    return log_ratio(log_probs, old_log_probs).exp() * k1(log_probs, ref_log_probs)


@register_kl("k3_ratio")
def k3_ratio(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """rho k3 with rho = exp(clamp(l - o, -20, 20)): the KL per token and its gradient, for samples of any policy.

    l is `log_probs`, o `old_log_probs`: the policy before the first update of the step, which sampled. The gradient
    includes the gradient of rho. DeepSeek-V3.2, https://arxiv.org/abs/2512.02556."""
    return log_ratio(log_probs, old_log_probs).exp() * k3(log_probs, ref_log_probs)


@register_kl("full")
def full(vocab_log_probs: Tensor, ref_vocab_log_probs: Tensor) -> Tensor:
    """sum_v pi_v (log pi_v - log ref_v): the exact KL of the next token; needs two tensors [B, R, V].

    As a loss, with the states of the samples held fixed, its gradient is the expectation of the gradient of `k2` and of
    every + form, without their variance. Only for small vocabularies: all of it stays in memory until the update.
    """
    return (vocab_log_probs.exp() * (vocab_log_probs - ref_vocab_log_probs)).sum(-1)


def _with_gradient(gradient: str, value: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Returns `value` with its own gradient, or if `gradient` is "k2" (as in form `k3+`) with the gradient of k2."""
    if gradient == "own":
        return value
    other = k2(log_probs, ref_log_probs)
    return value.detach() + (other - other.detach())
