# SPDX-License-Identifier: Apache-2.0
"""The worker that trains or reads a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.engines.engine import Engine
from whet.engines.protocol import Objective
from whet.engines.single import SingleEngine
from whet.errors import CheckpointError, WorkerError
from whet.metrics import Metrics
from whet.models.freeze import freeze
from whet.models.load import (
    body_of,
    compile_layers,
    load_policy,
    load_value_model,
    recompute_activations,
)
from whet.models.lora import adapter_off, add_adapter, fingerprint
from whet.models.outputs import ForwardSettings
from whet.models.value_head import ValueModel
from whet.protocol import DataProto
from whet.trainers.weight_sender import WeightSender

# By `make bench` (docs/benchmarks.md, "Packed or padded"): another device comes in with its own measurement
# (a GPU's numbers are not measured yet).
PACKING_BY_DEVICE = {"cpu": True, "cuda": True}
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class RoleSettings:
    """What one training worker is."""

    model_path: str
    engine: EngineConfig
    dtype: Literal["float32", "bfloat16"]
    max_tokens_per_micro_batch: int | None = None  # unset: MICRO_BATCH_TOKENS of the device
    optim: OptimConfig | None = None  # unset: the model is only read
    grad_clip: float | None = None
    total_steps: int = 1  # optimizer steps of the run, for the schedule
    is_value_model: bool = False
    gradient_checkpointing: bool = False
    adapter_path: str | None = None  # merged first
    allow_pickle: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig | None = None  # unset: the whole model is trained
    freeze: tuple[str, ...] = ()
    seed: int = 0  # of a new adapter

    @property
    def device(self) -> str:
        """Where its engine computes."""
        return "cuda" if self.engine.name == "fsdp" and torch.cuda.is_available() else "cpu"

    @property
    def forward(self) -> ForwardSettings:
        """How its forward passes are computed."""
        packing = self.engine.packing
        return ForwardSettings(
            packing=PACKING_BY_DEVICE[self.device] if packing is None else packing,
            share_prompts=self.engine.share_prompts,
            chunk_tokens=self.engine.logits_chunk_tokens,
            dtype=torch_dtype(self.dtype),
        )

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a forward pass."""
        tokens = self.max_tokens_per_micro_batch
        return MICRO_BATCH_TOKENS[self.device] if tokens is None else tokens

    def shards(self, processes: int) -> int:
        """The parts that its weights, gradients and optimizer state lie in."""
        return (self.engine.shard_size or processes) if self.engine.name == "fsdp" else 1

    @property
    def engine_options(self) -> dict[str, Any]:
        """What engines of all kinds are told."""
        return {
            "forward": self.forward,
            "max_tokens_per_micro_batch": self.micro_batch_tokens,
            "grad_clip": self.grad_clip,
            "total_steps": self.total_steps,
            "seed": self.seed,
        }


