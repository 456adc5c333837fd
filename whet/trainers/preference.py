# SPDX-License-Identifier: Apache-2.0
"""Preference training without a reward model: on pairs, on responses labelled good or bad, or on ranked lists."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.statistics import row_sums
from whet.batch import Batch
from whet.config.preference import PreferenceConfig, frozen_models
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.preferences import Comparison
from whet.engines.protocol import CopiesWeights
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, DataError, EngineError, StorageError
from whet.keyed import key
from whet.metrics import Metrics
from whet.models.packing import MEDIA
from whet.models.positions import rotary_positions
from whet.phases import phase
from whet.registry import register_trainer
from whet.roles.workers import AdapterOffWorker, TrainWorker, actor_beside, check_vocabulary, settings_of, tokenizer_of
from whet.tracking.console import USE, ConsoleColumn
from whet.trainers.objectives import ComparisonObjective
from whet.trainers.preference_health import RECENT, RULES
from whet.trainers.reference_cache import BatchRows, Key, ReferenceCache, digest_of_all
from whet.trainers.sft import Callbacks, ExamplesRun, Rows, padded, train_on_examples

log = logging.getLogger(__name__)
CACHED_TOKENS = 2**13  # of prompt and response, in comparisons of the greatest length, at once in the cached pass
COLUMNS = (
    ConsoleColumn("loss", ("preference/loss",), ".4f"),
    ConsoleColumn("accuracy", ("preference/accuracy",), ".3f"),
    ConsoleColumn("margin", ("preference/margin",), ".3f"),
    ConsoleColumn("chosen", ("preference/chosen_moved",), ".2f"),
    ConsoleColumn("lr", ("preference/lr",), ".2e"),
    *USE,
)


class MovingReference(TrainWorker):
    """A reference model that copies the policy's weights at intervals.

    Raises: EngineError if the engines cannot copy weights or store them in two ways; ConfigError for other weights."""

    def __init__(self, placement: Placement, settings: RoleSettings) -> None:
        super().__init__(placement, settings)
        own, actor = self.engine, actor_beside(self).engine
        if not isinstance(own, CopiesWeights) or not isinstance(actor, CopiesWeights):
            expected = "an engine with the methods of CopiesWeights (whet.engines.protocol)"
            raise EngineError("reference.update_steps", type(actor).__name__, expected, "unset it")
        weights, actor_weights = own.stored(), actor.stored()
        kinds, actor_kinds = ({type(each).__name__ for each in stored.values()} for stored in (weights, actor_weights))
        if kinds != actor_kinds:
            found, expected = (f"weights as {', '.join(sorted(each))}" for each in (actor_kinds, kinds))
            raise EngineError("reference.update_steps", found, f"{expected}, as in the reference", "unset it")
        shapes, actor_shapes = ({name: w.shape for name, w in each.items()} for each in (weights, actor_weights))
        if shapes != actor_shapes:
            expected = "a model with weights of the policy's names and shapes, which reference.update_steps copies"
            raise ConfigError("reference.model_path", settings.model_path, expected, "unset one of both")
        self._copy = partial(own.copy_from, actor)

    @register(Dispatch.ONE_TO_ALL)
    def follow(self) -> None:
        """Copies the policy's weights."""
        self._copy()


