# SPDX-License-Identifier: Apache-2.0
"""An engine that returns scripted responses."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from whet.rollout.protocol import Completion, Event, Finished, Request, Status, Weights
from whet.types import Message, Prompt

VERSION = 3


class Scripted:
    """Gives its answers in the order of the requests, again from the first one after the last, and remembers these.

    With `by_sample` a request gets the answer of its sample's number: environments in processes begin in any order."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *answers: str, by_sample: bool = False) -> None:
        self.tokenizer, self.answers, self.by_sample = tokenizer, answers, by_sample
        self.requests: list[Request] = []
        self._events: list[Event] = []

    def submit(self, request: Request) -> bool:
        number = int(request.uid.split(":")[-2]) if self.by_sample else len(self.requests)
        answer = self.answers[number % len(self.answers)]
        self.requests.append(request)
        self._events.append(Finished(request.uid, request.attempt, self.say(answer, request)))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        self._events = [event for event in self._events if event.uid not in uids]

    def status(self) -> Status:
        return Status(VERSION, 0, len(self._events))

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def load(self, weights: Weights, version: int) -> None: ...

    def close(self) -> None: ...

    def say(self, answer: str, request: Request) -> Completion:
        ids = (*self.tokenizer.encode(answer), self.tokenizer.eos_token_id)[: request.params.max_new_tokens]
        stopped = ids[-1] == self.tokenizer.eos_token_id
        log_probs = tuple(-0.5 - 0.25 * position for position in range(len(ids)))
        return Completion(ids, log_probs, "stop" if stopped else "length", ((VERSION, len(ids)),))


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str = "2+2=", index: int = 0) -> Prompt:
    """A prompt that is fed as it is."""
    ids = tuple(tokenizer.encode(text))
    return Prompt(f"0:{index}", index, (Message("user", text),), ids, "test", ground_truth="4")
