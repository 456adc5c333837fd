# SPDX-License-Identifier: Apache-2.0
"""Who gives each batch column. The functions in use name the columns, these their providers, these the roles to start.

A provider is registered under the column's name; its marks say which roles it needs, and which columns it reads itself:
    @register_provider("ref_log_probs", roles=("ref",))
    def ref_log_probs(batch, sources): return sources.forward("ref", batch, "log_probs")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from whet.config.schema import TrainConfig
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


class Role(Protocol):
    """What computes model outputs."""

    def forward(self, batch: DataProto, needs: tuple[str, ...], temperature: float) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient."""
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
        return self.roles[role].forward(batch, (output,), self.config.rollout.temperature or 1.0)[output]


@dataclass(frozen=True)
class ColumnPlan:
    """The providers to call in every step, in order, and the roles that they need."""

    providers: tuple[Entry, ...]
    roles: frozenset[str]

    def add(self, batch: DataProto, sources: Sources, metrics: Metrics) -> DataProto:
        """The batch with every planned column that it does not have yet."""
        for provider in self.providers:
            if provider.name not in batch:
                with metrics.time(f"time/{provider.marks.get('phase', 'columns')}"):
                    given = provider.load()(batch, sources)
                batch = batch.with_columns(**{provider.name: given})
        return batch


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


@register_provider("old_log_probs", roles=("actor",), phase="log_probs")
def old_log_probs(batch: DataProto, sources: Sources) -> torch.Tensor:
    """log pi of the policy before the update, by the trainer's kernels or, if so configured, the sampler's."""
    if sources.config.algorithm.correction.old_log_probs == "rollout":
        return batch["rollout_log_probs"].clone()
    return sources.forward("actor", batch, "log_probs")


@register_provider("entropy", roles=("actor",), phase="log_probs")
def entropy(batch: DataProto, sources: Sources) -> torch.Tensor:
    """Entropy of the policy before the update, in the state where each token was chosen."""
    return sources.forward("actor", batch, "entropy")


@register_provider("sum_pi_squared", roles=("actor",), phase="log_probs")
def sum_pi_squared(batch: DataProto, sources: Sources) -> torch.Tensor:
    """sum_v pi_v^2 of the policy before the update, in the state where each token was chosen."""
    return sources.forward("actor", batch, "sum_pi_squared")


@register_provider("ref_log_probs", roles=("ref",), phase="log_probs")
def ref_log_probs(batch: DataProto, sources: Sources) -> torch.Tensor:
    """log pi of the reference policy."""
    return sources.forward("ref", batch, "log_probs")


@register_provider("old_vocab_log_probs", roles=("actor",), phase="log_probs")
def old_vocab_log_probs(batch: DataProto, sources: Sources) -> torch.Tensor:
    """log pi of every token of the vocabulary, of the policy before the update.   [B, R, V]"""
    return sources.forward("actor", batch, "vocab_log_probs")


@register_provider("ref_vocab_log_probs", roles=("ref",), phase="log_probs")
def ref_vocab_log_probs(batch: DataProto, sources: Sources) -> torch.Tensor:
    """log pi of every token of the vocabulary, of the reference policy.   [B, R, V]"""
    return sources.forward("ref", batch, "vocab_log_probs")


@register_provider("values", roles=("critic",), phase="values")
def values(batch: DataProto, sources: Sources) -> torch.Tensor:
    """The critic's value of the state in which each token was chosen."""
    return sources.forward("critic", batch, "values")


@register_provider("process_rewards", roles=("critic",), reads=("ref_log_probs",), phase="values")
def process_rewards(batch: DataProto, sources: Sources) -> torch.Tensor:
    """log pi of the critic, a language model here, less that of the reference: an implicit reward of each token."""
    return sources.forward("critic", batch, "log_probs") - batch["ref_log_probs"]


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
