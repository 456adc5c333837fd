# SPDX-License-Identifier: Apache-2.0
"""Consistency rules of the algorithm, its losses and corrections, and of updates. No torch, as in `checks`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from whet import registry
from whet.columns import COLUMNS
from whet.config import schema
from whet.config.section import Place, entry_at
from whet.errors import ConfigError

DEFAULT_AGGREGATION = "token-mean"
AGGREGATED = ("values", "response_mask", "num_tokens", "num_sequences", "fixed_length")  # parameters of an aggregation


def aggregation(algorithm: schema.AlgorithmConfig) -> str:
    """The aggregation of token losses: the one that the loss or the estimator fixes, else the one in the config.

    Raises: ConfigError where two of these disagree."""
    loss = entry_at(registry.POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    estimator = _estimator(algorithm)
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


def uses_critic(algorithm: schema.AlgorithmConfig) -> bool:
    """Tells whether the estimator or the loss reads a column of the critic.  Raises: ConfigError."""
    loss = entry_at(registry.POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    read = {*_estimator(algorithm).columns, *loss.columns}
    return any("critic" in COLUMNS[name].roles for name in read if name in COLUMNS)


def algorithm_rule(algorithm: schema.AlgorithmConfig, at: Place) -> Iterator[str]:
    """Checks KL, overlong penalty, teacher, correction and aggregation."""
    wrapper = algorithm.adv_options.get("wrap_method")
    if isinstance(wrapper, str):  # the option of `cpo` that names a registered function
        entry_at(registry.WRAPPERS, "algorithm.adv_options.wrap_method", wrapper)
    kl, overlong, limit = algorithm.kl, algorithm.overlong, at.whole["data"].max_response_length
    if kl.controller == "adaptive" and kl.where != "reward":
        yield (
            f"algorithm.kl.controller=adaptive needs the KL in the reward, but algorithm.kl.where is {kl.where}; set "
            "algorithm.kl.where=reward, or algorithm.kl.controller=fixed"
        )
    if overlong.penalty > 0 and overlong.buffer_length >= limit:
        yield (
            f"algorithm.overlong.buffer_length={overlong.buffer_length} must be below "
            f"data.max_response_length={limit}, since the buffer is the end of that length; try {max(1, limit // 4)}"
        )
    estimator, teacher = _estimator(algorithm), at.whole["teacher"]
    if "teacher_log_probs" in estimator.columns and not teacher.model_paths and teacher.hint is None:
        yield (
            f"{estimator.name!r} reads teacher_log_probs, but without a teacher or a hint these are the policy's own; "
            "set teacher.hint (reference, peer, own, judge) or teacher.model_paths"
        )
    given = teacher.hint_options
    if teacher.hint == "judge" and ("complete" in given) == ("endpoint" in given and "model" in given):
        yield (
            "teacher.hint=judge requires either teacher.hint_options.complete, a function, or "
            f"teacher.hint_options.endpoint and .model; found {', '.join(given) or 'none of them'}; set one of the two"
        )
    yield from _correction(algorithm)
    entry = entry_at(registry.AGGREGATIONS, "algorithm.loss_agg_mode", aggregation(algorithm))
    required = [name for name, default in entry.options.items() if default is registry.REQUIRED]
    if unknown := [name for name in (*entry.parameters, *required) if name not in AGGREGATED]:
        yield (
            f"algorithm.loss_agg_mode={entry.name} has a parameter {unknown[0]!r}; an aggregation may have "
            f"{', '.join(AGGREGATED)}; make it an option with a default after the `*`, or remove it"
        )


def _correction(algorithm: schema.AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    loss = entry_at(registry.POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    if correction.weight is not None and loss.marks.get("corrects"):
        yield (
            f"policy loss {loss.name!r} corrects for the mismatch of trainer and rollout itself, and "
            f"algorithm.correction.weight={correction.weight} would correct it twice; unset "
            "algorithm.correction.weight, or set algorithm.policy_loss=ppo_clip"
        )
    given = correction.rejection_options
    bounds = [given.get("high"), given.get("low") if given.get("form") == "k1" else None]  # the others are never < 0
    if correction.rejection == "divergence" and all(each in (None, math.inf, -math.inf) for each in bounds):
        yield (
            "algorithm.correction.rejection=divergence has no bound, so no token is rejected; set "
            "algorithm.correction.rejection_options.high, such as 0.3: the k3 of a token that became twice as likely"
        )
    if correction.old_log_probs == "trainer":
        return
    for name, kind in (("weight", registry.WEIGHTS), ("rejection", registry.REJECTIONS)):
        chosen = correction[name]
        reads = entry_at(kind, f"algorithm.correction.{name}", chosen).columns if chosen is not None else ()
        if {"old_log_probs", "rollout_log_probs"} <= set(reads):
            is_same = correction.old_log_probs == "rollout"
            does = "uses the rollout's for both" if is_same else "has the former in the loss alone"
            yield (
                f"algorithm.correction.{name}={chosen} compares the trainer's log-probs with the rollout's, but "
                f"algorithm.correction.old_log_probs={correction.old_log_probs} {does}; unset one of these two keys"
            )
    if correction.old_log_probs == "interpolated" and algorithm.kl.where == "reward":
        yield (
            "algorithm.kl.where=reward reads old log-probs before the loss, but algorithm.correction.old_log_probs="
            "interpolated has them in the loss alone; set algorithm.kl.where=loss, or unset one of these two keys"
        )


def group_rule(rollout: schema.RolloutConfig, at: Place) -> Iterator[str]:
    """Requires several responses a prompt for estimators and filters that compare them."""
    if rollout.n > 1 or not isinstance(at.whole, schema.TrainConfig):
        return
    entry, chosen = _estimator(at.whole.algorithm), at.whole.algorithm.filter.name
    if "uid" in entry.columns:
        yield (
            f"rollout.n=1, but {entry.name!r} compares the responses to one prompt; set rollout.n to 2 or more, or "
            "algorithm.adv_estimator to one that does not (gae, reinforce_plus_plus)"
        )
    if chosen is not None:
        yield (
            f"rollout.n=1, but algorithm.filter.name={chosen} compares the responses to one prompt; set rollout.n to 2 "
            "or more, or unset algorithm.filter.name"
        )


def updates_rule(role: schema.ActorConfig, at: Place) -> Iterator[str]:
    """Checks the mini-batch and micro-batch sizes of a trained role."""
    if at.key == "critic" and not uses_critic(at.whole["algorithm"]):
        return
    data: schema.DataConfig = at.whole["data"]
    batch, mini_batch = data.train_batch_size, role.mini_batch_size or data.train_batch_size
    if batch % mini_batch:
        near = " or ".join(map(str, nearest_divisors(batch, mini_batch)))
        yield (
            f"{at.key}.mini_batch_size={mini_batch} must divide data.train_batch_size={batch} (both in prompts); "
            f"try {near}"
        )
    longest = data.max_prompt_length + data.max_response_length
    if role.max_tokens_per_micro_batch is not None and role.max_tokens_per_micro_batch < longest:
        yield (
            f"{at.key}.max_tokens_per_micro_batch={role.max_tokens_per_micro_batch} cannot hold one row of "
            f"data.max_prompt_length + data.max_response_length = {longest} tokens; set it to {longest} or more"
        )


def optim_rule(optim: schema.OptimConfig, at: Place) -> Iterator[str]:
    """Allows the options of AdamW's states with AdamW only."""
    for name, default in (("state_dtype", "float32"), ("weight_rounding", None)):
        if optim.name != "adamw" and optim[name] != default:
            yield f"{at.of(name)}={optim[name]} is an option of adamw, but {at.of('name')} is {optim.name}; unset one"


