# SPDX-License-Identifier: Apache-2.0
"""Prepares weights for a server: whole, as one safetensors file in shared memory or on a disk, or in parts. The
server's processes read them in place."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from whet.errors import WeightSyncError
from whet.rollout.protocol import Weights

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
PART_BYTES = 2**27  # after which a part ends
ALIGNED = 16  # bytes, for views of any dtype
SHARED = 7  # of the arguments that rebuild a tensor, the first that locates its memory
Part = dict[str, Any]  # where a server finds the weights, as JSON: see inside/whet_weight_parts.py


@dataclass(frozen=True)
class Adapter:
    """An adapter: its weights and its config, which become the files of a folder."""

    weights: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    version: int


class WeightsFile:
    """A safetensors file in memory or in a folder, written weight by weight. It has no name that could remain after a
    crash: its path is a file descriptor of this process, and the kernel frees the file when the last process closes it.
    Only a file in a folder shared with other machines has a name.

    Raises: WeightSyncError, in all methods, if there is no room."""

    def __init__(self, folder: str | None = None, header_bytes: int = HEADER_BYTES, *, is_shared: bool = False) -> None:
        self._folder, self._header_bytes = folder, header_bytes
        self._header, self._end, self._name = dict[str, object](), 0, None
        if is_shared:
            self._file, self._name = tempfile.mkstemp(".safetensors", "whet-weights-", folder)
        else:
            self._file = _opened(folder)
        self.path = self._name or f"/proc/{os.getpid()}/fd/{self._file}"

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Appends a weight to the file."""
        octets = octets_of(weight).to("cpu").numpy()
        _write(self._file, octets.data, self._header_bytes + self._end, self._folder)
        place = [self._end, self._end + len(octets)]
        self._header[name] = {"dtype": DTYPES[weight.dtype], "shape": list(weight.shape), "data_offsets": place}
        self._end += len(octets)

    def finish(self) -> None:
        """Writes the header, which precedes the weights in the file and completes it."""
        text = json.dumps(self._header).encode().ljust(self._header_bytes - 8)
        if len(text) + 8 > self._header_bytes:
            found = f"the names and shapes of {len(self._header)} weights take {len(text)} bytes"
            expected = f"at most {self._header_bytes - 8}, in a file for the server"
            raise WeightSyncError(self.path, found, expected, "set rollout.engine.options.weight_transfer=ipc")
        _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0, self._folder)
        if self._name is not None:
            os.fsync(self._file)  # before other machines are told of it

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            os.close(self._file)
            if self._name is not None:
                Path(self._name).unlink()


def octets_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a weight as a vector."""
    return weight.detach().contiguous().flatten().view(torch.uint8)


@contextmanager
def weights_file(weights: Weights, folder: str | None = None, *, header_bytes: int = HEADER_BYTES) -> Iterator[str]:
    """Writes weights into a file as they arrive, and yields its path.  Raises: errors of WeightsFile and `weights`."""
    with closing(WeightsFile(folder, header_bytes)) as file:
        for name, weight in weights:
            file.add(name, weight)
        file.finish()
        yield file.path


def _opened(folder: str | None) -> int:
    """Opens a new file without a name, and returns its descriptor."""
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
    found = f"no weights can be written at byte {offset} ({error.strerror})"
    change = "make some room there" if folder else instead
    return WeightSyncError(folder or "shared memory", found, "room for all weights, twice with restarts", change)


def _write(file: int, octets: memoryview, offset: int, folder: str | None) -> None:
    try:
        while octets:
            written = os.pwrite(file, octets, offset)
            octets, offset = octets[written:], offset + written
    except OSError as error:
        raise _no_room(folder, offset, error) from error


def as_in_checkpoints(weights: Weights, model: PreTrainedModel) -> Weights:
    """Yields the weights under their names in checkpoints. Splits weights that transformers stacks, such as experts.
    `model` may be on the meta device."""
    if not get_model_conversion_mapping(model, add_legacy=False):
        return weights
    return _split(weights, model)


@contextmanager
def adapter_folder(adapter: Adapter, place: str | None = None) -> Iterator[str]:
    """Writes an adapter's folder, in `place` or else in shared memory if possible, and yields its path."""
    memory = MEMORY if Path(MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="whet-adapter-", dir=place or memory) as folder:
        on_host = {name: weight.detach().cpu().contiguous() for name, weight in adapter.weights.items()}
        save_file(on_host, f"{folder}/{ADAPTER_WEIGHTS}")
        Path(folder, "adapter_config.json").write_text(json.dumps(dict(adapter.config)))
        yield folder


