# SPDX-License-Identifier: Apache-2.0
"""Training on preferences, without a reward model: the better of two responses, good and bad ones, or lists."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.statistics import row_sums
from whet.batch import Batch
from whet.columns import POLICY_OUTPUTS
from whet.config.preference import PreferenceConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.data.preferences import Comparison, Response
from whet.engines.engine import Engine
from whet.engines.protocol import Columns
from whet.errors import DataError, EngineError, StorageError
from whet.keyed import key
from whet.metrics import Metrics
from whet.models.packing import MEDIA
from whet.models.positions import position_ids, rotary_positions
from whet.phases import phase
from whet.registry import PREFERENCE_LOSSES, register_trainer
from whet.tracking.console import USE, Column
from whet.trainers.objectives import Objective
from whet.trainers.reference_cache import ReferenceCache, digest_of_all
from whet.trainers.sft import Callbacks, ExamplesRun, Rows, train_on_examples
from whet.trainers.workers import AdapterOffWorker, TrainWorker, actor_beside, settings_of

log = logging.getLogger(__name__)
COLUMNS = (
    Column("loss", ("preference/loss",), ".4f"),
    Column("accuracy", ("preference/accuracy",), ".3f"),
    Column("margin", ("preference/margin",), ".3f"),
    Column("chosen", ("preference/chosen_moved",), ".2f"),
    Column("lr", ("preference/lr",), ".2e"),
    *USE,
)


@dataclass(frozen=True)
class ComparisonObjective(Objective):
    """A registered preference loss: a mean over the comparisons of the whole batch. Rows of one stay together."""

    of: str = "pair"  # pair, label, list
    name = "preference"
    kind = PREFERENCE_LOSSES

    @classmethod
    def from_config(cls, config: PreferenceConfig) -> ComparisonObjective:
        """The objective of a config.  Raises: ConfigError."""
        options = config.entry.resolve_options(config.loss_options, "loss_options")
        block = 1 if config.of == "label" else config.rows_an_example
        return cls(config.loss, options, block=block, of=config.of)

    @property
    def needs(self) -> frozenset[str]:
        """Log-probs, and other outputs of the policy that the loss names."""
        return frozenset({"log_probs"}) | (POLICY_OUTPUTS & {*self.function.columns})

    def counts(self, batch: Columns) -> dict[str, Tensor]:
        """The number of comparisons with a token to train on."""
        return {"num_comparisons": self._blocks(batch["response_mask"]).sum()}

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[Tensor, Metrics]:
        """Losses of the comparisons of these rows, divided by the number of all."""
        losses, rewards = self.function({**batch, **outputs})
        metrics, total = Metrics(), losses.sum()
        self.measure(metrics, "preference/", losses.detach(), rewards.detach(), {**batch, **outputs})
        metrics.sum("preference/tokens", batch["attention_mask"][batch["response_mask"].any(1)].sum())
        return total / counts["num_comparisons"], metrics

    def measure(self, metrics: Metrics, area: str, losses: Tensor, rewards: Tensor, batch: Columns) -> None:
        """Means over comparisons of the loss, of how the rewards that it implies agree with the order, and over rows of
        how far the better and the worse responses have moved; `chosen_moved` falls where both get less likely."""
        mask, label = batch["response_mask"], batch["label"] != 0
        is_there, count = mask.bool().any(1), self._blocks(mask).sum()
        metrics.mean(area + "loss", losses.sum() / count.clamp(min=1), count)
        moved = (
            row_sums((batch["log_probs"] - batch["ref_log_probs"]).detach(), mask) if "ref_log_probs" in batch else None
        )
        for name, rows in (("chosen", is_there & label), ("rejected", is_there & ~label)):
            size = rows.sum()
            if size:
                metrics.mean(f"{area}{name}_reward", rewards[rows].mean(), size)
                metrics.mean(f"{area}{name}_length", mask[rows].sum(1).float().mean(), size)
                log_probs = row_sums(batch["log_probs"].detach(), mask)[rows]
                metrics.mean(f"{area}{name}_log_probs", log_probs.mean(), size)
                if moved is not None:
                    metrics.mean(f"{area}{name}_moved", moved[rows].mean(), size)
        if self.of == "label":
            zero = batch.get("reference_point", batch.get("mean_log_ratio", torch.zeros_like(rewards)))
            right = (rewards > zero * self.options.get("beta", 1.0)) == label
            metrics.mean(area + "accuracy", right[is_there].float().mean(), is_there.sum())
            return
        better, worse, longer = self._ends(rewards, mask)
        if len(better):
            right = (better > worse).float()
            metrics.mean(area + "accuracy", right.mean(), len(right))
            metrics.mean(area + "margin", (better - worse).mean(), len(right))
            for name, rows in (("longer", longer), ("shorter", ~longer)):
                if rows.any():
                    metrics.mean(f"{area}accuracy_{name}", right[rows].mean(), rows.sum())

    def _blocks(self, mask: Tensor) -> Tensor:
        """True for comparisons with a token.   [B, R] -> [B / block]"""
        return mask.bool().any(1).view(-1, self.block).any(1)

    def _ends(self, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards of the first and the last response of each comparison, and whether the first is the longer."""
        lengths, rows = mask.sum(1).view(-1, self.block), rewards.view(-1, self.block)
        last = (lengths > 0).sum(1, keepdim=True) - 1
        kept = last[:, 0] > 0
        worse, length = rows.gather(1, last.clamp(min=0))[:, 0], lengths.gather(1, last.clamp(min=0))[:, 0]
        return rows[kept, 0], worse[kept], (lengths[:, 0] > length)[kept]


