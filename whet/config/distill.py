# SPDX-License-Identifier: Apache-2.0
"""The config of `whet distill`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from whet.config.schema import ExamplesConfig, SupervisedDataConfig, TrainerConfig
from whet.config.section import Choice, SectionPlace, Values, key
from whet.errors import ConfigError
from whet.registry import DIVERGENCES

OTHERS = "*"  # in `teachers`
TEACHERS = (
    "teacher by data source, * for all others: a model folder or hub name, or the address of an OpenAI-compatible "
    "server with prompt_logprobs (http://127.0.0.1:8000/v1)"
)
TOP_K = (
    "number of tokens compared at each position: the teacher's most likely; all others together count as one more; "
    "unset: the whole vocabulary, not for a teacher on a server"
)
ALIGNMENT = (
    "ids: teachers have the student's tokens under the student's ids; bytes: they may have another vocabulary, and are "
    "compared where a token of each begins, over the tokens of equal bytes"
)


class DistillDataConfig(SupervisedDataConfig):
    """The examples of `whet distill`."""

    data_source: str = key("", "data source of rows without a field data_source")


class DistillConfig(ExamplesConfig):
    """The config of `whet distill`."""

    data: DistillDataConfig = DistillDataConfig()
    loss: Annotated[str, Choice(DIVERGENCES, "loss_options")] = key("forward_kl", "registered divergence")
    loss_options: Values = key({}, "options of the divergence")
    teachers: dict[str, str] = key({}, TEACHERS)
    alignment: Literal["ids", "bytes"] = key("ids", ALIGNMENT)
    top_k: PositiveInt | None = key(64, TOP_K)
    temperature: PositiveFloat = key(1.0, "temperature of student and teacher, in the loss and in sampling")
    on_policy: NonNegativeFloat = key(
        0.0, "share of rows whose last response is sampled by the student, not read from the data", le=1.0
    )
    max_response_length: PositiveInt = key(256, "most tokens sampled by the student (with the prompt: data.max_length)")
    trainer: TrainerConfig = TrainerConfig(experiment_name="distill")

    command: ClassVar[str] = "distill"

    def problems(self, at: SectionPlace) -> Iterator[ConfigError]:
        if not self.teachers:
            yield ConfigError("teachers", {}, "a teacher by data source", "set 'teachers={*: MODEL}' for one teacher")
        served = [source for source, where in self.teachers.items() if is_server(where)]
        if self.alignment == "bytes" and self.top_k is None:
            yield ConfigError("top_k", None, "a number of tokens, with alignment=bytes", "set it, such as to 64")
        if served and self.top_k is None:
            expected = f"a number of tokens, which the server of teachers.{served[0]} is asked for"
            yield ConfigError("top_k", None, expected, "set it, at most to the server's own limit (vLLM: max_logprobs)")
        if served and self.alignment == "bytes":
            expected = f"ids: a server does not tell the bytes of the tokens (teachers.{served[0]})"
            yield ConfigError("alignment", "bytes", expected, "name the teacher's folder")
        if served and self.temperature != 1.0:
            expected = f"1, the temperature of the log-probs of a server (teachers.{served[0]})"
            yield ConfigError("temperature", self.temperature, expected, "unset it, or name the teacher's folder")


def frozen_models(config: DistillConfig) -> dict[str, str]:
    """Returns the paths of the teachers that are not on a server, by role."""
    return {f"teacher:{name}": path for name, path in config.teachers.items() if not is_server(path)}


def is_server(teacher: str) -> bool:
    """Tells whether a teacher is the address of a server."""
    return teacher.startswith(("http://", "https://"))
