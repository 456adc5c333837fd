# SPDX-License-Identifier: Apache-2.0
"""The settings of the mathematics: `algorithm.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from whet.config.choice import Choice
from whet.config.section import Section
from whet.registry import ADV_ESTIMATORS, AGGREGATIONS, FILTERS, KL_FORMS, POLICY_LOSSES, REJECTIONS, WEIGHTS


class KLConfig(Section):
    """Distance to the reference policy."""

    where: Literal["none", "reward", "loss"] = Field("none", description="what the KL term is added to")
    form: Annotated[str, Choice(KL_FORMS)] = Field(
        "k3",
        description="k1, k2, k3, abs, with + the value of the form and the gradient of k2; k1_ratio and k3_ratio for a "
        "loss with several updates a step; full over the vocabulary",
    )
    coef: NonNegativeFloat = Field(0.001, description="its weight")
    controller: Literal["fixed", "adaptive"] = Field("fixed", description="whether the weight follows a target")
    target: PositiveFloat = Field(0.1, description="KL that the adaptive controller aims at")
    horizon: PositiveInt = Field(10_000, description="sequences over which the adaptive controller acts")


class FilterConfig(Section):
    """Dynamic sampling: which groups are worth training on."""

    name: Annotated[str | None, Choice(FILTERS, "options")] = Field(
        None, description="registered filter, such as dapo; unset: every group is"
    )
    options: dict[str, Any] = Field({}, description="options of the filter")
    metric: str = Field("accuracy", description="accuracy, reward, or the name of a part of the reward")
    max_refills: NonNegativeInt = Field(
        4, description="batches of prompts tried again before training on what there is"
    )


class OverlongConfig(Section):
    """DAPO's soft penalty for responses near the limit: min(-(len - (limit - buffer)) / buffer * penalty, 0)."""

    penalty: NonNegativeFloat = Field(0.0, description="the most that is taken from a reward; 0 is off")
    buffer_length: PositiveInt = Field(64, description="tokens before the limit over which the penalty grows")


class CorrectionConfig(Section):
    """Sampler and trainer compute other probabilities of the same tokens: what is done about it."""

    old_log_probs: Literal["trainer", "rollout"] = Field(
        "trainer", description="who says what the policy was before the update; rollout saves a pass"
    )
    weight: Annotated[str | None, Choice(WEIGHTS, "weight_options")] = Field(
        None, description="registered weight of each token in the loss, such as importance"
    )
    weight_options: dict[str, Any] = Field({}, description="options of the weight")
    rejection: Annotated[str | None, Choice(REJECTIONS, "rejection_options")] = Field(
        None, description="registered rule by which tokens are not trained on"
    )
    rejection_options: dict[str, Any] = Field({}, description="options of the rejection")


Over = Literal["none", "group", "batch"]


class ShapingConfig(Section):
    """What happens to rewards before the estimator, and to advantages after it."""

    norm_mean: Over | Literal["running"] = Field(
        "none", description="whose mean score is taken off; running: all steps"
    )
    norm_std: Over | Literal["running"] = Field("none", description="whose deviation of scores rewards are divided by")
    reward_clip: PositiveFloat | None = Field(None, description="largest reward of a token, either sign")
    advantage_clip: PositiveFloat | None = Field(None, description="largest advantage, either sign")
    whiten_advantages: bool = Field(False, description="mean 0 and deviation 1 over the sampled tokens of a step")


class EntropyConfig(Section):
    """An entropy bonus that keeps the entropy above a target."""

    target: NonNegativeFloat | None = Field(None, description="unset: algorithm.entropy_coef stays as it is")
    delta: PositiveFloat = Field(1e-4, description="how much the bonus' weight moves a step")
    highest: PositiveFloat = Field(5e-3, description="the largest weight")


class AlgorithmConfig(Section):
    """The mathematics of one step."""

    adv_estimator: Annotated[str, Choice(ADV_ESTIMATORS, "adv_options")] = Field(
        "grpo", description="registered name, module:function or file.py:function"
    )
    adv_options: dict[str, Any] = Field({}, description="options of the estimator")
    policy_loss: Annotated[str, Choice(POLICY_LOSSES, "loss_options")] = Field(
        "ppo_clip", description="registered name, module:function or file.py:function"
    )
    loss_options: dict[str, Any] = Field({}, description="options of the loss")
    loss_agg_mode: Annotated[str | None, Choice(AGGREGATIONS, is_checked=False)] = Field(
        None,
        description="registered aggregation, module:function or file.py:function; unset: what the loss or estimator "
        "fixes, else token-mean",
    )
    loss_fixed_length: PositiveInt | None = Field(
        None, description="F of seq-mean-token-sum-norm; unset: data.max_response_length"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    filter: FilterConfig = FilterConfig()
    overlong: OverlongConfig = OverlongConfig()
    shaping: ShapingConfig = ShapingConfig()
    entropy: EntropyConfig = EntropyConfig()
    truncated: Literal["keep", "drop", "zero"] = Field(
        "keep", description="answers cut off at the limit: drop takes them out of the group, zero trains on none"
    )