class MovingReference(TrainWorker):
    """A reference that becomes the policy of its process from time to time."""

    @register(Dispatch.ONE_TO_ALL)
    def follow(self) -> None:
        """Takes over the policy's weights.  Raises: EngineError for engines of two kinds."""
        own, actor = self.engine, actor_beside(self).engine
        if not isinstance(own, Engine) or type(actor) is not type(own):
            found, expected = type(actor).__name__, f"the reference's, {type(own).__name__}, by whet's base"
            raise EngineError("engine of the policy", found, expected, "unset reference.update_steps")
        own.copy_from(actor)


@dataclass(kw_only=True, repr=False)
class PreferenceRun(ExamplesRun):
    """A run on preferences."""

    columns_shown = COLUMNS
    tokens_metric = "preference/tokens"
    noun = "comparisons"

    config: PreferenceConfig
    log_ratios: tuple[float, int] = (0.0, 0)  # sum and number of S(l - b) of all rows so far, for `mean_log_ratio`
    cached: ReferenceCache | None = None
    has_warned: bool = False  # of better responses that become less likely

    @classmethod
    def objective_of(cls, config: PreferenceConfig) -> ComparisonObjective:
        return ComparisonObjective.from_config(config)

    @classmethod
    def specs(cls, config: PreferenceConfig, total_steps: int) -> list[WorkerSpec]:
        specs = super().specs(config, total_steps)
        reference = config.reference
        if not config.reads_reference or (reference.mode == "cached" and reference.model_path is None):
            return specs
        if config.model.lora.rank is not None and reference.model_path is None:
            return [*specs, WorkerSpec("ref", AdapterOffWorker)]
        worker = TrainWorker if reference.update_steps is None else MovingReference
        return [*specs, WorkerSpec("ref", worker, (settings_of(config.model, config, reference.model_path),))]

    @property
    def saved_roles(self) -> Mapping[str, WorkerGroup]:
        return self.roles if self.config.reference.update_steps is not None else super().saved_roles

    def start(self) -> None:
        super().start()
        if self.config.reads_reference and self.config.reference.mode == "cached" and self.opened.is_taken:
            self.cached = self._cache()

    @classmethod
    def check(cls, config: PreferenceConfig, examples: Sequence[Comparison]) -> None:
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
        """The batch of these examples with the log-probs of the reference, where the loss reads them."""
        if "ref_log_probs" not in self.config.entry.columns:
            return batch
        has_point = "reference_point" in self.config.entry.columns
        if not self.config.reads_reference:  # no response is more likely than 1, so the mean distance is below 0
            zero = {"reference_point": torch.zeros(len(batch))} if has_point else {}
            return batch.with_columns(ref_log_probs=torch.zeros(batch["response_mask"].shape), **zero)
        if self.cached is not None:
            rows = rows_of(examples, self.config.of, self.config.data.list_size)
            return batch.with_columns(ref_log_probs=self.cached.column(rows, batch["response_mask"].shape[1]))
        if not has_point:
            return batch.with_columns(ref_log_probs=self._reference(batch))
        other = to_batch(mismatched(examples, self.config.trainer.seed, self.step), self.pad_token_id, "label", 1)
        own, others = self._reference(Batch.concat([batch, other])).split(len(batch))  # prompts are shared in one pass
        point = self._log_ratios(other.with_columns(ref_log_probs=others)).mean().clamp(min=0)
        return batch.with_columns(ref_log_probs=own, reference_point=point.expand(len(batch)).clone())

    def _reference(self, batch: Batch) -> Tensor:
        """Log-probs of the reference model; before the first step the policy is it.   [B, R]"""
        log_probs: Tensor = self.roles.get("ref", self.roles["actor"]).forward(batch, ("log_probs",))["log_probs"]
        return log_probs

    def _cache(self) -> ReferenceCache:
        """The file of the reference's log-probs, made where it is missing.  Raises: StorageError."""
        path = Path(self.config.reference.file or self.run_dir / "reference.safetensors")
        examples = [*self.examples, *self.val_examples]
        inputs = {"rows": digest_of_all(examples), "dtype": str(self.config.model.dtype)}
        is_known = "ref" in self.roles or self.step == 0  # else the policy has moved
        if is_known:
            inputs["model"] = self.roles.get("ref", self.roles["actor"]).digest()[0]
        elif not path.exists():
            change = "put it back, or start the run again (trainer.resume=overwrite)"
            raise StorageError(str(path), "is missing", f"the file that the run made before step {self.step}", change)
        if path.exists():
            return ReferenceCache.load(path, inputs)
        size, of, width = self.config.data.train_batch_size, self.config.of, self.config.data.list_size
        parts = (examples[start : start + size] for start in range(0, len(examples), size))
        with phase("log-probs of the reference"):
            return ReferenceCache.make(
                path, inputs, ((rows_of(part, of, width), self.batch(part)) for part in parts), self._reference
            )

    def with_baseline(self, batch: Batch, examples: Sequence[Comparison], *, counts: bool = True) -> Batch:
        """The batch with the column that a loss of labels compares rewards with; `counts` is true of rows to train
        on."""
        if "mean_log_ratio" in self.config.entry.columns:
            found = self._log_ratios(batch)
            total, number = self.log_ratios[0] + found.double().sum().item(), self.log_ratios[1] + len(found)
            batch = batch.with_columns(mean_log_ratio=torch.full((len(batch),), total / number))
            if counts:
                self.log_ratios = total, number
        return batch

    def _log_ratios(self, batch: Batch) -> Tensor:
        """S(l - b) of the policy as it is.   [B]"""
        log_probs = self.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        return row_sums(log_probs - batch["ref_log_probs"], batch["response_mask"])

    def validate(self, step: int = 0) -> Metrics:
        """Loss, accuracy and rewards over the held-out comparisons."""
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
        last, lost = self.history[-1], [name for name in ("chosen", "rejected") if self._fell(name)]
        if len(lost) == 2 and not self.has_warned:
            self.has_warned = True
            log.warning(
                "step %d: the better responses have lost %.1f nats and the worse ones %.1f: both become less likely, "
                "and others that no row has take their place; add an SFT term (loss=rpo), lower optim.lr or raise beta",
                *(self.step, -last["preference/chosen_moved"], -last["preference/rejected_moved"]),
            )

    def _fell(self, name: str) -> bool:
        """Tells whether responses lost a tenth of their log-prob since the reference."""
        last = self.history[-1]
        moved = last.get(f"preference/{name}_moved", 0.0)
        return moved < 0 and moved < 0.1 * (last[f"preference/{name}_log_probs"] - moved)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "log_ratios": list(self.log_ratios)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        total, number = state["log_ratios"]
        self.log_ratios = float(total), int(number)


