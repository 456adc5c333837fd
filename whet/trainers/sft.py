# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on the same engine: imitate the answers of a data set, and nothing but the answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from whet.config.checks import check_context
from whet.config.render import to_yaml
from whet.config.schema import SFTConfig
from whet.controller.local import launch
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.loader import OrderLoader
from whet.data.prompts import PromptFormat
from whet.data.sources import read_rows
from whet.data.supervised import SupervisedExample, build_examples
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.models.load import load_config, load_tokenizer
from whet.protocol import DataProto
from whet.registry import load_target
from whet.tracking.console import Column, ConsoleTracker
from whet.tracking.tracker import Tracker, Trackers
from whet.trainers import checkpoint
from whet.trainers.objectives import ImitationObjective
from whet.trainers.run import metric_file, open_trackers, run_folder
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
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

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
                metrics.merge(self.roles["actor"].update(to_batch(chosen, self._pad_token_id), ImitationObjective()))
            self.step += 1
            if validates and self.is_due(trainer.val_freq):
                metrics.merge(self.validate())
            self.log(metrics)
            for callback in self.callbacks:
                callback(self)
            if self.is_due(trainer.save_freq):
                self.save()

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: only at the end) follows the step just done."""
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def stop(self) -> None:
        """Makes the step just done the last one: for callbacks."""
        self.total_steps = self.step

    def validate(self) -> Metrics:
        """Loss over the held-out examples, each token weighing the same."""
        batch = to_batch(self.val_examples, self._pad_token_id)
        log_probs = self.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        tokens = batch["response_mask"].sum()
        metrics = Metrics()
        metrics.mean("val/loss", -log_probs.sum() / tokens, tokens)
        return metrics

    def log(self, metrics: Metrics) -> None:
        """Hands a step's numbers to the trackers."""
        numbers, timings = metrics.reduce(), metrics.timings()
        self.history.append({"step": self.step, **numbers})
        if "time/step" in timings:
            timings["perf/throughput"] = numbers["sft/tokens"] / timings["time/step"]
        self.metrics_file.log(self.step, numbers)
        self.timings_file.log(self.step, timings)
        self.trackers.log(self.step, {**numbers, **timings})

    def save(self) -> Path:
        """Writes a checkpoint of this step.  Returns its folder."""
        return checkpoint.save(
            self.run_dir,
            self.step,
            roles=self.roles,
            state={"loader": self.loader.state()},
            tokenizer=self.tokenizer,
            model_path=str(self.config.model.path),
            save_limit=self.config.trainer.save_limit,
        )

    def restore(self, folder: Path) -> None:
        """Goes on where the checkpoint in `folder` was written."""
        state = checkpoint.restore(folder, self.roles)
        self.step = state["step"]
        self.loader.load_state(state["loader"])

    def close(self) -> None:
        """Ends workers and trackers."""
        with ExitStack() as stack:
            for group in self.roles.values():
                stack.callback(group.close)
            for tracker in (self.trackers, self.metrics_file, self.timings_file):
                stack.callback(tracker.close, failed=sys.exception() is not None)

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

    `callbacks` come before those that `trainer.callbacks` names.

    Raises: WhetError for everything that a user can mend.
    """
    if config.model.path is None:
        raise ConfigError("model.path is not set; it names a Hugging Face model folder or hub name")
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    check_context(config, load_config(config.model.path).get_text_config().max_position_embeddings)
    examples = _examples(config, tokenizer, list(data) if data is not None else config.data.train_files)
    val_examples = _examples(config, tokenizer, config.data.val_files) if config.data.val_files else ()
    callbacks = [*callbacks, *(load_target(path) for path in config.trainer.callbacks)]
    loader = OrderLoader(len(examples), seed=config.trainer.seed, shuffle=config.data.shuffle)
    epoch_steps = max(1, len(examples) // config.data.train_batch_size)
    total_steps = config.trainer.total_steps or config.trainer.total_epochs * epoch_steps
    run_dir = run_folder(config.trainer)
    found = checkpoint.open_run_dir(run_dir, config.trainer.resume, to_yaml(config))
    start_step = None if found is None else checkpoint.step_of(found)
    console = [ConsoleTracker(total_steps, first_step=start_step or 0, columns=COLUMNS)]
    with ExitStack() as on_error:
        services = open_trackers(config, run_dir, start_step)
        on_error.callback(services.close, failed=True)
        roles = launch(
            [WorkerSpec("actor", TrainWorker, (_settings(config, total_steps),))],
            ResourcePool(processes=config.cluster.processes),
            deadline_seconds=config.cluster.deadline_seconds,
        )
        on_error.pop_all()
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
    )
    try:
        if found is not None:
            run.restore(found)
        run.fit()
    finally:
        run.close()
    return run


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


def _examples(config: SFTConfig, tokenizer: PreTrainedTokenizerBase, source: Any) -> tuple[SupervisedExample, ...]:
    built = build_examples(
        read_rows(source),
        PromptFormat(tokenizer, apply_chat_template=config.data.apply_chat_template),
        messages_key=config.data.messages_key,
        prompt_key=config.data.prompt_key,
        response_key=config.data.response_key,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
    )
    return built.examples


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
    )
