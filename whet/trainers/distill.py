# SPDX-License-Identifier: Apache-2.0
"""Distillation: a student learns a teacher's next-token distribution, on responses of the data or of the student."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from whet.algorithms.divergences import outcomes
from whet.batch import Batch
from whet.config.distill import OTHERS, DistillConfig, frozen_models, is_server
from whet.config.schema import ModelConfig, RolloutConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import WorkerSpec
from whet.data.preferences import Comparison
from whet.data.supervised import SupervisedExample
from whet.engines.protocol import Columns
from whet.errors import ConfigError, EngineError
from whet.keyed import key
from whet.metrics import Metrics
from whet.models.load import load_config, load_tokenizer, stop_token_ids, torch_dtype
from whet.models.lora import adapted_layers
from whet.registry import DIVERGENCES, PARTS, register_trainer
from whet.roles.workers import TrainWorker, check_vocabulary, path_of, settings_of, tokenizer_of
from whet.rollout.build import chosen_engine, rollout_engine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.tracking.console import USE, ConsoleColumn
from whet.trainers.objectives import TokenObjective
from whet.trainers.preference import to_batch
from whet.trainers.sft import Callbacks, ExamplesRun, Rows, train_on_examples, weights_of
from whet.weight_sync import buckets

TEXTS = "name a teacher with the student's tokenizer, or train on this one's texts (`whet generate`, then `whet sft`)"
ALIGN = f"{TEXTS}, or set alignment=bytes"
CHUNK_TOKENS = 4096  # whose distributions over a vocabulary are on the host at once
COLUMNS = (
    ConsoleColumn("loss", ("distill/loss",), ".4f"),
    ConsoleColumn("on-policy", ("distill/on_policy",), ".2f"),
    ConsoleColumn("grad norm", ("distill/grad_norm",), ".3f"),
    ConsoleColumn("lr", ("distill/lr",), ".2e"),
    *USE,
)


class ServedTeacher(Protocol):
    """A teacher behind a server."""

    def outcomes(self, batch: Batch, top_k: int, vocab_size: int) -> dict[str, Tensor]:
        """Returns `teacher_ids` and `teacher_outcomes` of the `top_k` most probable tokens below `vocab_size`."""


class AlignedTeacher(Protocol):
    """A teacher with a vocabulary of its own."""

    @property
    def size(self) -> int:
        """The number of tokens that both vocabularies have."""

    def check(self, example: SupervisedExample, number: int) -> None:
        """Checks that the teacher can read row `number` of the data.  Raises: DataError."""

    def outcomes(
        self, batch: Batch, top_k: int, ask: Callable[[Batch, Tensor], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Returns `teacher_ids` and `teacher_outcomes` in the student's ids, and the `response_mask` of places that
        have them. `ask` gets both in the teacher's ids, for a batch of the teacher's and tokens to choose from."""


@dataclass(frozen=True)
class DistillObjective(TokenObjective):
    """Averages a registered divergence between student and teacher over the tokens of the whole batch."""

    name = "distill"
    kind = DIVERGENCES
    needs = frozenset({"vocab_log_probs"})

    def divergence(self, student: Tensor, batch: Columns) -> Tensor:
        """Computes the divergence at each position.   [B, R, V] -> [B, R]"""
        if "teacher_ids" in batch:
            student = outcomes(student, batch["teacher_ids"])
        found: Tensor = self.function({"student": student, "teacher": batch["teacher_outcomes"]})
        return found

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[Tensor, Metrics]:
        """Sums the divergences of these rows, and divides by the token count of the whole batch."""
        return self.mean(self.divergence(outputs["vocab_log_probs"], batch), batch, counts)


