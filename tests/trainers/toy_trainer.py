# SPDX-License-Identifier: Apache-2.0
"""A trainer in one file: imitates examples of which each has a weight. Its recipe is toy_trainer.yaml.

With `anchor_path` a run has a second, frozen model, and reports how far its log-probs have moved from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat

from whet import register_trainer
from whet.batch import Batch
from whet.config.schema import ExamplesConfig, SupervisedDataConfig, TrainerConfig
from whet.config.section import Section, SectionPlace, key
from whet.controller.worker import WorkerSpec
from whet.data.prompts import PromptFormat, Row
from whet.data.supervised import SupervisedExample, build_examples
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.roles.workers import TrainWorker, settings_of
from whet.trainers.sft import Rows, SFTRun, to_batch, train_on_examples


class WeightsConfig(Section):
    """The weights of examples."""

    lowest: NonNegativeFloat = key(0.0, "a smaller weight of a row becomes this one")
    highest: NonNegativeFloat = key(1.0, "a larger weight of a row becomes this one")

    def problems(self, at: SectionPlace) -> Iterable[ConfigError]:
        if self.lowest > self.highest:
            yield ConfigError(at.of("lowest"), self.lowest, f"at most {at.of('highest')}={self.highest}", "lower it")


class ToyDataConfig(SupervisedDataConfig):
    """The examples of the toy."""

    weight_key: str = key("weight", "field with the weight of a row")

    builder: ClassVar[str] = f"{__name__}:build_weighted"


class ToyConfig(ExamplesConfig):
    """The config of the toy."""

    data: ToyDataConfig = ToyDataConfig()
    trainer: TrainerConfig = TrainerConfig(experiment_name="toy")
    weights: WeightsConfig = WeightsConfig()
    anchor_path: str | None = key(None, "frozen model whose log-probs the run is compared with; unset: none")


@dataclass(frozen=True)
class WeightedExample(SupervisedExample):
    """An example with its weight."""

    weight: float = 1.0

    @property
    def content(self) -> tuple[Any, ...]:
        return (*super().content, self.weight)


def build_weighted(
    rows: Sequence[Row], prompt_format: PromptFormat, data: ToyDataConfig, *, numbers: Sequence[int]
) -> list[WeightedExample]:
    """Makes examples from rows."""
    made = [
        (build_examples([row], prompt_format, data, numbers=[n]), row) for n, row in zip(numbers, rows, strict=True)
    ]
    return [
        WeightedExample(each.input_ids, each.loss_mask, weight=float(row[data.weight_key]))
        for examples, row in made
        for each in examples
    ]


@dataclass(frozen=True)
class WeightedObjective:
    """-weight log pi, summed over trained tokens and divided by their number."""

    lowest: float
    highest: float
    name = "toy"
    needs = frozenset({"log_probs"})
    temperature = 1.0
    block = 1

    def counts(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The number of trained tokens."""
        return {"tokens": batch["response_mask"].sum()}

    def loss(self, outputs: dict[str, Any], batch: dict[str, Any], counts: dict[str, Any]) -> tuple[Any, Metrics]:
        """The share of these rows."""
        weights = batch["weight"].clamp(self.lowest, self.highest)[:, None]
        total, metrics = -(weights * outputs["log_probs"] * batch["response_mask"]).sum(), Metrics()
        tokens = batch["response_mask"].sum()
        metrics.mean("toy/loss", total.detach() / tokens, tokens)
        metrics.sum("toy/tokens", tokens)
        return total / counts["tokens"], metrics


@dataclass(kw_only=True, repr=False)
class ToyRun(SFTRun):
    """A run of the toy."""

    tokens_metric = "toy/tokens"

    @classmethod
    def objective_of(cls, config: ToyConfig) -> Any:
        return WeightedObjective(config.weights.lowest, config.weights.highest)

    @classmethod
    def specs(cls, config: ToyConfig, total_steps: int) -> list[WorkerSpec]:
        specs = super().specs(config, total_steps)
        if config.anchor_path is None:
            return specs
        return [*specs, WorkerSpec("anchor", TrainWorker, (settings_of(config.model, config, config.anchor_path),))]

    def prepared(self, examples: Sequence[Any], metrics: Metrics) -> Batch:
        batch = super().prepared(examples, metrics)
        if "anchor" in self.roles:
            own, anchor = (self.roles[role].forward(batch, ("log_probs",))["log_probs"] for role in ("actor", "anchor"))
            metrics.mean("toy/moved", (own - anchor).sum() / batch["response_mask"].sum())
        return batch

    def batch(self, examples: Sequence[Any]) -> Batch:
        weights = torch.tensor([each.weight for each in examples])
        return to_batch(examples, self.pad_token_id).with_columns(weight=weights)


@register_trainer("toy", config=ToyConfig, setup=ToyRun.setup, summary="Imitate examples by their weights.")
def train_toy(config: ToyConfig, *, data: Rows = None, val_data: Rows = None, dry_run: bool = False) -> ToyRun:
    """Trains on weighted examples."""
    return train_on_examples(ToyRun, config, data=data, val_data=val_data, dry_run=dry_run)
