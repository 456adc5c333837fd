# SPDX-License-Identifier: Apache-2.0
"""An episode as a state machine: it takes completions, observations and failures, and returns commands.

It has no clock, thread or socket. A driver carries out the commands: `Driver` as fast as it can, the simulator of the
tests in any order of events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from whet.data.chat import assistant_message, check_message
from whet.environments.protocol import GOES_ON, Answer, Observation, Result, Task, unpaid
from whet.errors import DataError, TextError, ToolError
from whet.keyed import key
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams
from whet.types import Failure, Limit, Media, Message, Prompt, Trajectory, Turn, Turns

MAIN = ""  # agent of an episode that is not the task of another episode


class Codec(Protocol):
    """Converts between tokens and text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes a response, without special tokens."""
        ...

    def calls(self, token_ids: Sequence[int], turn: int) -> Sequence[Mapping[str, Any]]:
        """Parses the tool calls of turn number `turn`: id, name, arguments, and an error if malformed.

        Raises: ToolError if the parser raises."""
        ...

    def read(self, observation: Observation) -> Observation:
        """Converts tags of the observation to content parts, and counts tokens of media.  Raises: DataError."""
        ...

    def opening(self, messages: Sequence[Message], media: Sequence[Media]) -> list[int]:
        """Encodes a conversation up to the beginning of the model's next turn.  Raises: DataError."""
        ...

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media]
    ) -> list[int]:
        """Encodes the text between a sampled turn and the next: the end of the turn, the new messages with their media,
        and the generation prompt.

        Raises: DataError where the chat template rewrites the conversation so far."""
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of an episode; None means no limit."""

    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_episode_tokens: int | None = None  # sampled in all turns
    max_context_tokens: int | None = None  # of a conversation before its first turn
    fails_at: frozenset[Limit] = frozenset({"time"})  # at other limits an episode ends with its turns so far
    seconds: float = 3600.0


@dataclass(frozen=True)
class Stage:
    """The settings of the episodes of one agent."""

    codec: Codec
    limits: EpisodeLimits = EpisodeLimits()
    is_silent: bool = False  # no environment replies: the episode ends after its first turn


@dataclass(frozen=True)
class Rules:
    """The settings that the episodes of one rollout share.

    `params.max_new_tokens` bounds the whole response: all turns and the text of the environment between them. `purpose`
    and `step` are part of the key of random draws, so that validation never changes training."""

    stages: Mapping[str, Stage]  # of the main agent and its sub-agents, by name
    params: SamplingParams
    seed: int
    step: int
    purpose: str = "rollout"


@dataclass(frozen=True)
class Reset:
    """Command: create the environment of the episode, for its prompt and seed."""


@dataclass(frozen=True)
class Sample:
    """Command: submit a request to the rollout engine."""

    request: Request


@dataclass(frozen=True)
class Step:
    """Command: pass a completion to the environment."""

    answer: Answer


@dataclass(frozen=True)
class Delegate:
    """Command: run the episode of a sub-agent, and pass its trajectory to `on_delegated`."""

    child: Episode


@dataclass(frozen=True)
class End:
    """Command: close the episode's environment. Score its trajectory unless it failed."""

    trajectory: Trajectory


Command = Reset | Sample | Step | Delegate | End


@dataclass(frozen=True)
class Conversation:
    """The conversation that a player reads as its context."""

    token_ids: tuple[int, ...]
    row_start: int  # number of tokens before the response of the row
    messages: tuple[Message, ...]
    media: tuple[Media, ...]