class TrainWorker(WeightSender):
    """One rank of the actor, the critic, the reference or any other model that is trained or read row by row."""

    def __init__(self, placement: Placement, settings: RoleSettings) -> None:
        super().__init__(placement)
        self.start: dict[str, Any] | None = None
        self.engine: Engine = self._sharded(settings) if settings.engine.name == "fsdp" else self._single(settings)
        if settings.lora is not None:
            self.start = start_of(settings, settings.lora) | {"fingerprint": fingerprint(body_of(self.model))}

    @property
    def dp_rank(self) -> int:
        """Which shard of a batch the engine is given here."""
        return self.engine.dp_rank

    @property
    def dp_size(self) -> int:
        """Into how many shards a batch is split."""
        return self.engine.dp_size

    @property
    def is_reporting(self) -> bool:
        """Whether results come from this rank."""
        return self.engine.is_reporting

    @register(Dispatch.DP_COMPUTE)
    def forward(self, batch: DataProto, needs: tuple[str, ...], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient."""
        return self.engine.forward(batch, frozenset(needs), temperature)

    @register(Dispatch.DP_COMPUTE)
    def update(self, batch: DataProto, objective: Objective) -> Metrics:
        """One optimizer step on the mini-batch `batch`."""
        return self.engine.update(batch, objective)

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        """Writes weights, optimizer state and step count; of an adapter what it was put into too.

        Raises: CheckpointError.
        """
        try:
            self.engine.save(Path(path), self.start)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        """Puts back what `save` wrote.  Raises: CheckpointError."""
        if not Path(path).exists():
            raise CheckpointError(f"{path} is missing: the checkpoint has no state for the role {self.role!r}")
        saved = self.engine.load(Path(path))
        if saved is not None and self.start is not None and saved["fingerprint"] != self.start["fingerprint"]:
            raise CheckpointError(
                f"{path} is an adapter for the model at {saved['model_path']}, and the weights at "
                f"{self.start['model_path']} are others; name the model that the run started from"
            )

    def _single(self, settings: RoleSettings) -> Engine:
        load = load_value_model if settings.is_value_model else load_policy
        self.model: PreTrainedModel | ValueModel = load(
            settings.model_path,
            adapter_path=settings.adapter_path,
            allow_pickle=settings.allow_pickle,
            trust_remote_code=settings.trust_remote_code,
        )
        self._prepare(settings)
        return SingleEngine(self.model, settings.optim, process_group=self.process_group, **settings.engine_options)

    def _sharded(self, settings: RoleSettings) -> Engine:
        from whet.engines.fsdp.engine import FSDPEngine
        from whet.models.sharded import empty_model, fill

        engine, device = settings.engine, torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.model = empty_model(
            settings.model_path,
            device,
            is_value_model=settings.is_value_model,
            trust_remote_code=settings.trust_remote_code,
        )
        self._prepare(settings)
        return FSDPEngine(
            self.model,
            partial(
                fill,
                path=settings.model_path,
                device=torch.device("cpu") if engine.cpu_offload else device,
                seed=settings.seed,
                allow_pickle=settings.allow_pickle,
            ),
            settings.optim,
            engine,
            process_group=self.process_group,
            device=device,
            **settings.engine_options,
        )

    def _prepare(self, settings: RoleSettings) -> None:
        """What is trained of the model, and how its layers run."""
        freeze(self.model, settings.freeze)
        if settings.lora is not None:
            add_adapter(body_of(self.model), settings.lora, settings.seed, torch_dtype(settings.dtype))
        if settings.gradient_checkpointing:
            recompute_activations(self.model)
        if settings.engine.compile:
            compile_layers(self.model)


class AdapterOffWorker(Worker):
    """The reference where the actor trains an adapter: the actor's own module, with the adapter off."""

    @property
    def dp_rank(self) -> int:
        """As the actor's: its module is read."""
        return actor_beside(self).dp_rank

    @property
    def dp_size(self) -> int:
        """As the actor's."""
        return actor_beside(self).dp_size

    @property
    def is_reporting(self) -> bool:
        """As the actor's."""
        return actor_beside(self).is_reporting

    @register(Dispatch.DP_COMPUTE)
    def forward(self, batch: DataProto, needs: tuple[str, ...], temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Model outputs [B, R] without gradient."""
        actor = actor_beside(self)
        with adapter_off(actor.model):
            return actor.engine.forward(batch, frozenset(needs), temperature)


def start_of(settings: RoleSettings, lora: LoraConfig) -> dict[str, Any]:
    """What a checkpoint says of the model that an adapter is for; folders by their whole path, wherever it is read."""

    def whole(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path is not None and Path(path).is_dir() else path

    return {
        "model_path": whole(settings.model_path),
        "adapter_path": whole(settings.adapter_path),
        "allow_pickle": settings.allow_pickle,
        "lora": lora.model_dump(include={"rank", "alpha", "target_modules"}),
    }


def actor_beside(worker: Worker) -> TrainWorker:
    """The actor in the process of another worker.  Raises: WorkerError."""
    actor = worker.neighbours["actor"]
    if not isinstance(actor, TrainWorker) or not isinstance(actor.model, PreTrainedModel):
        raise WorkerError(f"{worker.role} rank {worker.rank} has no actor with a language model in its process")
    return actor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config's dtype name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