def _split(weights: Weights, model: PreTrainedModel) -> Weights:
    for _, group in groupby(weights, key=layer_of):
        whole = {name: weight.clone() for name, weight in group}  # a weight may be a view that the next one overwrites
        yield from revert_weight_conversion(model, whole).items()


def layer_of(named: tuple[str, torch.Tensor]) -> str:
    """Returns the name of a weight's layer; the weight's own name if it belongs to no layer."""
    found = LAYER.match(named[0])
    return named[0] if found is None else found.group()


class KeptWeights:
    """Keeps the newest weights in a file, for a server that reads them whole or restarts; `folder`: see WeightsFile."""

    def __init__(self, folder: str | None, *, is_shared: bool = False) -> None:
        self._folder, self._is_shared, self.version = folder, is_shared, -1
        self.file: WeightsFile | None = None  # None where none are kept

    @property
    def part(self) -> Part:
        """Returns the weights as a single part."""
        assert self.file is not None
        return {"path": self.file.path}

    def writing(self, weights: Weights, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields weights as they arrive, and writes them to a new file. After the last weight it replaces the old
        file.  Raises: errors of `weights`; WeightSyncError if there is no room."""
        with ExitStack() as unfinished:
            file = WeightsFile(self._folder, is_shared=self._is_shared)
            unfinished.callback(file.close)
            for name, weight in weights:
                file.add(name, weight)
                yield name, weight
            file.finish()
            unfinished.pop_all()
        self.drop()
        self.file, self.version = file, version

    def drop(self) -> None:
        """Closes the file of the kept weights, if there is one."""
        if self.file is not None:
            self.file.close()
        self.file = None


def in_parts(
    weights: Weights, readers: int = 1, folder: str | None = None, part_bytes: int = PART_BYTES
) -> Iterator[list[Part]]:
    """Yields weights in parts as they arrive. A part ends with a layer, and has at least `part_bytes` unless it is the
    last. It exists until the next part is requested. Weights on an accelerator stay there, and each of the `readers`
    gets a handle; others become files in the host's memory, or in `folder`.  Raises: errors of `weights`;
    WeightSyncError if there is no room."""
    layers: Iterator[Weights] = (layer for _, layer in groupby(weights, key=layer_of))
    for layer in layers:
        left = iter(layer)
        first = next(left)
        some = _up_to(part_bytes, chain([chain([first], left)], layers))
        with _on_accelerator(some, readers) if first[1].is_cuda else weights_file(some, folder) as part:
            yield [{"path": part}] * readers if isinstance(part, str) else part


def _up_to(part_bytes: int, layers: Iterable[Weights]) -> Weights:
    """Yields the weights of the next layers, until they have `part_bytes` together or no layer is left."""
    total = 0
    for layer in layers:
        for name, weight in layer:
            yield name, weight
            total += weight.nbytes
        if total >= part_bytes:
            return


@contextmanager
def _on_accelerator(weights: Weights, readers: int) -> Iterator[list[Part]]:
    """Copies weights into one tensor on the accelerator. Yields for each reader a handle of its memory, with the
    positions of the weights in it. The memory is freed after the last reader has released it."""
    whole, places = packed(weights)
    device = torch.get_device_module(whole.device)
    device.synchronize(whole.device)
    uuid = str(device.get_device_properties(whole.device).uuid)
    yield [{"places": places, "memory": _handle(whole, uuid)} for _ in range(readers)]
    del whole
    device.ipc_collect()


def packed(weights: Weights) -> tuple[torch.Tensor, list[list[Any]]]:
    """Concatenates the bytes of weights. Returns them, and for each weight its name, dtype, shape, start and end."""
    copies, places, end = list[torch.Tensor](), list[list[Any]](), 0
    for name, weight in weights:  # each may be a view that the next one overwrites
        octets = octets_of(weight)
        places.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), end, end + len(octets)])
        copies.append(pad(octets, (0, -len(octets) % ALIGNED)))
        end += len(copies[-1])
    return torch.cat(copies), places


def _handle(whole: torch.Tensor, uuid: str) -> dict[str, Any]:
    """Returns a tensor's handle as JSON, for one other process only: torch counts readers by handle."""
    _, arguments = reduce_tensor(whole)
    shared = [each.hex() if isinstance(each, bytes) else each for each in arguments[SHARED:]]
    return {"device": uuid, "size": len(whole), "offset": whole.storage_offset(), "shared": shared}
