# SPDX-License-Identifier: Apache-2.0
"""Who gives each batch column. The functions in use name the columns, these their providers, these the roles to start.

A provider is registered under the column's name, with the roles it needs as marks:
    @register_provider("ref_log_probs", roles=("ref",))
    def ref_log_probs(batch, roles): return roles["ref"].forward(batch, ...)["ref_log_probs"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import Entry, Registry

PROVIDERS = Registry("column provider", "trainers", "register_provider")
register_provider = PROVIDERS.register

# What `rollout.to_batch` puts into every batch, and what the loop itself adds before advantages are estimated.
ROLLOUT_COLUMNS = frozenset(
    {
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids"),
        *("response_mask", "turn_ids", "policy_version", "rollout_log_probs"),
        *("token_level_scores", "token_level_rewards", "accuracy", "reward_parts"),
        *("uid", "trajectory_uid"),
    }
)


class Forward(Protocol):
    """A role that computes model outputs."""

    def forward(self, batch: DataProto, needs: tuple[str, ...], temperature: float) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient."""
        ...


@dataclass(frozen=True)
class ColumnPlan:
    """The providers to call in every step, in order, and the roles that they need."""

    providers: tuple[Entry, ...]
    roles: frozenset[str]
    temperature: float

    def add(self, batch: DataProto, roles: Mapping[str, Any], metrics: Metrics) -> DataProto:
        """The batch with every planned column that it does not have yet."""
        for provider in self.providers:
            if provider.name not in batch:
                with metrics.time(f"time/{provider.marks.get('phase', 'columns')}"):
                    given = provider.load()(batch, roles, self.temperature)
                batch = batch.with_columns(**given)
        return batch


def plan_columns(readers: Mapping[str, Sequence[str]], fields: Sequence[str], temperature: float) -> ColumnPlan:
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
    for reader, columns in readers.items():
        for column in columns:
            if column in PROVIDERS:
                providers.setdefault(column, PROVIDERS[column])
            elif column not in given:
                raise ConfigError(
                    f"{reader} reads the column {column!r}, which nobody provides. Providers: "
                    f"{', '.join(PROVIDERS.names())}; every batch has: {', '.join(sorted(ROLLOUT_COLUMNS))}. A number "
                    "that the reward returns becomes a column when reward.columns lists it"
                )
    roles = frozenset(role for provider in providers.values() for role in provider.marks.get("roles", ()))
    return ColumnPlan(tuple(providers.values()), roles, temperature)


@register_provider("old_log_probs", roles=("actor",), phase="log_probs")
def old_log_probs(batch: DataProto, roles: Mapping[str, Forward], temperature: float) -> dict[str, torch.Tensor]:
    """log pi of the policy before the update, by the trainer's kernels."""
    return {"old_log_probs": roles["actor"].forward(batch, ("log_probs",), temperature)["log_probs"]}


@register_provider("entropy", roles=("actor",), phase="log_probs")
def entropy(batch: DataProto, roles: Mapping[str, Forward], temperature: float) -> dict[str, torch.Tensor]:
    """Entropy of the policy before the update, in the state where each token was chosen."""
    return {"entropy": roles["actor"].forward(batch, ("entropy",), temperature)["entropy"]}


@register_provider("sum_pi_squared", roles=("actor",), phase="log_probs")
def sum_pi_squared(batch: DataProto, roles: Mapping[str, Forward], temperature: float) -> dict[str, torch.Tensor]:
    """sum_v pi_v^2 of the policy before the update, in the state where each token was chosen."""
    return {"sum_pi_squared": roles["actor"].forward(batch, ("sum_pi_squared",), temperature)["sum_pi_squared"]}


@register_provider("ref_log_probs", roles=("ref",), phase="log_probs")
def ref_log_probs(batch: DataProto, roles: Mapping[str, Forward], temperature: float) -> dict[str, torch.Tensor]:
    """log pi of the reference policy."""
    return {"ref_log_probs": roles["ref"].forward(batch, ("log_probs",), temperature)["log_probs"]}


@register_provider("values", roles=("critic",), phase="values")
def values(batch: DataProto, roles: Mapping[str, Forward], temperature: float) -> dict[str, torch.Tensor]:
    """The critic's value of the state in which each token was chosen."""
    return {"values": roles["critic"].forward(batch, ("values",), temperature)["values"]}
