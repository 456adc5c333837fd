# SPDX-License-Identifier: Apache-2.0
"""Weight files of a Hugging Face folder, written a few weights at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from whet.errors import CheckpointError

FILE_BYTES = 2**29  # of a written file, whose weights are in memory together
Named = tuple[str, torch.Tensor]


def write_weights(out: Path, weights: Iterator[Named], model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Writes `weights`, named as in `model` (which may be on meta), in `dtype` and under their Hugging Face names.

    Memory: the weights of one file, and of one layer.
    """
    out.mkdir(parents=True, exist_ok=True)
    written: list[list[str]] = []
    kept: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if kept:
            part = out / f"part-{len(written)}"
            part.touch()
            mode = part.stat().st_mode  # of the user's umask; safetensors would let only the owner read the file
            save_file(kept, part, metadata={"format": "pt"})
            part.chmod(mode)
            written.append(list(kept))
            kept.clear()

    total = 0
    for _, group in groupby(weights, key=lambda named: _layer(named[0])):
        # The files may split a layer's weights differently, such as experts one by one.
        part = revert_weight_conversion(model, {name: _finite(name, weight.to(dtype)) for name, weight in group})
        for name, weight in part.items():
            if sum(each.nbytes for each in kept.values()) + weight.nbytes > FILE_BYTES:
                flush()
            kept[name] = weight.contiguous()
            total += weight.nbytes
    flush()
    if len(written) == 1:
        (out / "part-0").rename(out / "model.safetensors")
        return
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05}-of-{len(written):05}.safetensors"
        (out / f"part-{number}").rename(out / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class MergedShards(Mapping[str, torch.Tensor]):
    """The weights of a sharded state, each merged from its shards on access."""

    def __init__(self, folder: Path) -> None:
        reader = HuggingFaceStorageReader(str(folder))
        self._found = reader.read_metadata()

    def __getitem__(self, name: str) -> torch.Tensor:
        saved: Any = self._found.state_dict_metadata[f"model.{name}"]
        whole = torch.empty(saved.size, dtype=saved.properties.dtype)
        for index, file in self._found.storage_data.items():
            if index.fqn == f"model.{name}":
                at = tuple(slice(start, start + size) for start, size in zip(index.offset, file.shape, strict=True))
                with safe_open(file.relative_path, framework="pt") as opened:  # a closed file uses no memory
                    whole[at] = opened.get_tensor(index.fqn)
        return whole

    def __iter__(self) -> Iterator[str]:
        names = self._found.state_dict_metadata
        return (name.removeprefix("model.") for name in names if name.startswith("model."))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _finite(name: str, weight: torch.Tensor) -> torch.Tensor:
    if not weight.isfinite().all():
        raise CheckpointError(
            f"{name} holds NaN or infinite numbers in {weight.dtype}, so these weights are no usable model; choose a "
            "checkpoint of an earlier step"
        )
    return weight


def _layer(name: str) -> str:
    """The prefix that the weights of one layer share; the whole name for a weight outside the layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name