@dataclass
class Episode:
    """A trajectory while it is running."""

    prompt: Prompt
    sample: int
    rules: Rules
    seed: int = 0  # of the environment, equal for the samples of a prompt
    agent: str = MAIN
    turns: list[Turn] = field(default_factory=list)  # including turns of its sub-agents
    messages: list[Message] = field(default_factory=list)  # all messages after the prompt
    fields: dict[str, Any] = field(default_factory=dict)
    over: bool = False
    _partial: Completion | None = None  # of the turn that is being sampled, from aborted attempts
    _behind: int | None = None  # digest of the context of `_partial`, where an earlier run sampled it
    _attempt: int = 0
    _noted: Completion | None = None  # of the attempt that is running
    _read: Observation = GOES_ON  # the observation before the turn that is being sampled
    _contexts: dict[str, Conversation] = field(default_factory=dict)  # by player
    _last: dict[str, int] = field(default_factory=dict)  # the player's last turn: its place in `turns`
    _tasks: dict[str, Result | None] = field(default_factory=dict)  # by uid of the sub-agent's trajectory
    _num_turns: int = 0  # without turns of its sub-agents
    _num_tasks: int = 0

    def __post_init__(self) -> None:
        self.stage = self.rules.stages[self.agent]
        self.uid = f"{self.prompt.uid}:{self.sample}"  # names the trajectory in the run
        self.id = f"{self.rules.purpose}:{self.rules.step}:{self.uid}"  # names the episode among all that run

    def start(self) -> list[Command]:
        """Starts the episode. A silent environment needs no reset."""
        return self._next_turn(GOES_ON) if self.stage.is_silent else [Reset()]

    def on_result(self, result: Observation | Failure) -> list[Command]:
        """Continues with the result of the environment's reset or step, in the form that the model reads."""
        if not isinstance(result, Failure) and (result.messages or result.media or result.tasks):
            try:
                result = self.stage.codec.read(result)
            except DataError as error:
                result = Failure("environment", str(error))
        return self.on_failure(result) if isinstance(result, Failure) else self.on_observation(result)

    def on_observation(self, observation: Observation) -> list[Command]:
        """Reads the observation from the environment's reset or step. Then continues or ends the episode."""
        if self.over:
            return []
        try:
            return self._on_observation(observation)
        except TextError as error:
            return self._end(Failure("environment", str(error)))

    def _on_observation(self, observation: Observation) -> list[Command]:
        for message in observation.messages:
            check_message(message)
        self.fields.update(observation.fields)
        self._pay(observation)
        if observation.tasks:
            return self._delegate(observation.tasks)
        if observation.done or observation.truncated:
            if not self.turns:
                return self._end(Failure("environment", "reset ended the episode before its first response"))
            self.messages += [Message(each.role, _text(each), each.fields) for each in observation.messages]
            return self._end(limit="environment" if observation.truncated else None)
        before = self.turns[self._last[self._read.player]] if self._last else None
        if before is not None and before.finish_reason == "length" and self._turn_limit is None:
            return self._end(limit="length")
        return self._next_turn(observation)

    def _next_turn(self, observation: Observation) -> list[Command]:
        self._to_context(observation)
        if self._num_turns == self.stage.limits.max_turns:
            return self._end(limit="turns")
        return self._check_length() or [Sample(self._request())]

    def on_completion(self, completion: Completion) -> list[Command]:
        """Adds a completion to the turn. After an aborted one, a new attempt samples the missing tokens."""
        if self.over:
            return []
        whole = completion if self._partial is None else joined(self._partial, completion)
        if completion.finish_reason == "abort":
            self._partial, self._attempt, self._noted = whole, self._attempt + 1, None
            return [Sample(self._request())]
        self._partial, self._attempt, self._noted = None, 0, None
        text, read, context = self.stage.codec.decode(whole.token_ids), self._read, self._context
        calls: tuple[Mapping[str, Any], ...] = ()
        failure: Failure | None = None
        try:
            calls = tuple(self.stage.codec.calls(whole.token_ids, self._num_turns))
        except ToolError as error:
            failure = Failure("tool", str(error))
        sampled = {name: each for name, each in vars(whole).items() if name != "likeliest"}  # for a server's clients
        turn = Turn(
            context.token_ids,
            **sampled,  # a turn has all other fields of a completion
            media=context.media,
            observation=read.messages,
            state_key=read.state_key,
            agent=self.agent,
            player=read.player,
            is_trained=read.is_trained,
        )
        self._last[read.player], self._num_turns = len(self.turns), self._num_turns + 1
        self.turns.append(turn)
        self.messages.append(assistant_message(text, calls) if calls else Message("assistant", text))
        self._contexts[read.player] = replace(context, messages=(*context.messages, self.messages[-1]))
        if failure is not None:
            return self._end(failure)
        if self.stage.is_silent:
            return self._end()
        return [Step(Answer(text, calls, whole.token_ids, whole.finish_reason, media=turn.media))]

    def on_partial(self, partial: Partial) -> None:
        """Records the tokens that the running attempt at a request has sampled so far."""
        if partial.attempt == self._attempt:
            tokens, log_probs, versions = partial.token_ids, partial.log_probs, partial.versions
            self._noted = Completion(tokens, log_probs, "abort", versions, routed=partial.routed)

    def go_on_from(self, sampled: Completion, context_digest: int | None = None) -> None:
        """Starts the first turn with the tokens `sampled` in an earlier run, unless the turn's context has changed."""
        self._partial, self._behind, self._attempt = sampled, context_digest, self._attempt + 1

    @property
    def context_digest(self) -> int | None:
        """A hash of the context that `sampled` continues; None if it is unknown."""
        if (context := self._contexts.get(self._read.player)) is None:
            return self._behind
        return key(0, "context", *context.token_ids, *(media.digest for media in context.media))

    @property
    def sampled(self) -> Completion | None:
        """The tokens sampled so far in the current turn; None if none are known."""
        if self._noted is None or self._partial is None:
            return self._noted or self._partial
        return joined(self._partial, self._noted)

    def on_failure(self, failure: Failure) -> list[Command]:
        """Ends the episode with a failure of its environment or engine. If the failure is a deadline and `fails_at`
        lacks "time", the episode ends with its turns so far instead."""
        if self.over:
            return []
        return self._stop("time", failure) if failure.timed_out else self._end(failure)

    def on_delegated(self, trajectory: Trajectory) -> list[Command]:
        """Adds the turns of a sub-agent's trajectory to this episode. When all tasks are done, the environment gets
        their results together."""
        if self.over or trajectory.uid not in self._tasks:
            return []
        written = [str(message.content) for message in trajectory.messages if message.role == "assistant"]
        self._tasks[trajectory.uid] = Result(
            text=written[-1] if written else "",
            reward=trajectory.score,
            num_turns=len(trajectory.turns),
            fields=trajectory.fields,
            failure=None if trajectory.failure is None else trajectory.failure.message,
        )
        if trajectory.failure is None:
            self.turns += [replace(turn, player=self._read.player) for turn in trajectory.turns]
        results = tuple(result for result in self._tasks.values() if result is not None)
        if len(results) < len(self._tasks):
            return []
        self._tasks = {}
        return [Step(Answer("", results=results))]

    def _pay(self, observation: Observation) -> None:
        """Adds the rewards of an observation to the last turns of the players.  Raises: TextError."""
        if observation.rewards and (
            why := unpaid(observation, [t.player for t in self.turns if t.agent == self.agent])
        ):
            raise why
        for player, reward in ((self._read.player, observation.reward), *observation.rewards.items()):
            if reward and player in self._last:
                turn = self.turns[self._last[player]]
                self.turns[self._last[player]] = replace(turn, reward=turn.reward + reward)

    def _delegate(self, tasks: Sequence[Task]) -> list[Command]:
        """Starts an episode for each task."""
        agents = {} if self.agent else {name: stage for name, stage in self.rules.stages.items() if name}
        if unknown := [task.agent for task in tasks if task.agent not in agents]:
            known = ", ".join(agents) or "none"
            what = f"a task is for the agent {unknown[0]!r}; environment.agents has {known}: add it there"
            return self._end(Failure("environment", what))
        children = []
        for task in tasks:
            self._num_tasks += 1
            name = f"{self.prompt.uid}/{task.agent}.{self._num_tasks}"
            given = {"ground_truth": task.ground_truth, "extra_info": task.extra_info, "media": ()}
            ids = tuple(agents[task.agent].codec.opening(task.messages, ()))
            prompt = replace(self.prompt, uid=name, messages=task.messages, token_ids=ids, **given)
            seed = key(self.seed, "task", self._num_tasks)
            children.append(Episode(prompt, self.sample, self.rules, seed, task.agent))
        self._tasks = {child.uid: None for child in children}
        return [Delegate(child) for child in children]

    def _to_context(self, observation: Observation) -> None:
        """Adds an observation to its player's context, or replaces the context."""
        codec, new, player = self.stage.codec, observation.messages, observation.player
        self.messages += new
        self._read = observation
        context, ids = self._contexts.get(player), self.prompt.token_ids
        is_opened = observation.context == "replace"
        if is_opened:
            context = Conversation((), 0, new, observation.media)
        elif context is None:
            prompt, is_opened = self.prompt, bool(new)
            context = Conversation(ids, len(ids), (*prompt.messages, *new), prompt.media + observation.media)
        else:
            last = self.turns[self._last[player]]
            between = codec.continuation(context.messages[:-1], new, last, observation.media)
            ids, media = last.context_ids + last.token_ids + tuple(between), context.media + observation.media
            context = Conversation(ids, context.row_start, (*context.messages, *new), media)
        if is_opened:
            ids = tuple(codec.opening(context.messages, context.media))
            context = replace(context, token_ids=ids, row_start=len(ids))
        self._contexts[player] = context

    @property
    def _context(self) -> Conversation:
        return self._contexts[self._read.player]

    @property
    def _turn_limit(self) -> int | None:
        """The token limit of the next turn: the environment's, else the config's; None if both set none."""
        return self._read.max_tokens or self.stage.limits.max_turn_tokens

    @property
    def _row_left(self) -> int:
        """The number of tokens that may still be added to the row's response."""
        return self.rules.params.max_new_tokens - (len(self._context.token_ids) - self._context.row_start)

    @property
    def _most_tokens(self) -> int:
        """The largest number of tokens for the next turn."""
        most = self._row_left if self._turn_limit is None else min(self._row_left, self._turn_limit)
        whole = self.stage.limits.max_episode_tokens
        return most if whole is None else min(most, whole - sum(len(turn.token_ids) for turn in self.turns))

    def _check_length(self) -> list[Command]:
        """Ends the episode if token limits leave no token for a turn, or if a conversation is too long before its first
        turn. The data loader has already checked the length of unchanged prompts."""
        length, most = len(self._context.token_ids), self.stage.limits.max_context_tokens
        is_given = not self.agent and self._context.token_ids == self.prompt.token_ids
        is_long = most is not None and length == self._context.row_start > most and not is_given
        if is_long or self._row_left < 1:
            return self._overflow(length, most if is_long else None)
        return [] if self._most_tokens > 0 else self._end(limit="tokens")

    def _overflow(self, length: int, most: int | None) -> list[Command]:
        what = f"the environment's messages leave no room: turns and messages have {length} tokens"
        if most is not None:
            before = "" if self._read.context == "replace" else f"the {'task' if self.agent else 'prompt'} and "
            what = f"{before}the environment's messages have {length} tokens, more than data.max_prompt_length={most}"
        hint = "shorten them, raise the limit, or set environment.on_overflow=truncate"
        hint = hint if self.turns else "shorten them, or raise the limit"  # without a turn there is nothing to keep
        return self._stop("overflow", Failure("environment", f"{what}; {hint}"))

    def _request(self) -> Request:
        rules, turn, most = self.rules, self._num_turns, self._most_tokens
        whole = most == rules.params.max_new_tokens
        request = Request(
            uid=f"{self.id}:{turn}",
            prompt_ids=self._context.token_ids,
            params=rules.params if whole else replace(rules.params, max_new_tokens=most),
            key=key(rules.seed, rules.purpose, rules.step, self.prompt.uid, self.sample, turn),
            attempt=self._attempt,
            media=self._context.media,
            opening=self._context.row_start if self._context.media else None,
            keeps_cache=turn + 1 < self.stage.limits.max_turns,
        )
        return request if self._partial is None else self._continued(self._partial, request)

    def _continued(self, sampled: Completion, request: Request) -> Request:
        if self._behind is not None and self._behind != self.context_digest:  # the first messages have changed
            self._partial = None
        else:
            self._partial = unfinished(sampled, request)
        self._behind = None
        return request if self._partial is None else replace(request, sampled_ids=self._partial.token_ids)

    def _stop(self, limit: Limit, failure: Failure) -> list[Command]:
        """Ends the episode at a limit, with its turns so far or with the failure."""
        is_failed = limit in self.stage.limits.fails_at or not self.turns
        return self._end(failure) if is_failed else self._end(limit=limit)

    def _end(self, failure: Failure | None = None, limit: Limit | None = None) -> list[Command]:
        self.over = True
        ended = Trajectory(self.uid, self.prompt, Turns(self.turns), self.sample, failure=failure, limit=limit)
        return [End(replace(ended, messages=tuple(self.messages), fields=self.fields))]


