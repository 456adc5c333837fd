# SPDX-License-Identifier: Apache-2.0
"""A reinforcement learning run: the parts that the loop uses, and the files that the run writes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet import files
from whet.algorithms.calls import Bound
from whet.batch import Batch
from whet.config.schema import TrainConfig
from whet.evaluation.answers import readable
from whet.metrics import Metrics
from whet.models.encoders.load import encoders_of
from whet.roles.rollout_worker import Direct
from whet.rollout.batch import to_batch
from whet.rollout.flow import by_player
from whet.rollout.protocol import SamplingParams
from whet.rollout.replicas import Replicas
from whet.rollout.rollouts import Rollouts
from whet.rounding import alike
from whet.tracking.rollouts import read_rollouts
from whet.tracking.tracker import TableRow, json_line, printable
from whet.trainers.columns import ColumnPlan, Sources, judged, with_truth
from whet.trainers.frame import OWN_TRACKERS, Frame
from whet.trainers.health import Health
from whet.trainers.objectives import PolicyObjective, ValueObjective
from whet.trainers.run_dir import MEDIA
from whet.trainers.shape import AdaptiveEntropy, Correction, Fixed, Shaper
from whet.types import Group, Prompt, trajectories_of

log = logging.getLogger(__name__)
TOKEN_MARKS = ("response_mask", "loss_mask", "turn_ids", "policy_version")  # columns of whole numbers
MAX_COPIED_BYTES = 32 * 2**20  # of an image or video
WINDOW = 5  # steps whose mean is the training reward
GAP = 0.25  # share of the range of rewards: warn of a gap that is as large and grew by as much
LONGEST_LIST = 10
Record = Mapping[str, Any]


@dataclass(kw_only=True, repr=False)
class Run(Frame):
    """A training run, which the loop reads. Only `step` and the state of the roles change."""

    config: TrainConfig
    rollouts: Rollouts
    columns: ColumnPlan
    estimator: Bound
    correction: Correction
    policy_objective: PolicyObjective
    value_objective: ValueObjective | None
    shaper: Shaper
    entropy_controller: Fixed | AdaptiveEntropy
    val_prompts: Sequence[Prompt]
    val_params: SamplingParams
    health: Health = field(default_factory=Health)
    has_gap: bool = False  # whether the run has warned of a gap between rewards and held-out accuracy
    digests: dict[int, str] = field(default_factory=dict)  # of the rollout's weights, by version

    @property
    def engine(self) -> Replicas | Direct:
        """The rollout ranks as one engine, or the rollout engine in this process."""
        return cast(Replicas | Direct, self.rollouts.driver.engine)

    @property
    def validates(self) -> bool:
        return bool(self.val_prompts) and super().validates

    @cached_property
    def environment_name(self) -> str:
        """The environment's name in metrics."""
        return self.config.environment.label

    @property
    def samples_apart(self) -> bool:
        """Tells whether the rollout has processes of its own and a validation needs no other role."""
        cluster = self.config.cluster
        if self.columns.judges.roles or self.config.reward_model.judge is not None:
            return False
        pools = [cluster.pool_of(role) for role in self.roles]
        return not self.stays_here and pools.count(cluster.pool_of("rollout")) == 1

    def sources(self, groups: Sequence[Group], step: int) -> Sources:
        """The sources of column providers in one step."""
        return Sources(self.roles, step, by_player(groups), self.policy_objective.temperature, self.rollouts)

    def judge(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Adds the score of the reward model or judge to held-out groups, as part `reward_model`, if the run has one.
        If scoring fails, the trajectory keeps its reward and accuracy, and the reason is logged."""
        if not self.columns.judges.providers:
            return list(groups)
        found = list[Group]()
        for start in range(0, len(groups), self.config.data.train_batch_size):  # no more memory than a step
            own = groups[start : start + self.config.data.train_batch_size]
            batch = to_batch(own, pad_token_id=self.pad_token_id)
            found += judged(own, self.columns.judges.add(batch, self.sources(own, step), Metrics()))
        return [with_truth(*pair) for pair in zip(groups, found, strict=True)]

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs a step's metrics to trackers and callbacks. Warns of a gap between rewards and held-out accuracy."""
        if lost := self.engine.num_lost:
            metrics.max("rollout/lost_ranks", lost)
        if metrics.value("val/accuracy") is not None:
            self._check_gap(step, metrics)
        super().log(step, metrics)
        numbers = {name: value for name, value in self.history[-1].items() if name != "step"}
        for callback in self.callbacks:
            callback(self, step, numbers)

    def state(self) -> dict[str, Any]:
        return {
            "rollouts": {**self.rollouts.state(), "spent": dict(self.rollouts.spent)},
            "shaper": self.shaper.state(),
            "entropy": self.entropy_controller.state(),
            "health": self.health.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rollouts.load_state(state["rollouts"])
        self.rollouts.spent |= {name: 0.0 + value for name, value in state["rollouts"].get("spent", {}).items()}
        self.shaper.load_state(state["shaper"])
        self.entropy_controller.load_state(state["entropy"])
        self.health.load_state(state["health"])

    def start(self) -> None:
        """Resumes from the checkpoint, if there is one, and syncs the rollout's weights."""
        super().start()
        self.rollouts.may_stop = self.signals.here
        self.sync(self.step)

    def check_health(self, batch: Batch, metrics: Metrics) -> None:
        """Warns of jumps and skipped updates.  Raises: EngineError after three skipped updates in a row."""
        self.health.check(self, batch, self.step, metrics)

    def sync(self, step: int) -> None:
        """Syncs the weights of `step` to the rollout.  Raises: WeightSyncError, DeadlineError, WorkerError."""
        self.digests[step] = self.engine.sync(step)
        self.rollouts.on_weights(step)

    def write_rollouts(self, step: int, groups: Sequence[Group], purpose: str = "rollout") -> None:
        """Writes each trajectory as a JSON object to rollouts/, and its images and videos to media/. Adds some
        trajectories to the tables of trackers that have tables."""
        every, dropping = self.config.trainer.log_rollouts, self.config.algorithm.filter
        if every == 0 or not groups or (purpose != "validation" and step % every):
            return
        prefix = "step" if purpose == "rollout" else purpose
        path = self.run_dir / "rollouts" / f"{prefix}_{step:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        lines = [[readable(each, self.tokenizer) for each in group.trajectories] for group in groups]
        for line in chain.from_iterable(lines):
            line["policy_digest"] = self.digests.get(line["policy_version"])
            if purpose == "dropped":
                line["dropped_by"] = f"{dropping.name}, which reads the group's {dropping.metric}"
        files.write(path, "".join(map(json_line, chain.from_iterable(lines))))
        if encoders_of(self.tokenizer) is not None:
            copy_media(self.run_dir / MEDIA, groups)
        if purpose == "validation":
            self._write_jumps(path, list(chain.from_iterable(lines)))
        if not OWN_TRACKERS.issuperset(self.config.trainer.logger):  # console and jsonl show no tables
            rows = table_rows(lines, self.config.trainer.table_rows)
            self.trackers.add_table(step, f"generations/{purpose}", rows)

    def write_tokens(self, step: int, batch: Batch) -> None:
        """Writes a JSON object for each row to tokens/: each token as text, with its value in every column. If the
        batch lacks the policy's entropy or log-probs, they are computed for this file."""
        every = self.config.trainer.log_tokens
        if every and step % every == 0:
            self._write_tokens(step, batch)

    def _write_tokens(self, step: int, batch: Batch) -> None:
        outputs = {"old_log_probs": "log_probs", "entropy": "entropy"}
        if missing := {name: output for name, output in outputs.items() if name not in batch}:
            found = self.roles["actor"].forward(batch, tuple(missing.values()), self.policy_objective.temperature)
            batch = batch.with_columns(**{name: found[output] for name, output in missing.items()})
        path = self.run_dir / "tokens" / f"step_{step:06}.jsonl"
        path.parent.mkdir(exist_ok=True)
        files.write(path, "".join(json_line(row) for row in readable_tokens(batch, self.tokenizer)))

    def _check_gap(self, step: int, metrics: Metrics) -> None:
        gap, growth = reward_gap([*self.history, {"step": step, **metrics.reduce()}])
        metrics.mean("val/reward_gap", gap)
        if min(gap, growth) < GAP or self.has_gap:
            return
        self.has_gap = True
        log.warning(
            "step %d: the training reward is %.0f %% of its range above the held-out accuracy, %.0f %% more than at "
            "first: the reward may pay for something other than correct responses. Read rollouts/jumps_%06d.jsonl (the "
            "held-out responses whose reward grew most) and the best paid ones in rollouts/, and try "
            "`whet check-reward` (this is logged once)",
            *(step, 100 * gap, 100 * growth, step),
        )

    def _write_jumps(self, path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes the responses whose reward grew most since the last validation."""
        earlier = [each for each in sorted(path.parent.glob("validation_*.jsonl")) if each.name < path.name]
        if not earlier:
            return
        if jumps := largest_jumps(read_rollouts(earlier[-1]), lines):
            name = path.name.replace("validation", "jumps")
            files.write(path.with_name(name), "".join(map(json_line, jumps)))

    def close(self) -> None:
        """Ends workers, reward processes and trackers, then unlocks the folder."""
        with ExitStack() as stack:
            stack.callback(super().close)
            stack.callback(self.rollouts.close)


def copy_media(folder: Path, groups: Sequence[Group]) -> None:
    """Copies the images and videos that came from files into `folder`, named by digest, so that a copy of the run
    folder has them. Missing files and files over 32 MiB are left out."""
    turns = (turn for each in trajectories_of(groups) for turn in each.turns)
    prompts = (media for group in groups for media in group.prompt.media)
    for media in dict.fromkeys(chain(prompts, (media for turn in turns for media in turn.media))):
        source = Path(media.source) if isinstance(media.source, str) else None
        if source is None or source.parent == folder.absolute():
            continue
        target = folder / f"{media.digest}{source.suffix}"
        with suppress(OSError):
            if not target.exists() and source.stat().st_size <= MAX_COPIED_BYTES:
                folder.mkdir(exist_ok=True)
                files.write(target, source.read_bytes())


def table_rows(lines: Sequence[Sequence[dict[str, Any]]], limit: int) -> list[TableRow]:
    """Returns up to `limit` rows: all groups' first trajectories, then the second ones. `lines` are from `readable`."""

    def row(read: dict[str, Any]) -> TableRow:
        failure = read["failure"]
        return {
            **{name: printable(str(read[name])) for name in ("uid", "prompt", "response", "ground_truth")},
            **{name: read[name] for name in ("reward", "accuracy", "tokens", "turns")},
            "finish_reason": read["finish_reason"] or "",
            "failure": "" if failure is None else printable(f"{failure['source']}: {failure['message']}"),
        }

    in_turn = filter(None, chain.from_iterable(zip_longest(*lines)))
    return [row(read) for read in islice(in_turn, limit)]


def readable_tokens(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
    """Yields a record for each row: trajectory, float columns [B, R], and tokens, with their turns, policy versions,
    and whether they are sampled and trained. With a teacher `k` is the teacher's log-prob minus the policy's."""
    shape = batch["response_mask"].shape
    columns = {name: column for name, column in batch.tensors().items() if column.shape == shape}
    columns = {name: column for name, column in columns.items() if column.is_floating_point()}
    if {"teacher_log_probs", "old_log_probs"} <= columns.keys():
        columns["k"] = columns["teacher_log_probs"] - columns["old_log_probs"]
    lengths = batch["attention_mask"][:, -shape[1] :].sum(1).tolist()
    for row, length in enumerate(lengths):
        ids = batch["responses"][row, :length].tolist()
        found = {name: column[row, :length].tolist() for name, column in columns.items()}
        yield {
            "uid": batch["trajectory_uid_name"][row],
            **({"agent": agent} if (agent := batch["agent"][row]) else {}),
            "tokens": [tokenizer.decode([token]) for token in ids],
            **{name: batch[name][row, :length].tolist() for name in TOKEN_MARKS if name in batch},
            **{name: [round(value, 6) for value in values] for name, values in found.items()},
        }


def reward_gap(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Returns the gap at the last validation, and its growth since the first; both 0 if there is nothing to compare.

    The gap is the mean training reward of the last steps, as a share of the range of all rewards so far, minus the
    held-out accuracy. If the reward function's scores are all equal, there is nothing to compare. With a reward model,
    the training reward includes its score. `history` has the numbers of all steps, each with its `step`."""
    trained = [record for record in history if "critic/score/mean" in record]
    validated = [record for record in history if "val/accuracy" in record]
    if not trained or not validated:
        return 0.0, 0.0

    def range_of(name: str) -> tuple[float, float]:
        lowest = min(record[f"{name}/min"] for record in trained)
        return lowest, max(record[f"{name}/max"] for record in trained) - lowest

    lowest, width = range_of("critic/score")
    if alike(lowest, lowest + width):
        return 0.0, 0.0
    sampled, mean = "filter/sampled_score", "critic/score/mean"
    if "reward/reward_model" in trained[-1]:
        lowest, width = range_of("critic/rewards")
        sampled = mean = "critic/rewards/mean"

    def level(records: Sequence[Mapping[str, float]]) -> float:
        scores = [record.get(sampled, record[mean]) for record in records]
        return (fmean(scores) - lowest) / max(width, 1e-9)

    first = level(trained[:WINDOW]) - validated[0]["val/accuracy"]
    last = level(trained[-WINDOW:]) - validated[-1]["val/accuracy"]
    return last, last - first


def largest_jumps(before: Sequence[Record], after: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the responses whose reward grew most between two validations, the largest jump first. Among equal jumps,
    wrong responses come first. The records come from `readable`."""
    earlier = {row["uid"]: row for row in before}
    jumps = [
        {
            "uid": row["uid"],
            "jump": row["reward"] - old["reward"],
            "prompt": row["prompt"],
            "ground_truth": row["ground_truth"],
            **{f"{name}_before": old[name] for name in ("reward", "accuracy", "response")},
            **{f"{name}_after": row[name] for name in ("reward", "accuracy", "response")},
        }
        for row in after
        if (old := earlier.get(row["uid"])) is not None and None not in (row["reward"], old["reward"])
    ]
    jumps = [jump for jump in jumps if jump["jump"] > 0]
    return sorted(jumps, key=lambda jump: (-jump["jump"], jump["accuracy_after"] or 0.0))[:LONGEST_LIST]
