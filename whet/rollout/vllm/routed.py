# SPDX-License-Identifier: Apache-2.0
"""The experts that vLLM chose for each token (`--enable-return-routed-experts`), for the routers of the trainer."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from whet.errors import ConfigError, EngineError
from whet.models.experts import expert_modules
from whet.models.load import layers
from whet.models.routing import as_bytes
from whet.rollout.protocol import Completion
from whet.rollout.servers.environment import Environment

KEY = "rollout.engine.options.routed_experts"
TOLD = ("sampling_params.py", "routed_experts_prompt_start")  # versions whose answers can begin behind the prompt


def check_routed(found: Environment, options: Mapping[str, Any], is_plain: bool) -> None:
    """Raises: ConfigError where the server would not tell experts."""
    if not options["routed_experts"]:
        return
    if not is_plain:
        expected = "false, as whet's additions to vLLM need the model runner that tells none"
        raise ConfigError(KEY, True, expected, "set rollout.engine.options.plain=true, or unset it")
    if not found.mentions(*TOLD):
        raise ConfigError(KEY, True, f"a vLLM with {TOLD[1]} (0.32): here is {found.version}", "unset it")


def mixtures(model: torch.nn.Module) -> list[int]:
    """The numbers of the layers with experts.  Raises: ConfigError without any."""
    found = [number for number, layer in enumerate(layers(model)) if next(expert_modules(layer), None) is not None]
    if not found:
        raise ConfigError(KEY, True, "a mixture of experts", "unset it")
    return found


def routed_of(answer: Any, completion: Completion, numbers: Sequence[int]) -> tuple[bytes, ...]:
    """The experts of each token of an answer in the layers with these numbers, as `Completion.routed`.
    Raises: EngineError."""
    tokens, told = len(completion.token_ids), answer["choices"][0].get("routed_experts")
    if not numbers or told is None:
        return (b"",) * tokens if numbers else ()
    table = np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False)  # [tokens, layers, k]
    if table.ndim != 3 or len(table) != tokens or table.shape[1] <= numbers[-1]:
        expected = f"{tokens} tokens, {numbers[-1] + 1} layers or more, and experts"
        raise EngineError("routed_experts of vLLM", f"shape {table.shape}", expected, "see its log")
    return tuple(as_bytes([torch.from_numpy(table[:, layer].astype(np.int16)) for layer in numbers], None))
