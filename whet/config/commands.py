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
    """Returns the config schema of a command. The schema stores the command's name.  Raises: RegistryError."""
    if command in READERS:
        return READERS[command]
    trainer = trainer_of(command)
    schema: type[Section] = trainer.marked("config")
    schema.command = trainer.name
    return schema


def likely_command(sections: Collection[str]) -> str:
    """Guesses the trainer of a run folder that does not name it: the shipped trainer whose config has most of the given
    sections and keys. Among equals it prefers a trainer whose config has no other sections and keys."""

    def likeness(name: str) -> tuple[int, bool]:
        own = schema_of(name).model_fields.keys()
        return len(own & {*sections}), own <= {*sections}

    return max(TRAINERS.shipped, key=likeness)  # the first of equals
