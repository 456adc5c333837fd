# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model on preference pairs: the chosen response gets the higher score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from whet.algorithms.value_loss import calibration
from whet.batch import Batch
from whet.config.preference import RewardTrainingConfig
from whet.data.preferences import Comparison, StepExample
from whet.data.supervised import common_prefix
from whet.engines.role import RoleSettings
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.models.load import outline, reward_config
from whet.registry import register_trainer
from whet.tracking.console import USE, ConsoleColumn
from whet.trainers.objectives import PreferenceObjective, StepObjective
from whet.trainers.sft import Callbacks, ExamplesRun, Rows, padded, to_batch as to_rows, train_on_examples

COLUMNS = (
    ConsoleColumn("loss", ("reward_model/loss",), ".4f"),
    ConsoleColumn("accuracy", ("reward_model/accuracy",), ".3f"),
    ConsoleColumn("margin", ("reward_model/margin",), ".3f"),
    ConsoleColumn("lr", ("reward_model/lr",), ".2e"),
    *USE,
)


@dataclass(kw_only=True, repr=False)
class RewardTrainingRun(ExamplesRun):
    """A run that trains a reward model."""

    columns_shown = COLUMNS
    tokens_metric = "reward_model/tokens"
    noun = "rows"

    config: RewardTrainingConfig

    @classmethod
    def objective_of(cls, config: RewardTrainingConfig) -> PreferenceObjective:
        return PreferenceObjective(config.center_coef)

    @property
    def objective(self) -> PreferenceObjective:
        return self._objective_for(self.examples)

    def _objective_for(self, examples: Sequence[Any]) -> PreferenceObjective:
        return StepObjective() if has_steps(examples) else self.objective_of(self.config)

    @classmethod
    def check(cls, config: RewardTrainingConfig, examples: Sequence[Any]) -> None:
        if config.center_coef and has_steps(examples):
            expected = "0 with rows of steps: it centres the two scores of a pair"
            raise ConfigError("center_coef", config.center_coef, expected, "unset it")

    @classmethod
    def settings_of(cls, config: RewardTrainingConfig, total_steps: int) -> RoleSettings:
        """The settings of the trained model. It is a classifier, or a language model that gets a new head."""
        return replace(super().settings_of(config, total_steps), is_reward_model=True)

    @cached_property
    def model_config(self) -> Any:
        """The config of the classifier. Checkpoints keep it for `whet export`."""
        path, trusted = self._model_path, self.config.model.trust_remote_code
        config = reward_config(path, is_new=True, trust_remote_code=trusted)
        with torch.device("meta"):
            made = outline(path, is_reward_model=True, trust_remote_code=trusted)
        config.architectures = [type(made).__name__]
        text = config.get_text_config()
        if text.pad_token_id is None and self.pad_token_id != self.tokenizer.eos_token_id:
            text.pad_token_id = self.pad_token_id  # transformers needs it for several rows at a time
        return config

    def batch(self, examples: Sequence[Any]) -> Batch:
        return (step_batch if has_steps(examples) else to_batch)(examples, self.pad_token_id)

    def validate(self, step: int = 0) -> Metrics:
        """Computes loss, accuracy, scores and calibration over the held-out pairs or steps."""
        objective = self._objective_for(self.val_examples)
        batch, metrics = self.batch(self.val_examples), Metrics()
        with metrics.time("time/validation"):
            outputs = self.roles["actor"].forward(batch, tuple(objective.needs))
        _, logits, labels = objective.measure(metrics, "val/", {**batch.columns(), **outputs})
        for name, value in calibration(logits, labels).items():
            metrics.mean(f"val/{name}", value)
        return metrics


@register_trainer(
    "train-reward",
    config="whet.config.preference:RewardTrainingConfig",
    setup="whet.trainers.train_reward:RewardTrainingRun.setup",
    frozen_models="whet.config.schema:no_frozen_models",
    summary="Train a reward model on preference pairs (Bradley-Terry).",
)
def train_reward(
    config: RewardTrainingConfig,
    *,
    data: Rows = None,
    val_data: Rows = None,
    callbacks: Callbacks = (),
    dry_run: bool = False,
) -> RewardTrainingRun:
    """Trains a reward model. Arguments and errors are as in `train_on_examples`."""
    kind = RewardTrainingRun
    return train_on_examples(kind, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)


def has_steps(examples: Sequence[Any]) -> bool:
    """Tells whether the examples have labels of reasoning steps. Otherwise they are pairs."""
    return bool(examples) and isinstance(examples[0], StepExample)


def step_batch(examples: Sequence[StepExample], pad_token_id: int) -> Batch:
    """Makes the batch of examples with reasoning steps. Where the mask is 1, `label` [B, R] is the label of a step."""
    batch = to_rows(examples, pad_token_id)
    labels = torch.tensor([label for each in examples for label in each.labels])
    mask = batch["response_mask"]
    return batch.with_columns(label=torch.zeros(mask.shape).masked_scatter(mask != 0, labels))


def to_batch(pairs: Sequence[Comparison], pad_token_id: int) -> Batch:
    """Makes the batch of pairs, the chosen response first. Both rows have the pair's shared tokens as prompt."""
    rows = [(pair.chosen, pair.rejected) for pair in pairs]
    shared = [max(1, min(common_prefix(*row), *(len(ids) - 1 for ids in row))) for row in rows]
    both = [
        (ids[:start], (ids[start:], (1,) * (len(ids) - start)))
        for row, start in zip(rows, shared, strict=True)
        for ids in row
    ]
    margins = torch.tensor([pair.margin for pair in pairs for _ in range(2)])
    return Batch.of(padded(both, pad_token_id) | {"margin": margins})
