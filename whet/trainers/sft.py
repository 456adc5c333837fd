# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on the same engine: imitate the answers of a data set, and nothing but the answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from whet.config.checks import check_context
from whet.config.schema import SFTConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.load import VAL, load_examples
from whet.data.loader import OrderLoader, steps_per_epoch
from whet.data.samplers import order_of
from whet.data.supervised import SupervisedExample
from whet.errors import ConfigError
from whet.metrics import Metrics, phase
from whet.models.load import context_length, load_tokenizer
from whet.planning.fit import check_fits
from whet.planning.memory import Lengths, Setup
from whet.protocol import DataProto
from whet.registry import load_target
from whet.tracking.console import Column, ConsoleTracker
from whet.tracking.profile import observed
from whet.tracking.tracker import Tracker, Trackers
from whet.trainers import checkpoint
from whet.trainers.health import check_skipped
from whet.trainers.objectives import ImitationObjective
from whet.trainers.restart import with_restarts
from whet.trainers.run import best_score, metric_file, open_trackers, restored, run_folder
from whet.trainers.run_dir import RunDir, disk_errors, open_run_dir
from whet.trainers.stop import Stopped, StopSignals, stopped_in_order
from whet.trainers.workers import RoleSettings, TrainWorker

log = logging.getLogger(__name__)
COLUMNS = (
    Column("loss", ("sft/loss",), ".4f"),
    Column("grad norm", ("sft/grad_norm",), ".3f"),
    Column("lr", ("sft/lr",), ".2e"),
    Column("tokens/s", ("perf/throughput",), ",.0f"),
)


@dataclass
class SFTRun:
    """One fine-tuning run."""

    config: SFTConfig
    run_dir: Path
    tokenizer: PreTrainedTokenizerBase
    roles: Mapping[str, WorkerGroup]
    examples: Sequence[SupervisedExample]
    val_examples: Sequence[SupervisedExample]
    loader: OrderLoader
    total_steps: int
    metrics_file: Tracker
    timings_file: Tracker
    trackers: Trackers
    callbacks: Sequence[Callable[[SFTRun], None]] = ()  # after every step
    opened: RunDir | None = None  # the run's folder, taken
    step: int = 0
    score: float | None = None  # trainer.best_metric where the last step was validated
    is_good: bool = True  # no update was skipped since the last that was not
    history: list[dict[str, float]] = field(default_factory=list)
    signals: StopSignals = field(init=False)

    def __post_init__(self) -> None:
        self.signals = StopSignals(self.run_dir / "stop")

    def fit(self) -> None:
        """Trains until `total_steps`."""
        trainer = self.config.trainer
        validates = bool(self.val_examples) and trainer.val_freq >= 0
        if self.step == 0 and trainer.val_before_train and validates:
            self.log(self.validate())
        while self.step < self.total_steps:
            metrics = Metrics()
            with metrics.time("time/step"):
                chosen = [self.examples[index] for index in self.loader.take(self.config.data.train_batch_size)]
                batch = to_batch(chosen, self._pad_token_id)
                with metrics.time("time/update"):
                    metrics.merge(self.roles["actor"].update(batch, ImitationObjective()))
            self.step += 1
            if validates and self.is_due(trainer.val_freq):
                metrics.merge(self.validate())
            self.log(metrics)
            self.is_good = check_skipped("sft", "optim.lr", metrics, self.run_dir)
            for callback in self.callbacks:
                callback(self)
            if self.is_due(trainer.save_freq):
                self.save()
            if self.step < self.total_steps:
                self.signals.here()

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: only at the end) follows the step just done."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def stop(self) -> None:
        """Makes the step just done the last one: for callbacks."""
        self.total_steps = self.step

    def validate(self) -> Metrics:
        """Loss over the held-out examples, each token weighing the same."""
        batch = to_batch(self.val_examples, self._pad_token_id)
        tokens, metrics = batch["response_mask"].sum(), Metrics()
        with metrics.time("time/validation"):
            log_probs = self.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        metrics.mean("val/loss", -log_probs.sum() / tokens, tokens)
        return metrics

    def log(self, metrics: Metrics) -> None:
        """Hands a step's numbers to the trackers."""
        numbers, timings = metrics.reduce(), metrics.timings()
        self.history.append({"step": self.step, **numbers})
        self.score = best_score(numbers, self.config.trainer.best_metric or "-val/loss")
        if "time/step" in timings:
            timings["perf/throughput"] = numbers["sft/tokens"] / timings["time/step"]
        self.metrics_file.log(self.step, numbers)
        self.timings_file.log(self.step, timings)
        self.trackers.log(self.step, {**numbers, **timings})

    def save(self) -> Path:
        """Writes a checkpoint of this step.  Returns its folder."""
        with phase("save"):
            return checkpoint.save(
                self.run_dir,
                self.step,
                roles=self.roles,
                state={"loader": self.loader.state()},
                score=self.score,
                is_good=self.is_good,
                tokenizer=self.tokenizer,
                model_path=str(self.config.model.path),
                trust_remote_code=self.config.model.trust_remote_code,
                save_limit=self.config.trainer.save_limit,
            )

    def restore(self, folder: Path) -> None:
        """Goes on where the checkpoint in `folder` was written."""
        state = restored(folder, self.roles, self.config.model.path)
        self.step = state["step"]
        self.loader.load_state(state["loader"])

    def close(self) -> None:
        """Ends workers and trackers."""
        with ExitStack() as stack:
            for group in self.roles.values():
                stack.callback(group.close)
            for tracker in (self.trackers, self.metrics_file, self.timings_file):
                stack.callback(tracker.close, failed=not isinstance(sys.exception(), Stopped | None))
            if self.opened is not None:
                stack.callback(self.opened.close)

    @property
    def _pad_token_id(self) -> int:
        assert isinstance(self.tokenizer.pad_token_id, int)
        return self.tokenizer.pad_token_id


