# SPDX-License-Identifier: Apache-2.0
"""Providers of batch columns. Functions name the columns that they read; `whet.columns` has the provider of each.

Most columns are an output of a role's model. Any other column has a function, registered under its name:
    @register_provider("prompt_difficulty", reads=("accuracy",))
    def prompt_difficulty(batch, sources): ...
It returns the column, or a function that waits for it (`sources.start`), so that several models compute at the same
time. A provider of scores may return `ScoreColumn` instead, with failures of trajectories that got none. Parameters
after `*` get values of the config, whose keys `options` names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from statistics import fmean
from typing import Any

import torch

from whet.algorithms.calls import mini_batch_functions
from whet.algorithms.kl import kl_columns
from whet.batch import Batch
from whet.columns import COLUMNS, SCORED_BY, TABLE, Column, Reader, When
from whet.config.algorithm_checks import uses_critic
from whet.config.compose import flatten, unknown_key
from whet.config.schema import ActorConfig, TrainConfig
from whet.config.section import entry_at, is_known
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, EngineError, RegistryError
from whet.kernels.sampling import uniforms
from whet.keyed import key
from whet.metrics import Metrics
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, PROVIDERS, REJECTIONS, VALUE_LOSSES, WEIGHTS
from whet.roles.reward_texts import text_batch, text_reader
from whet.rollout.batch import with_failures
from whet.rollout.rollouts import Rollouts
from whet.types import Failure, Group, Trajectory, trajectories_of


@dataclass(frozen=True)
class ScoreColumn:
    """A column, and the failures of trajectories that got no score, by uid. Rows of these trajectories are masked."""

    column: torch.Tensor
    failures: Mapping[str, Failure] = field(default_factory=dict)


Values = torch.Tensor | ScoreColumn | Callable[[], torch.Tensor | ScoreColumn]
Provider = Callable[..., Values]  # of a batch and `Sources`


@dataclass(frozen=True)
class Sources:
    """Inputs of a provider beside the batch: the roles; the step's groups, in the order of the batch's `uid`; and the
    rollouts, if the run samples."""

    roles: Mapping[str, WorkerGroup]
    step: int
    groups: Sequence[Group] = ()
    temperature: float = 1.0  # at which responses were sampled
    made_by: Rollouts | None = None

    @property
    def rollouts(self) -> Rollouts:
        """The rollouts of a run that samples.  Raises: EngineError in a run that does not sample."""
        if self.made_by is None:
            raise EngineError("rollouts", None, "a run that samples, because a column needs its rollouts")
        return self.made_by

    def forward(self, role: str, batch: Batch, output: str) -> torch.Tensor:
        """Computes an output [B, R] of a role's model, at the temperature of sampling."""
        return self.start(role, batch, output)()

    def start(self, role: str, batch: Batch, output: str) -> Callable[[], torch.Tensor]:
        """Starts `forward`.  Returns a function that waits for its output."""
        call = self.roles[role].start("forward", batch, (output,), self.temperature)
        return lambda: call.result()[output]


def register_provider(
    name: str,
    *,
    roles: Sequence[str] = (),
    reads: Sequence[str] = (),
    phase: str = "columns",
    unscored: bool = False,
    shape: str = "B, R",
    options: Mapping[str, str] = {},  # read only
) -> Callable[[Provider], Provider]:
    """Decorator: registers the function that computes a column, and the column itself if `whet.columns` lacks it.

    `roles` names the models that the function calls, `reads` the columns of other providers that it reads. With
    `unscored` it needs no rewards, and runs while responses are being scored; its seconds are logged as `time/<phase>`.
    `options` are the config keys whose values (or sections) the function's parameters after `*` get in a run.
    Raises: RegistryError if the name is taken."""

    def decorate(function: Provider) -> Provider:
        if name in COLUMNS and name not in PROVIDERS:
            change = f"register {function.__name__} under another name"
            raise RegistryError(f"column {name}", "exists already", "", change)
        PROVIDERS.register(name, options=options)(function)
        meaning = (function.__doc__ or "").partition("\n")[0]
        when: When = "unscored" if unscored else "scored"
        COLUMNS.setdefault(name, Column(name, shape, when, meaning, tuple(roles), None, tuple(reads), phase))
        return function

    return decorate


