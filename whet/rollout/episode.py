# SPDX-License-Identifier: Apache-2.0
"""An episode as a state machine: completions, observations and failures go in, commands come out.

It has no clock, thread or socket. A driver carries out the commands: `Collector` as fast as it can, the simulator of
the tests in any order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from whet.data.chat import check_message
from whet.environments.protocol import Answer, Observation
from whet.errors import DataError
from whet.keyed import key
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams
from whet.types import Failure, Message, Prompt, Trajectory, Turn


class Codec(Protocol):
    """Between tokens and text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, special tokens left out."""
        ...

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model's next turn begins.  Raises: DataError."""
        ...

    def continuation(self, before: Sequence[Message], new: Sequence[Message], turn: Turn) -> list[int]:
        """The ids between a sampled turn and the next: the end of the turn, the new messages, the generation prompt.

        Raises: DataError where the chat template rewrites the conversation so far."""
        ...


@dataclass(frozen=True)
class Rules:
    """The settings that the episodes of one rollout share.

    `params.max_new_tokens` bounds the whole response: all turns and the text of the environment between them.
    `purpose` and `step` name the random draws, so that validation never disturbs training.
    """

    codec: Codec
    params: SamplingParams
    seed: int
    step: int
    purpose: str = "rollout"
    max_turns: int = 8


@dataclass(frozen=True)
class Reset:
    """Make the environment of an episode."""

    episode: str  # its id
    prompt: Prompt
    seed: int


@dataclass(frozen=True)
class Sample:
    """Submit a request of an episode to the rollout engine."""

    episode: str  # its id
    request: Request


@dataclass(frozen=True)
class Step:
    """Give a completion to the environment of an episode."""

    episode: str  # its id
    answer: Answer


@dataclass(frozen=True)
class Close:
    """Let the environment of an episode go; nothing follows from it."""

    episode: str  # its id


@dataclass(frozen=True)
class Score:
    """The episode is over: score its trajectory, unless that carries a failure."""

    trajectory: Trajectory
    episode: str


Command = Reset | Sample | Step | Close | Score


