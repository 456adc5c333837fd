# SPDX-License-Identifier: Apache-2.0
"""Training of a reward model from preference pairs, on the same engine: the chosen response shall score higher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from whet.config.schema import RewardTrainingConfig
from whet.data.preferences import PreferencePair
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.errors import no_exit
from whet.metrics import Metrics
from whet.models.load import outline, reward_config
from whet.models.positions import position_ids
from whet.protocol import DataProto
from whet.tracking.console import Column
from whet.trainers.frame import with_restarts
from whet.trainers.objectives import PreferenceObjective, measure_pairs
from whet.trainers.sft import ExamplesRun, Rows, train_on_examples

log = logging.getLogger(__name__)
COLUMNS = (
    Column("loss", ("reward_model/loss",), ".4f"),
    Column("accuracy", ("reward_model/accuracy",), ".3f"),
    Column("margin", ("reward_model/margin",), ".3f"),
    Column("lr", ("reward_model/lr",), ".2e"),
    Column("tokens/s", ("perf/throughput",), ",.0f"),
    Column("MFU", ("perf/mfu",), ".1%"),
)


@dataclass(kw_only=True, repr=False)
class RewardTrainingRun(ExamplesRun):
    """A run that trains a reward model."""

    columns_shown = COLUMNS
    tokens_metric = "reward_model/tokens"

    config: RewardTrainingConfig

    @classmethod
    def objective_of(cls, config: RewardTrainingConfig) -> Objective:
        """The objective of a config."""
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

    def batch(self, examples: Sequence[PreferencePair]) -> DataProto:
        """Pairs as rows."""
        return to_batch(examples, self.pad_token_id)

    def validate(self, step: int = 0) -> Metrics:
        """Loss, accuracy and scores over the held-out pairs."""
        batch, metrics = self.batch(self.val_examples), Metrics()
        with metrics.time("time/validation"):
            scores = self.roles["actor"].forward(batch, ("scores",))["scores"].sum(1)
        measure_pairs(metrics, "val/", scores, batch["margin"][::2], self.config.center_coef)
        return metrics


setup = RewardTrainingRun.setup


@no_exit()
def train_reward(
    config: RewardTrainingConfig,
    *,
    dry_run: bool = False,
    data: Rows = None,
    val_data: Rows = None,
    callbacks: Sequence[Callable[[RewardTrainingRun], None]] = (),
) -> RewardTrainingRun:
    """Builds the run, trains it to the end and returns it; `data` stands in for `data.train_files`, `val_data`
    for `data.val_files`.

    With `dry_run` everything is built, and nothing is trained or written. `callbacks` come before those that
    `trainer.callbacks` names.  Raises: WhetError for everything that a user can mend.
    """

    def attempt(once: RewardTrainingConfig) -> RewardTrainingRun:
        return train_on_examples(RewardTrainingRun, once, data, val_data, callbacks, dry_run=dry_run)

    run = with_restarts(config, attempt)
    if dry_run:
        pair = run.examples[0]
        counts = len(run.examples), len(run.val_examples), run.total_steps
        log.info("dry run: %d pairs to train on, %d to validate on, %d steps", *counts)
        for name, ids in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            log.info("the first pair, %s:\n%s", name, run.tokenizer.decode(list(ids)))
    return run


def to_batch(pairs: Sequence[PreferencePair], pad_token_id: int) -> DataProto:
    """Pairs as rows, the chosen response first. The tokens that a pair shares are the prompt of both rows, which packed
    rows compute once."""
    rows = [(ids, pair) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    prompts = [ids[: pair.num_shared] for ids, pair in rows]
    responses = [ids[pair.num_shared :] for ids, pair in rows]
    left, right = max(map(len, prompts)), max(map(len, responses))

    def padded(prompt: Sequence[int], response: Sequence[int], value: int) -> list[int]:
        return [*[value] * (left - len(prompt)), *prompt, *response, *[value] * (right - len(response))]

    both = list(zip(prompts, responses, strict=True))
    mask = torch.tensor([padded([1] * len(prompt), [1] * len(response), 0) for prompt, response in both])
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([padded(prompt, response, pad_token_id) for prompt, response in both]),
            "attention_mask": mask,
            "position_ids": position_ids(mask),
            "response_mask": mask[:, left:].clone(),
            "margin": torch.tensor([pair.margin for _, pair in rows]),
        }
    )
