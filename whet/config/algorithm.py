# SPDX-License-Identifier: Apache-2.0
"""The settings of the mathematics: `algorithm.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.choice import Choice
from whet.config.section import Section, key
from whet.registry import ADV_ESTIMATORS, AGGREGATIONS, FILTERS, KL_FORMS, POLICY_LOSSES, REJECTIONS, WEIGHTS


class KLConfig(Section):
    """Distance to the reference policy."""

    where: Literal["none", "reward", "loss"] = key("none", "what the KL term is added to")
    form: Annotated[str, Choice(KL_FORMS)] = key(
        "k3",
        "k1, k2, k3, abs, with + the value of the form and the gradient of k2; k1_ratio and k3_ratio for a "
        "loss with several updates a step; full over the vocabulary",
    )
    coef: NonNegativeFloat = key(0.001, "its weight")
    controller: Literal["fixed", "adaptive"] = key("fixed", "whether the weight follows a target")
    target: PositiveFloat = key(0.1, "KL that the adaptive controller aims at")
    horizon: PositiveInt = key(10_000, "sequences over which the adaptive controller acts")


class FilterConfig(Section):
    """Dynamic sampling: which groups are worth training on."""

    name: Annotated[str | None, Choice(FILTERS, "options")] = key(None, "registered filter, such as dapo; unset: none")
    options: dict[str, Any] = key({}, "options of the filter")
    metric: str = key("accuracy", "accuracy, reward, or the name of a part of the reward")
    max_refills: NonNegativeInt = key(4, "batches of prompts tried again before training on what there is")


class OverlongConfig(Section):
    """DAPO's soft penalty for responses near the limit: min(-(len - (limit - buffer)) / buffer * penalty, 0)."""

    penalty: NonNegativeFloat = key(0.0, "the most that is taken from a reward; 0 is off")
    buffer_length: PositiveInt = key(64, "tokens before the limit over which the penalty grows")


class CorrectionConfig(Section):
    """Correction for sampler and trainer, which compute other probabilities of the same tokens."""

    old_log_probs: Literal["trainer", "rollout"] = key(
        "trainer", "source of the log-probs before the update; rollout saves a pass"
    )
    weight: Annotated[str | None, Choice(WEIGHTS, "weight_options")] = key(
        None, "registered weight of tokens in the loss: importance, ..."
    )
    weight_options: dict[str, Any] = key({}, "options of the weight")
    rejection: Annotated[str | None, Choice(REJECTIONS, "rejection_options")] = key(
        None, "registered rule that takes tokens out of training"
    )
    rejection_options: dict[str, Any] = key({}, "options of the rejection")


Over = Literal["none", "group", "batch"]


class ShapingConfig(Section):
    """Changes of rewards before the estimator, and of advantages after it."""

    norm_mean: Over | Literal["running"] = key("none", "rows whose mean score is subtracted; running: of all steps")
    norm_std: Over | Literal["running"] = key("none", "rows whose deviation of scores divides rewards")
    reward_clip: PositiveFloat | None = key(None, "largest reward of a token, either sign")
    advantage_clip: PositiveFloat | None = key(None, "largest advantage, either sign")
    whiten_advantages: bool = key(False, "mean 0 and deviation 1 over the sampled tokens of a step")


class EntropyConfig(Section):
    """An entropy bonus that keeps the entropy above a target."""

    target: NonNegativeFloat | None = key(None, "unset: algorithm.entropy_coef stays as it is")
    delta: PositiveFloat = key(1e-4, "how much the bonus' weight moves a step")
    highest: PositiveFloat = key(5e-3, "the largest weight")


class AlgorithmConfig(Section):
    """The mathematics of one step."""

    adv_estimator: Annotated[str, Choice(ADV_ESTIMATORS, "adv_options")] = key(
        "grpo", "registered name, module:function or file.py:function"
    )
    adv_options: dict[str, Any] = key({}, "options of the estimator")
    policy_loss: Annotated[str, Choice(POLICY_LOSSES, "loss_options")] = key(
        "ppo_clip", "registered name, module:function or file.py:function"
    )
    loss_options: dict[str, Any] = key({}, "options of the loss")
    loss_agg_mode: Annotated[str | None, Choice(AGGREGATIONS, is_checked=False)] = key(
        None,
        "registered aggregation, module:function or file.py:function; unset: what the loss or estimator "
        "fixes, else token-mean",
    )
    loss_fixed_length: PositiveInt | None = key(None, "F of seq-mean-token-sum-norm; unset: data.max_response_length")
    entropy_coef: float = key(0.0, "weight of the entropy bonus")
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    filter: FilterConfig = FilterConfig()
    overlong: OverlongConfig = OverlongConfig()
    shaping: ShapingConfig = ShapingConfig()
    entropy: EntropyConfig = EntropyConfig()
    truncated: Literal["keep", "drop", "zero"] = key(
        "keep", "responses cut off at the limit: drop from the group, or train on none of their tokens"
    )