@dataclass
class Episode:
    """A trajectory while it is running."""

    prompt: Prompt
    sample: int
    rules: Rules
    seed: int = 0  # of the environment, equal for the samples of a prompt
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # all that were exchanged after the prompt
    fields: dict[str, Any] = field(default_factory=dict)
    over: bool = False
    _partial: Completion | None = None  # of the turn that is being sampled, from aborted attempts
    _attempt: int = 0
    _noted: Completion | None = None  # of the attempt that is running
    _turn_limit: int | None = None  # tokens that the environment allows the next response

    def __post_init__(self) -> None:
        self.uid = f"{self.prompt.uid}:{self.sample}"  # names the trajectory in the run
        self.id = f"{self.rules.purpose}:{self.rules.step}:{self.uid}"  # names the episode among all that run
        # The model reads a context: a conversation, its ids (the first `_row_start` of which are no response), media.
        self.context_ids, self._row_start = self.prompt.token_ids, len(self.prompt.token_ids)
        self._conversation, self._media = list(self.prompt.messages), self.prompt.media

    def start(self) -> list[Command]:
        """Begins."""
        return [Reset(self.id, self.prompt, self.seed)]

    def on_observation(self, observation: Observation) -> list[Command]:
        """Reads what the environment returned from its reset or from a step, and goes on or ends."""
        if self.over:
            return []
        try:
            for message in observation.messages:
                check_message(message)
        except DataError as error:
            return self._end(Failure("environment", str(error)))
        self.fields.update(observation.fields)
        is_done = observation.done or observation.truncated
        if self.turns:
            last = self.turns[-1]
            if observation.reward:
                last = self.turns[-1] = replace(last, reward=observation.reward)
            if is_done or (last.finish_reason == "length" and self._turn_limit is None):
                return self._end()
        elif is_done:
            return self._end(Failure("environment", "reset ended the episode before its first response"))
        self._read(observation)
        if len(self.turns) == self.rules.max_turns or self._left < 1:
            return self._end()
        return [Sample(self.id, self._request())]

    def on_completion(self, completion: Completion) -> list[Command]:
        """Reads the response of the engine; of one that was aborted the next attempt samples the rest."""
        if self.over:
            return []
        whole = completion if self._partial is None else joined(self._partial, completion)
        if completion.finish_reason == "abort":
            self._partial, self._attempt, self._noted = whole, self._attempt + 1, None
            return [Sample(self.id, self._request())]
        self._partial, self._attempt, self._noted = None, 0, None
        text = self.rules.codec.decode(whole.token_ids)
        self.turns.append(Turn(self.context_ids, **vars(whole)))  # a turn has all fields of a completion
        message = Message("assistant", text)
        self.messages.append(message)
        self._conversation.append(message)
        return [Step(self.id, Answer(text, token_ids=whole.token_ids, finish_reason=whole.finish_reason))]

    def on_partial(self, partial: Partial) -> None:
        """Notes tokens of the running attempt."""
        if partial.attempt == self._attempt:
            self._noted = Completion(partial.token_ids, partial.log_probs, "abort", partial.versions)

    def go_on_from(self, sampled: Completion) -> None:
        """Lets the first turn begin with tokens that an earlier run sampled."""
        self._partial, self._attempt = sampled, self._attempt + 1

    @property
    def sampled(self) -> Completion | None:
        """The tokens so far of the turn that is being sampled, as far as they are known; None without any."""
        if self._noted is None or self._partial is None:
            return self._noted or self._partial
        return joined(self._partial, self._noted)

    def on_failure(self, failure: Failure) -> list[Command]:
        """Ends the episode with a failure of its environment or of the engine."""
        return [] if self.over else self._end(failure)

    def _read(self, observation: Observation) -> None:
        """Puts an observation into the context, behind it or in its place."""
        codec, new = self.rules.codec, observation.messages
        self.messages += new
        self._turn_limit = observation.max_tokens
        is_replaced = observation.context == "replace"
        if self.turns and not is_replaced:
            last, before = self.turns[-1], self._conversation[:-1]
            self.context_ids = last.context_ids + last.token_ids + tuple(codec.continuation(before, new, last))
        self._conversation = [*new] if is_replaced else [*self._conversation, *new]
        self._media = observation.media if is_replaced else self._media + observation.media
        if is_replaced or (new and not self.turns):
            self.context_ids = tuple(codec.opening(self._conversation))
            self._row_start = len(self.context_ids)

    @property
    def _left(self) -> int:
        """Tokens that the response may still have."""
        return self.rules.params.max_new_tokens - (len(self.context_ids) - self._row_start)

    def _request(self) -> Request:
        rules, turn = self.rules, len(self.turns)
        most = self._left if self._turn_limit is None else min(self._left, self._turn_limit)
        whole = most == rules.params.max_new_tokens
        request = Request(
            uid=f"{self.id}:{turn}",
            prompt_ids=self.context_ids,
            params=rules.params if whole else replace(rules.params, max_new_tokens=most),
            key=key(rules.seed, rules.purpose, rules.step, self.prompt.uid, self.sample, turn),
            attempt=self._attempt,
            media=self._media,
        )
        self._partial = self._partial and unfinished(self._partial, request)
        return request if self._partial is None else replace(request, sampled_ids=self._partial.token_ids)

    def _end(self, failure: Failure | None = None) -> list[Command]:
        self.over = True
        trajectory = Trajectory(
            uid=self.uid,
            prompt=self.prompt,
            turns=tuple(self.turns),
            sample=self.sample,
            failure=failure,
            messages=tuple(self.messages),
            fields=self.fields,
        )
        return [Close(self.id), Score(trajectory, self.id)]


def joined(first: Completion, rest: Completion) -> Completion:
    """The completion of one response from those of two attempts, the second of which went on behind the first."""
    runs = [*first.versions]
    for version, count in rest.versions:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        else:
            runs.append((version, count))
    return replace(
        rest,
        token_ids=first.token_ids + rest.token_ids,
        log_probs=first.log_probs + rest.log_probs,
        versions=tuple(runs),
        preemptions=first.preemptions + rest.preemptions,
    )


def unfinished(sampled: Completion, request: Request) -> Completion | None:
    """The tokens that another attempt of a request goes on behind; None without any. A token that may have ended the
    response is left out, to be sampled again: its engine was gone before it said so."""
    params, tokens = request.params, sampled.token_ids
    may_be_whole = bool(tokens) and (bool(params.stop) or tokens[-1] in params.stop_token_ids)
    count = min(len(tokens) - may_be_whole, params.max_new_tokens - len(request.sampled_ids) - 1)
    return sampled if count == len(tokens) else part(sampled, 0, count)


def part(completion: Completion, start: int, end: int) -> Completion | None:
    """The tokens from `start` up to `end`; None where there are none."""
    if start >= end:
        return None
    runs, first = list[tuple[int, int]](), 0  # number of the run's first token
    for version, count in completion.versions:
        inside = min(first + count, end) - max(first, start)
        first += count
        if inside > 0:
            runs.append((version, inside))
    tokens, log_probs = completion.token_ids[start:end], completion.log_probs[start:end]
    return replace(completion, token_ids=tokens, log_probs=log_probs, versions=tuple(runs))
