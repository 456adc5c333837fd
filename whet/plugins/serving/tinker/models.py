# SPDX-License-Identifier: Apache-2.0
"""Trains, saves and loads the clients' models, which share one base model, and gives their modules to the sampler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from whet import serialization
from whet.config.schema import Dtype, EngineConfig, LoraConfig, OptimConfig
from whet.errors import ConfigError, EngineError
from whet.models.experts import expert_modules
from whet.models.lora import ALL, adapter_weights, fingerprint, layers_like_experts
from whet.models.outputs import prompt_log_probs
from whet.plugins.serving.tinker.store import WEIGHTS, WHOLE, ModelKind, Saved, Store
from whet.plugins.serving.tinker.training import Base, SharedRole, Training
from whet.plugins.serving.tinker.wire import LossRequest, PromptScores

ALPHA = 32.0  # of all adapters of the SDK
KEPT = 4  # modules that are sampled from, in memory
ATTENTION = ("attn", "attention", "mixer")  # in the name of a module with layers of attention


class Models:
    """Creates, trains, saves and loads models, and returns modules to sample from. One thread calls all methods."""

    def __init__(
        self,
        base: Base,
        name: str,
        dtype: Dtype,
        store: Store,
        context: int,
        device: torch.device,
        engine: str = "single",
        ranks: Callable[..., Any] | None = None,
    ) -> None:
        """Creates no model yet. `ranks` calls a method of `Training` in other processes; None: in this process."""
        self.base, self.name, self.store, self.context = base.module, name, store, context
        nn.Module.to(self.base, device)
        self.fingerprint = fingerprint(self.base)
        self.vocab_size: int = self.base.config.get_text_config().vocab_size
        optim = OptimConfig(lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        settings: dict[str, Any] = {"dtype": dtype, "optim": optim, "trust_remote_code": base.trust_remote_code}
        self._role = SharedRole(base.folder, EngineConfig(name=engine), base=base, **settings)
        self.here = Training(base, device)
        self._train = ranks or (lambda method, *arguments: getattr(self.here, method)(*arguments))
        self._kinds: dict[str, ModelKind] = {}
        self._sampled: OrderedDict[str, PreTrainedModel] = OrderedDict()  # by path
        if dtype == "bfloat16":  # an adapter casts the layers below it, which all models share
            self._module(ModelKind(name, 1))

    def create(self, model_id: str, kind: ModelKind) -> None:
        """Creates a model.  Raises: ConfigError, ModelError."""
        self._train("create", model_id, self._role_of(kind))
        self._kinds[model_id] = kind

    def drop(self, model_id: str) -> None:
        """Frees a model, its snapshots, and their modules."""
        self.store.remove_snapshots(model_id)
        if self._kinds.pop(model_id, None) is not None:
            self._train("drop", model_id)
        for path in [each for each in self._sampled if f"//{model_id}/" in each]:
            del self._sampled[path]

    def kind_of(self, model_id: str) -> ModelKind:
        """Returns the kind of a model.  Raises: EngineError."""
        if model_id not in self._kinds:
            raise EngineError(model_id, "was not created: its request failed", "a model", "create another model")
        return self._kinds[model_id]

    def _role_of(self, kind: ModelKind) -> SharedRole:
        lora = LoraConfig(rank=kind.rank, alpha=ALPHA, target_modules=self._targets(kind)) if kind.rank else None
        return replace(self._role, lora=lora, seed=kind.seed, adapts_head=kind.train_unembed)

    def _targets(self, kind: ModelKind) -> list[str]:
        """Returns the names of the layers that get an adapter; experts belong to the MLP.  Raises: ConfigError."""
        experts = ["experts"] if kind.train_mlp and any(expert_modules(self.base)) else []
        if kind.train_attn and kind.train_mlp:
            return [ALL, *experts] if experts else []
        head, taken = self.base.get_output_embeddings(), layers_like_experts(self.base)
        chosen = set[str](experts)
        for path, module in self.base.named_modules():
            part = kind.train_attn if any(each in path for each in ATTENTION) else kind.train_mlp
            if isinstance(module, nn.Linear) and (kind.train_unembed if module is head else part):
                chosen |= {path.rpartition(".")[2]} - taken
        if not chosen:
            expected = "train_attn, train_mlp or train_unembed"
            raise ConfigError("lora_config", "trains no layers", expected, "set one of them to True")
        return sorted(chosen)

    def loss(self, request: LossRequest) -> Iterator[bytes | None]:
        """Computes a loss, and accumulates its gradient for the next step. Yields None after each part of the work, and
        finally a ForwardBackwardOutput.  Raises: DataError, RegistryError, ConfigError."""
        yield from self._train("loss", request, self.vocab_size, self.context)

    def step(self, model_id: str, params: Mapping[str, Any]) -> dict[str, float]:
        """Takes an AdamW step with the SDK's parameters.  Returns metrics.  Raises: ConfigError."""
        found: dict[str, float] = self._train("step", model_id, params)
        return found

    def save(self, model_id: str, path: str, saved: Saved, *, overwrite: bool) -> None:
        """Writes a checkpoint: for training, or with weights alone for sampling.  Raises: RefusedError."""
        saved = replace(saved, base=self.fingerprint)
        with self.store.writing(path, saved, overwrite=overwrite) as place:
            self._train("save", model_id, place, f"/{WEIGHTS}/" in path)
        self._sampled.pop(path, None)

    def _find(self, owner: str, path: str) -> tuple[Path, ModelKind]:
        """Finds a checkpoint of a model with this base.  Raises: RefusedError, EngineError."""
        place, saved = self.store.find(owner, path)
        if (saved.base or saved.kind.base_model) != (self.fingerprint if saved.base else self.name):
            found = f"is of another base, {saved.kind.base_model!r}"
            raise EngineError(path, found, f"a checkpoint of this server's base {self.name!r}")
        return place, saved.kind

    def load(self, owner: str, model_id: str, path: str, *, optimizer: bool) -> None:
        """Loads a checkpoint into a new model, or into a model of the same kind.  Raises: RefusedError, EngineError."""
        place, kind = self._find(owner, path)
        is_ready = model_id in self._kinds
        if not is_ready:
            self.create(model_id, kind)
        try:
            self._train("load", model_id, place, optimizer)
            is_ready = True
        finally:
            if not is_ready:  # it has the weights of a new model
                self.drop(model_id)

    def module(self, owner: str, path: str | None) -> PreTrainedModel:
        """Returns the base, or a module with a checkpoint's weights.  Raises: RefusedError, EngineError."""
        if path is None:
            return self.base
        place, kind = self._find(owner, path)
        if path not in self._sampled:
            while len(self._sampled) >= (KEPT if kind.rank else 1):
                self._sampled.popitem(last=False)
            module = self._module(kind)
            try:
                fill(module, serialization.load(place / WHOLE), path)
            except OSError as error:
                raise EngineError(path, f"cannot be read ({error.strerror})", change="save it again") from error
            self._sampled[path] = module
        self._sampled.move_to_end(path)
        return self._sampled[path]

    def _module(self, kind: ModelKind) -> PreTrainedModel:
        whole = cast(PreTrainedModel, self._role_of(kind).whole_model())
        return nn.Module.to(whole, self.base.device).requires_grad_(False).eval()

    def scores(self, module: PreTrainedModel, prompt: tuple[int, ...], likeliest: int) -> PromptScores:
        """Computes the log-probs of a prompt's tokens, and the most probable tokens at each position."""
        own, tables = prompt_log_probs(module, prompt, likeliest, self._role.forward)
        return PromptScores(np.array([np.nan, *own], np.float32), [[], *tables] if likeliest else [])


@torch.no_grad()
def fill(module: nn.Module, weights: Mapping[str, torch.Tensor], path: str) -> None:
    """Copies whole weights into a module, or adapter weights into its adapter.  Raises: EngineError for weights of
    another model."""
    own = dict(adapter_weights(module)) or dict(module.named_parameters())
    if weights.keys() != own.keys() or any(own[name].shape != each.shape for name, each in weights.items()):
        raise EngineError(path, "has the weights of another model", "those of one with the same base and rank")
    for name, each in weights.items():
        own[name].copy_(each)
