# SPDX-License-Identifier: Apache-2.0
"""An engine that says what it was told to say."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from whet.rollout.protocol import Completion, Request
from whet.types import Message, Prompt

VERSION = 3


class Scripted:
    """Gives its answers in the order of the requests, again from the first one after the last, and remembers these."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *answers: str) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.requests: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> list[Completion]:
        first = len(self.requests)
        self.requests += requests
        return [self._say(self.answers[(first + at) % len(self.answers)], each) for at, each in enumerate(requests)]

    def _say(self, answer: str, request: Request) -> Completion:
        ids = (*self.tokenizer.encode(answer), self.tokenizer.eos_token_id)[: request.params.max_new_tokens]
        stopped = ids[-1] == self.tokenizer.eos_token_id
        log_probs = tuple(-0.5 - 0.25 * position for position in range(len(ids)))
        return Completion(ids, log_probs, "stop" if stopped else "length", VERSION)


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str = "2+2=", index: int = 0) -> Prompt:
    """A prompt that is fed as it is."""
    ids = tuple(tokenizer.encode(text))
    return Prompt(f"0:{index}", index, (Message("user", text),), ids, "test", ground_truth="4")
