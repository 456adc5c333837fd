# SPDX-License-Identifier: Apache-2.0
"""What the collector asks of a rollout engine: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedModel

from whet.types import FinishReason


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. The defaults are off; `temperature` 0 is greedy.

    What changes the choice follows vLLM's order: allowed tokens, bad words, penalties (repetition, frequency,
    presence), temperature, min-p, top-k, top-p.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0  # of the likeliest token's probability (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # of tokens in prompt or answer: l / r where l > 0, l * r elsewhere (CTRL)
    presence_penalty: float = 0.0  # taken off the logit of a token that the answer has (OpenAI)
    frequency_penalty: float = 0.0  # taken off once for each time
    stop: tuple[str, ...] = ()  # the answer ends with the token that completes one of them
    bad_words: tuple[tuple[int, ...], ...] = ()  # never in an answer: the last token is not drawn behind the others
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is drawn


@dataclass(frozen=True)
class Request:
    """One answer to sample. Equal `key`s draw equal random numbers, whatever else is sampled beside them."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    key: int  # from whet.keyed.key


@dataclass(frozen=True)
class Completion:
    """The sampled tokens, the stop token included where one ended them, and all tokens of a stop string.

    The text of an answer is what all of its tokens say (vLLM's include_stop_str_in_output): rewards and environments
    read what is trained on, the stop string and whatever else its last token brought along.
    """

    token_ids: tuple[int, ...]
    # log_softmax(logits / temperature), temperature 1 when greedy, before anything else that changes the choice
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
    stop: str | None = None  # the stop string that ended it
    preemptions: int = field(default=0, compare=False)  # how often it made room for others: no part of the answer


# Which requests, by their numbers, to take on beside those that are unfinished, up to about so many in all.
Claim = Callable[[int, int], Sequence[int]]


class RolloutEngine(Protocol):
    """Samples from a policy whose weights come from outside."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError for a request that can never fit."""
        ...

    def answer(self, requests: Sequence[Request], claim: Claim) -> dict[int, Completion]:
        """Completions of the requests that `claim` gives, by their numbers, until it gives none to an idle engine.

        Raises: EngineError; WeightSyncError where the last weights did not arrive whole.
        """
        ...

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        """Samples from `module` itself, without a copy, from now on. Where it is the engine's own it may be filled, and
        leaves the device while the engine sleeps."""
        ...

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes a module of its own like `module`, without adapters and in the rollout dtype, for `load_weights`."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module with weights under their Hugging Face names.

        Raises: WeightSyncError for weights that do not fit; what `weights` raises. Then nothing is sampled until all
        weights of a version came."""
        ...

    def sleep(self) -> None:
        """Frees what sampling alone needs: the cache of keys and values, and an own module's place on the device."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`."""
        ...