@dataclass(kw_only=True, repr=False)
class PreferenceRun(ExamplesRun):
    """A run that trains a model on preferences."""

    columns_shown = COLUMNS
    tokens_metric = "preference/tokens"
    noun = "comparisons"

    config: PreferenceConfig
    log_ratios: tuple[float, int] = (0.0, 0)  # sum and number of S(l - b) of all rows so far, for `mean_log_ratio`
    cached: ReferenceCache | None = None
    others: Mapping[Key, Comparison] = field(default_factory=dict)  # `mismatched` rows, if the loss reads them
    reference_inputs: Mapping[str, str] = field(default_factory=dict)  # of the resumed run's cached reference
    warned: set[str] = field(default_factory=set)  # names of the `RULES` that the run has warned of

    @classmethod
    def objective_of(cls, config: PreferenceConfig) -> ComparisonObjective:
        return ComparisonObjective.from_config(config)

    @classmethod
    def specs(cls, config: PreferenceConfig, total_steps: int) -> list[WorkerSpec]:
        specs = super().specs(config, total_steps)
        reference = config.reference
        if frozen_models(config):
            worker = TrainWorker if reference.update_steps is None else MovingReference
            return [*specs, WorkerSpec("ref", worker, (settings_of(config.model, config, reference.model_path),))]
        if config.reads_reference and reference.mode != "cached":
            return [*specs, WorkerSpec("ref", AdapterOffWorker)]
        return specs

    @property
    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        return self.roles if self.config.reference.update_steps is not None else super().saved_roles

    def start(self) -> None:
        super().start()
        if self.config.reads_mismatched:
            seed, most = self.config.trainer.seed, self.config.data.max_length
            self.others = mismatched(self.examples, seed, most) | mismatched(self.val_examples, seed, most)
        if self.config.reads_reference and self.config.reference.mode == "cached" and self.opened.is_taken:
            self.cached = self._cache()

    @classmethod
    def check(cls, config: PreferenceConfig, examples: Sequence[Comparison]) -> None:
        if config.reads_reference and (path := config.reference.model_path) is not None:
            check_vocabulary({"reference.model_path": path}, config.model, tokenizer_of(config, path), "name one")
        for number, each in enumerate(examples):
            is_labelled = {*each.scores} <= {0.0, 1.0} and len(each.responses) <= 2
            if len(each.responses) > 1 if config.of != "label" else is_labelled:
                continue
            found = f"{len(each.responses)} responses with scores {list(each.scores)}"
            wanted = {"pair": "chosen and rejected", "list": "a list with scores", "label": "a response with a label"}
            change = "choose a loss for such rows (`whet algorithms`), or other rows"
            raise DataError(
                f"comparison {number}", found, f"{wanted[config.of]}, which loss={config.loss} reads", change
            )
        if config.reads_mismatched and len(examples) == 1:
            expected = f"at least 2: loss={config.loss} reads the responses of other comparisons"
            raise DataError("number of comparisons", 1, expected, "add rows, or choose another loss")

    def prepared(self, examples: Sequence[Comparison], metrics: Metrics) -> Batch:
        batch = self.batch(examples)
        with metrics.time("time/reference"):
            return self.with_baseline(self.with_reference(batch, examples), examples)

    def updated(self) -> None:
        if (every := self.config.reference.update_steps) is not None and (self.step + 1) % every == 0:
            self.roles["ref"].follow()

    def batch(self, examples: Sequence[Comparison]) -> Batch:
        return to_batch(examples, self.pad_token_id, self.config.of, self.config.data.list_size)

    def with_reference(self, batch: Batch, examples: Sequence[Comparison]) -> Batch:
        """Adds the reference's log-probs to the batch of these examples, if the loss reads them."""
        if "ref_log_probs" not in self.config.entry.columns:
            return batch
        has_point = "reference_point" in self.config.entry.columns
        if not self.config.reads_reference:  # no response is more likely than 1, so the mean distance is below 0
            zero = {"reference_point": torch.zeros(len(batch))} if has_point else {}
            return batch.with_columns(ref_log_probs=torch.zeros(batch["response_mask"].shape), **zero)
        rows, width = rows_of(examples, self.config.of, self.config.data.list_size), batch["response_mask"].shape[1]
        if not (others := self._others(rows)):
            return batch.with_columns(ref_log_probs=self._reference(rows, batch))
        other = batch_of(others, self.pad_token_id, "label")
        found = self._reference([*rows, *others])  # together: a prompt is computed once for all its responses
        own, rest = found[: len(rows), :width], found[len(rows) :, : other["response_mask"].shape[1]]
        point = self._log_ratios(other.with_columns(ref_log_probs=rest)).mean().clamp(min=0)
        return batch.with_columns(ref_log_probs=own, reference_point=point.expand(len(batch)).clone())

    def _others(self, rows: BatchRows) -> BatchRows:
        """Returns the prompts of these rows with responses to other prompts, if the loss reads them."""
        return [(uid, self.others[each.digest, n], 0) for uid, each, n in rows if self.others and n is not None]

    def _reference(self, rows: BatchRows, batch: Batch | None = None) -> Tensor:
        """Returns log-probs under the reference: from the file if there is one, else by role `ref`, else by the policy
        before its first step.   [B, R]"""
        if self.cached is not None:
            return self.cached.column(rows)
        batch = batch_of(rows, self.pad_token_id, "label") if batch is None else batch
        log_probs: Tensor = self.roles.get("ref", self.roles["actor"]).forward(batch, ("log_probs",))["log_probs"]
        return log_probs

    def _cache(self) -> ReferenceCache:
        """Opens the file of the reference's log-probs. Computes it first if it is missing.  Raises: StorageError."""
        path = Path(self.config.reference.file or self.run_dir / "reference.safetensors")
        examples = list({each.digest: each for each in (*self.examples, *self.val_examples)}.values())
        inputs = {**self.reference_inputs, "rows": digest_of_all(examples), "dtype": str(self.config.model.dtype)}
        rows = rows_of(examples, self.config.of, self.config.data.list_size)
        if "ref" in self.roles or self.step == 0:  # else the policy has been trained
            inputs["model"] = self.roles.get("ref", self.roles["actor"]).digest()[0]
        elif not path.exists():
            change = "put it back, or start the run again (trainer.resume=overwrite)"
            raise StorageError(str(path), "is missing", f"the file that the run made before step {self.step}", change)
        if path.exists():
            return ReferenceCache.load(path, inputs, [*rows, *self._others(rows)])
        size = max(self.config.data.train_batch_size, CACHED_TOKENS // self.config.data.max_length)
        parts = (examples[start : start + size] for start in range(0, len(examples), size))
        whole = (rows_of(part, "label", 1) for part in parts)  # all responses, also for losses that read others
        with phase("log-probs of the reference"):
            return ReferenceCache.make(path, inputs, ([*each, *self._others(each)] for each in whole), self._reference)

    def with_baseline(self, batch: Batch, examples: Sequence[Comparison], *, counts: bool = True) -> Batch:
        """Adds the mean log-ratio of all earlier rows and these to the batch, if the loss reads it. With `counts` later
        means include these rows too."""
        if "mean_log_ratio" in self.config.entry.columns:
            found = self._log_ratios(batch)
            total, number = self.log_ratios[0] + found.double().sum().item(), self.log_ratios[1] + len(found)
            batch = batch.with_columns(mean_log_ratio=torch.full((len(batch),), total / number))
            if counts:
                self.log_ratios = total, number
        return batch

    def _log_ratios(self, batch: Batch) -> Tensor:
        """Sums log-prob of the policy minus log-prob of the reference over each response.   [B]"""
        log_probs = self.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        return row_sums(log_probs - batch["ref_log_probs"], batch["response_mask"])

    def validate(self, step: int = 0) -> Metrics:
        """Computes loss, accuracy and rewards over the held-out comparisons."""
        objective, metrics = self.objective_of(self.config), Metrics()
        with metrics.time("time/validation"):
            batch = self.with_reference(self.batch(self.val_examples), self.val_examples)
            batch = self.with_baseline(batch, self.val_examples, counts=False)
            columns = {**batch.columns(), **self.roles["actor"].forward(batch, tuple(sorted(objective.needs)))}
        losses, rewards = objective.function(columns)
        objective.measure(metrics, "val/", losses, rewards, columns)
        return metrics

    def check_health(self, batch: Batch, metrics: Metrics) -> None:
        super().check_health(batch, metrics)
        for rule, warning in RULES.items():
            if self.is_due(RECENT) and rule.__name__ not in self.warned and (numbers := rule(self.history)):
                self.warned.add(rule.__name__)
                log.warning(f"step %d: {warning}", self.step, *numbers)

    def state(self) -> dict[str, Any]:
        kept = {} if self.cached is None else {"reference": self.cached.inputs}
        return {**super().state(), "log_ratios": list(self.log_ratios), "warned": sorted(self.warned), **kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        total, number = state["log_ratios"]
        self.log_ratios, self.warned = (float(total), int(number)), set(state.get("warned", ()))
        self.reference_inputs = dict(state.get("reference", {}))


@register_trainer(
    "preference",
    config="whet.config.preference:PreferenceConfig",
    setup="whet.trainers.preference:PreferenceRun.setup",
    frozen_models="whet.config.preference:frozen_models",
    summary="Train a model on preferences (DPO, KTO, ...).",
)
def train_preference(
    config: PreferenceConfig,
    *,
    data: Rows = None,
    val_data: Rows = None,
    callbacks: Callbacks = (),
    dry_run: bool = False,
) -> PreferenceRun:
    """Trains a model on preferences. Arguments and errors are as in `train_on_examples`."""
    return train_on_examples(PreferenceRun, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)


def mismatched(examples: Sequence[Comparison], seed: int, most: int) -> dict[Key, Comparison]:
    """Pairs each prompt with the response of another comparison, cut to `most` tokens together: the next in a cyclic
    order of all responses, which is drawn by `seed`. Keys are the prompt's comparison and response."""
    rows = [(each, number) for each in examples for number in range(len(each.responses))]
    order = list(range(len(rows)))
    Random(key(seed, "mismatched")).shuffle(order)
    place, made = {number: at for at, number in enumerate(order)}, {}
    for number, (each, own) in enumerate(rows):
        following = (rows[order[(place[number] + ahead) % len(order)]] for ahead in range(1, len(order)))
        ids, mask = next(other.responses[at] for other, at in following if other is not each)
        room = most - len(each.prompt_ids)
        made[each.digest, own] = Comparison(each.prompt_ids, ((ids[:room], mask[:room]),), (0.0,), each.media)
    return made


def rows_of(examples: Sequence[Comparison], of: str, list_size: int) -> BatchRows:
    """Returns the batch rows of comparisons, as (index of the comparison, comparison, index of the response). Index
    None is an empty row. A pair has the best and worst response; a list is cut or padded to `list_size` rows."""
    most = {"pair": 2, "list": list_size}
    rows: list[tuple[int, Comparison, int | None]] = []
    for uid, each in enumerate(examples):
        chosen = picked(len(each.responses), most.get(of, len(each.responses)))
        rows += [(uid, each, number) for number in chosen]
        rows += [(uid, each, None)] * (list_size - len(chosen) if of == "list" else 0)
    return rows


def to_batch(examples: Sequence[Comparison], pad_token_id: int, of: str, list_size: int) -> Batch:
    """Makes the batch of `rows_of`: prompts padded left, responses right; `label` is 1 for good or best responses."""
    return batch_of(rows_of(examples, of, list_size), pad_token_id, of)


def batch_of(rows: BatchRows, pad_token_id: int, of: str) -> Batch:
    """Makes the batch of these rows."""
    texts = [(each.prompt_ids, ((), ()) if number is None else each.responses[number]) for _, each, number in rows]
    scores = [0.0 if number is None else each.scores[number] for _, each, number in rows]
    best = [1.0 if of == "label" else each.scores[0] for _, each, _ in rows]
    seen = [each.media for _, each, _ in rows]
    positions = [rotary_positions(each.prompt_ids, each.media) for _, each, _ in rows] if any(seen) else ()
    return Batch.of(
        {
            **padded(texts, pad_token_id, positions),
            "uid": torch.tensor([uid for uid, *_ in rows]),
            "scores": torch.tensor(scores),
            "label": torch.tensor([float(score == top) for score, top in zip(scores, best, strict=True)]),
        },
        {MEDIA: seen} if any(seen) else {},
    )


def picked(count: int, most: int) -> list[int]:
    """Picks at most `most` numbers below `count`, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / max(1, most - 1)) for number in range(most)]
