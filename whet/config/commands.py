# SPDX-License-Identifier: Apache-2.0
"""The commands that read a config: trainers, `whet eval` and `whet generate`."""

from __future__ import annotations

from collections.abc import Collection

from whet.config.schema import EvalConfig, GenerateConfig
from whet.config.section import Section
from whet.registry import TRAINERS, trainer_of

READERS: dict[str, type[Section]] = {"eval": EvalConfig, "generate": GenerateConfig}


def commands() -> list[str]:
    """Returns the shipped commands that read a config, trainers first."""
    return [*TRAINERS.shipped, *READERS]


def schema_of(command: str) -> type[Section]:
    """The config schema of the command named `command`; the schema stores this name.  Raises: RegistryError."""
    if command in READERS:
        return READERS[command]
    trainer = trainer_of(command)
    schema: type[Section] = trainer.marked("config")
    schema.command = trainer.name
    return schema


def likely_command(sections: Collection[str]) -> str:
    """The shipped trainer whose config has most of the given sections and keys, at equal numbers one without further
    sections. Used for run folders that do not name their trainer."""

    def likeness(name: str) -> tuple[int, bool]:
        own = schema_of(name).model_fields.keys()
        return len(own & {*sections}), own <= {*sections}

    return max(TRAINERS.shipped, key=likeness)  # the first of equals
