# SPDX-License-Identifier: Apache-2.0
"""What the collector asks of a rollout engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from whet.types import FinishReason


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One answer to sample. Equal `key`s draw equal random numbers, whatever else is sampled beside them."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    key: int  # from whet.keyed.key


@dataclass(frozen=True)
class Completion:
    """The sampled tokens, the stop token included where one ended them."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # log_softmax(logits / temperature), before top-p and top-k; temperature 1 when greedy
    finish_reason: FinishReason
    policy_version: int


class RolloutEngine(Protocol):
    """Samples from a policy whose weights come from outside."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError for a request that can never fit."""
        ...

    def attach(self, module: PreTrainedModel, version: int) -> None:
        """Samples from `module` itself, without a copy, from now on."""
        ...

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes a module of its own like `module`, without adapters and in the rollout dtype, for `load_weights`."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module with weights under their Hugging Face names."""
        ...

    def sleep(self) -> None:
        """Frees what sampling alone needs (the cache of keys and values)."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`."""
        ...
