# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model from preference pairs, on the same engine: the chosen response shall score higher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from whet.batch import Batch
from whet.config.preference import RewardTrainingConfig
from whet.data.preferences import Comparison
from whet.data.supervised import common_prefix
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.metrics import Metrics
from whet.models.load import outline, reward_config
from whet.models.positions import position_ids
from whet.registry import register_trainer
from whet.tracking.console import USE, Column
from whet.trainers.objectives import PreferenceObjective, measure_pairs
from whet.trainers.sft import Callbacks, ExamplesRun, Rows, train_on_examples

COLUMNS = (
    Column("loss", ("reward_model/loss",), ".4f"),
    Column("accuracy", ("reward_model/accuracy",), ".3f"),
    Column("margin", ("reward_model/margin",), ".3f"),
    Column("lr", ("reward_model/lr",), ".2e"),
    *USE,
)


@dataclass(kw_only=True, repr=False)
class RewardTrainingRun(ExamplesRun):
    """A run that trains a reward model."""

    columns_shown = COLUMNS
    tokens_metric = "reward_model/tokens"
    noun = "pairs"

    config: RewardTrainingConfig

    @classmethod
    def objective_of(cls, config: RewardTrainingConfig) -> Objective:
        return PreferenceObjective(config.center_coef)

    @classmethod
    def settings_of(cls, config: RewardTrainingConfig, total_steps: int) -> RoleSettings:
        """The settings of the trained model: a classifier, or a language model that gets a new head."""
        return replace(super().settings_of(config, total_steps), is_reward_model=True)

    @cached_property
    def model_config(self) -> Any:
        """The config of the classifier, for `whet export`."""
        path, trusted = self._model_path, self.config.model.trust_remote_code
        config = reward_config(path, is_new=True, trust_remote_code=trusted)
        with torch.device("meta"):
            made = outline(path, is_reward_model=True, trust_remote_code=trusted)
        config.architectures = [type(made).__name__]
        text = config.get_text_config()
        if text.pad_token_id is None and self.pad_token_id != self.tokenizer.eos_token_id:
            text.pad_token_id = self.pad_token_id  # transformers needs it for several rows at a time
        return config

    def batch(self, examples: Sequence[Comparison]) -> Batch:
        return to_batch(examples, self.pad_token_id)

    def validate(self, step: int = 0) -> Metrics:
        """Loss, accuracy and scores over the held-out pairs."""
        batch, metrics = self.batch(self.val_examples), Metrics()
        with metrics.time("time/validation"):
            scores = self.roles["actor"].forward(batch, ("scores",))["scores"].sum(1)
        measure_pairs(metrics, "val/", scores, batch["margin"][::2], self.config.center_coef)
        return metrics


@register_trainer(
    "train-reward",
    config="whet.config.preference:RewardTrainingConfig",
    setup="whet.trainers.train_reward:RewardTrainingRun.setup",
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
    """Trains a reward model as `train_on_examples` does."""
    kind = RewardTrainingRun
    return train_on_examples(kind, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)


def to_batch(pairs: Sequence[Comparison], pad_token_id: int) -> Batch:
    """Pairs as rows, the chosen response first. The tokens that a pair shares are the prompt of both, computed once."""
    rows = [(pair.chosen, pair.rejected) for pair in pairs]
    shared = [max(1, min(common_prefix(*row), *(len(ids) - 1 for ids in row))) for row in rows]
    both = [(ids[:start], ids[start:]) for row, start in zip(rows, shared, strict=True) for ids in row]
    left, right = (max(map(len, each)) for each in zip(*both, strict=True))

    def padded(prompt: Sequence[int], response: Sequence[int], value: int) -> list[int]:
        return [*[value] * (left - len(prompt)), *prompt, *response, *[value] * (right - len(response))]

    mask = torch.tensor([padded([1] * len(prompt), [1] * len(response), 0) for prompt, response in both])
    return Batch.of(
        {
            "input_ids": torch.tensor([padded(prompt, response, pad_token_id) for prompt, response in both]),
            "attention_mask": mask,
            "position_ids": position_ids(mask),
            "response_mask": mask[:, left:].clone(),
            "margin": torch.tensor([pair.margin for pair in pairs for _ in range(2)]),
        }
    )
