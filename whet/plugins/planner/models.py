# SPDX-License-Identifier: Apache-2.0
"""The models of a run by role, as the setups of the trainers have them. It loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from whet.columns import COLUMNS, SCORED_BY
from whet.config.algorithm_checks import uses_critic
from whet.config.distill import DistillConfig, is_server
from whet.config.preference import PreferenceConfig
from whet.config.schema import EngineConfig, RunConfig, TrainConfig
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS


def trained_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the trained models by role."""
    found = {"actor": str(config.model.path)}
    if config.trains_on == "prompts" and uses_critic(config.algorithm):
        found["critic"] = str(config.critic.model_path or config.model.path)
    return found


def frozen_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the models that are only read, by role. A reference that is the base of an adapter needs no
    memory of its own."""
    policy, has_adapter = str(config.model.path), config.model.lora.rank is not None
    match config:
        case DistillConfig():
            return {f"teacher:{name}": path for name, path in config.teachers.items() if not is_server(path)}
        case PreferenceConfig():
            own = config.reference.model_path
            is_read = config.reads_reference and (own is not None or config.reference.mode != "cached")
            return {"ref": str(own or policy)} if is_read and (own is not None or not has_adapter) else {}
        case TrainConfig():
            return dict(_of_columns(config, policy, has_adapter))
    return {}


def _of_columns(config: TrainConfig, policy: str, has_adapter: bool) -> Iterator[tuple[str, str]]:
    read, own, reward_model = {*_with_reads(_columns(config))}, config.ref.model_path, config.reward_model
    reads_ref = config.algorithm.kl.where != "none" or any("ref" in COLUMNS[name].roles for name in read)
    if reads_ref and (own is not None or not has_adapter):
        yield "ref", str(own or policy)
    if "teacher_log_probs" in read:
        yield from ((f"teacher:{name}", path) for name, path in config.teacher.model_paths.items())
    if reward_model.model_path is not None:
        yield "reward_model", reward_model.model_path


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
