# SPDX-License-Identifier: Apache-2.0
"""The values that data, rollout, rewards and the training loop exchange: frozen, without tensors, cheap to pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

FailureSource = Literal["environment", "tool", "sandbox", "reward", "engine"]
FinishReason = Literal["stop", "length", "abort"]
Limit = Literal["turns", "length", "tokens", "overflow", "time", "environment"]  # the limit that ended an episode
Likeliest = tuple[tuple[int, float], ...]  # (token, log-prob), the most probable first
Versions = tuple[tuple[int, int], ...]  # runs of (policy version, number of tokens that it sampled)


def last_versions(versions: Versions, count: int) -> Versions:
    """Returns the versions of the last `count` tokens."""
    runs: list[tuple[int, int]] = []
    for version, length in reversed(versions):
        if count > 0:
            runs.insert(0, (version, min(length, count)))
            count -= length
    return tuple(runs)


@dataclass(frozen=True)
class MediaTokens:
    """An image or video as one model reads it: its text in the prompt, and the tokens of its patches."""

    placeholder: str  # text that the chat template writes for the media
    text: tuple[tuple[str, int], ...]  # text that replaces the placeholder: pieces, and how often each is repeated
    token_id: int  # the token of every patch
    grids: tuple[tuple[int, int, int], ...]  # (time, height, width) of each run of patch tokens
    size: tuple[int, int]  # (height, width) in pixels to which it is resized
    time_step: float | None = None  # multimodal rotary positions per time step; None: positions count tokens

    @property
    def count(self) -> int:
        """The number of patch tokens in all runs."""
        return sum(time * height * width for time, height, width in self.grids)


@dataclass(frozen=True)
class Media:
    """An image, video or audio of a prompt or an observation, identified by the digest of its bytes."""

    kind: Literal["image", "video", "audio"]
    digest: str  # hash of the bytes, and of the limits for reading them
    source: Any = field(compare=False)  # encoded bytes, a path, or for the frames of a video a tuple of either
    frames: tuple[int, ...] = field(default=(), compare=False)  # numbers of the frames of a video that are read
    tokens: MediaTokens | None = field(default=None, compare=False)  # None until a model's encoder has measured it
    origin: str = field(default="", compare=False)  # the row of a data set, for errors: "row 17"

    @property
    def sources(self) -> tuple[Any, ...]:
        """The sources of all its frames, or its one source."""
        return self.source if isinstance(self.source, tuple) else (self.source,)


@dataclass(frozen=True)
class Message:
    """A chat message. `content` is text, or the list of parts that multimodal chat templates take."""

    role: str
    content: str | list[dict[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)  # more fields for the template: name, tool_calls, ...

    @property
    def is_text(self) -> bool:
        """Tells whether the content is text, not a list of parts."""
        return isinstance(self.content, str)

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The content as a list of parts. Text is one part."""
        return [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content or []

    def to_dict(self) -> dict[str, Any]:
        """Returns the message as a dict for `tokenizer.apply_chat_template`."""
        return {"role": self.role, "content": self.content, **self.fields}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Message:
        """Builds a message from a dict with `role` and `content`. Other keys stay unless None.  Raises: KeyError."""
        rest = {key: value for key, value in raw.items() if key not in ("role", "content") and value is not None}
        return cls(role=raw["role"], content=raw["content"], fields=rest)


@dataclass(frozen=True)
class Prompt:
    """A row of the data set as the model reads it, with the fields that the reward function needs."""

    uid: str  # identifies the row in this run: "<epoch>:<index in the data set>"
    index: int  # row number in the data set, over all files
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]  # the input of the model, after the chat template
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()  # in the order of their placeholders in `token_ids`
    domain: str = ""  # a name in `reward.domains`
    is_text: bool = False  # the row has a text as its prompt, not messages

    @property
    def num_tokens(self) -> int:
        """The length in tokens."""
        return len(self.token_ids)

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that a step reads, without media."""
        return self.token_ids, self.data_source, self.ground_truth, self.extra_info


class Example(Protocol):
    """A training example of supervised or preference training. The `builder` of the data section makes it from rows."""

    media: tuple[Media, ...]

    @property
    def num_tokens(self) -> int:
        """The length in tokens, which `data.max_length` limits."""

    @property
    def content(self) -> tuple[object, ...]:
        """The fields that a step reads, without media. A resumed run compares the digest of these fields."""

    def texts(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns token ids and loss mask of each text. Keys are the suffixes that `whet data` shows: ", chosen"."""

    def facts(self) -> Mapping[str, object]:
        """Further facts that `whet data` shows."""
        return {}

    @staticmethod
    def notes(items: Sequence[Any]) -> list[str]:
        """Facts about all examples together, for `whet data`."""
        return []