class DistillWorker(TrainWorker):
    """Worker of the student, which also samples, or of a teacher."""

    _sampler: Any = None  # the engine that samples from the student

    @register(Dispatch.DP_COMPUTE)
    def outcomes(self, batch: Batch, top_k: int | None, among: int | Tensor, temperature: float) -> dict[str, Tensor]:
        """Computes log-probs at each position. With `top_k`: of the `top_k` most probable tokens `among` these (a
        number: all below it) with their ids, and of all other tokens together. Without: of all tokens."""
        log_probs = self.engine.forward(batch, frozenset({"vocab_log_probs"}), temperature)["vocab_log_probs"]
        if top_k is None or not len(batch):
            return {"teacher_outcomes": log_probs} if len(batch) else {}
        if isinstance(among, int):
            ids = log_probs[..., :among].topk(top_k).indices
        else:
            others = torch.full(log_probs.shape[-1:], -torch.inf).index_fill(0, among, 0.0)
            ids = (log_probs + others).topk(top_k).indices
        return {"teacher_ids": ids, "teacher_outcomes": outcomes(log_probs, ids)}

    @register(Dispatch.DP_COMPUTE)
    def sample(
        self, requests: list[Request], rollout: RolloutConfig, model: ModelConfig, step: int
    ) -> list[Completion]:
        """Samples with the weights of `step`.  Raises: EngineError if this rank does not hold the whole model."""
        module = self.engine.whole_module()
        if module is None:
            found, change = "splits the student's weights over ranks", "set engine.name=single, or on_policy=0"
            raise EngineError(f"engine {self.settings.engine.name}", found, "a whole model, to sample from", change)
        dtype, is_adapted = torch_dtype(self.settings.dtype), bool(adapted_layers(module))
        if self._sampler is None:
            self._sampler = rollout_engine(rollout, dtype, partial(load_tokenizer, path_of(model)), self.device, model)
            if is_adapted:  # by adapters in another dtype than the base: it samples from a copy without them
                self._sampler.adopt(module)
        if is_adapted:
            self._sampler.wake()
            buckets.copy(self._sampler.load, self.engine.named_weights(), step, dtype)
        else:
            self._sampler.attach(module, step)
        done = generate(self._sampler, requests, rollout.deadline_seconds)
        self._sampler.sleep()
        return done