@dataclass(frozen=True)
class ColumnPlan:
    """The columns that providers compute in every step, in order."""

    providers: tuple[Column, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of providers, by column

    @property
    def passes(self) -> tuple[str, ...]:
        """The roles whose models compute columns, with one entry for each forward pass."""
        return tuple(role for column in self.providers for role in column.roles)

    @property
    def roles(self) -> frozenset[str]:
        """The roles that the columns need."""
        return frozenset(self.passes)

    @property
    def judges(self) -> ColumnPlan:
        """Returns the part of the plan that scores: only the columns of the reward model or judge."""
        return replace(self, providers=tuple(each for each in self.providers if each.name in SCORED_BY.values()))

    def add(self, batch: Batch, sources: Sources, metrics: Metrics, *, is_scored: bool = True) -> Batch:
        """Adds the planned columns that the batch lacks. Before scoring (`is_scored` false) it adds only columns that
        need no scores. Providers that do not read each other's columns run at the same time."""
        return self._added(batch, sources, metrics, is_scored) if self.providers else batch

    def _added(self, batch: Batch, sources: Sources, metrics: Metrics, is_scored: bool) -> Batch:
        failures = dict[str, Failure]()
        left = [column for column in self.providers if column.name not in batch]
        left = left if is_scored else _unscored(left)
        while left:
            missing = {column.name for column in left}
            ready = [column for column in left if missing.isdisjoint(column.reads)]
            begun: list[Values] = []
            for column in ready:
                with metrics.time(f"time/{column.phase}"):
                    begun.append(self._begin(column, batch, sources))
            for column, values in zip(ready, begun, strict=True):
                with metrics.time(f"time/{column.phase}"):
                    found = values() if callable(values) else values
                if isinstance(found, ScoreColumn):
                    failures |= found.failures
                    found = found.column
                batch = batch.with_columns(**{column.name: found})
            left = [column for column in left if column not in ready]
        for failure in failures.values():
            metrics.sum(f"failures/{failure.source}", 1)
        return with_failures(batch, failures) if failures else batch

    def _begin(self, column: Column, batch: Batch, sources: Sources) -> Values:
        if column.name in PROVIDERS:
            values: Values = PROVIDERS[column.name].load()(batch, sources, **self.options.get(column.name, {}))
            return values
        assert column.output is not None
        return sources.start(column.roles[0], batch, column.output)


def judged(groups: Sequence[Group], batch: Batch) -> list[Group]:
    """Adds the results of providers to the groups: failures, and the score of the reward model or judge as reward part
    `reward_model`. A trajectory with several players gets the mean of the players' scores."""
    scores = next((batch[name].tolist() for name in SCORED_BY.values() if name in batch), None)
    return list(groups) if scores is None and not any(batch["error"]) else _judged(groups, batch, scores)


def _judged(groups: Sequence[Group], batch: Batch, scores: list[float] | None) -> list[Group]:
    last = {uid: row for row, uid in enumerate(batch["trajectory_uid_name"])}

    def of(each: Trajectory) -> Trajectory:
        names = dict.fromkeys((each.uid, *(f"{each.uid}/{turn.player}" for turn in each.turns)))
        rows = [last[name] for name in names if name in last]
        failure = next((batch["error"][row] for row in rows if batch["error"][row] is not None), each.failure)
        if failure is not None or scores is None:
            return replace(each, failure=failure)
        return replace(each, parts={**each.parts, "reward_model": fmean(scores[row] for row in rows)})

    return [replace(group, trajectories=tuple(map(of, group.trajectories))) for group in groups]


def with_truth(scored: Group, judged: Group) -> Group:
    """Returns the `judged` group. If the judge failed, a trajectory stays as `scored`, with the reason in `logged`."""

    def of(own: Trajectory, each: Trajectory) -> Trajectory:
        if each.failure is None or own.failure is not None:
            return each
        return replace(own, logged={**own.logged, "reward_model": each.failure.message})

    return replace(judged, trajectories=tuple(map(of, scored.trajectories, judged.trajectories)))


def _unscored(columns: Sequence[Column]) -> list[Column]:
    """The columns that need no scores, directly or through other columns."""
    later: set[str] = set()
    for column in columns:  # columns that a column reads come before it
        if column.when != "unscored" or not later.isdisjoint(column.reads):
            later.add(column.name)
    return [column for column in columns if column.name not in later]


def readers(config: TrainConfig) -> Iterator[tuple[str, Reader, Iterable[str]]]:
    """Yields, for each function that a config names, its key, the phase in which it reads, and its columns."""
    algorithm, critic = config.algorithm, config.critic
    correction, kl = algorithm.correction, algorithm.kl
    loss = POLICY_LOSSES[algorithm.policy_loss]
    own = mini_batch_functions(loss)
    estimator = ADV_ESTIMATORS[algorithm.adv_estimator]
    yield f"algorithm.adv_estimator={algorithm.adv_estimator}", "estimator", estimator.columns
    yield f"algorithm.policy_loss={algorithm.policy_loss}", "actor", [c for c in loss.columns if c not in own]
    for column, function in own.items():
        yield f"{column} of algorithm.policy_loss={algorithm.policy_loss}", "correction", function.columns
    for registry, name in ((WEIGHTS, correction.weight), (REJECTIONS, correction.rejection)):
        if name is not None:
            yield f"algorithm.correction={name}", "correction", registry[name].columns
    if uses_critic(algorithm):
        yield f"critic.value_loss={critic.value_loss}", "critic", VALUE_LOSSES[critic.value_loss].columns
    of_loss = {*loss.columns, *(kl_columns(kl.form) if kl.where == "loss" else ())}
    is_moved = updates_per_step(config.actor, config.data.train_batch_size) > 1 or correction.old_log_probs == "rollout"
    is_given = correction.old_log_probs == "interpolated"  # by the objective
    if "old_log_probs" in of_loss and not is_given and (is_moved or config.rollout.max_staleness > 0):
        # With one update a step on samples of the current policy its own log-probs, detached, are the old ones.
        yield "the ratio of the policy to what it was", "correction", ["old_log_probs"]
    if (source := config.reward_model.source) is not None:
        yield f"reward_model.{source}={config.reward_model[source]}", "estimator", [SCORED_BY[source]]
    if kl.where == "reward":
        yield "algorithm.kl.where=reward", "estimator", ["old_log_probs", *kl_columns(kl.form, "old_")]
    if kl.where == "loss":
        yield "algorithm.kl.where=loss", "actor", kl_columns(kl.form)


def updates_per_step(role: ActorConfig, train_batch_size: int) -> int:
    """Number of optimizer steps of a role in one step of the loop."""
    return role.epochs * -(-train_batch_size // (role.mini_batch_size or train_batch_size))


def plan(config: TrainConfig) -> ColumnPlan:
    """The columns that the chosen functions read, with their providers.  Raises: ConfigError."""
    found = plan_columns(readers(config), config.reward.columns)
    options = {column.name: options_of(column, config) for column in found.providers if column.name in PROVIDERS}
    return replace(found, options=options)


def options_of(column: Column, config: TrainConfig) -> dict[str, Any]:
    """Returns the options of a column's provider, by parameter.  Raises: ConfigError for an unknown key."""
    keys: Mapping[str, str] = PROVIDERS[column.name].marks.get("options", {})
    if unknown := [key for key in keys.values() if not is_known(TrainConfig, key)]:
        raise unknown_key(TrainConfig, unknown[0], f"the provider of {column.name}")
    return {name: reduce(getitem, key.split("."), config) for name, key in keys.items()}


def unread(config: TrainConfig, plan: ColumnPlan) -> list[str]:
    """Returns a warning for each config section with changed keys if no function in use reads the section's columns.

    A warning names possible readers. Empty with a loop or a provider of the user, since the columns that these read are
    unknown here."""
    if config.trainer.loop is not None or any(COLUMNS[column.name] not in TABLE for column in plan.providers):
        return []
    found = []
    for section in dict.fromkeys(column.section for column in TABLE if column.section is not None):
        columns = {column.name for column in TABLE if column.section == section}
        default = dict(flatten(TrainConfig.model_fields[section].default.model_dump(), f"{section}."))
        values = flatten(config[section].model_dump(), f"{section}.")
        keys = [f"{key}={value}" for key, value in values if key not in default or default[key] != value]
        if not keys or any(column.section == section for column in plan.providers):
            continue
        readers = [entry.name for entry in ADV_ESTIMATORS if columns & set(entry.columns)]
        chosen = f"algorithm.adv_estimator={', '.join(readers)}"
        if columns.intersection(kl_columns("k3")):
            chosen = "algorithm.kl.where=reward, loss"
        word = "key" if len(keys) == 1 else "keys"
        found.append(
            f"{', '.join(keys)}: no function in use reads {' or '.join(sorted(columns))}, which the {word} would "
            f"shape; choose one that does ({chosen}), or take the {word} out"
        )
    return found


def plan_columns(readers: Iterable[tuple[str, Reader, Iterable[str]]], fields: Sequence[str]) -> ColumnPlan:
    """Plans the columns that `readers` read. `fields` are columns that the reward function reports.

    Raises: ConfigError for a column without a provider, naming its reader, or for a field whose name is taken."""
    for name in fields:
        if name in COLUMNS:
            change = "take it out, or let the reward report its number under another name"
            raise ConfigError("reward.columns", name, "no column of every batch, nor one that has a provider", change)
    given = {*fields, *(column.name for column in COLUMNS.values() if column.is_in_every_batch)}
    planned: dict[str, Column] = {}

    def want(who: str, reader: Reader, name: str) -> None:
        column = COLUMNS.get(name)
        if name in planned or name in given or (column is not None and reader in column.given_to):
            return
        if column is None or not column.has_provider:
            provided = sorted(column.name for column in COLUMNS.values() if column.has_provider)
            expected = f"one with a provider ({', '.join(provided)}) or of every batch ({', '.join(sorted(given))})"
            change = "name one, or list a number of the reward in reward.columns"
            raise ConfigError(who, f"reads the column {name}, which nothing provides", expected, change)
        for read in column.reads:
            want(f"the provider of {name}", "estimator", read)
        if column.output is None:
            entry_at(PROVIDERS, who, name)  # raises if its plugin is missing
        planned[name] = column

    for who, reader, names in readers:
        for name in names:
            want(who, reader, name)
    return ColumnPlan(tuple(planned.values()))


@register_provider("old_log_probs", options={"by": "algorithm.correction.old_log_probs"})
def old_log_probs(batch: Batch, sources: Sources, *, by: str) -> Values:
    """Log-probs of the policy before the update, computed by the trainer or, with `by="rollout"`, by the sampler."""
    if by == "rollout":
        return batch["rollout_log_probs"].clone()
    return sources.start("actor", batch, "log_probs")


@register_provider("process_rewards")
def process_rewards(batch: Batch, sources: Sources) -> Values:
    """Implicit reward of each token: log-prob under the critic minus log-prob under the reference model."""
    log_probs = sources.start("critic", batch, "log_probs")
    return lambda: log_probs() - batch["ref_log_probs"]


@register_provider("rm_scores", options={"path": "reward_model.model_path", "trusted": "model.trust_remote_code"})
def rm_scores(batch: Batch, sources: Sources, *, path: str | None = None, trusted: bool = False) -> Values:
    """Scores of the reward model at `path`, on the last row of each trajectory; other rows have 0. The model reads
    token ids or, if its vocabulary differs from the policy's, the conversation as text.   [B]"""
    mask = batch["response_mask"] * last_rows(batch)[:, None]
    read = batch.with_columns(response_mask=mask)
    reader = None if path is None else text_reader(path, trusted, sources.rollouts.tokenizer)
    if reader is not None:
        read = text_batch(read, trajectories_of(sources.groups), reader)
    scores = sources.start("reward_model", read, "scores")
    return lambda: scores().sum(1)


def last_rows(batch: Batch) -> torch.Tensor:
    """Marks the last row of each trajectory.   [B] bool"""
    uid = batch["trajectory_uid"]
    is_last = torch.ones(len(uid), dtype=torch.bool)
    is_last[:-1] = uid[1:] != uid[:-1]
    return is_last


@register_provider("reward_baselines")
def reward_baselines(batch: Batch, sources: Sources) -> torch.Tensor:
    """The score of the greedy response to each row's prompt; 0 if the greedy response failed.   [B]"""
    greedy = replace(sources.rollouts.params, temperature=0.0, top_p=1.0, top_k=0)
    prompts = [group.prompt for group in sources.groups]
    step = sources.step
    groups = sources.rollouts.sample(prompts, 1, greedy, step=step, purpose="reward_baselines")
    return torch.tensor([group.trajectories[0].score for group in groups])[batch["uid"]]


@register_provider("draws", options={"seed": "trainer.seed"})
def draws(batch: Batch, sources: Sources, *, seed: int) -> torch.Tensor:
    """A uniform number in [0, 1) for each token, by seed, trajectory name and position of the token.   [B, R]"""
    keys = torch.tensor([key(seed, "draws", name) for name in batch["trajectory_uid_name"]])
    return uniforms(keys[:, None], torch.arange(batch["responses"].shape[1]))


@register_provider("state_hash")
def state_hash(batch: Batch, sources: Sources) -> torch.Tensor:
    """A hash of the state before each token's turn. The state is the environment's `state_key`; without one it is the
    last messages (at the first turn the prompt).

    Equal states have equal hashes. Tokens that were not sampled have 0.   [B, R] int64"""
    trajectories = trajectories_of(sources.groups)
    states = [torch.tensor(_states(trajectory) or [0]) for trajectory in trajectories]
    table = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    turns = batch["turn_ids"]
    return table[batch["trajectory_uid"]].gather(1, turns.clamp(min=0)).masked_fill(turns < 0, 0)


def _states(trajectory: Trajectory) -> list[int]:
    """The hash of the state before each turn."""
    states, since = [], [trajectory.prompt.uid]
    for turn in trajectory.turns:
        since += [str(message.content) for message in turn.observation]
        states.append(key(0, "state", *(since if turn.state_key is None else [turn.state_key])))
        since = []
    return states
