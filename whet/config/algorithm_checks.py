# SPDX-License-Identifier: Apache-2.0
"""Which algorithms, losses, corrections and updates go together. As in `checks`, nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from whet.columns import COLUMNS
from whet.config.choice import entry_at
from whet.config.schema import ActorConfig, AlgorithmConfig, DataConfig, KLConfig, OptimConfig, TrainConfig
from whet.errors import ConfigError
from whet.registry import (
    ADV_ESTIMATORS,
    AGGREGATIONS,
    POLICY_LOSSES,
    REJECTIONS,
    REQUIRED,
    VALUE_LOSSES,
    WEIGHTS,
    WRAPPERS,
)

DEFAULT_AGGREGATION = "token-mean"
AGGREGATED = ("values", "response_mask", "num_tokens", "num_sequences", "fixed_length")  # what there is to aggregate


def aggregation(algorithm: AlgorithmConfig) -> str:
    """How per-token losses become one number: what the loss or the estimator fixes, else what the config says.

    Raises: ConfigError where two of the three disagree."""
    loss = entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    estimator = entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", algorithm.adv_estimator)
    chosen, why = algorithm.loss_agg_mode, "algorithm.loss_agg_mode"
    for entry in (loss, estimator):
        fixed = entry.marks.get("aggregation")
        if fixed is None:
            continue
        if chosen is not None and chosen != fixed:
            raise ConfigError(
                f"{why} is {chosen}, but {entry.kind} {entry.name!r} is defined with {fixed}; leave "
                f"algorithm.loss_agg_mode unset, or choose a loss and an estimator that agree"
            )
        chosen, why = fixed, f"the aggregation of {entry.kind} {entry.name!r}"
    return chosen or DEFAULT_AGGREGATION


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Whether the estimator or the loss reads what a second model says.  Raises: ConfigError."""
    return any(
        "critic" in COLUMNS[name].roles
        for entry in (
            entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", algorithm.adv_estimator),
            entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss),
        )
        for name in entry.columns
        if name in COLUMNS
    )


def algorithm_checks(config: TrainConfig) -> list[Callable[[], object]]:
    """What `check` looks at in the mathematics and the updates."""
    algorithm = config.algorithm
    return [
        partial(_check_wrapper, algorithm),
        partial(_check_kl_controller, algorithm.kl),
        partial(_check_correction, algorithm),
        partial(_check_group, config),
        partial(_check_aggregation, algorithm),
        partial(_check_overlong, config),
        partial(_check_updates, "actor", config.actor, config.data),
        partial(_check_critic, config),
        partial(_check_teacher, config),
    ]


def _check_kl_controller(kl: KLConfig) -> None:
    if kl.controller == "adaptive" and kl.where != "reward":
        raise ConfigError(
            f"algorithm.kl.controller=adaptive follows the KL that is taken from the reward, and algorithm.kl.where is "
            f"{kl.where}; set algorithm.kl.where=reward, or algorithm.kl.controller=fixed"
        )


def _check_wrapper(algorithm: AlgorithmConfig) -> None:
    """An option of `cpo` that names a function, which would not be looked for before the first step."""
    name = algorithm.adv_options.get("wrap_method")
    if isinstance(name, str):
        entry_at(WRAPPERS, "algorithm.adv_options.wrap_method", name)


def _check_aggregation(algorithm: AlgorithmConfig) -> None:
    entry = entry_at(AGGREGATIONS, "algorithm.loss_agg_mode", aggregation(algorithm))
    required = [name for name, default in entry.options.items() if default is REQUIRED]
    if unknown := [name for name in (*entry.parameters, *required) if name not in AGGREGATED]:
        raise ConfigError(
            f"algorithm.loss_agg_mode={entry.name} takes {unknown[0]!r}, which nobody gives it; there is "
            f"{', '.join(AGGREGATED)}; give it a default after the `*`, or take it out"
        )


def _check_correction(algorithm: AlgorithmConfig) -> None:
    correction = algorithm.correction
    kinds = (("weight", WEIGHTS), ("rejection", REJECTIONS))
    loss = entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    if correction.weight is not None and loss.marks.get("corrects"):
        raise ConfigError(
            f"policy loss {loss.name!r} weighs tokens by trainer against sampler itself, and "
            f"algorithm.correction.weight={correction.weight} would do it twice; unset it, or choose ppo_clip"
        )
    if correction.old_log_probs == "rollout":
        for name, registry in kinds:
            chosen = correction[name]
            reads = entry_at(registry, f"algorithm.correction.{name}", chosen).columns if chosen is not None else ()
            if {"old_log_probs", "rollout_log_probs"} <= set(reads):
                raise ConfigError(
                    f"algorithm.correction.{name}={correction[name]} compares trainer and sampler, and "
                    "algorithm.correction.old_log_probs=rollout takes the sampler's word for both; unset one of them"
                )


