# SPDX-License-Identifier: Apache-2.0
"""Episodes: the engine samples a turn for each that is not done, its environment answers, until all are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import as_text, check_message, encode_continuation, encode_rendered
from whet.environments.protocol import Environment, Observation
from whet.keyed import key
from whet.registry import ENVIRONMENTS
from whet.rewards.adapter import describe
from whet.rollout.protocol import Completion, Request, SamplingParams
from whet.types import Failure, Message, Prompt, Trajectory, Turn

Generate = Callable[[Sequence[Request]], list[Completion]]


@dataclass
class Episode:
    """One answer to one prompt while it is being given."""

    prompt: Prompt
    sample: int
    environment: Environment | None
    context_ids: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def uid(self) -> str:
        """Names the trajectory in the run."""
        return f"{self.prompt.uid}:{self.sample}"

    @property
    def tokens_used(self) -> int:
        """How long the response is so far, what the environment said included."""
        return len(self.context_ids) - len(self.prompt.token_ids)

    def trajectory(self) -> Trajectory:
        """The episode as a value, not scored yet."""
        return Trajectory(
            uid=self.uid,
            prompt=self.prompt,
            turns=tuple(self.turns),
            sample=self.sample,
            failure=self.failure,
            messages=tuple(self.messages),
            fields=self.fields,
        )


class Collector:
    """Runs episodes of one environment. What an environment raises fails its episode and no other."""

    def __init__(
        self,
        generate: Generate,
        tokenizer: PreTrainedTokenizerBase,
        *,
        environment: str = "single_turn",
        environment_options: Mapping[str, Any] | None = None,
        max_turns: int = 8,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        entry = ENVIRONMENTS[environment]
        self._make = entry.load()
        self._options = entry.resolve_options(environment_options or {}, "environment.options")
        self.generate, self.tokenizer, self.max_turns, self.seed = generate, tokenizer, max_turns, seed
        self.apply_chat_template, self.chat_template_kwargs = apply_chat_template, chat_template_kwargs or {}

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """n unscored trajectories for each prompt, in order.

        `params.max_new_tokens` bounds the whole response: all turns and what the environment says between them.
        `purpose` and `step` name the random draws, so that validation never disturbs training.
        """
        episodes = [self._start(prompt, sample) for prompt in prompts for sample in range(n)]
        active = [episode for episode in episodes if episode.failure is None]
        for turn in range(self.max_turns):
            if not active:
                break
            requests = [self._request(episode, params, step, purpose, turn) for episode in active]
            for episode, request, completion in zip(active, requests, self.generate(requests), strict=True):
                self._answer(episode, request, completion)
            active = [e for e in active if e.environment is not None and e.tokens_used < params.max_new_tokens]
        done = [episode.trajectory() for episode in episodes]
        return [done[start : start + n] for start in range(0, len(done), n)]

    def _start(self, prompt: Prompt, sample: int) -> Episode:
        episode = Episode(prompt, sample, None, prompt.token_ids)
        try:
            episode.environment = self._make(prompt, **self._options)
        except Exception as error:  # other people's code
            episode.failure = Failure("environment", describe(error))
        return episode

    def _request(self, episode: Episode, params: SamplingParams, step: int, purpose: str, turn: int) -> Request:
        draw = key(self.seed, purpose, step, episode.prompt.uid, episode.sample, turn)
        left = params.max_new_tokens - episode.tokens_used
        own = params if left == params.max_new_tokens else replace(params, max_new_tokens=left)
        return Request(episode.context_ids, own, draw)

    def _answer(self, episode: Episode, request: Request, completion: Completion) -> None:
        """Appends the turn, lets the environment answer, and sets the next turn's context, or ends the episode."""
        assert episode.environment is not None
        text = cast(str, self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))
        try:
            observation = episode.environment.step(text)
            for message in observation.messages:
                check_message(message)
        except Exception as error:  # other people's code
            observation, episode.failure = Observation(done=True), Failure("environment", describe(error))
        turn = Turn(
            context_ids=request.token_ids,
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            reward=observation.reward,
            stop=completion.stop,
            preemptions=completion.preemptions,
        )
        before = [*episode.prompt.messages, *episode.messages]
        episode.turns.append(turn)
        episode.messages.append(Message("assistant", text))
        episode.fields.update(observation.fields)
        if observation.done or completion.finish_reason == "length":
            episode.environment = None
            return
        episode.messages += observation.messages
        read = self._encode(before, observation.messages, turn)
        episode.context_ids = request.token_ids + completion.token_ids + tuple(read)

    def _encode(self, before: Sequence[Message], new: Sequence[Message], turn: Turn) -> list[int]:
        if self.apply_chat_template:
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=self.chat_template_kwargs
            )
        said = as_text(self.tokenizer, "".join(str(message.content) for message in new), self.chat_template_kwargs)
        return encode_rendered(self.tokenizer, [said])[0]
