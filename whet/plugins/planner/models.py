# SPDX-License-Identifier: Apache-2.0
"""The models of a run by role, as in the setup of its trainer.

A trainer with the mark `frozen_models` trains the actor and, on prompts, the critic. Its models are found without a
setup, for a trainer that ships with whet also without torch."""

from __future__ import annotations

from whet.config.algorithm_checks import uses_critic
from whet.config.schema import EngineConfig, RunConfig
from whet.registry import trainer_of


def trained_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the trained models by role."""
    if "frozen_models" not in trainer_of(config.command).marks:
        return _of_setup(config, trained=True)
    found = {"actor": str(config.model.path)}
    if config.trains_on == "prompts" and uses_critic(config.algorithm):
        found["critic"] = str(config.critic.model_path or config.model.path)
    return found


def frozen_models(config: RunConfig) -> dict[str, str]:
    """Returns the paths of the models that are only read, by role. A reference that is the base of an adapter needs no
    memory of its own."""
    entry = trainer_of(config.command)
    if "frozen_models" not in entry.marks:
        return _of_setup(config, trained=False)
    found: dict[str, str] = entry.marked("frozen_models")(config)
    return found


def _of_setup(config: RunConfig, *, trained: bool) -> dict[str, str]:
    """Returns the paths of the models in the setup with which a run's trainer is registered. It loads torch."""
    model = config.model.model_copy(update={"dtype": "float32"})  # a setup has a named dtype, which changes no path
    setup = trainer_of(config.command).marked("setup")(config.model_copy(update={"model": model}))
    roles = {role: each for role, each in setup.roles.items() if (role in setup.objectives) == trained}
    return {role: str(each.model_path) for role, each in roles.items()}


def engine_of(config: RunConfig, role: str) -> tuple[EngineConfig, str]:
    """Returns a role's training engine, and the config key of the engine's options. Teachers have that of `ref`."""
    if config.trains_on == "examples":
        return config.engine, "engine.options"
    section = "ref" if role.startswith("teacher:") else role
    return config[section].engine, f"{section}.engine.options"
