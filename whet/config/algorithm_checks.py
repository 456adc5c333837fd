# SPDX-License-Identifier: Apache-2.0
"""Rules about algorithms, losses, corrections and updates. As in `checks`, nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from whet.columns import COLUMNS
from whet.config.choice import entry_at
from whet.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    OptimConfig,
    RolloutConfig,
    TrainConfig,
)
from whet.config.section import Place
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
    Entry,
)

DEFAULT_AGGREGATION = "token-mean"
AGGREGATED = ("values", "response_mask", "num_tokens", "num_sequences", "fixed_length")  # what there is to aggregate


def aggregation(algorithm: AlgorithmConfig) -> str:
    """The aggregation of per-token losses: what the loss or the estimator fixes, else what the config says.

    Raises: ConfigError where two of the three disagree."""
    loss = entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
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


def uses_critic(algorithm: AlgorithmConfig) -> bool:
    """Tells whether the estimator or the loss reads what a second model says.  Raises: ConfigError."""
    loss = entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    read = {*_estimator(algorithm).columns, *loss.columns}
    return any("critic" in COLUMNS[name].roles for name in read if name in COLUMNS)


def algorithm_rule(algorithm: AlgorithmConfig, at: Place) -> Iterator[str]:
    """The mathematics."""
    wrapper = algorithm.adv_options.get("wrap_method")
    if isinstance(wrapper, str):  # an option of `cpo` that names a function
        entry_at(WRAPPERS, "algorithm.adv_options.wrap_method", wrapper)
    kl, overlong, limit = algorithm.kl, algorithm.overlong, at.whole["data"].max_response_length
    if kl.controller == "adaptive" and kl.where != "reward":
        yield (
            f"algorithm.kl.controller=adaptive follows the KL that is taken from the reward, and algorithm.kl.where is "
            f"{kl.where}; set algorithm.kl.where=reward, or algorithm.kl.controller=fixed"
        )
    if overlong.penalty > 0 and overlong.buffer_length >= limit:
        yield (
            f"algorithm.overlong.buffer_length={overlong.buffer_length} must be below "
            f"data.max_response_length={limit}, whose last part it is; try {max(1, limit // 4)}"
        )
    estimator, teacher = _estimator(algorithm), at.whole["teacher"]
    if "teacher_log_probs" in estimator.columns and not teacher.model_paths and teacher.hint is None:
        yield (
            f"{estimator.name!r} reads what a teacher says, and without a hint the policy would be its own teacher and "
            "agree with itself; set teacher.hint (reference, peer, own, judge) or teacher.model_paths"
        )
    yield from _correction(algorithm)
    entry = entry_at(AGGREGATIONS, "algorithm.loss_agg_mode", aggregation(algorithm))
    required = [name for name, default in entry.options.items() if default is REQUIRED]
    if unknown := [name for name in (*entry.parameters, *required) if name not in AGGREGATED]:
        yield (
            f"algorithm.loss_agg_mode={entry.name} takes {unknown[0]!r}, which nobody gives it; there is "
            f"{', '.join(AGGREGATED)}; give it a default after the `*`, or take it out"
        )


def _correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction, loss = algorithm.correction, entry_at(POLICY_LOSSES, "algorithm.policy_loss", algorithm.policy_loss)
    if correction.weight is not None and loss.marks.get("corrects"):
        yield (
            f"policy loss {loss.name!r} weighs tokens by trainer against sampler itself, and "
            f"algorithm.correction.weight={correction.weight} would do it twice; unset it, or choose ppo_clip"
        )
    if correction.old_log_probs == "trainer":
        return
    for name, registry in (("weight", WEIGHTS), ("rejection", REJECTIONS)):
        chosen = correction[name]
        reads = entry_at(registry, f"algorithm.correction.{name}", chosen).columns if chosen is not None else ()
        if {"old_log_probs", "rollout_log_probs"} <= set(reads):
            yield (
                f"algorithm.correction.{name}={chosen} compares trainer and sampler, and "
                "algorithm.correction.old_log_probs=rollout takes the sampler's word for both; unset one of them"
            )


def group_rule(rollout: RolloutConfig, at: Place) -> Iterator[str]:
    """A group has several answers."""
    if rollout.n > 1 or not isinstance(at.whole, TrainConfig):
        return
    entry, chosen = _estimator(at.whole.algorithm), at.whole.algorithm.filter.name
    if "uid" in entry.columns:
        yield (
            f"rollout.n=1, but {entry.name!r} compares the answers to one prompt; set rollout.n to 2 or more, or "
            "choose an estimator that does not (gae, reinforce_plus_plus)"
        )
    if chosen is not None:
        yield (
            f"rollout.n=1, but algorithm.filter.name={chosen} judges groups of answers to one "
            "prompt; set rollout.n to 2 or more, or unset the filter"
        )


def updates_rule(role: ActorConfig, at: Place) -> Iterator[str]:
    """Mini-batches and micro-batches of a role that is trained."""
    if at.key == "critic" and not uses_critic(at.whole["algorithm"]):
        return
    data: DataConfig = at.whole["data"]
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


def optim_rule(optim: OptimConfig, at: Place) -> Iterator[str]:
    """Options of AdamW's states."""
    for name, default in (("state_dtype", "float32"), ("weight_rounding", None)):
        if optim.name != "adamw" and optim[name] != default:
            yield f"{at.of(name)}={optim[name]} is for adamw, and {at.of('name')} is {optim.name}; unset one"


def critic_rule(critic: CriticConfig, at: Place) -> Iterator[str]:
    """A value model gives values, a process reward model log-probs; the loss says which of them is trained."""
    algorithm, steps = at.whole["algorithm"], at.whole["trainer"].total_steps
    if not uses_critic(algorithm):
        if critic.warmup_steps > 0:
            yield (
                f"critic.warmup_steps={critic.warmup_steps}, but no critic is trained: neither estimator "
                f"{algorithm.adv_estimator!r} nor loss {algorithm.policy_loss!r} reads values"
            )
        return
    if steps is not None and critic.warmup_steps >= steps:
        yield f"critic.warmup_steps={critic.warmup_steps} leaves no step of trainer.total_steps={steps} to the policy"
    estimator = _estimator(algorithm)
    wanted, output = (
        ("log_probs", "process_rewards") if "process_rewards" in estimator.columns else ("values", "values")
    )
    if wanted not in entry_at(VALUE_LOSSES, "critic.value_loss", critic.value_loss).columns:
        fitting = [entry.name for entry in VALUE_LOSSES if wanted in entry.columns]
        yield (
            f"{estimator.name!r} reads {output}, and critic.value_loss={critic.value_loss} trains a model that does "
            f"not give them; set critic.value_loss to {' or '.join(fitting)}"
        )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next to `wanted`: the largest below and the smallest above, where there are such."""
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    below, above = [each for each in divisors if each < wanted], [each for each in divisors if each > wanted]
    return [*below[-1:], *above[:1]]


def _estimator(algorithm: AlgorithmConfig) -> Entry:
    return entry_at(ADV_ESTIMATORS, "algorithm.adv_estimator", algorithm.adv_estimator)
