# SPDX-License-Identifier: Apache-2.0
"""The distance to the reference policy: its estimators per token, its place in the reward, and control of its weight.

d = l - b is the log-ratio of the policy to the reference at the sampled token (o - b in the reward). Where each fits:
as a loss, on-policy and summed over the sequence, `k1` has zero expected gradient, `k2` and every `+` form follow the
gradient of the per-token KL with the state distribution held fixed, and `k3` is biased. In the reward, `k1` gives the
gradient of the sequence KL where it is neither discounted nor divided by a group's deviation; `k3` is far from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from whet.registry import KL_FORMS, call, register_kl


def kl_penalty(
    form: str,
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    response_mask: Tensor | None = None,
    *,
    vocab_log_probs: Tensor | None = None,
    ref_vocab_log_probs: Tensor | None = None,
) -> Tensor:
    """The registered `form` of the KL per token, with its gradient with respect to `log_probs`.   [B, R] -> [B, R]

    `full` reads the last two [B, R, V] in their place. With `response_mask`, what stands where it is 0 reaches neither
    the result nor the gradient.  Raises: RegistryError.
    """
    given = {
        "log_probs": log_probs,
        "ref_log_probs": ref_log_probs,
        "response_mask": response_mask,
        "vocab_log_probs": vocab_log_probs,
        "ref_vocab_log_probs": ref_vocab_log_probs,
    }
    columns = {name: column for name, column in given.items() if column is not None}
    penalty: Tensor = call(KL_FORMS[form], columns, {})
    return penalty


def kl_columns(form: str, policy: str = "") -> list[str]:
    """The columns that a form reads, of the policy under the prefix that says which: "" or "old_".
    Raises: RegistryError."""
    return [name if name.startswith("ref_") else policy + name for name in KL_FORMS[form].columns]


def apply_kl_to_reward(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    response_mask: Tensor,
    *,
    form: str,
    coef: float,
    old_vocab_log_probs: Tensor | None = None,
    ref_vocab_log_probs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(token_level_rewards, KL), both [B, R] and 0 where the mask is 0: r_t = score_t - coef k(o, b)_t.

    The KL is that of the samples' policy before the update, and comes back for the controller and the metrics. The last
    two [B, R, V] are what `full` reads.
    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593.
    """
    outside = response_mask == 0
    vocabulary = {"vocab_log_probs": old_vocab_log_probs, "ref_vocab_log_probs": ref_vocab_log_probs}
    with torch.no_grad():
        penalty = kl_penalty(form, old_log_probs, ref_log_probs, response_mask, **vocabulary).masked_fill(outside, 0.0)
        return token_level_scores.masked_fill(outside, 0.0) - coef * penalty, penalty


@register_kl("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d: unbiased for KL(pi || ref), of either sign. For the reward; as a loss its expected gradient is zero.

    Schulman 2020, http://joschu.net/blog/kl-approx.html.

    Elsewhere: verl `k1`, `kl`.
    """
    return log_probs - ref_log_probs


@register_kl("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """d^2 / 2: biased in value, of little variance; on-policy its gradient is that of the per-token KL.

    Schulman 2020, http://joschu.net/blog/kl-approx.html.

    Elsewhere: verl `k2`, `mse`.
    """
    return 0.5 * (log_probs - ref_log_probs).square()


@register_kl("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(-d) + d - 1, -d within 20 and the result at most 10: never negative, unbiased in value, biased as a loss.

    Schulman 2020, http://joschu.net/blog/kl-approx.html; GRPO's choice, https://arxiv.org/abs/2402.03300.

    Elsewhere: verl `k3`, `low_var_kl`, the same limits; TRL's KL term without them, times the ratio by default.
    """
    x = (ref_log_probs - log_probs).clamp(-20.0, 20.0)
    return (x.expm1() - x).clamp(max=10.0)  # expm1: exp(x) - 1 - x would lose a small x altogether


@register_kl("abs")
def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """abs(d).

    Elsewhere: verl `abs`.
    """
    return (log_probs - ref_log_probs).abs()


@register_kl("full")
def full(vocab_log_probs: Tensor, ref_vocab_log_probs: Tensor) -> Tensor:
    """sum_v pi_v (log pi_v - log ref_v): the KL of the next token itself, no estimate; needs B R V numbers twice.

    As a loss, with the states of the samples held fixed, what `k2` and every `+` form have in expectation, without
    their variance. For small vocabularies: no chunk of it can be thrown away before the update.

    Elsewhere: verl knows the name and raises NotImplementedError.
    """
    return (vocab_log_probs.exp() * (vocab_log_probs - ref_vocab_log_probs)).sum(-1)


@register_kl("k1+")
def k1_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2.

    Elsewhere: verl `k1+`.
    """
    return _with_gradient_of_k2(k1(log_probs, ref_log_probs), log_probs, ref_log_probs)


@register_kl("k2+")
def k2_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """k2, under the name that the other forms' pattern gives it.

    Elsewhere: verl `k2+`.
    """
    return k2(log_probs, ref_log_probs)


@register_kl("k3+")
def k3_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2.

    Elsewhere: verl `k3+`.
    """
    return _with_gradient_of_k2(k3(log_probs, ref_log_probs), log_probs, ref_log_probs)


@register_kl("abs+")
def absolute_plus(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of abs with the gradient of k2.

    Elsewhere: verl `abs+`.
    """
    return _with_gradient_of_k2(absolute(log_probs, ref_log_probs), log_probs, ref_log_probs)


def _with_gradient_of_k2(value: Tensor, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    gradient = k2(log_probs, ref_log_probs)
    return value.detach() + (gradient - gradient.detach())


class KLController(Protocol):
    """What sets the weight of the KL from step to step. Its state belongs in the checkpoint."""

    @property
    def coef(self) -> float:
        """The weight for the next step."""

    def update(self, kl: float, num_sequences: int) -> None:
        """Take note of a step's mean KL and of how many sequences it had."""

    def state(self) -> dict[str, float]:
        """What a resumed run needs."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""


class FixedKL:
    """The same weight in every step. It has no state: a resumed run follows its config."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float, num_sequences: int) -> None:
        """Nothing to adapt."""

    def state(self) -> dict[str, float]:
        """Empty."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing to load."""


class AdaptiveKL:
    """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon after a step of n sequences: the weight grows while the
    KL is above its target.  Ziegler et al. 2019, https://arxiv.org/abs/1909.08593."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Adapt the weight to a step's mean KL."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        """The current weight."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on with a saved weight."""
        self.coef = state["coef"]