@dataclass(kw_only=True, repr=False)
class DistillRun(ExamplesRun):
    """A distillation run."""

    columns_shown = COLUMNS
    tokens_metric = "distill/tokens"

    config: DistillConfig

    @classmethod
    def objective_of(cls, config: DistillConfig) -> DistillObjective:
        options = DIVERGENCES[config.loss].resolve_options(config.loss_options, "loss_options")
        return DistillObjective(config.loss, options, temperature=config.temperature)

    @classmethod
    def specs(cls, config: DistillConfig, total_steps: int) -> list[WorkerSpec]:
        settings = {role: settings_of(config.model, config, path) for role, path in frozen_models(config).items()}
        roles = {"actor": cls.settings_of(config, total_steps), **settings}
        return [WorkerSpec(role, DistillWorker, (each,)) for role, each in roles.items()]

    @classmethod
    def check(cls, config: DistillConfig, examples: Sequence[SupervisedExample]) -> None:
        """Checks that all examples have a teacher that can read them.  Raises: ConfigError, DataError."""
        paths = {f"teachers.{name}": path for name, path in config.teachers.items() if not is_server(path)}
        tokenizer = tokenizer_of(config)
        if config.alignment == "ids":
            check_vocabulary(paths, config.model, tokenizer, ALIGN)
        aligned = aligned_teachers(config, tokenizer)
        for number, each in enumerate(examples):
            if each.source not in config.teachers and OTHERS not in config.teachers:
                found = f"no teacher for the data source {each.source!r} (example {number})"
                expected = f"data sources with a teacher: {', '.join(config.teachers)}"
                raise ConfigError("teachers", found, expected, "add a teacher for it, or for all others as '*'")
            if aligned:
                aligned[each.source if each.source in aligned else OTHERS].check(each, number)

    @cached_property
    def served(self) -> dict[str, ServedTeacher]:
        """The teachers behind servers, by data source."""
        served = {source: where for source, where in self.config.teachers.items() if is_server(where)}
        return {
            source: PARTS["served_teacher"].load()(f"teachers.{source}", where, self.tokenizer)
            for source, where in served.items()
        }

    @cached_property
    def aligned(self) -> dict[str, AlignedTeacher]:
        """The teachers with vocabularies of their own, by data source."""
        return aligned_teachers(self.config, self.tokenizer)

    @cached_property
    def vocab_size(self) -> int:
        """The size of the student's vocabulary."""
        return self._vocab_size(path_of(self.config.model))

    @cached_property
    def top_k(self) -> int | None:
        """The number of tokens compared at each position. None compares all tokens of equal vocabularies."""
        sizes = {self.vocab_size, *map(self._vocab_size, frozen_models(self.config).values())}
        common = {each.size for each in self.aligned.values()}
        most = min([min(sizes) - 1, *common])  # and one more, which is all others
        wanted = self.config.top_k or max(sizes)
        is_whole = len(sizes) == 1 and wanted > most and not self.served and not common  # a server tells fewer
        return None if is_whole else min(wanted, most)

    def _vocab_size(self, path: str) -> int:
        config = load_config(path, trust_remote_code=self.config.model.trust_remote_code)
        return int(config.get_text_config().vocab_size)

    def batch(self, examples: Sequence[SupervisedExample]) -> Batch:
        """Makes a row of each example. Tokens before the first trained one are the prompt, others the response. The
        first token is a prompt in any case: a model has no distribution of it."""
        rows = []
        for each in examples:
            first = max(1, each.loss_mask.index(1))
            response = each.input_ids[first:], each.loss_mask[first:]
            rows.append(Comparison(each.input_ids[:first], (response,), (1.0,), each.media))
        return to_batch(rows, self.pad_token_id, "label", 1).with_columns(**weights_of(examples))

    def prepared(self, examples: Sequence[SupervisedExample], metrics: Metrics) -> Batch:
        drawn = [
            key(self.config.trainer.seed, "on-policy", self.step, place) < self.config.on_policy * 2**63
            for place in range(len(examples))
        ]
        metrics.mean("distill/on_policy", sum(drawn) / len(drawn))
        if any(drawn):
            with metrics.time("time/rollout"):
                examples = self._sampled(examples, drawn)
        with metrics.time("time/teacher"):
            return self.with_teachers(self.batch(examples), examples, metrics)

    def _sampled(self, examples: Sequence[SupervisedExample], drawn: Sequence[bool]) -> list[SupervisedExample]:
        """Replaces the last response of each `drawn` example by a response that the student samples."""
        config, model = self.config, self.config.model
        stops = stop_token_ids(path_of(model), self.tokenizer, config.data.template_options)
        requests = []
        for place in (place for place, is_drawn in enumerate(drawn) if is_drawn):
            prompt = prompt_of(examples[place])
            most = max(1, min(config.max_response_length, config.data.max_length - len(prompt)))
            params = SamplingParams(most, temperature=config.temperature, stop_token_ids=stops)
            seed = key(config.trainer.seed, "student", self.step, place)
            requests.append(Request(str(place), prompt, params, seed, media=examples[place].media))
        done = self.roles["actor"].sample(requests, chosen_engine(RolloutConfig(), model), model, self.step)
        found = list(examples)
        for request, completion in zip(requests, done, strict=True):
            ids, place = (*request.prompt_ids, *completion.token_ids), int(request.uid)
            mask = (0,) * len(request.prompt_ids) + (1,) * len(completion.token_ids)
            found[place] = replace(found[place], input_ids=ids, loss_mask=mask)
        return found

    def with_teachers(self, batch: Batch, examples: Sequence[SupervisedExample], metrics: Metrics) -> Batch:
        """Adds the distributions of the examples' teachers to the batch, as columns."""
        names = [each.source if each.source in self.config.teachers else OTHERS for each in examples]
        found = dict[str, Tensor]()
        for name in dict.fromkeys(names):
            own = [row for row, each in enumerate(names) if each == name]
            for rows in chunks(own, batch["response_mask"].shape[1]):
                for column, values in self._told(name, batch[rows]).items():
                    found.setdefault(column, values.new_zeros(len(batch), *values.shape[1:]))[rows] = values
        count, batch = batch["response_mask"].sum(), batch.with_columns(**found)
        mask = batch["response_mask"].bool()
        if self.aligned:
            metrics.mean("distill/aligned", mask.sum() / count, count)
        if "teacher_ids" in found and mask.any():
            metrics.mean("distill/teacher_mass", -found["teacher_outcomes"][..., -1][mask].expm1().mean(), mask.sum())
        return batch

    def _told(self, name: str, batch: Batch) -> dict[str, Tensor]:
        """Gets the distributions of teacher `name` for the rows of `batch`, from its worker or its server."""
        if name in self.served:
            assert self.top_k is not None
            return self.served[name].outcomes(batch, self.top_k, self.vocab_size)

        def ask(batch: Batch, among: int | Tensor) -> dict[str, Tensor]:
            asked = batch, self.top_k, among, self.config.temperature
            found: dict[str, Tensor] = self.roles[f"teacher:{name}"].outcomes(*asked)
            return found

        if name in self.aligned:
            assert self.top_k is not None
            return self.aligned[name].outcomes(batch, self.top_k, ask)
        return ask(batch, self.vocab_size)

    def validate(self, step: int = 0) -> Metrics:
        """Computes the divergence over the held-out examples. All tokens weigh the same."""
        objective, metrics = self.objective_of(self.config), Metrics()
        with metrics.time("time/validation"):
            for rows in chunks(range(len(self.val_examples)), self.config.data.max_length):
                examples = [self.val_examples[row] for row in rows]
                batch = self.with_teachers(self.batch(examples), examples, Metrics())
                found = self.roles["actor"].forward(batch, ("vocab_log_probs",), self.config.temperature)
                mask = batch["response_mask"].bool()
                values = objective.divergence(found["vocab_log_probs"], batch.columns())[mask]
                metrics.mean("val/loss", values.mean(), mask.sum())
        return metrics


