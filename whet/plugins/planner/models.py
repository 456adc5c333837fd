# SPDX-License-Identifier: Apache-2.0
"""The models of a run by role, as the setups of the trainers have them. Shipped trainers need no torch for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from whet.columns import COLUMNS, SCORED_BY
from whet.config.algorithm_checks import uses_critic
from whet.config.distill import is_server
from whet.config.schema import EngineConfig, RunConfig, TrainConfig
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS, trainer_of


def trained_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the trained models by role."""
    if config.command not in FROZEN:
        return _of_setup(config, trained=True)
    found = {"actor": str(config.model.path)}
    if config.trains_on == "prompts" and uses_critic(config.algorithm):
        found["critic"] = str(config.critic.model_path or config.model.path)
    return found


def frozen_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the models that are only read, by role. A reference that is the base of an adapter needs no
    memory of its own."""
    if config.command not in FROZEN:
        return _of_setup(config, trained=False)
    return dict(FROZEN[config.command](config))


def _of_setup(config: RunConfig, *, trained: bool) -> dict[str, str]:
    """Returns the paths of the models in the setup with which a run's trainer is registered. It loads torch."""
    model = config.model.model_copy(update={"dtype": "float32"})  # a setup has a named dtype, which changes no path
    setup = trainer_of(config.command).marked("setup")(config.model_copy(update={"model": model}))
    roles = {role: each for role, each in setup.roles.items() if (role in setup.objectives) == trained}
    return {role: str(each.model_path) for role, each in roles.items()}


def _of_columns(config: TrainConfig) -> Iterator[tuple[str, str]]:
    read, own, reward_model = {*_with_reads(_columns(config))}, config.ref.model_path, config.reward_model
    reads_ref = config.algorithm.kl.where != "none" or any("ref" in COLUMNS[name].roles for name in read)
    if reads_ref and (own is not None or config.model.lora.rank is None):
        yield "ref", str(own or config.model.path)
    if "teacher_log_probs" in read:
        yield from ((f"teacher:{name}", path) for name, path in config.teacher.model_paths.items())
    if reward_model.model_path is not None:
        yield "reward_model", reward_model.model_path


def _of_preferences(config: Any) -> Iterator[tuple[str, str]]:
    own = config.reference.model_path
    is_read = config.reads_reference and (own is not None or config.reference.mode != "cached")
    if is_read and (own is not None or config.model.lora.rank is None):
        yield "ref", str(own or config.model.path)


def _of_teachers(config: Any) -> Iterator[tuple[str, str]]:
    yield from ((f"teacher:{name}", path) for name, path in config.teachers.items() if not is_server(path))


# The frozen models of shipped trainers, without torch. Those of any other trainer are in its setup, which loads torch.
FROZEN: dict[str, Callable[[Any], Iterable[tuple[str, str]]]] = {
    "train": _of_columns,
    "preference": _of_preferences,
    "distill": _of_teachers,
    "sft": lambda config: (),
    "train-reward": lambda config: (),
}


def _columns(config: TrainConfig) -> Iterator[str]:
    """Yields the columns that the functions of a config read."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    chosen = [(ADV_ESTIMATORS, algorithm.adv_estimator), (POLICY_LOSSES, algorithm.policy_loss)]
    chosen += [(WEIGHTS, correction.weight)] if correction.weight is not None else []
    chosen += [(REJECTIONS, correction.rejection)] if correction.rejection is not None else []
    chosen += [(VALUE_LOSSES, config.critic.value_loss)] if uses_critic(algorithm) else []
    for registry, name in chosen:
        yield from registry[name].columns
    if config.reward_model.source is not None:
        yield SCORED_BY[config.reward_model.source]


def _with_reads(names: Iterable[str]) -> Iterator[str]:
    """Yields columns, and the columns that their providers read."""
    for name in names:
        if name in COLUMNS:
            yield name
            yield from _with_reads(COLUMNS[name].reads)


def engine_of(config: RunConfig, role: str) -> tuple[EngineConfig, str]:
    """Returns a role's training engine, and the config key of the engine's options. Teachers have that of `ref`."""
    if config.trains_on == "examples":
        return config.engine, "engine.options"
    section = "ref" if role.startswith("teacher:") else role
    return config[section].engine, f"{section}.engine.options"
