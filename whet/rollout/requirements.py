# SPDX-License-Identifier: Apache-2.0
"""Requirements of a rollout engine that is not built yet: its memory, and a check that it runs on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from whet.config.schema import KV_CACHE_BYTES, ModelConfig, SamplingConfig
from whet.devices import room_for_tensors
from whet.errors import ConfigError
from whet.models.encoders.base import Encoders
from whet.rollout.protocol import SamplingParams
from whet.types import Media

Sampling = SamplingParams | SamplingConfig  # of a request, or of a section of the config


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's sequences in tokens: of `prompts` (all in the data, or one limit) and of the longest
    `response`. In runs on examples `prompts` has the lengths of whole examples."""

    prompts: tuple[int, ...]
    response: int

    def spread(self, count: int) -> list[int]:
        """Returns `count` prompt lengths, evenly spaced over the sorted data, the longest first."""
        ordered = sorted(self.prompts, reverse=True)
        return [ordered[index * len(ordered) // count] for index in range(count)]


@dataclass(frozen=True)
class Decoding:
    """Sequences that one process decodes: `rows` of them, `n` for each prompt, their lengths and bytes of memory."""

    rows: int
    n: int  # completions of a prompt
    lengths: Lengths
    token_bytes: int  # keys and values of one token in all layers
    layers: int
    sequence_bytes: int = 0  # states of one sequence in all layers
    most: int = 0  # `rollout.max_batch_size`


@dataclass(frozen=True)
class RolloutBytes:
    """Memory that an engine takes in addition to the model's weights."""

    cache: int  # reserved for keys, values and states
    written: int  # the most of the cache that is used
    is_kept: bool  # whether the cache is kept between two rollouts
    prompt_rows: int  # prompts whose logits exist at once
    prompt_tokens: int  # tokens of prompts that are computed together
    smaller: Mapping[str, Any] = field(default_factory=dict)  # options that would reduce the memory
    host_copies: int = 0  # of the weights, in the host's memory, while new ones are sent


@dataclass(frozen=True)
class CacheRoom:
    """Limits of the key and value cache with `kv_cache_bytes=auto`: other memory, and the most bytes it fills."""

    beside: int = 0  # most bytes of other tensors of the process while there is a cache
    most: float = math.inf  # bytes that the sequences of a step fill

    def bytes(self, device_bytes: int, allocated: int = 0) -> int:
        """Returns the size of the cache: the bytes that the process's other tensors leave free when they take most. The
        process may use `device_bytes` of the accelerator; its tensors have `allocated` now."""
        left = room_for_tensors(device_bytes) - max(self.beside, allocated)
        return max(KV_CACHE_BYTES, int(min(self.most, left)))


@runtime_checkable
class PlansMemory(Protocol):
    """A class of rollout engines that can compute their memory in advance."""

    def planned_bytes(self, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """Returns the memory of an engine with these options. This is a class method."""
        ...


@runtime_checkable
class ChecksAhead(Protocol):
    """A class of rollout engines that can check in advance whether an engine would start on this machine."""

    def check_ahead(self, model: ModelConfig, longest: int, options: Mapping[str, Any]) -> None:
        """Checks that an engine with these options can sample sequences of `longest` tokens. A class method that starts
        no process.  Raises: ConfigError."""
        ...

    def refused(self, sampling: Sampling, options: Mapping[str, Any]) -> ConfigError | None:
        """Returns the error for a sampling parameter that the engine does not support. This is a class method."""
        ...


@runtime_checkable
class ChecksMedia(Protocol):
    """A class of rollout engines that support images only for some models."""

    def check_media(self, encoders: Encoders | None, media: Sequence[Media], whose: str) -> None:
        """Checks that the engine supports media of the prompt named `whose`. A class method.  Raises: EngineError."""
        ...
