# SPDX-License-Identifier: Apache-2.0
"""A weight transfer back end for the workers of vLLM 0.26 and newer (--worker-extension-cls, --weight-transfer-config).
It uses vLLM's interface for such back ends, and loads weights part by part. It imports nothing of whet."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.platforms import current_platform
from whet_weight_parts import weights_in


class PlainExtension:
    """A base class that vLLM adds to its worker, with a call to drop an incomplete update."""

    def abandon_update(self) -> None:
        """Drops an incomplete update, and weights that wait for the rest of their layer."""
        self._weight_update_active = False
        for layer in LAYERWISE_INFO.values():
            layer.loaded_weights.clear()
            layer.load_numel = 0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Has no fields: the start of a transfer needs no information."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A part of an update. If it is a list, each worker reads its own item."""

    part: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


class PlainTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads weights part by part under their checkpoint names, as vLLM does when it reloads a model."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    own: set[str] | None = None  # names of the model's weights; tied weights have one name
    came: set[str] | None  # names that an update has loaded; None if the model does not report them

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing: the transfer needs no preparation."""

    def start_weight_update(self) -> None:
        """Starts an update. vLLM itself restores the checkpoint layout of weights that its kernels have changed."""
        self.came = set()
        if self.own is None:  # before an update, which hides that a head shares the embedding's weight
            self.own = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, info: UpdateInfo) -> None:
        """Loads the weights of a part."""
        part = info.part if isinstance(info.part, dict) else info.part[torch.distributed.get_rank()]
        loaded = self.model.load_weights(weights_in(part))
        self.came = None if loaded is None or self.came is None else self.came | loaded

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Ends an update, and converts weights to the layout of the kernels.  Raises: ValueError if a weight of the
        model is missing."""
        self.require_all()
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():  # a head computes with a packed copy, also of a weight that it shares
            for module in self.model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)

    def require_all(self) -> None:
        """Raises: ValueError if a weight of the model is missing."""
        if self.came is not None and (missing := sorted((self.own or set()) - self.came)):
            raise ValueError(f"{len(missing)} weights of the model did not come, such as {missing[0]}")

    def shutdown(self) -> None:
        """Does nothing: the transfer holds no resources."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Unused method of the trainer's side, which vLLM before 0.32 requires here.  Raises: NotImplementedError."""
        raise NotImplementedError


with suppress(ValueError):  # it is registered, as in a process that was forked
    WeightTransferEngineFactory.register_engine("whet_plain", PlainTransfer)
