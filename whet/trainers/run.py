# SPDX-License-Identifier: Apache-2.0
"""A run: everything that the loop works with, already built, and the run's files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet import files
from whet.algorithms.controllers import AdaptiveEntropy, Fixed
from whet.config.schema import TrainConfig
from whet.evaluation.answers import readable
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import Entry
from whet.rollout.protocol import SamplingParams
from whet.rollout.stream import Rollouts
from whet.tracking.jsonl import json_line, printable
from whet.tracking.tracker import Row
from whet.trainers.columns import ColumnPlan, Sources
from whet.trainers.frame import Frame
from whet.trainers.health import Health
from whet.trainers.modes import Modes
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.settle import Settlement
from whet.trainers.shape import Shaper
from whet.types import Group, Prompt
from whet.weight_sync.between_pools import WeightSync


@dataclass(kw_only=True)
class Run(Frame):
    """One training run. The loop reads it; only `step` and what roles hold change."""

    config: TrainConfig
    weight_sync: WeightSync
    rollouts: Rollouts
    columns: ColumnPlan
    estimator: Entry
    estimator_options: Mapping[str, Any]
    settlement: Settlement
    policy_objective: PolicyObjective
    value_objective: ValueObjective | None
    shaper: Shaper
    entropy_controller: Fixed | AdaptiveEntropy
    val_prompts: Sequence[Prompt]
    val_params: SamplingParams
    modes: Modes = field(default_factory=Modes)
    health: Health = field(default_factory=Health)
    digests: dict[int, str] = field(default_factory=dict)  # of the weights that the rollout was given, by version
    _next_prompts: dict[str, Any] | None = None  # of the rollouts' state, while a step's prompts are taken

    @property
    def samples_apart(self) -> bool:
        """Whether the rollout has processes in which nothing else is."""
        cluster = self.config.cluster
        pools = [cluster.pool_of(role) for role in self.roles]
        return not cluster.stays_here and pools.count(cluster.pool_of("rollout")) == 1

    def sources(self, groups: Sequence[Group], step: int) -> Sources:
        """What column providers draw on in one step."""
        return Sources(self.config, self.roles, self.rollouts, groups, step)

    def log(self, step: int, metrics: Metrics) -> None:
        """Hands a step's numbers to the trackers and to the callbacks."""
        super().log(step, metrics)
        numbers = {name: value for name, value in self.history[-1].items() if name != "step"}
        for callback in self.callbacks:
            callback(self, step, numbers)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs beside weights and optimizers."""
        return {
            "rollouts": self._next_prompts or dict(self.rollouts.state()),
            "shaper": self.shaper.state(),
            "entropy": self.entropy_controller.state(),
            "health": self.health.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self.rollouts.load_state(state["rollouts"])
        self.shaper.load_state(state["shaper"])
        self.entropy_controller.load_state(state["entropy"])
        self.health.load_state(state["health"])

    def start(self) -> None:
        """Goes on where the checkpoint that was found was written, and lets the rollout have the weights."""
        super().start()
        self.sync(self.step)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For what changes no weights, at the start of a step: whoever ends the run here waits for nothing, and the
        checkpoint is that of the step before. Workers in other processes have to finish their call first, unless there
        is nothing to save yet."""
        self._next_prompts = copy.deepcopy(dict(self.rollouts.state()))
        if self.step > 0 and not self.config.cluster.stays_here:
            self.signals.here()
            yield
        else:
            with self.signals.at_once():
                yield
        self._next_prompts = None

    def sync(self, step: int) -> None:
        """Lets the rollout sample from the weights after `step`.

        Raises: WeightSyncError, DeadlineError, WorkerError."""
        self.digests[step] = self.weight_sync(step)

    def write_rollouts(self, step: int, groups: Sequence[Group], purpose: str = "rollout") -> None:
        """One JSON object an answer, in rollouts/, so that a person can read what the model wrote and was paid; a few
        of them as a table for the trackers."""
        every = self.config.trainer.log_rollouts
        if every == 0 or (purpose == "rollout" and step % every):
            return
        prefix = "step" if purpose == "rollout" else purpose
        path = self.run_dir / "rollouts" / f"{prefix}_{step:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_answers(path, groups, self.tokenizer, self.digests)
        rows = table_rows(groups, self.tokenizer, self.config.trainer.table_rows)
        self.trackers.add_table(f"generations/{purpose}", rows)

    def write_tokens(self, step: int, batch: DataProto) -> None:
        """One JSON object a row, in tokens/: each token as text, and what every column says of it."""
        every = self.config.trainer.log_tokens
        if every == 0 or step % every:
            return
        path = self.run_dir / "tokens" / f"step_{step:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        files.write(path, "".join(json_line(row) for row in readable_tokens(batch, self.tokenizer)))

    def close(self) -> None:
        """Ends workers, reward processes and trackers, then lets go of the folder."""
        with ExitStack() as stack:
            stack.callback(super().close)
            stack.callback(self.rollouts.close)


def write_answers(
    path: Path, groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, digests: Mapping[int, str]
) -> None:
    """One JSON object an answer and line; `digests` are of the weights by version."""
    answers = [readable(answer, tokenizer) for group in groups for answer in group.trajectories]
    answers = [{**answer, "policy_digest": digests.get(answer["policy_version"])} for answer in answers]
    files.write(path, "".join(json_line(answer) for answer in answers))


def table_rows(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Row]:
    """The first answer of each group, then the second of each, up to `limit`."""
    in_turn = (answer for answers in zip_longest(*(group.trajectories for group in groups)) for answer in answers)
    rows: list[Row] = []
    for answer in islice(filter(None, in_turn), limit):
        read = readable(answer, tokenizer)
        rows.append(
            {
                **{name: printable(str(read[name])) for name in ("uid", "prompt", "response", "ground_truth")},
                **{name: read[name] for name in ("reward", "accuracy", "tokens", "turns")},
                "finish_reason": read["finish_reason"] or "",
                "failure": ""
                if answer.failure is None
                else printable(f"{answer.failure.source}: {answer.failure.message}"),
            }
        )
    return rows


def readable_tokens(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Each row: whose answer it is, its tokens, whether the policy sampled and trains on them, and every column that
    has a number for each token. Where a teacher spoke, `k` is what it gives a token over what the policy does."""
    shape = batch["response_mask"].shape
    columns = {name: column for name, column in batch.tensors().items() if column.shape == shape}
    columns = {name: column for name, column in columns.items() if column.is_floating_point()}
    if {"teacher_log_probs", "old_log_probs"} <= columns.keys():
        columns["k"] = columns["teacher_log_probs"] - columns["old_log_probs"]
    lengths = batch["attention_mask"][:, -shape[1] :].sum(1).tolist()
    for row, length in enumerate(lengths):
        ids = batch["responses"][row, :length].tolist()
        numbers = {
            name: [round(value, 6) for value in column[row, :length].tolist()] for name, column in columns.items()
        }
        yield {
            "uid": batch["trajectory_uid_name"][row],
            "tokens": [tokenizer.decode([token]) for token in ids],
            **{name: batch[name][row, :length].tolist() for name in ("response_mask", "loss_mask") if name in batch},
            **numbers,
        }
