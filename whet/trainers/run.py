# SPDX-License-Identifier: Apache-2.0
"""A run: everything that the loop works with, already built, and the run's files."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.algorithms.controllers import AdaptiveEntropy, Fixed
from whet.config.schema import SFTConfig, TrainConfig, TrainerConfig
from whet.controller.worker_group import WorkerGroup
from whet.errors import CheckpointError, EngineError
from whet.metrics import Metrics, phase
from whet.protocol import DataProto
from whet.registry import Entry
from whet.rollout.protocol import SamplingParams
from whet.rollout.stream import Rollouts
from whet.tracking.jsonl import JsonlTracker
from whet.tracking.service import TrackedRun, open_services
from whet.tracking.tracker import Row, Tracker, Trackers
from whet.trainers import checkpoint
from whet.trainers.columns import ColumnPlan, Sources
from whet.trainers.health import Health
from whet.trainers.modes import Modes
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.run_dir import RunDir
from whet.trainers.settle import Settlement
from whet.trainers.shape import Shaper
from whet.trainers.stop import Stopped, StopSignals
from whet.types import Group, Prompt, Trajectory
from whet.weight_sync.between_pools import WeightSync

Callback = Callable[["Run", int, Mapping[str, float]], None]


@dataclass
class Run:
    """One training run. The loop reads it; only `step` and what roles hold change."""

    config: TrainConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    roles: Mapping[str, WorkerGroup]
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
    total_steps: int
    trackers: Trackers  # are shown everything
    metrics_file: Tracker  # what the mathematics produced: equal in equal runs
    timings_file: Tracker  # what the clock said
    callbacks: Sequence[Callback] = ()
    modes: Modes = field(default_factory=Modes)
    opened: RunDir | None = None  # the run's folder, taken; None where nothing is written
    step: int = 0  # steps done
    score: float | None = None  # trainer.best_metric where the last step was validated
    history: list[dict[str, float]] = field(default_factory=list)  # what was logged, with `step`
    first_update_at: float | None = None  # time.time() after the first optimizer step of this process
    health: Health = field(default_factory=Health)
    digests: dict[int, str] = field(default_factory=dict)  # of the weights that the rollout was given, by version
    signals: StopSignals = field(init=False)

    def __post_init__(self) -> None:
        self.signals = StopSignals(self.run_dir / "stop")
        self._next_prompts: dict[str, Any] | None = None  # of the rollouts' state, while a step's prompts are taken

    @property
    def pad_token_id(self) -> int:
        """What fills up rows."""
        assert isinstance(self.tokenizer.pad_token_id, int)
        return self.tokenizer.pad_token_id

    @property
    def samples_apart(self) -> bool:
        """Whether the rollout has processes in which nothing else is."""
        cluster = self.config.cluster
        pools = [cluster.pool_of(role) for role in self.roles]
        return not cluster.stays_here and pools.count(cluster.pool_of("rollout")) == 1

    def sources(self, groups: Sequence[Group], step: int) -> Sources:
        """What column providers draw on in one step."""
        return Sources(self.config, self.roles, self.rollouts, groups, step)

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: only at the end) follows the step just done."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def log(self, step: int, metrics: Metrics) -> None:
        """Hands a step's numbers to the trackers and to the callbacks."""
        if self.first_update_at is None and step > 0:
            self.first_update_at = time.time()
        numbers, timings = metrics.reduce(), metrics.timings()
        self.history.append({"step": step, **numbers})
        self.score = best_score(numbers, self.config.trainer.best_metric or "val/accuracy")
        seconds = timings.get("time/step", 0.0)
        if seconds > 0 and "perf/total_num_tokens" in numbers:
            timings["perf/throughput"] = numbers["perf/total_num_tokens"] / seconds
        self.metrics_file.log(step, numbers)
        self.timings_file.log(step, timings)
        self.trackers.log(step, {**numbers, **timings})
        for callback in self.callbacks:
            callback(self, step, numbers)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizers."""
        return {
            "rollouts": self._next_prompts or dict(self.rollouts.state()),
            "shaper": self.shaper.state(),
            "entropy": self.entropy_controller.state(),
            "health": self.health.state(),
        }

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For what changes no weights, at the start of a step: whoever ends the run here waits for nothing, and the
        checkpoint is that of the step before. Workers in other processes have to finish their call first."""
        self._next_prompts = copy.deepcopy(dict(self.rollouts.state()))
        if not self.config.cluster.stays_here:
            self.signals.here()
            yield
        else:
            with self.signals.at_once():
                yield
        self._next_prompts = None

    def save(self) -> Path:
        """Writes a checkpoint of this step.  Returns its folder."""
        with phase("save"):
            return checkpoint.save(
                self.run_dir,
                self.step,
                roles=self.roles,
                state=self.state(),
                score=self.score,
                is_good=self.health.is_good,
                tokenizer=self.tokenizer,
                model_path=str(self.config.model.path),
                save_limit=self.config.trainer.save_limit,
            )

    def start(self, folder: Path | None) -> None:
        """Goes on where the checkpoint in `folder` was written; without one begins with the weights as they are."""
        if folder is not None:
            state = restored(folder, self.roles, self.config.model.path)
            self.step = state["step"]
            self.rollouts.load_state(state["rollouts"])
            self.shaper.load_state(state["shaper"])
            self.entropy_controller.load_state(state["entropy"])
            self.health.load_state(state["health"])
        self.sync(self.step)

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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_answers(path, groups, self.tokenizer, self.digests)
        rows = table_rows(groups, self.tokenizer, self.config.trainer.table_rows)
        self.trackers.add_table(f"generations/{purpose}", rows)

    def write_tokens(self, step: int, batch: DataProto) -> None:
        """One JSON object a row, in tokens/: each token as text, and what every column says of it."""
        every = self.config.trainer.log_tokens
        if every == 0 or step % every:
            return
        path = self.run_dir / "tokens" / f"step_{step:06}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in readable_tokens(batch, self.tokenizer)]
        path.write_text("".join(lines), encoding="utf-8")

    def close(self) -> None:
        """Ends workers, reward processes and trackers, the later ones also where an earlier one fails."""
        with ExitStack() as stack:
            for group in self.roles.values():
                stack.callback(group.close)
            if self.rollouts.scorer is not None:
                stack.callback(self.rollouts.scorer.close)
            for tracker in (self.trackers, self.metrics_file, self.timings_file):
                stack.callback(tracker.close, failed=not isinstance(sys.exception(), Stopped | None))
            if self.opened is not None:
                stack.callback(self.opened.close)