@dataclass(frozen=True)
class Turn:
    """A completion inside a trajectory: its context tokens and its sampled tokens."""

    context_ids: tuple[int, ...]  # all tokens before the first sampled token
    token_ids: tuple[int, ...]  # the sampled tokens, with the stop token if it was sampled
    log_probs: tuple[float, ...]  # log_softmax(logits / temperature) of each sampled token
    finish_reason: FinishReason
    versions: Versions  # policy versions that sampled its tokens
    reward: float = 0.0  # from the environment, for this turn
    stop: str | None = None  # the stop string that ended the completion
    preemptions: int = field(default=0, compare=False)  # number of preemptions of its request
    routed: tuple[bytes, ...] = ()  # experts of each sampled token, if the engine records them (`models.routing`)
    media: tuple[Media, ...] = ()  # the media of the context
    observation: tuple[Message, ...] = ()  # the messages read since the previous turn
    state_key: str | None = None  # the environment's name for the state before the turn
    agent: str = ""  # the sub-agent that took the turn
    player: str = ""  # the player that took the turn, in an environment with several players
    is_trained: bool = True

    @property
    def policy_version(self) -> int:
        """The version of the weights that sampled the last token."""
        return self.versions[-1][0]


class Turns(tuple[Turn, ...]):
    """The turns of a trajectory, and how they divide into the rows of a batch, found once."""

    rows: tuple[tuple[int, ...], ...]  # numbers of the turns of each row

    def __new__(cls, turns: Iterable[Turn]) -> Turns:
        """Returns `turns` themselves if their rows are known."""
        if isinstance(turns, Turns):
            return turns
        made = super().__new__(cls, turns)
        made.rows = _rows_of(made)
        return made


def _rows_of(turns: Sequence[Turn]) -> tuple[tuple[int, ...], ...]:
    """Divides turns into rows, which are ordered by their last turns. A turn that continues the last row of its player
    and sub-agent extends this row; any other turn starts a row. Rows without a turn to train on are left out."""
    rows: list[tuple[int, ...]] = []
    latest: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {}  # row with its tokens, by player, agent
    for number, turn in enumerate(turns):
        who, context = (turn.player, turn.agent), turn.context_ids
        row, so_far = latest.get(who, ((), ()))
        if row and context[: len(so_far)] == so_far:
            rows.remove(row)
        else:
            row = ()
        rows.append((*row, number))
        latest[who] = rows[-1], context + turn.token_ids
    return tuple(row for row in rows if any(turns[number].is_trained for number in row))


@dataclass(frozen=True)
class Failure:
    """The reason why a trajectory failed, and the component that failed."""

    source: FailureSource
    message: str
    timed_out: bool = False  # a deadline caused the failure: a repeat of the run may differ here
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)  # numbers of the failed call, such as its cost
    key: str = ""  # the key of the error in a result that the function returned


