# SPDX-License-Identifier: Apache-2.0
"""Converts Hugging Face models to folders in Megatron-Core's distributed form, and back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from whet.config.schema import EngineConfig
from whet.devices import HOST
from whet.engines.role import RoleSettings
from whet.errors import ModelError
from whet.plugins.megatron import checkpoint
from whet.plugins.megatron.engine import MegatronEngine

COPIED = ("*.json", "*.model", "*.jinja", "*.txt")  # config and tokenizer


class _Empty(MegatronEngine):
    """An engine that starts without weights, since `read` loads a folder's weights later."""

    def _fill(self) -> None: ...


def write(folder: str, out: Path) -> None:
    """Converts the model of a Hugging Face folder to `out`, in the distributed form, with config and tokenizer."""
    engine = _engine(folder)
    with engine.ranks.used():
        checkpoint.write(out, engine.stages)
    for each in (found for kind in COPIED for found in Path(folder).glob(kind) if not found.match("*.index.json")):
        shutil.copy(each, out)


def read(path: Path, model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of a folder in the distributed form by their Hugging Face names. `model`: a folder with the
    config.  Raises: CheckpointError, ModelError."""
    engine = _engine(str(model), is_empty=True)
    with engine.ranks.used():
        checkpoint.read(path, engine.stages)
    return engine.named_weights()


def _engine(folder: str, is_empty: bool = False) -> MegatronEngine:
    """Returns an engine in this process that only converts weights, in float32."""
    if not Path(folder, "config.json").is_file():
        raise ModelError(folder, "has no config.json", "a model folder", "name the model's folder with --base")
    role = RoleSettings(folder, EngineConfig(name="megatron"), "float32")
    return (_Empty if is_empty else MegatronEngine)(role, None, HOST)
