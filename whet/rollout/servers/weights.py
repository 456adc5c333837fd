# SPDX-License-Identifier: Apache-2.0
"""Weights as one safetensors file in shared memory or on a disk, which the processes of a server read."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from whet.errors import WeightSyncError

HEADER_BYTES = 2**22  # names, dtypes and places of some ten thousand weights; the rest is spaces
ADAPTER_WEIGHTS, MEMORY = "adapter_model.safetensors", "/dev/shm"
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
LAYER = re.compile(r".*?\.\d+\.")  # the beginning of a name, up to the number of its layer
Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Adapter:
    """An adapter, as its folder has it."""

    weights: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    version: int


@contextmanager
def weights_file(weights: Weights, folder: str | None = None, *, header_bytes: int = HEADER_BYTES) -> Iterator[str]:
    """Writes weights as they come, in memory or in a folder, and yields the path of the file. It has no name that could
    remain after a crash: it is a descriptor of this process, and the kernel frees it with the last process that has it
    open.

    Raises: what `weights` raises; WeightSyncError where there is no room for them."""
    file = _opened(folder)
    try:
        header, end = dict[str, object](), 0
        for name, weight in weights:
            octets = weight.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
            _write(file, octets.data, header_bytes + end, folder)
            place = [end, end + len(octets)]
            header[name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": place}
            end += len(octets)
        text = json.dumps(header).encode().ljust(header_bytes - 8)
        _write(file, memoryview(len(text).to_bytes(8, "little") + text), 0, folder)
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        with suppress(OSError):
            os.close(file)


def _opened(folder: str | None) -> int:
    """A new file without a name."""
    try:
        if folder is None:
            return os.memfd_create("whet-rollout-weights")
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise _no_room(folder, 0, error) from error


def _no_room(folder: str | None, offset: int, error: OSError) -> WeightSyncError:
    instead = (
        "set rollout.engine.options.weights_dir to a folder on a disk that has it, or use a machine with more memory"
    )
    return WeightSyncError(
        f"weights for the rollout cannot be written to {folder or 'shared memory'} at byte {offset} "
        f"({error.strerror}); expected room for all weights, twice with restarts: {'make some' if folder else instead}"
    )


def _write(file: int, octets: memoryview, offset: int, folder: str | None) -> None:
    try:
        while octets:
            written = os.pwrite(file, octets, offset)
            octets, offset = octets[written:], offset + written
    except OSError as error:
        raise _no_room(folder, offset, error) from error


def as_in_checkpoints(weights: Weights, model: PreTrainedModel) -> Weights:
    """The weights under the names of checkpoints: where transformers keeps weights of a layer together, such as those
    of its experts, they are split; `model` may be on meta."""
    if not get_model_conversion_mapping(model, add_legacy=False):
        return weights
    return _split(weights, model)


@contextmanager
def adapter_folder(adapter: Adapter, place: str | None = None) -> Iterator[str]:
    """Writes an adapter's folder, in `place` or in shared memory where there is some, and yields its path."""
    memory = MEMORY if Path(MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="whet-adapter-", dir=place or memory) as folder:
        on_host = {name: weight.detach().cpu().contiguous() for name, weight in adapter.weights.items()}
        save_file(on_host, f"{folder}/{ADAPTER_WEIGHTS}")
        Path(folder, "adapter_config.json").write_text(json.dumps(dict(adapter.config)))
        yield folder


def _split(weights: Weights, model: PreTrainedModel) -> Weights:
    for _, group in groupby(weights, key=_layer):
        whole = {name: weight.clone() for name, weight in group}  # a weight may be a view that the next one overwrites
        yield from revert_weight_conversion(model, whole).items()


def _layer(named: tuple[str, torch.Tensor]) -> str:
    found = LAYER.match(named[0])
    return named[0] if found is None else found.group()


@dataclass(frozen=True)
class Kept:
    """Weights in a file, as long as `files` is open."""

    path: str
    version: int
    files: ExitStack


def kept(opened: AbstractContextManager[str], version: int) -> Kept:
    """Holds weights that are written to a file.  Raises: whatever writing them raises."""
    files = ExitStack()
    return Kept(files.enter_context(opened), version, files)
