# SPDX-License-Identifier: Apache-2.0
"""Who gives each batch column. The functions in use name the columns, these their providers, these the roles to start.

A provider is registered under the column's name; its marks say which roles it needs, and which columns it reads itself:
    @register_provider("ref_log_probs", roles=("ref",))
    def ref_log_probs(batch, sources): return sources.forward("ref", batch, "log_probs")
It returns the column, or a function that waits for it (`sources.start`): then providers wait for their models side by
side. One marked `unscored=True` needs no rewards, and is called while answers are still being judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from whet.config.schema import TrainConfig
from whet.controller.worker_group import PendingCall
from whet.errors import ConfigError
from whet.keyed import key
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import Entry, Registry
from whet.rollout.sampling import uniforms
from whet.rollout.stream import Rollouts
from whet.types import Group, Trajectory

PROVIDERS = Registry("column provider", "trainers", "register_provider")
register_provider = PROVIDERS.register

# What `rollout.to_batch` puts into every batch, and what the loop itself adds before advantages are estimated.
ROLLOUT_COLUMNS = frozenset(
    {
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids"),
        *("response_mask", "turn_ids", "policy_version", "rollout_log_probs"),
        *("token_level_scores", "token_level_rewards", "accuracy", "truncated", "reward_parts"),
        *("uid", "trajectory_uid"),
    }
)


Column = torch.Tensor | Callable[[], torch.Tensor]


class Role(Protocol):
    """What computes model outputs: its method `forward` gives them [B, R] without gradient."""

    def start(self, method: str, *args: Any) -> PendingCall:
        """Begins a call of `method`."""
        ...


@dataclass(frozen=True)
class Sources:
    """What a provider may draw on: the step's groups, in the order of the batch's `uid`, and what made them."""

    config: TrainConfig
    roles: Mapping[str, Role]
    rollouts: Rollouts
    groups: Sequence[Group]
    step: int

    def forward(self, role: str, batch: DataProto, output: str) -> torch.Tensor:
        """One output of a role's model [B, R], at the temperature at which answers were sampled."""
        return self.start(role, batch, output)()

    def start(self, role: str, batch: DataProto, output: str) -> Callable[[], torch.Tensor]:
        """Begins `forward`.  Returns what waits for it."""
        call = self.roles[role].start("forward", batch, (output,), self.config.rollout.temperature or 1.0)
        return lambda: call.result()[output]


@dataclass(frozen=True)
class ColumnPlan:
    """The providers to call in every step, in order, and the roles that they need."""

    providers: tuple[Entry, ...]
    roles: frozenset[str]

    def add(self, batch: DataProto, sources: Sources, metrics: Metrics, *, is_scored: bool = True) -> DataProto:
        """The batch with every planned column that it does not have yet; before it is scored, with those that need no
        scores. Providers that read no column of each other begin together."""
        left = [each for each in self.providers if each.name not in batch]
        if is_scored:
            batch = self._without_failed(batch)
        else:
            left = _unscored(left)
        while left:
            missing = {provider.name for provider in left}
            ready = [provider for provider in left if missing.isdisjoint(provider.marks.get("reads", ()))]
            begun: list[Column] = []
            for provider in ready:
                with metrics.time(_timed_as(provider)):
                    begun.append(provider.load()(batch, sources))
            for provider, column in zip(ready, begun, strict=True):
                with metrics.time(_timed_as(provider)):
                    batch = batch.with_columns(**{provider.name: column() if callable(column) else column})
            left = [provider for provider in left if provider not in ready]
        return batch

    def _without_failed(self, batch: DataProto) -> DataProto:
        """What models said of answers that then could not be judged is 0, as on everything that does not count."""
        if not any(batch["error"]):
            return batch
        counted = batch["response_mask"].bool()
        said = {each.name: batch[each.name] for each in self.providers if each.name in batch}
        by_token = {name: column for name, column in said.items() if column.shape[:2] == counted.shape}
        return batch.with_columns(
            **{name: torch.where(_like(counted, column), column, 0) for name, column in by_token.items()}
        )


def _unscored(providers: Sequence[Entry]) -> list[Entry]:
    """Those that need no scores, nor a column that needs some."""
    later: set[str] = set()
    chosen = []
    for provider in providers:  # what one reads comes before it
        if provider.marks.get("unscored") and later.isdisjoint(provider.marks.get("reads", ())):
            chosen.append(provider)
        else:
            later.add(provider.name)
    return chosen


