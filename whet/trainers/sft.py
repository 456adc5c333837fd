# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with the same training engines: only the responses of the data set are trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.batch import Batch
from whet.checkpoints.export import model_digest
from whet.config.digests import digests
from whet.config.schema import ExamplesConfig, SFTConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.data.load import VAL, load_items
from whet.data.loader import OrderLoader, run_steps
from whet.data.preferences import Response
from whet.data.samplers import order_of
from whet.data.supervised import SupervisedExample
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.errors import no_exit
from whet.metrics import Metrics
from whet.models.packing import LATER_MEDIA
from whet.models.positions import position_ids, rotary_positions
from whet.planning.machine import free_accelerator
from whet.planning.planner import Counts, Setup, planner
from whet.registry import load_target, register_trainer
from whet.roles.workers import TrainWorker, check_media, settings_trained, tokenizer_of
from whet.rollout.build import with_engine
from whet.rollout.requirements import Lengths
from whet.tracking.console import USE, ConsoleColumn
from whet.trainers.frame import Frame, opened_for, run_folder, with_named_dtypes, with_restarts
from whet.trainers.health import check_skipped
from whet.trainers.objectives import ImitationObjective
from whet.trainers.run_dir import MEDIA
from whet.trainers.schedule import Schedule
from whet.trainers.stop import likely_steps

log = logging.getLogger(__name__)
COLUMNS = (
    ConsoleColumn("loss", ("sft/loss",), ".4f"),
    ConsoleColumn("grad norm", ("sft/grad_norm",), ".3f"),
    ConsoleColumn("lr", ("sft/lr",), ".2e"),
    *USE,
)
R = TypeVar("R", bound="ExamplesRun")
Rows = Sequence[Mapping[str, Any]] | None
Callbacks = Sequence[Callable[..., None]]  # get the run after every step


@dataclass(kw_only=True, repr=False)
class ExamplesRun(Frame):
    """Base of runs on examples. Subclasses add `objective_of`, `batch`, `validate`. `callbacks` run after each step."""

    default_best_metric = "-val/loss"
    noun: ClassVar[str] = "examples"

    config: ExamplesConfig
    examples: Sequence[Any]  # of whet.types.Example
    val_examples: Sequence[Any]
    loader: OrderLoader[int]

    @classmethod
    def objective_of(cls, config: Any) -> Objective:
        """Returns the objective that the config describes."""
        raise NotImplementedError

    @property
    def objective(self) -> Objective:
        """The objective of the run."""
        return self.objective_of(self.config)

    @classmethod
    def settings_of(cls, config: Any, total_steps: int) -> RoleSettings:
        """The settings of the trained model."""
        return replace(settings_trained(config, config, total_steps), freeze=tuple(config.model.freeze))

    @classmethod
    def setup(cls, config: Any, lengths: Sequence[int] = ()) -> Setup:
        """Returns the setup for the memory plan. Without `lengths`, each example has the greatest allowed length."""
        lengths = tuple(lengths) or (config.data.max_length,)
        roles = {spec.role: spec.args[0] for spec in cls.specs(config, 1) if spec.args}
        return Setup(config, roles, {"actor": cls.objective_of(config)}, Lengths(lengths, 0))

    @classmethod
    def specs(cls, config: Any, total_steps: int) -> list[WorkerSpec]:
        """Returns the workers of one process. A worker with its own model has the model's settings as argument."""
        return [WorkerSpec("actor", TrainWorker, (cls.settings_of(config, total_steps),))]

    @classmethod
    def check(cls, config: Any, examples: Sequence[Any]) -> None:
        """Checks that the examples fit the config.  Raises: DataError."""

    def batch(self, examples: Sequence[Any]) -> Batch:
        """Makes a batch of the examples."""
        raise NotImplementedError

    def prepared(self, examples: Sequence[Any], metrics: Metrics) -> Batch:
        """Makes the batch to train on: the examples, with the columns that models compute."""
        return self.batch(examples)

    def updated(self) -> None:
        """Hook that `fit` calls after each update."""

    def validate(self, step: int = 0) -> Metrics:
        """Computes the metrics of the held-out examples."""
        raise NotImplementedError

    def fit(self) -> None:
        """Trains until step `total_steps`."""
        objective = self.objective
        with Schedule(self, type(self).validate) as schedule:
            while self.step < self.total_steps:
                self.signals.here()
                metrics = Metrics()
                with metrics.time("time/step"):
                    chosen = [self.examples[index] for index in self.loader.take(self.config.data.train_batch_size)]
                    batch = self.prepared(chosen, metrics)
                    with metrics.time("time/update"):
                        metrics.merge(self.roles["actor"].update(batch, objective))
                    self.updated()
                schedule.end_step(batch, metrics)

    @property
    def validates(self) -> bool:
        return bool(self.val_examples) and super().validates

    def check_health(self, batch: Batch, metrics: Metrics) -> None:
        """Warns of a skipped update, then calls the callbacks.  Raises: EngineError after three in a row."""
        name = self.objective_of(self.config).name
        self.is_good = check_skipped(name, "optim.lr", metrics, self.run_dir)
        for callback in self.callbacks:
            callback(self)

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state(state["loader"])