def train_sft(
    config: SFTConfig,
    *,
    data: Sequence[Mapping[str, Any]] | None = None,
    callbacks: Sequence[Callable[[SFTRun], None]] = (),
) -> SFTRun:
    """Builds the run, trains it to the end and returns it; `data` stands in for `data.train_files`.

    `callbacks` come before those that `trainer.callbacks` names.  Raises: WhetError for everything that a
    user can mend.
    """
    return with_restarts(config, lambda once: _train_sft(once, data, callbacks))


def _train_sft(
    config: SFTConfig, data: Sequence[Mapping[str, Any]] | None, callbacks: Sequence[Callable[[SFTRun], None]]
) -> SFTRun:
    if config.model.path is None:
        raise ConfigError("model.path is not set; it names a Hugging Face model folder or hub name")
    model_path, trusted = config.model.path, config.model.trust_remote_code
    tokenizer = load_tokenizer(config.model.tokenizer_path or model_path, model_path, trust_remote_code=trusted)
    check_context(config, context_length(model_path, trust_remote_code=trusted))
    seed = config.trainer.seed
    loaded = load_examples(config.data, tokenizer, rows=data, where=config.data.filter, seed=seed)
    val_examples = load_examples(config.data, tokenizer, VAL, seed=seed).items if config.data.val_files else ()
    examples, shuffle = loaded.items, config.data.shuffle
    callbacks = [*callbacks, *(load_target(path) for path in config.trainer.callbacks)]
    order = order_of(loaded, seed=seed, shuffle=shuffle)
    loader = OrderLoader(len(examples), seed=seed, shuffle=shuffle, order=order)
    epoch_steps = steps_per_epoch(len(examples), config.data.train_batch_size)
    total_steps = config.trainer.total_steps or config.trainer.total_epochs * epoch_steps
    run_dir = run_folder(config.trainer)
    lengths = [len(example.input_ids) for example in examples]
    reclaimed = checkpoint.bytes_over_limit(run_dir, config.trainer.save_limit)
    check_fits(setup(config, lengths), run_dir, lambda other: setup(other, lengths), reclaimed)
    with ExitStack() as undo:
        opened = undo.enter_context(closing(open_run_dir(run_dir, config)))
        start_step = None if opened.found is None else checkpoint.step_of(opened.found)
        console = [ConsoleTracker(total_steps, first_step=start_step or 0, columns=COLUMNS)]
        services = open_trackers(config, run_dir, start_step)
        undo.callback(services.close, failed=True)
        roles = launch_roles([WorkerSpec("actor", TrainWorker, (_settings(config, total_steps),))], config.cluster)
        undo.pop_all()
    run = SFTRun(
        config=config,
        run_dir=run_dir,
        tokenizer=tokenizer,
        roles=roles,
        examples=examples,
        val_examples=val_examples,
        loader=loader,
        total_steps=total_steps,
        metrics_file=metric_file(config.trainer, run_dir / "metrics.jsonl"),
        timings_file=metric_file(config.trainer, run_dir / "timings.jsonl"),
        trackers=Trackers([*(console if "console" in config.trainer.logger else []), services]),
        callbacks=callbacks,
        opened=opened,
    )
    return _finished(run, opened.found)


def _finished(run: SFTRun, found: Path | None) -> SFTRun:
    """Trains to the end, from the checkpoint that was found."""
    try:
        if found is not None:
            run.restore(found)
        watched = observed(run.run_dir, run.config.trainer.profile, lambda: run.step + 1)
        with run.signals, disk_errors(run.run_dir), watched:
            run.fit()
    except Stopped as stopped:
        raise stopped_in_order(stopped, run.step, run.run_dir, run.save) from stopped
    finally:
        run.close()
    return run


def setup(config: SFTConfig, lengths: Sequence[int] = ()) -> Setup:
    """What the plan of a run is made from; without lengths every example is taken to be as long as it may be."""
    lengths = tuple(lengths) or (config.data.max_length,)
    return Setup(config, {"actor": _settings(config, 1)}, {"actor": ImitationObjective()}, Lengths(lengths, 0))


def to_batch(examples: Sequence[SupervisedExample], pad_token_id: int) -> DataProto:
    """Examples as rows: the first token is the prompt, all others the response; the mask says what is learnt."""
    width = max(len(example.input_ids) for example in examples)

    def padded(values: Sequence[int], value: int) -> list[int]:
        return [*values, *[value] * (width - len(values))]

    attention_mask = torch.tensor([padded([1] * len(example.input_ids), 0) for example in examples])
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([padded(example.input_ids, pad_token_id) for example in examples]),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": torch.tensor([padded(example.loss_mask, 0) for example in examples])[:, 1:],
        }
    )


def _settings(config: SFTConfig, total_steps: int) -> RoleSettings:
    return RoleSettings(
        model_path=str(config.model.path),
        engine=config.engine,
        dtype=config.model.dtype,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        optim=config.optim,
        grad_clip=config.grad_clip,
        total_steps=total_steps,
        gradient_checkpointing=config.model.gradient_checkpointing,
        adapter_path=config.model.lora.path,
        allow_pickle=config.model.allow_pickle,
        trust_remote_code=config.model.trust_remote_code,
        lora=config.model.lora if config.model.lora.rank is not None else None,
        freeze=tuple(config.model.freeze),
        seed=config.trainer.seed,
    )