def best_score(numbers: Mapping[str, float], metric: str) -> float | None:
    """The metric, higher being better (a minus before its name turns it round); None where it is not there."""
    sign = -1.0 if metric.startswith("-") else 1.0
    value = numbers.get(metric.removeprefix("-"))
    return None if value is None or math.isnan(value) else sign * value


def restored(folder: Path, roles: Mapping[str, WorkerGroup], model_path: str | None) -> dict[str, Any]:
    """What `checkpoint.restore` gives.  Raises: CheckpointError where it is of another model."""
    try:
        return checkpoint.restore(folder, roles)
    except EngineError as error:
        raise CheckpointError(
            f"{folder} does not fit model.path={model_path}: {error}; name the model that the checkpoint was trained "
            "from, or another checkpoint"
        ) from error


def run_folder(trainer: TrainerConfig) -> Path:
    """Where a run writes."""
    return Path(trainer.run_dir or Path("runs", trainer.project_name, trainer.experiment_name))


def metric_file(trainer: TrainerConfig, path: Path) -> Tracker:
    """A JSONL file of metrics, or nothing where `trainer.logger` does not ask for it."""
    return JsonlTracker(path) if "jsonl" in trainer.logger else Trackers([])


def open_trackers(config: TrainConfig | SFTConfig, run_dir: Path, start_step: int | None) -> Trackers:
    """The services that `trainer.logger` names; `start_step` is None in a run that starts afresh.

    Raises: ConfigError where one does not start."""
    trainer = config.trainer
    told = TrackedRun(
        folder=run_dir,
        project=trainer.project_name,
        name=trainer.experiment_name,
        config=config.model_dump(mode="json"),
        steps_done=-1 if start_step is None else start_step,
    )
    services = dict.fromkeys(name for name in trainer.logger if name not in ("console", "jsonl"))
    return Trackers(open_services(list(services), told))


def write_answers(
    path: Path, groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, digests: Mapping[int, str]
) -> None:
    """One JSON object an answer and line; `digests` are of the weights by version."""
    answers = [readable(answer, tokenizer) for group in groups for answer in group.trajectories]
    answers = [{**answer, "policy_digest": digests.get(answer["policy_version"])} for answer in answers]
    lines = [json.dumps(answer, ensure_ascii=False, default=str) + "\n" for answer in answers]
    path.write_text("".join(lines), encoding="utf-8")


def readable(answer: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """An answer as a person reads it: text, reward, and why it failed if it did."""
    sampled = [token for turn in answer.turns for token in turn.token_ids]
    last = answer.turns[-1] if answer.turns else None
    return {
        "uid": answer.uid,
        "index": answer.prompt.index,
        "data_source": answer.prompt.data_source,
        "prompt": tokenizer.decode(list(answer.prompt.token_ids)),
        "response": tokenizer.decode(list(_response_ids(answer))),
        "ground_truth": answer.prompt.ground_truth,
        "extracted": answer.extracted,
        "reward": None if answer.failure is not None else answer.score,
        "accuracy": answer.accuracy,
        "parts": dict(answer.parts),
        "tokens": len(sampled),
        "turns": len(answer.turns),
        "finish_reason": last.finish_reason if last is not None else None,
        "stop": last.stop if last is not None else None,
        "mean_log_prob": _mean([value for turn in answer.turns for value in turn.log_probs]),
        "policy_version": last.policy_version if last is not None else None,
        "failure": None if answer.failure is None else asdict(answer.failure),
    }


def table_rows(groups: Sequence[Group], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[Row]:
    """The first answer of each group, then the second of each, up to `limit`."""
    in_turn = (answer for answers in zip_longest(*(group.trajectories for group in groups)) for answer in answers)
    rows: list[Row] = []
    for answer in islice(filter(None, in_turn), limit):
        read = readable(answer, tokenizer)
        rows.append(
            {
                **{name: str(read[name]) for name in ("uid", "prompt", "response", "ground_truth")},
                **{name: read[name] for name in ("reward", "accuracy", "tokens", "turns")},
                "finish_reason": read["finish_reason"] or "",
                "failure": "" if answer.failure is None else f"{answer.failure.source}: {answer.failure.message}",
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


def _response_ids(answer: Trajectory) -> tuple[int, ...]:
    """Everything after the prompt, where the context was never rewritten; the last turn's view where it was."""
    if not answer.turns:
        return ()
    last = answer.turns[-1]
    whole = last.context_ids + last.token_ids
    start = len(answer.prompt.token_ids) if whole[: len(answer.prompt.token_ids)] == answer.prompt.token_ids else 0
    return whole[start:]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
