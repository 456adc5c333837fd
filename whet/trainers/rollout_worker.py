# SPDX-License-Identifier: Apache-2.0
"""The worker that samples, and the group of them as one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.config.schema import ModelConfig, RolloutConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.controller.worker_group import WorkerGroup
from whet.engines.protocol import TrainEngine
from whet.engines.single import SingleEngine
from whet.models.load import load_policy, load_tokenizer
from whet.models.lora import adapted_layers
from whet.rollout.hf import HFEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, RolloutEngine
from whet.rollout.share import Share
from whet.trainers.workers import TrainWorker, actor_beside, torch_dtype
from whet.weight_sync import in_process
from whet.weight_sync.buckets import Inlet, receive
from whet.weight_sync.digest import Digest
from whet.weight_sync.routes import Route, Site, device_here, open_inlet


class RolloutWorker(Worker):
    """One rank that samples: from the module of an actor in its process where it can, else from one of its own."""

    def __init__(
        self, placement: Placement, config: RolloutConfig, dtype: str, tokenizer_path: str, model: ModelConfig
    ) -> None:
        super().__init__(placement)
        self.dtype, self._model = torch_dtype(config.dtype or dtype), model
        self.engine = rollout_engine(
            config,
            self.dtype,
            cache(partial(load_tokenizer, tokenizer_path, trust_remote_code=model.trust_remote_code)),
        )
        self._owns_module = self._attached = False
        self._inlet: Inlet | None = None
        self._calls = 0
        if not self.is_beside_actor():
            self._load()

    @register(Dispatch.DP_COMPUTE)
    def generate(self, requests: list[Request]) -> list[Completion]:
        """One completion a request, in order, each rank for the requests that it was given."""
        return self.engine.generate(requests)

    @register(Dispatch.ONE_TO_ALL)
    def answer(self, requests: list[Request]) -> dict[int, Completion]:
        """The completions of those requests that this rank took, by their numbers; the other ranks took the rest."""
        assert self.process_group is not None
        store: Any = self.process_group.get_group_store()
        self._calls += 1  # equal on all ranks: each is given every call
        taken, done = (f"whet/{self.role}/{self._calls}/{name}" for name in ("taken", "done"))
        share = Share(requests, self.world_size, lambda: store.add(taken, 1) - 1)
        completions = self.engine.answer(requests, share)
        if store.add(done, 1) == self.world_size:
            store.delete_key(taken)
            store.delete_key(done)
        return completions

    @register(Dispatch.ONE_TO_ALL)
    def is_beside_actor(self) -> bool:
        """Whether this process has a rank of the actor too."""
        return "actor" in self.neighbours

    @register(Dispatch.ONE_TO_ALL)
    def sync(self, version: int) -> str:
        """Takes the weights of `version` from the actor beside it, and returns their digest: its module itself where
        it is whole on this rank, both compute in the same dtype, and no adapter in it would slow down every token."""
        actor = actor_beside(self)
        module, weights = actor.model, actor.engine.named_weights()
        assert isinstance(module, PreTrainedModel)
        self._attached = isinstance(actor.engine, SingleEngine) and self._computes_alike(actor.engine, module)
        if self._attached:
            return in_process.attach(self.engine, module, weights, version)
        if not self._owns_module:
            if isinstance(actor.engine, SingleEngine):
                self.engine.adopt(module)
                self._owns_module = True
            else:
                self._load()
        return in_process.copy(self.engine, weights, version, self.dtype)

    @register(Dispatch.ONE_TO_ALL)
    def site(self) -> Site:
        """Where this rank runs."""
        return Site.here(self.address)

    @register(Dispatch.ALL_TO_ALL)
    def open_inlet(self, route: Route, deadline_seconds: float) -> None:
        """Opens this rank's end of the link to the trainer."""
        self._inlet = open_inlet(route, deadline_seconds)

    @register(Dispatch.ONE_TO_ALL)
    def receive(self, version: int) -> str:
        """Takes the weights of `version` from the link, and returns their digest.

        Raises: WeightSyncError; DeadlineError.
        """
        assert self._inlet is not None
        digest = Digest()
        try:
            self.engine.load_weights(receive(self._inlet, version, digest), version)
        except BaseException:
            self.close()  # the trainer, which waits for this rank, hears of it
            raise
        return str(digest)

    @register(Dispatch.ONE_TO_ALL)
    def rollout_mode(self) -> None:
        """Takes what is trained in this process off the device, but for a module that this rank samples from."""
        for engine in self._engines_beside():
            engine.offload()
        self.engine.wake()

    @register(Dispatch.ONE_TO_ALL)
    def trainer_mode(self) -> None:
        """Undoes `rollout_mode`, and frees what sampling alone needs."""
        self.engine.sleep()
        for engine in self._engines_beside():
            engine.onload()

    def close(self) -> None:
        """Lets go of the link."""
        if self._inlet is not None:
            self._inlet.close()

    def _load(self) -> None:
        model = self._model
        assert model.path is not None
        module = load_policy(
            model.path,
            adapter_path=model.lora.path,
            allow_pickle=model.allow_pickle,
            trust_remote_code=model.trust_remote_code,
        )
        module.requires_grad_(False)
        self.engine.attach(module.to(device_here(), self.dtype), version=0, is_own=True)  # type: ignore[arg-type]
        self._owns_module = True

    def _computes_alike(self, engine: SingleEngine, module: PreTrainedModel) -> bool:
        alike = module.dtype == self.dtype and engine.forward_settings.dtype == self.dtype
        return alike and not adapted_layers(module)

    def _engines_beside(self) -> list[TrainEngine]:
        workers = [each for role, each in self.neighbours.items() if not (self._attached and role == "actor")]
        return [each.engine for each in workers if isinstance(each, TrainWorker)]


def sampler(rollout: WorkerGroup) -> Callable[[Sequence[Request]], list[Completion]]:
    """One completion a request, in order, from all ranks of the group, each of which takes the next requests as it has
    room."""

    def generate(requests: Sequence[Request]) -> list[Completion]:
        if rollout.world_size == 1:
            alone: list[Completion] = rollout.generate(list(requests))
            return alone
        answered: dict[int, Completion] = {}
        for part in rollout.answer(list(requests)):
            answered |= part
        return [answered[index] for index in range(len(requests))]

    return generate


def rollout_engine(
    config: RolloutConfig, dtype: torch.dtype, load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> RolloutEngine:
    """The engine that the config names, without a model yet; only stop strings make it load a tokenizer."""
    if config.name == "hf":
        return HFEngine(
            dtype=dtype,
            max_batch_size=config.max_batch_size,
            deadline_seconds=config.deadline_seconds,
            load_tokenizer=load_tokenizer,
        )
    return NativeEngine(
        dtype=dtype,
        max_batch_size=config.max_batch_size,
        kv_cache_bytes=config.kv_cache_bytes,
        compile_decode=config.compile,
        deadline_seconds=config.deadline_seconds,
        load_tokenizer=load_tokenizer,
    )