@dataclass(frozen=True)
class Trajectory:
    """The finished record of one sample of a prompt: its turns, and the result of the reward function.

    `reward` is trained on (None until scored), `accuracy` is 0 or 1, `parts` are all other numbers of the reward, and
    `logged` has the values that the reward function logged: numbers become metrics. A trajectory with a `failure` keeps
    its turns for the rollouts file; its rows are masked and count in no mean."""

    uid: str  # "<prompt uid>:<sample>"
    prompt: Prompt
    turns: tuple[Turn, ...]
    sample: int
    reward: float | None = None
    accuracy: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    token_rewards: tuple[float, ...] | None = None  # one for each response token, if any; `reward` is their sum
    extracted: str | None = None  # the final answer that the reward extracted from the text, for majority votes
    logged: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    messages: tuple[Message, ...] = ()  # the conversation after the prompt: responses, tool results
    fields: Mapping[str, Any] = field(default_factory=dict)  # columns from the environment, by name
    limit: Limit | None = None  # the limit that ended the episode

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", Turns(self.turns))

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the turns in each row of the batch, in the order of the rows."""
        return cast(Turns, self.turns).rows

    @property
    def score(self) -> float:
        """The sum of the rewards from reward function and environment; 0 for a failed trajectory."""
        return 0.0 if self.failure is not None else (self.reward or 0.0) + sum(turn.reward for turn in self.turns)

    def to_dict(self) -> dict[str, Any]:
        """Returns the dict that a reward function gets: messages after the prompt, turn rewards, fields, and limit."""
        return {
            "messages": [message.to_dict() for message in self.messages],
            "turn_rewards": [turn.reward for turn in self.turns],
            "fields": dict(self.fields),
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt, which group estimators compare."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Lists the trajectories of groups, in order."""
    return [each for group in groups for each in group.trajectories]


@dataclass(frozen=True)
class RewardItem:
    """A response to score, with the arguments of the reward function. The ids are the tokens that the model read and
    sampled. `trajectory` is the dict of an environment's trajectory; with one turn it may be empty. `messages` belong
    to the prompt; they are empty if the prompt is text."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt_str: str = ""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    trajectory: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RewardResult:
    """The score of a response. All numbers are finite.

    `token_rewards` has one number for each response token, with `reward` as their sum; None if the function returned
    one number. `extracted` is the final answer that the function extracted from the text, if it reports it.
    """

    reward: float
    accuracy: float
    parts: Mapping[str, float] = field(default_factory=dict)
    token_rewards: tuple[float, ...] | None = None
    extracted: str | None = None
    logged: Mapping[str, Any] = field(default_factory=dict)


Outcome = RewardResult | Failure


class Outcomes(Protocol):
    """The outcomes of reward functions that may still be running."""

    def result(self) -> list[Outcome]:
        """Waits for the outcomes.  Returns them in order."""

    def done(self) -> bool:
        """Tells whether `result` would return at once."""


class Scorer(Protocol):
    """A pool of reward processes, or another object that scores responses."""

    scores_alone: bool  # scores each response alone and in other threads, so that others are sampled meanwhile

    def submit_batch(self, items: Sequence[RewardItem]) -> Outcomes:
        """Begins to score the items, and returns at once."""

    def close(self) -> None:
        """Ends the processes of the scorer."""


@dataclass(frozen=True)
class SamplingParams:
    """The options of sampling, and the end of a response. By default no option is on; `temperature` 0 is greedy.

    Options apply in vLLM's order: allowed tokens, bad words, penalties (repetition, frequency, presence), temperature,
    min-p, top-k, top-p."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0  # least probability, as a share of the most probable token's (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # for tokens in prompt or response: logit l becomes l / r if l > 0, else l r (CTRL)
    presence_penalty: float = 0.0  # subtracted from the logit of a token that the response contains (OpenAI)
    frequency_penalty: float = 0.0  # subtracted once for each occurrence of the token in the response
    stop: tuple[str, ...] = ()  # texts; the response ends with the token that completes one of them
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that no response contains: their last token is masked
    allowed_token_ids: tuple[int, ...] | None = None  # no other tokens are drawn
    num_likeliest: int = 0  # at each position, number of most probable tokens whose log-probs are returned too
