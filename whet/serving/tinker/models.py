# SPDX-License-Identifier: Apache-2.0
"""The models of clients on one base: each an engine of its own; adapters share the weights of the base."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from whet import serialization
from whet.config.schema import Dtype, EngineConfig, LoraConfig, OptimConfig
from whet.engines.optim import optimizers_of
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, DataError, EngineError
from whet.models.load import TrainedModel, kept_buffers
from whet.models.outputs import prompt_log_probs
from whet.registry import ENGINES
from whet.serving.tinker.losses import CROSS_ENTROPY, SHORT, Rows, objective_of, targets_of
from whet.serving.tinker.store import STATE, ModelKind, Saved, Store
from whet.serving.tinker.wire import LossRequest, PromptScores, write_loss_output

# Numbers of the SDK's AdamParams.
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
ALPHA = 32.0  # of all adapters of the SDK
KEPT = 4  # modules that are sampled from, in memory
PICKED_ROWS = 4  # rows whose whole vocabulary is in memory at once
Engine = Any  # of the kind `single`, which gives and takes its state
ATTENTION = ("attn", "attention", "mixer")  # in the name of a module with layers of attention


@dataclass(frozen=True)
class SharedRole(RoleSettings):
    """The settings of a model beside others: its module is a copy of `base`, which an adapter leaves as it is."""

    base: PreTrainedModel | None = None

    def whole_model(self) -> TrainedModel:
        """A copy of the base, which shares the base's weights if it gets an adapter."""
        base = self.base
        assert base is not None
        shared = [*base.parameters(), *base.buffers()] if self.lora is not None else []
        module = copy.deepcopy(base, {id(each): each for each in shared}).requires_grad_(True)
        return self._prepared(module)


