# SPDX-License-Identifier: Apache-2.0
"""Reads weights in a process of the server, from the parts that whet/plugins/inference/servers/weights.py writes. It
imports nothing of whet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch.multiprocessing import reductions


def weights_in(part: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of a part by name. On an accelerator they are views of the sender's memory, which is freed
    after the last view."""
    if "path" in part:
        with safe_open(part["path"], "pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file is no mapping
                yield name, file.get_tensor(name)
        return
    yield from unpacked(_opened(part["memory"]), part["places"])
    torch.accelerator.synchronize()


def unpacked(octets: torch.Tensor, places: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights in a tensor of bytes by name, as views. `places`: each name, dtype, shape, start and end."""
    for name, dtype, shape, start, end in places:
        yield name, octets[start:end].view(getattr(torch, dtype)).view(shape)


def _opened(memory: dict[str, Any]) -> torch.Tensor:
    """Opens the sender's tensor of bytes.  Raises: ValueError if this process does not see its accelerator."""
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if memory["device"] not in seen:
        raise ValueError(
            f"the weights lie on the accelerator {memory['device']}, and this server sees {seen}; expected it among "
            "them: set rollout.engine.options.weight_transfer=file"
        )
    shared = [bytes.fromhex(each) if isinstance(each, str) else each for each in memory["shared"]]
    where = memory["offset"], torch.UntypedStorage, torch.uint8, seen.index(memory["device"])
    octets: torch.Tensor = reductions.rebuild_cuda_tensor(torch.Tensor, (memory["size"],), (1,), *where, *shared)
    return octets
