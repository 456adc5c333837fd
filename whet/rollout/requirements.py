# SPDX-License-Identifier: Apache-2.0
"""Requirements of a rollout engine that is not built yet: its memory, and a check that it runs on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.config.schema import KV_CACHE_BYTES, SamplingConfig
from whet.devices import room_for_tensors
from whet.registry import ROLLOUT_ENGINES, Entry
from whet.rollout.protocol import SamplingParams

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


def requirement(entry: Entry, mark: str) -> Callable[..., Any] | None:
    """Returns the function that an engine's registration names by `mark`, for questions before an engine is built. A
    class derived from a registered one has its functions; where they are class methods, those that it overrides. None
    without a function. The marks, all optional:

    planned_by(decoding, options) -> RolloutBytes: the memory of an engine.
    checked_by(model, longest, options): can an engine start here, and sample `longest` tokens?  Raises: ConfigError.
    refuses(sampling, options) -> ConfigError or None: the error for a sampling parameter that it does not support.
    media_checked_by(encoders, media, whose): can it read media of the prompt named `whose`?  Raises: EngineError."""
    if mark in entry.marks:
        return entry.marked(mark)  # type: ignore[no-any-return]
    bases = [ROLLOUT_ENGINES.registered(each) for each in getattr(entry.function, "__mro__", ())]
    found = next((each.marked(mark) for each in bases if each is not None and mark in each.marks), None)
    is_method = isinstance(getattr(found, "__self__", None), type)
    return getattr(entry.function, found.__name__) if found is not None and is_method else found  # type: ignore[no-any-return]
