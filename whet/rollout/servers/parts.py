# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to a server: in parts, each of which its processes read where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.functional import pad

from whet.rollout.servers.weights import Weights, WeightsFile, layer_of, octets_of, weights_file

PART_BYTES = 2**27  # after which a part ends
ALIGNED = 16  # bytes, for views of any dtype
SHARED = 7  # of the arguments that rebuild a tensor: those from here on say where its memory is
Part = dict[str, Any]  # what a server needs to find it, as JSON: see inside/whet_parts.py


class KeptWeights:
    """The newest weights in a file, for a server that reads them as a whole or starts again; `folder` as for
    WeightsFile."""

    def __init__(self, folder: str | None) -> None:
        self._folder, self.version = folder, -1
        self.file: WeightsFile | None = None  # None where none are kept

    @property
    def part(self) -> Part:
        """Returns them as a single part."""
        assert self.file is not None
        return {"path": self.file.path}

    def writing(self, weights: Weights, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they come; behind the last one they are kept in the place of older ones.
        Raises: what `weights` raises; WeightSyncError where there is no room."""
        with ExitStack() as unfinished:
            file = WeightsFile(self._folder)
            unfinished.callback(file.close)
            for name, weight in weights:
                file.add(name, weight)
                yield name, weight
            file.finish()
            unfinished.pop_all()
        self.drop()
        self.file, self.version = file, version

    def drop(self) -> None:
        """Keeps them no longer."""
        if self.file is not None:
            self.file.close()
        self.file = None


def in_parts(
    weights: Weights, readers: int = 1, folder: str | None = None, part_bytes: int = PART_BYTES
) -> Iterator[list[Part]]:
    """Gives weights as they come, in parts that end with a layer and have at least `part_bytes` but for the last; each
    is there until the next one is asked for. Weights of an accelerator stay on it, and each of the `readers` gets a
    handle of its own; others come as files in the host's memory, or in `folder`.
    Raises: what `weights` raises; WeightSyncError where there is no room."""
    layers: Iterator[Weights] = (layer for _, layer in groupby(weights, key=layer_of))
    for layer in layers:
        left = iter(layer)
        first = next(left)
        some = _up_to(part_bytes, chain([chain([first], left)], layers))
        with _on_accelerator(some, readers) if first[1].is_cuda else weights_file(some, folder) as part:
            yield [{"path": part}] * readers if isinstance(part, str) else part


def _up_to(part_bytes: int, layers: Iterable[Weights]) -> Weights:
    """The weights of the first layers that have so many bytes together, or of all."""
    total = 0
    for layer in layers:
        for name, weight in layer:
            yield name, weight
            total += weight.nbytes
        if total >= part_bytes:
            return


@contextmanager
def _on_accelerator(weights: Weights, readers: int) -> Iterator[list[Part]]:
    """Copies weights, and yields for each reader a handle of the memory and the places of the weights in it. The memory
    is freed when all readers have let go of it."""
    whole, places = packed(weights)
    device = torch.get_device_module(whole.device)
    device.synchronize(whole.device)
    uuid = str(device.get_device_properties(whole.device).uuid)
    yield [{"places": places, "memory": _handle(whole, uuid)} for _ in range(readers)]
    del whole
    device.ipc_collect()


def packed(weights: Weights) -> tuple[torch.Tensor, list[list[Any]]]:
    """The bytes of weights one behind the other, and of each its name, dtype, shape, start and end."""
    copies, places, end = list[torch.Tensor](), list[list[Any]](), 0
    for name, weight in weights:  # each may be a view that the next one overwrites
        octets = octets_of(weight)
        places.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), end, end + len(octets)])
        copies.append(pad(octets, (0, -len(octets) % ALIGNED)))
        end += len(copies[-1])
    return torch.cat(copies), places


def _handle(whole: torch.Tensor, uuid: str) -> dict[str, Any]:
    """The place of a tensor of bytes, for one other process, as JSON: torch counts its readers by handle."""
    _, arguments = reduce_tensor(whole)
    shared = [each.hex() if isinstance(each, bytes) else each for each in arguments[SHARED:]]
    return {"device": uuid, "size": len(whole), "offset": whole.storage_offset(), "shared": shared}