@register_trainer(
    "preference",
    config="whet.config.preference:PreferenceConfig",
    setup="whet.trainers.preference:PreferenceRun.setup",
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
    """Trains on preferences as `train_on_examples` does."""
    kind = PreferenceRun
    return train_on_examples(kind, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)


def mismatched(examples: Sequence[Comparison], seed: int, step: int) -> list[Comparison]:
    """Pairs each prompt with a response to another one: a cycle through the responses in a random order, by seed and
    step."""
    rows = [(each, response) for each in examples for response in each.responses]
    order = list(range(len(rows)))
    Random(key(seed, "mismatched", step)).shuffle(order)
    following = dict(pairwise([*order, order[0]]))
    return [
        Comparison(each.prompt_ids, (rows[following[number]][1],), (0.0,), each.media)
        for number, (each, _) in enumerate(rows)
    ]


def rows_of(examples: Sequence[Comparison], of: str, list_size: int) -> list[tuple[int, Comparison, int | None]]:
    """The rows of comparisons: number of the comparison, itself, and number of the response; None is an empty row. For
    pairs the best and the worst; lists are cut to `list_size` and filled up with empty rows."""
    most = {"pair": 2, "list": list_size}
    rows: list[tuple[int, Comparison, int | None]] = []
    for uid, each in enumerate(examples):
        chosen = picked(len(each.responses), most.get(of, len(each.responses)))
        rows += [(uid, each, number) for number in chosen]
        rows += [(uid, each, None)] * (list_size - len(chosen) if of == "list" else 0)
    return rows


def to_batch(examples: Sequence[Comparison], pad_token_id: int, of: str, list_size: int) -> Batch:
    """Comparisons as rows (`rows_of`), prompts padded on the left and responses on the right; `label` is 1 for good
    responses and for the best of a comparison."""
    rows = rows_of(examples, of, list_size)
    prompts = [each.prompt_ids for _, each, _ in rows]
    responses: list[Response] = [((), ()) if number is None else each.responses[number] for _, each, number in rows]
    scores = [0.0 if number is None else each.scores[number] for _, each, number in rows]
    best = [1.0 if of == "label" else each.scores[0] for _, each, _ in rows]
    lengths = torch.tensor([[len(prompt), len(ids)] for prompt, (ids, _) in zip(prompts, responses, strict=True)])
    left, right = lengths.amax(0).tolist()
    places = torch.arange(left + right)
    is_real = (places >= left - lengths[:, :1]) & (places < left + lengths[:, 1:])
    attention_mask = is_real.long()
    tokens = [token for prompt, (ids, _) in zip(prompts, responses, strict=True) for token in (*prompt, *ids)]
    trained = torch.tensor([flag for _, mask in responses for flag in mask], dtype=torch.int64)
    response_mask = torch.zeros(len(rows), right, dtype=torch.int64).masked_scatter(is_real[:, left:], trained)
    positions = [rotary_positions(each.prompt_ids, each.media) for _, each, _ in rows]
    media = {MEDIA: [each.media for _, each, _ in rows]} if any(each.media for each in examples) else {}
    return Batch.of(
        {
            "input_ids": torch.full(is_real.shape, pad_token_id).masked_scatter(is_real, torch.tensor(tokens)),
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask, positions if any(p is not None for p in positions) else None),
            "response_mask": response_mask,
            "uid": torch.tensor([uid for uid, *_ in rows]),
            "scores": torch.tensor(scores),
            "label": torch.tensor([float(score == top) for score, top in zip(scores, best, strict=True)]),
        },
        media,
    )


def picked(count: int, most: int) -> list[int]:
    """Numbers below `count`, at most `most` of them, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(number * (count - 1) / max(1, most - 1)) for number in range(most)]