def aligned_teachers(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, AlignedTeacher]:
    """Returns the teachers that a plugin aligns with the student's `tokenizer`, by data source; none for
    `alignment=ids`.  Raises: RegistryError without the plugin; ConfigError, DataError."""
    found: dict[str, AlignedTeacher] = {}
    return found if config.alignment == "ids" else PARTS["aligned_teachers"].load()(config, tokenizer)


def chunks(rows: Sequence[int], width: int) -> Iterator[list[int]]:
    """Yields row numbers in parts of at most CHUNK_TOKENS padded tokens, with at least one row in each part."""
    size = max(1, CHUNK_TOKENS // width)
    yield from ([*rows[start : start + size]] for start in range(0, len(rows), size))


def prompt_of(example: SupervisedExample) -> tuple[int, ...]:
    """Returns the tokens before the last response; the first token if there are none."""
    end = max(place for place, is_trained in enumerate(example.loss_mask) if is_trained)
    start = max((place + 1 for place, is_trained in enumerate(example.loss_mask[:end]) if not is_trained), default=0)
    return example.input_ids[: max(1, start)]


@register_trainer(
    "distill",
    config="whet.config.distill:DistillConfig",
    setup="whet.trainers.distill:DistillRun.setup",
    frozen_models="whet.config.distill:frozen_models",
    summary="Train a model on the distributions of a teacher.",
)
def distill(
    config: DistillConfig, *, data: Rows = None, val_data: Rows = None, callbacks: Callbacks = (), dry_run: bool = False
) -> DistillRun:
    """Distils a teacher into a student. Arguments and errors are as in `train_on_examples`."""
    return train_on_examples(DistillRun, config, data=data, val_data=val_data, callbacks=callbacks, dry_run=dry_run)
