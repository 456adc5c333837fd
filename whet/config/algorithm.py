# SPDX-License-Identifier: Apache-2.0
"""The config of the algorithm: `algorithm.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.section import Choice, Section, Values, key
from whet.registry import ADV_ESTIMATORS, AGGREGATIONS, FILTERS, KL_FORMS, POLICY_LOSSES, REJECTIONS, WEIGHTS


class KLConfig(Section):
    """KL divergence from the reference policy."""

    where: Literal["none", "reward", "loss"] = key("none", "whether the KL term is added to the reward or to the loss")
    form: Annotated[str, Choice(KL_FORMS)] = key(
        "k3",
        "estimator of the KL: k1, k2, k3, abs; with + after the name, its value with the gradient of k2; k1_ratio and "
        "k3_ratio for a loss with several updates a step; full: exact, over the vocabulary",
    )
    coef: NonNegativeFloat = key(0.001, "coefficient of the KL term")
    controller: Literal["fixed", "adaptive"] = key("fixed", "adaptive: adjusts coef to hold the KL at target")
    target: PositiveFloat = key(0.1, "target KL of the adaptive controller")
    horizon: PositiveInt = key(10_000, "horizon of the adaptive controller, in sequences: larger is slower")


class GroupFilterConfig(Section):
    """The options of the filter that chooses the groups to train on."""

    name: Annotated[str | None, Choice(FILTERS, "options")] = key(None, "registered filter, such as dapo; unset: none")
    options: Values = key({}, "options of the filter")
    metric: str = key("accuracy", "metric that the filter reads: accuracy, reward, or the name of a reward part")


class FilterConfig(GroupFilterConfig):
    """Dynamic sampling: a filter chooses the groups to train on, and further prompts replace dropped groups."""

    max_refills: NonNegativeInt = key(4, "most extra batches of prompts sampled in a step to replace dropped groups")


class OverlongConfig(Section):
    """DAPO's soft penalty for responses near the limit: min(-(len - (limit - buffer)) / buffer * penalty, 0)."""

    penalty: NonNegativeFloat = key(0.0, "largest penalty, subtracted from the reward at the limit; 0 is off")
    buffer_length: PositiveInt = key(64, "tokens before the limit over which the penalty grows from 0")


OLD_LOG_PROBS = (
    "source of old_log_probs; trainer: a forward pass before the update; rollout: rollout_log_probs, without a pass; "
    "interpolated: an estimate between rollout and policy by the staleness of a token, without a pass"
)


class CorrectionConfig(Section):
    """Correction for the difference between the rollout engine's and the trainer's probabilities of the same tokens."""

    old_log_probs: Literal["trainer", "rollout", "interpolated"] = key("trainer", OLD_LOG_PROBS)
    weight: Annotated[str | None, Choice(WEIGHTS, "weight_options")] = key(
        None, "registered weight of each token in the loss: importance, ...; unset: none"
    )
    weight_options: Values = key({}, "options of the weight")
    rejection: Annotated[str | None, Choice(REJECTIONS, "rejection_options")] = key(
        None, "registered rule that excludes tokens from training; unset: none"
    )
    rejection_options: Values = key({}, "options of the rejection")


Over = Literal["none", "group", "batch"]
Norm = Over | Literal["running"]


class ShapingConfig(Section):
    """Scaling, normalisation and clipping of rewards before the estimator, and of advantages after it."""

    reward_scale: float = key(1.0, "factor of scores, after reward_bias is added to them")
    reward_bias: float = key(0.0, "number added to every score")
    truncated_factor: float = key(1.0, "factor of the rewards of responses truncated at the limit")
    norm_mean: Norm = key("none", "subtract the mean score of the group, the batch, or all steps (running)")
    norm_std: Norm = key("none", "divide by the standard deviation of the group, the batch, or all steps (running)")
    reward_clip: PositiveFloat | None = key(None, "largest absolute reward of a token; unset: no limit")
    advantage_clip: PositiveFloat | None = key(None, "largest absolute advantage of a token; unset: no limit")
    whiten_advantages: bool = key(False, "scale advantages to mean 0 and deviation 1 over a step's sampled tokens")


class EntropyConfig(Section):
    """Adaptive entropy bonus. It keeps the entropy above a target."""

    target: NonNegativeFloat | None = key(None, "target entropy; unset: algorithm.entropy_coef is constant")
    delta: PositiveFloat = key(1e-4, "change of the coefficient in one step")
    highest: PositiveFloat = key(5e-3, "largest coefficient")


class AlgorithmConfig(Section):
    """The algorithm: estimator, loss, KL, corrections, filter and shaping."""

    adv_estimator: Annotated[str, Choice(ADV_ESTIMATORS, "adv_options")] = key(
        "grpo", "registered advantage estimator, module:function or file.py:function"
    )
    adv_options: Values = key({}, "options of the estimator")
    policy_loss: Annotated[str, Choice(POLICY_LOSSES, "loss_options")] = key(
        "ppo_clip", "registered policy loss, module:function or file.py:function"
    )
    loss_options: Values = key({}, "options of the loss")
    loss_agg_mode: Annotated[str | None, Choice(AGGREGATIONS, is_checked=False)] = key(
        None,
        "registered aggregation of token losses, module:function or file.py:function; unset: the aggregation that the "
        "loss or the estimator fixes, else token-mean",
    )
    loss_fixed_length: PositiveInt | None = key(None, "divisor of seq-mean-token-sum-norm; unset: max_response_length")
    entropy_coef: float = key(0.0, "coefficient of the entropy bonus")
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    filter: FilterConfig = FilterConfig()
    overlong: OverlongConfig = OverlongConfig()
    shaping: ShapingConfig = ShapingConfig()
    entropy: EntropyConfig = EntropyConfig()
    truncated: Literal["keep", "drop", "zero"] = key(
        "keep", "responses truncated at the limit: train on them, drop them from the group, or mask all of their tokens"
    )