def _text(message: Message) -> str:
    """The text of a message, without images and videos."""
    return "".join(str(part.get("text", "")) for part in message.parts)


def joined(first: Completion, rest: Completion) -> Completion:
    """Joins the completions of two attempts at one response; the second attempt continued the first."""
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
        likeliest=first.likeliest + rest.likeliest,
        routed=first.routed + rest.routed,
        versions=tuple(runs),
        preemptions=first.preemptions + rest.preemptions,
    )


def unfinished(sampled: Completion, request: Request) -> Completion | None:
    """Returns the sampled tokens that the next attempt at a request keeps; None if there are none. If the last token
    may have ended the response, it is sampled again, because the lost engine did not report the end."""
    params, tokens = request.params, sampled.token_ids
    may_be_whole = bool(tokens) and (bool(params.stop) or tokens[-1] in params.stop_token_ids)
    count = min(len(tokens) - may_be_whole, params.max_new_tokens - len(request.sampled_ids) - 1)
    return sampled if count == len(tokens) else part(sampled, 0, count)


def part(completion: Completion, start: int, end: int) -> Completion | None:
    """Returns the completion's tokens from number `start` up to number `end`; None if there are none."""
    if start >= end:
        return None
    runs, first = list[tuple[int, int]](), 0  # number of the run's first token
    for version, count in completion.versions:
        inside = min(first + count, end) - max(first, start)
        first += count
        if inside > 0:
            runs.append((version, inside))
    return replace(
        completion,
        token_ids=completion.token_ids[start:end],
        log_probs=completion.log_probs[start:end],
        versions=tuple(runs),
        likeliest=completion.likeliest[start:end],
        routed=completion.routed[start:end],
    )