@dataclass(kw_only=True, repr=False)
class SFTRun(ExamplesRun):
    """A fine-tuning run."""

    columns_shown = COLUMNS
    tokens_metric = "sft/tokens"

    @classmethod
    def objective_of(cls, config: SFTConfig) -> Objective:
        return ImitationObjective()

    def batch(self, examples: Sequence[SupervisedExample]) -> Batch:
        return to_batch(examples, self.pad_token_id)

    def validate(self, step: int = 0) -> Metrics:
        """Computes the loss over the held-out examples. All tokens weigh the same."""
        batch = self.batch(self.val_examples)
        tokens, metrics = batch["response_mask"].sum(), Metrics()
        with metrics.time("time/validation"):
            log_probs = self.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        metrics.mean("val/loss", -log_probs.sum() / tokens, tokens)
        return metrics


@no_exit()
def train_on_examples(
    kind: type[R],
    config: Any,
    *,
    data: Rows = None,
    val_data: Rows = None,
    callbacks: Callbacks = (),
    dry_run: bool = False,
) -> R:
    """Builds a run of class `kind`, trains it to the end and returns it. `data` replaces `data.train_files`, `val_data`
    replaces `data.val_files`.

    With `dry_run` everything is built, and nothing is trained or written. `callbacks` come before the callbacks of
    `trainer.callbacks`.  Raises: WhetError for every error that a user can correct."""
    run = with_restarts(config, lambda once: _train(kind, once, data, val_data, callbacks, dry_run))
    if dry_run:
        counts = len(run.examples), run.noun, len(run.val_examples), run.total_steps
        log.info("dry run: %d %s to train on, %d to validate on, %d steps", *counts)
        for name, (ids, _) in run.examples[0].texts().items():
            log.info("the first %s%s:\n%s", run.noun.removesuffix("s"), name, run.tokenizer.decode(list(ids)))
    return run


