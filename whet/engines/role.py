# SPDX-License-Identifier: Apache-2.0
"""The settings from which a training engine is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from whet.config.schema import MICRO_BATCH_TOKENS, EngineConfig, OptimConfig
from whet.models.encoders.base import keep_prepared
from whet.models.freeze import freeze
from whet.models.load import (
    TrainedModel,
    body_of,
    load_policy,
    load_reward_model,
    load_value_model,
    recompute_activations,
    torch_dtype,
)
from whet.models.lora import LoraSettings, add_adapter
from whet.models.outputs import ForwardSettings
from whet.models.sharded import empty_model, fill


@dataclass(frozen=True)
class RoleSettings:
    """The settings of a model, trained or not. They are sent to the process that builds its engine."""

    model_path: str
    engine: EngineConfig
    dtype: Literal["float32", "bfloat16"]
    max_tokens_per_micro_batch: int | None = None  # unset: a default for the kind of device
    optim: OptimConfig | None = None  # unset: the model is not trained
    grad_clip: float | None = None
    total_steps: int = 1  # optimizer steps of the run, for the schedule
    is_value_model: bool = False
    is_reward_model: bool = False  # if it is trained, it may start from a language model, with a new head
    gradient_checkpointing: bool = False
    adapter_path: str | None = None  # an adapter that is merged into the loaded weights
    allow_pickle: bool = False
    media_cache_gib: float = 1.0
    trust_remote_code: bool = False
    lora: LoraSettings | None = None  # unset: the whole model is trained
    adapts_head: bool = False  # the adapter has a part at the output layer too
    freeze: tuple[str, ...] = ()
    seed: int = 0  # of a new adapter or head, and of the optimizer's stochastic rounding
    batch_invariant: bool = False  # computes with the kernels of a batch-invariant rollout engine

    @property
    def forward(self) -> ForwardSettings:
        """Returns the settings of the model's forward passes."""
        return ForwardSettings(
            packing=self.engine.packing is not False,
            share_prompts=self.engine.share_prompts,
            chunk_tokens=self.engine.logits_chunk_tokens,
            replays=self.optim is not None and not self.is_value_model and not self.is_reward_model,
            dtype=torch_dtype(self.dtype),
        )

    def micro_batch_tokens(self, device_type: str) -> int:
        """Returns the token budget of a micro-batch: the configured one, or the default of the device type."""
        if self.max_tokens_per_micro_batch is not None:
            return self.max_tokens_per_micro_batch
        return MICRO_BATCH_TOKENS["cpu" if device_type == "cpu" else "accelerator"]

    def whole_model(self) -> TrainedModel:
        """Loads the model with its weights on the host.  Raises: ModelError."""
        options = {"allow_pickle": self.allow_pickle, "trust_remote_code": self.trust_remote_code}
        if self.is_reward_model:
            seed = None if self.optim is None else self.seed
            return self._prepared(load_reward_model(self.model_path, new_head_seed=seed, **options))
        load = load_value_model if self.is_value_model else load_policy
        return self._prepared(load(self.model_path, adapter_path=self.adapter_path, **options))

    def empty_model(self, device: torch.device) -> TrainedModel:
        """Builds the model without weights, which `fill` loads; its buffers are on `device`.  Raises: ModelError."""
        kind = {"is_value_model": self.is_value_model, "is_reward_model": self.is_reward_model}
        return self._prepared(empty_model(self.model_path, device, **kind, trust_remote_code=self.trust_remote_code))

    def fill(self, model: torch.nn.Module, device: torch.device) -> None:
        """Loads this rank's shards of the weights into a sharded `empty_model`.  Raises: ModelError."""
        is_new = self.is_reward_model and self.optim is not None
        fill(model, self.model_path, device, seed=self.seed, has_new_head=is_new, allow_pickle=self.allow_pickle)

    def _prepared(self, model: TrainedModel) -> TrainedModel:
        """Prepares a model in place: freezes weights, adds an adapter, turns on gradient checkpointing."""
        freeze(model, self.freeze)
        keep_prepared(self.media_cache_gib)
        if self.lora is not None:
            add_adapter(body_of(model), self.lora, self.seed, torch_dtype(self.dtype), adapts_head=self.adapts_head)
        if self.gradient_checkpointing:
            recompute_activations(model)
        return model