def _check_group(config: TrainConfig) -> None:
    if config.rollout.n > 1:
        return
    entry = entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", config.algorithm.adv_estimator)
    if "uid" in entry.columns:
        raise ConfigError(
            f"rollout.n=1, but {entry.name!r} compares the answers to one prompt; set rollout.n to 2 or more, or "
            "choose an estimator that does not (gae, reinforce_plus_plus)"
        )
    if config.algorithm.filter.name is not None:
        raise ConfigError(
            f"rollout.n=1, but algorithm.filter.name={config.algorithm.filter.name} judges groups of answers to one "
            "prompt; set rollout.n to 2 or more, or unset the filter"
        )


def _check_overlong(config: TrainConfig) -> None:
    overlong, limit = config.algorithm.overlong, config.data.max_response_length
    if overlong.penalty > 0 and overlong.buffer_length >= limit:
        raise ConfigError(
            f"algorithm.overlong.buffer_length={overlong.buffer_length} must be below "
            f"data.max_response_length={limit}, whose last part it is; try {max(1, limit // 4)}"
        )


def _check_updates(key: str, role: ActorConfig, data: DataConfig) -> None:
    check_optim(f"{key}.optim", role.optim)
    batch, mini_batch = data.train_batch_size, role.mini_batch_size or data.train_batch_size
    if batch % mini_batch:
        near = " or ".join(map(str, nearest_divisors(batch, mini_batch)))
        raise ConfigError(
            f"{key}.mini_batch_size={mini_batch} must divide data.train_batch_size={batch} (both in prompts); "
            f"try {near}"
        )
    longest = data.max_prompt_length + data.max_response_length
    if role.max_tokens_per_micro_batch is not None and role.max_tokens_per_micro_batch < longest:
        raise ConfigError(
            f"{key}.max_tokens_per_micro_batch={role.max_tokens_per_micro_batch} cannot hold one row of "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens; set it to {longest} or more"
        )


def check_optim(key: str, optim: OptimConfig) -> None:
    """Raises: ConfigError."""
    for name, default in (("state_dtype", "float32"), ("weight_rounding", None)):
        if optim.name != "adamw" and optim[name] != default:
            raise ConfigError(f"{key}.{name}={optim[name]} is for adamw, and {key}.name is {optim.name}; unset one")


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next to `wanted`: the largest below and the smallest above, where there are such."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below, above = [each for each in divisors if each < wanted], [each for each in divisors if each > wanted]
    return [*below[-1:], *above[:1]]


def _check_critic(config: TrainConfig) -> None:
    critic, steps = config.critic, config.trainer.total_steps
    if uses_critic(config.algorithm):
        _check_critic_loss(config)
        _check_updates("critic", critic, config.data)
        if steps is not None and critic.warmup_steps >= steps:
            raise ConfigError(
                f"critic.warmup_steps={critic.warmup_steps} leaves no step of trainer.total_steps={steps} to the policy"
            )
    elif critic.warmup_steps > 0:
        raise ConfigError(
            f"critic.warmup_steps={critic.warmup_steps}, but no critic is trained: neither estimator "
            f"{config.algorithm.adv_estimator!r} nor loss {config.algorithm.policy_loss!r} reads values"
        )


def _check_critic_loss(config: TrainConfig) -> None:
    """A value model gives values, a process reward model log-probs; the loss says which of them is trained."""
    name = config.critic.value_loss
    estimator = entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", config.algorithm.adv_estimator)
    wanted, output = (
        ("log_probs", "process_rewards") if "process_rewards" in estimator.columns else ("values", "values")
    )
    if wanted not in entry_at(VALUE_LOSSES, "critic.value_loss", name).columns:
        fitting = [entry.name for entry in VALUE_LOSSES if wanted in entry.columns]
        raise ConfigError(
            f"{estimator.name!r} reads {output}, and critic.value_loss={name} trains a model that does not give them; "
            f"set critic.value_loss to {' or '.join(fitting)}"
        )


def _check_teacher(config: TrainConfig) -> None:
    estimator = entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", config.algorithm.adv_estimator)
    if "teacher_log_probs" in estimator.columns and not config.teacher.model_paths and config.teacher.hint is None:
        raise ConfigError(
            f"{estimator.name!r} reads what a teacher says, and without a hint the policy would be its own teacher and "
            "agree with itself; set teacher.hint (reference, peer, own, judge) or teacher.model_paths"
        )