def _train(kind: type[R], config: Any, data: Rows, val_data: Rows, callbacks: Callbacks, dry_run: bool) -> R:
    config = with_engine(with_named_dtypes(config))
    tokenizer, seed = tokenizer_of(config), config.trainer.seed
    folder = None if dry_run else run_folder(config.trainer) / MEDIA
    loaded = load_items(config.data, tokenizer, rows=data, where=config.data.filter, seed=seed, media_folder=folder)
    val_examples = ()
    if config.data.val_files or val_data is not None:
        val_examples = load_items(
            config.data, tokenizer, VAL, rows=val_data, argument="val_data", seed=seed, media_folder=folder
        ).items
    examples, shuffle = loaded.items, config.data.shuffle
    for each in (examples, val_examples):
        kind.check(config, each)
    check_media(config, {f"example {number}": each.media for number, each in enumerate(examples)})
    callbacks = [*callbacks, *(load_target(path) for path in config.trainer.callbacks)]
    order = order_of(loaded, seed=seed, shuffle=shuffle)
    loader = OrderLoader(range(len(examples)), seed=seed, shuffle=shuffle, order=order)
    total_steps = run_steps(config.trainer, len(examples), config.data.train_batch_size)
    lengths = [example.num_tokens for example in examples]
    inputs = digests(config, examples, val_examples, command=config.command)
    read = {each.args[0].model_path for each in kind.specs(config, total_steps) if each.role != "actor" and each.args}
    inputs |= {f"weights of {path}": model_digest(path, config.model.trust_remote_code) for path in sorted(read)}
    counts = Counts(len(lengths), len(val_examples), total_steps, likely=likely_steps(callbacks, total_steps))
    with opened_for(config, kind.setup, lengths, inputs, counts, dry_run=dry_run) as (opened, services):
        plan, planned = replace(kind.setup(config, lengths), device=free_accelerator(config.cluster)), planner()
        specs = [
            replace(each, args=tuple(planned.sized(settings, plan, each.role) for settings in each.args))
            for each in kind.specs(config, total_steps)
        ]
        run = kind(
            config=config,
            opened=opened,
            services=services,
            tokenizer=tokenizer,
            roles=launch_roles(specs, config.cluster),
            examples=examples,
            val_examples=val_examples,
            loader=loader,
            total_steps=total_steps,
            callbacks=callbacks,
        )
    with closing(run):
        run.start()
        if not dry_run:
            run.train(kind.fit)
    return run


@register_trainer(
    "sft",
    config="whet.config.schema:SFTConfig",
    setup="whet.trainers.sft:SFTRun.setup",
    frozen_models="whet.config.schema:no_frozen_models",
    summary="Train a model on examples (supervised fine-tuning).",
)
def train_sft(
    config: SFTConfig, *, data: Rows = None, val_data: Rows = None, callbacks: Callbacks = (), dry_run: bool = False
) -> SFTRun:
    """Fine-tunes a model on examples. Arguments and errors are as in `train_on_examples`."""
    return train_on_examples(SFTRun, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)


def to_batch(examples: Sequence[SupervisedExample], pad_token_id: int) -> Batch:
    """Makes rows of examples. The first token is the prompt, the others the response; the mask marks trained tokens."""
    rows = [(each.input_ids[:1], (each.input_ids[1:], each.loss_mask[1:])) for each in examples]
    positions = [rotary_positions(each.input_ids, each.media, each.loss_mask.index(1)) for each in examples]
    media = {LATER_MEDIA: [example.media for example in examples]} if any(each.media for each in examples) else {}
    return Batch.of(weights_of(examples) | padded(rows, pad_token_id, positions), media)


def padded(
    rows: Sequence[tuple[tuple[int, ...], Response]], pad_token_id: int, positions: Sequence[Tensor | None] = ()
) -> dict[str, Tensor]:
    """Returns the columns of prompts and responses. Prompts are padded on the left, responses on the right. `positions`
    are rotary positions of rows that need them."""
    lengths = _integers([[len(prompt), len(ids)] for prompt, (ids, _) in rows])
    left, right = lengths.amax(0).tolist()
    places = torch.arange(left + right)
    is_real = (places >= left - lengths[:, :1]) & (places < left + lengths[:, 1:])
    attention_mask = is_real.long()
    tokens = _integers([token for prompt, (ids, _) in rows for token in (*prompt, *ids)])
    trained = _integers([flag for _, (_, mask) in rows for flag in mask])
    return {
        "input_ids": torch.full(is_real.shape, pad_token_id).masked_scatter(is_real, tokens),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask, positions if any(p is not None for p in positions) else None),
        "response_mask": torch.zeros(len(rows), right, dtype=torch.int64).masked_scatter(is_real[:, left:], trained),
    }


def _integers(numbers: Sequence[Any]) -> Tensor:
    """Makes a tensor of int64 through numpy, which reads lists faster than torch."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def weights_of(examples: Sequence[SupervisedExample]) -> dict[str, Tensor]:
    """Returns the column of example weights; empty if all weights are 1."""
    weights = [each.weight for each in examples]
    return {"example_weights": torch.tensor(weights)} if {*weights} != {1.0} else {}