def _like(mask: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return mask.view(*mask.shape, *[1] * (column.ndim - mask.ndim))


def _timed_as(provider: Entry) -> str:
    return f"time/{provider.marks.get('phase', 'columns')}"


def plan_columns(readers: Mapping[str, Sequence[str]], fields: Sequence[str]) -> ColumnPlan:
    """The plan for the columns that `readers` (who: which columns) read; `fields` are what the reward reports.

    Raises: ConfigError naming a column that nobody provides, and who reads it; or a field whose name is taken.
    """
    for name in fields:
        if name in ROLLOUT_COLUMNS or name in PROVIDERS:
            raise ConfigError(
                f"reward.columns names {name!r}, which is a column of every batch or has a provider already; take it "
                "out, or let the reward report its number under another name"
            )
    given = ROLLOUT_COLUMNS | frozenset(fields)
    providers: dict[str, Entry] = {}

    def want(reader: str, column: str) -> None:
        if column in PROVIDERS and column not in providers:
            entry = PROVIDERS[column]
            for read in entry.marks.get("reads", ()):
                want(f"the provider of {column}", read)
            providers[column] = entry
        elif column not in PROVIDERS and column not in given:
            raise ConfigError(
                f"{reader} reads the column {column!r}, which nobody provides. Providers: "
                f"{', '.join(PROVIDERS.names())}; every batch has: {', '.join(sorted(ROLLOUT_COLUMNS))}. A number "
                "that the reward returns becomes a column when reward.columns lists it"
            )

    for reader, columns in readers.items():
        for column in columns:
            want(reader, column)
    roles = frozenset(role for provider in providers.values() for role in provider.marks.get("roles", ()))
    return ColumnPlan(tuple(providers.values()), roles)


@register_provider("old_log_probs", roles=("actor",), phase="log_probs", unscored=True)
def old_log_probs(batch: DataProto, sources: Sources) -> Column:
    """log pi of the policy before the update, by the trainer's kernels or, if so configured, the sampler's."""
    if sources.config.algorithm.correction.old_log_probs == "rollout":
        return batch["rollout_log_probs"].clone()
    return sources.start("actor", batch, "log_probs")


@register_provider("entropy", roles=("actor",), phase="log_probs", unscored=True)
def entropy(batch: DataProto, sources: Sources) -> Column:
    """Entropy of the policy before the update, in the state where each token was chosen."""
    return sources.start("actor", batch, "entropy")


@register_provider("sum_pi_squared", roles=("actor",), phase="log_probs", unscored=True)
def sum_pi_squared(batch: DataProto, sources: Sources) -> Column:
    """sum_v pi_v^2 of the policy before the update, in the state where each token was chosen."""
    return sources.start("actor", batch, "sum_pi_squared")


@register_provider("ref_log_probs", roles=("ref",), phase="log_probs", unscored=True)
def ref_log_probs(batch: DataProto, sources: Sources) -> Column:
    """log pi of the reference policy."""
    return sources.start("ref", batch, "log_probs")


@register_provider("old_vocab_log_probs", roles=("actor",), phase="log_probs", unscored=True)
def old_vocab_log_probs(batch: DataProto, sources: Sources) -> Column:
    """log pi of every token of the vocabulary, of the policy before the update.   [B, R, V]"""
    return sources.start("actor", batch, "vocab_log_probs")


@register_provider("ref_vocab_log_probs", roles=("ref",), phase="log_probs", unscored=True)
def ref_vocab_log_probs(batch: DataProto, sources: Sources) -> Column:
    """log pi of every token of the vocabulary, of the reference policy.   [B, R, V]"""
    return sources.start("ref", batch, "vocab_log_probs")


@register_provider("values", roles=("critic",), phase="values", unscored=True)
def values(batch: DataProto, sources: Sources) -> Column:
    """The critic's value of the state in which each token was chosen."""
    return sources.start("critic", batch, "values")


@register_provider("process_rewards", roles=("critic",), reads=("ref_log_probs",), phase="values", unscored=True)
def process_rewards(batch: DataProto, sources: Sources) -> Column:
    """log pi of the critic, a language model here, less that of the reference: an implicit reward of each token."""
    log_probs = sources.start("critic", batch, "log_probs")
    return lambda: log_probs() - batch["ref_log_probs"]


@register_provider("reward_baselines", phase="baselines")
def reward_baselines(batch: DataProto, sources: Sources) -> torch.Tensor:
    """The score of the greedy answer to each row's prompt; 0 where that failed.   [B]"""
    greedy = replace(sources.rollouts.params, temperature=0.0, top_p=1.0, top_k=0)
    prompts = [group.prompt for group in sources.groups]
    answers = sources.rollouts.sample(
        prompts, 1, greedy, step=sources.step, metrics=Metrics(), purpose="reward_baselines"
    )
    return torch.tensor([group.trajectories[0].score for group in answers])[batch["uid"]]


@register_provider("draws")
def draws(batch: DataProto, sources: Sources) -> torch.Tensor:
    """A uniform number in [0, 1) for each token, the same whenever the answer is.   [B, R]"""
    seed = sources.config.trainer.seed
    keys = torch.tensor([key(seed, "draws", name) for name in batch["trajectory_uid_name"]])
    return uniforms(keys[:, None], torch.arange(batch["responses"].shape[1]))


@register_provider("state_hash")
def state_hash(batch: DataProto, sources: Sources) -> torch.Tensor:
    """Names the state in which each token's turn was sampled: what the environment said last, the prompt at first.

    Equal states have equal numbers; 0 on text that was not sampled.   [B, R] int64
    """
    trajectories = [trajectory for group in sources.groups for trajectory in group.trajectories]
    table = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(_states(trajectory) or [0]) for trajectory in trajectories], batch_first=True
    )
    turns = batch["turn_ids"]
    return table[batch["trajectory_uid"]].gather(1, turns.clamp(min=0)).masked_fill(turns < 0, 0)


def _states(trajectory: Trajectory) -> list[int]:
    """A number for what stood before each turn."""
    states, said = [], [trajectory.prompt.uid]
    for message in trajectory.messages:
        if message.role == "assistant":
            states.append(key(0, "state", *said))
            said = []
        else:
            said.append(str(message.content))
    return states[: len(trajectory.turns)]
