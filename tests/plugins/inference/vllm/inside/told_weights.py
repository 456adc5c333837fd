# SPDX-License-Identifier: Apache-2.0
"""An addition to the worker of a vLLM server in tests: it compares the worker's weights with a folder's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import whet_vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model


class Told(whet_vllm.Extension):
    """Reports the weights that differ from the ones that vLLM itself loads from a folder."""

    vllm_config: Any

    def differing(self, folder: str) -> list[str]:
        """The names of weights whose bits differ, in the layout of the kernels."""
        config, names = copy.copy(self.vllm_config), ("compilation_config", "model_config")
        for name in names:
            setattr(config, name, copy.copy(getattr(config, name)))
        config.compilation_config.static_forward_context, config.compilation_config.static_all_moe_layers = {}, []
        config.model_config.model = folder
        with set_current_vllm_config(config):
            theirs = dict(get_model(vllm_config=config).named_parameters())
        own = dict(self.model_runner.model.named_parameters())
        if own.keys() != theirs.keys():
            raise ValueError(f"{own.keys() ^ theirs.keys()} are on one side alone")
        return [name for name, weight in own.items() if not torch.equal(_octets(weight), _octets(theirs[name]))]


def _octets(weight: torch.Tensor) -> torch.Tensor:
    return weight.data.contiguous().view(-1).view(torch.uint8)