class Models:
    """Makes, trains, saves and loads models, and gives modules to sample from. One thread calls all methods."""

    def __init__(self, base: PreTrainedModel, name: str, dtype: Dtype, store: Store, context: int) -> None:
        self.base, self.name, self.store, self.context = base.requires_grad_(False).eval(), name, store, context
        self.device = base.device
        self.vocab_size: int = base.config.get_text_config().vocab_size
        optim = OptimConfig(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        self._role = SharedRole(name, EngineConfig(), cast(Any, dtype), optim=optim, base=base)
        self._engines: dict[str, tuple[ModelKind, Engine]] = {}
        self._sampled: OrderedDict[str, PreTrainedModel] = OrderedDict()  # by path

    def create(self, model_id: str, kind: ModelKind) -> None:
        """Makes a model.  Raises: ConfigError, ModelError."""
        self._engines[model_id] = kind, ENGINES["single"].load()(self._role_of(kind), device=self.device)

    def drop(self, model_id: str) -> None:
        """Frees a model, and the modules of its snapshots."""
        self._engines.pop(model_id, None)
        for path in [each for each in self._sampled if f"//{model_id}/" in each]:
            del self._sampled[path]

    def kind_of(self, model_id: str) -> ModelKind:
        """The kind of a model."""
        return self._engines[model_id][0]

    def _role_of(self, kind: ModelKind) -> SharedRole:
        lora = LoraConfig(rank=kind.rank, alpha=ALPHA, target_modules=self._targets(kind)) if kind.rank else None
        return replace(self._role, lora=lora, seed=kind.seed)

    def _targets(self, kind: ModelKind) -> list[str]:
        """Names of the layers that get an adapter; none: all.  Raises: ConfigError."""
        if kind.train_attn and kind.train_mlp:
            return []
        names = {name for name, module in self.base.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
        in_attention = {each for each in names if any(part in each for part in ATTENTION)}
        chosen = {each.rpartition(".")[2] for each in (in_attention if kind.train_attn else names - in_attention)}
        if not (kind.train_attn or kind.train_mlp) or not chosen:
            raise ConfigError("lora_config", "trains no layers", "train_attn or train_mlp", "set one of them to True")
        return sorted(chosen)

    def loss(self, request: LossRequest) -> bytes:
        """Computes a loss, and adds its gradient to the next step's.  Returns a ForwardBackwardOutput.

        Raises: DataError, RegistryError, ConfigError."""
        if not request.data:
            raise DataError("data", "is empty", "rows")
        engine = self._engines[request.model_id][1]
        rows = Rows.of(request.data, request.loss, self.vocab_size, self.context)
        objective = objective_of(request.loss, request.options, is_picked=rows.is_picked)
        batch, everything = rows.prepared(objective), rows.with_all_places()
        if not request.forward_only:
            engine.forward_backward(batch, objective)
        seen, is_whole = dict(objective.seen), torch.equal(batch["response_mask"], everything["response_mask"])
        if request.forward_only or (request.loss == CROSS_ENTROPY and not is_whole and SHORT not in request.options):
            counts = objective.counts(batch.columns())
            step = PICKED_ROWS if rows.is_picked else len(rows.data)
            for start in range(0, len(rows.data), step):
                part, own = everything[start : start + step], batch[start : start + step].columns()
                outputs = engine.forward(part, objective.needs)
                found = targets_of(outputs, part.columns())
                trained = own["response_mask"].bool()
                for row, all_places, mask in zip(own["row"].tolist(), found, trained, strict=True):
                    known = seen.get(row)
                    keeps = mask if found.ndim == 2 else mask[:, None]
                    seen[row] = all_places if known is None else torch.where(keeps, known, all_places)
                if request.forward_only:
                    objective.loss(outputs, own, counts)
        total = float(torch.stack(objective.total_loss).sum()) if objective.total_loss else 0.0
        return write_loss_output(rows.outputs(seen), {"loss:sum": total})

    def step(self, model_id: str, params: Mapping[str, Any]) -> dict[str, float]:
        """Takes a step of AdamW with the SDK's numbers.  Returns metrics.  Raises: ConfigError."""
        engine = self._engines[model_id][1]
        lr, beta1, beta2, eps, decay, clip = (float(params.get(name, default)) for name, default in ADAM.items())
        if not (0 <= lr < np.inf and 0 <= beta1 < 1 and 0 <= beta2 < 1 and 0 < eps < np.inf and 0 <= decay < np.inf):
            raise ConfigError("adam_params", str(dict(params)), "rates from 0 to 1, and an eps over 0")
        assert engine.role.optim is not None and engine.optimizer is not None
        optim = engine.role.optim.model_copy(update={"lr": lr, "betas": (beta1, beta2), "eps": eps})
        engine.role, engine.grad_clip = replace(engine.role, optim=optim), clip if clip > 0 else None
        for optimizer in optimizers_of(engine.optimizer):
            for group in optimizer.param_groups:
                is_decayed = any(weight.dim() >= 2 for weight in group["params"])
                group.update(betas=(beta1, beta2), eps=eps, weight_decay=decay if is_decayed else 0.0)
        found = engine.step().reduce()
        return {name.rpartition("/")[2]: float(value) for name, value in found.items()}

    def save(self, owner: str, model_id: str, path: str, saved: Saved, *, overwrite: bool, trains: bool) -> None:
        """Writes a checkpoint to train on, or the weights alone to sample from.  Raises: RefusedError."""
        engine, place = self._engines[model_id][1], self.store.begin(path, overwrite)
        if trains:
            engine.save(place / STATE, None)
        else:
            serialization.save(place / STATE, {"model": engine.state()["model"]})
        self._sampled.pop(path, None)
        self.store.end(place, saved)

    def load(self, owner: str, model_id: str, path: str, *, optimizer: bool) -> None:
        """Loads a checkpoint into a new model, or one of its kind.  Raises: RefusedError, EngineError."""
        place, saved = self.store.find(owner, path)
        if model_id not in self._engines:
            self.create(model_id, saved.kind)
        engine = self._engines[model_id][1]
        state = serialization.load(place / STATE)
        if optimizer and "optimizer" not in state:
            raise EngineError(path, "has no state of the optimizer", "weights that save_state wrote")
        fill(engine.model, state["model"], path)
        if optimizer:
            engine.load_state(state)

    def module(self, owner: str, path: str | None) -> PreTrainedModel:
        """The base, or the module with the weights of a checkpoint.  Raises: RefusedError, EngineError."""
        if path is None:
            return self.base
        place, saved = self.store.find(owner, path)
        if path not in self._sampled:
            while len(self._sampled) >= (KEPT if saved.kind.rank else 1):
                self._sampled.popitem(last=False)
            module = cast(PreTrainedModel, self._role_of(saved.kind).whole_model()).requires_grad_(False).eval()
            fill(module, serialization.load(place / STATE)["model"], path)
            self._sampled[path] = module
        self._sampled.move_to_end(path)
        return self._sampled[path]

    def scores(self, module: PreTrainedModel, prompt: tuple[int, ...], likeliest: int) -> PromptScores:
        """Log-probs of a prompt's tokens, and the likeliest tokens in each place."""
        own, tables = prompt_log_probs(module, prompt, likeliest, self._role.forward)
        return PromptScores(np.array([np.nan, *own], np.float32), [[], *tables] if likeliest else [])


@torch.no_grad()
def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], path: str) -> None:
    """Copies weights into a module.  Raises: EngineError for those of another."""
    own = {**dict(module.named_parameters()), **kept_buffers(module)}
    if not weights.keys() <= own.keys() or any(own[name].shape != each.shape for name, each in weights.items()):
        raise EngineError(path, "has the weights of another model", "those of one with the same base and rank")
    for name, each in weights.items():
        own[name].copy_(each)


def prompt_of(chunks: list[dict[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """The tokens of a prompt as JSON.  Raises: DataError."""
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise DataError("prompt", "has an image or audio", "text, which this server samples from")
    tokens = tuple(int(token) for chunk in chunks for token in chunk["tokens"])
    if not tokens or not all(0 <= token < vocab_size for token in tokens):
        raise DataError("prompt", "has no tokens, or some out of range", f"token ids from 0 to {vocab_size - 1}")
    return tokens


def saved_now(owner: str, kind: ModelKind, ttl_seconds: float | None, metadata: dict[str, str] | None) -> Saved:
    """The meta.json of a checkpoint that is written now."""
    now = time.time()
    return Saved(owner, kind, now, None if ttl_seconds is None else now + ttl_seconds, metadata or {})


def size_of(place: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(file.stat().st_size for file in place.iterdir())