def critic_rule(critic: schema.CriticConfig, at: Place) -> Iterator[str]:
    """Checks that the value loss trains the model that the estimator reads: a value model or a process reward model."""
    algorithm, steps = at.whole["algorithm"], at.whole["trainer"].total_steps
    if not uses_critic(algorithm):
        if critic.warmup_steps > 0:
            yield (
                f"critic.warmup_steps={critic.warmup_steps}, but no critic is trained: neither estimator "
                f"{algorithm.adv_estimator!r} nor loss {algorithm.policy_loss!r} reads values"
            )
        return
    if steps is not None and critic.warmup_steps >= steps:
        yield (
            f"critic.warmup_steps={critic.warmup_steps} must be below trainer.total_steps={steps}, or the policy is "
            "never trained; lower it"
        )
    estimator = _estimator(algorithm)
    wanted, output = (
        ("log_probs", "process_rewards") if "process_rewards" in estimator.columns else ("values", "values")
    )
    if wanted not in entry_at(registry.VALUE_LOSSES, "critic.value_loss", critic.value_loss).columns:
        fitting = [entry.name for entry in registry.VALUE_LOSSES if wanted in entry.columns]
        yield (
            f"{estimator.name!r} reads {output}, but critic.value_loss={critic.value_loss} trains a model without that "
            f"output; set critic.value_loss to {' or '.join(fitting)}"
        )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor of `number` below `wanted` and the smallest above it, where they exist."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below, above = [each for each in divisors if each < wanted], [each for each in divisors if each > wanted]
    return [*below[-1:], *above[:1]]


def _estimator(algorithm: schema.AlgorithmConfig) -> registry.Entry:
    return entry_at(registry.ADV_ESTIMATORS, "algorithm.adv_estimator", algorithm.adv_estimator)
