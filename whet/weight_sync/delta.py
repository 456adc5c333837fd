# SPDX-License-Identifier: Apache-2.0
"""Deltas of weights: the elements whose bits differ from the version before, exact for every dtype. Layout in bytes:

    top | mask | values    mask: a bit for each element, set if it changed; bytes of 0 are left out. top: a bit for each
                           byte of the mask, 0 if it is left out. values: the new elements. No bytes: no change.

If a share p of the elements changes, an element takes about 1/64 + (1 - (1 - p)^8) / 8 + p * itemsize bytes."""

from __future__ import annotations

import torch

from whet.devices import HOST

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: NaN and -0.0 compare as bits


class DeltaBase:
    """The weights of a version in host memory, at one end of a link. The next version can then be sent as a delta."""

    def __init__(self) -> None:
        self.version: int | None = None  # None before the first version, and while a version is being sent
        self.weights: dict[str, torch.Tensor] = {}

    def begin(self) -> int | None:
        """Begins the next version.  Returns the version of the stored weights."""
        before, self.version = self.version, None
        return before

    def keep(self, name: str, weight: torch.Tensor) -> None:
        """Stores a copy of a weight in host memory."""
        if name not in self.weights:
            self.weights[name] = torch.empty_like(weight, device=HOST, memory_format=torch.contiguous_format)
        self.weights[name].copy_(weight)

    def replace(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """Stores a weight's new values.  Returns the bytes of its delta; None if the full weight has fewer bytes."""
        before = self.weights.get(name)
        found = None if before is None else delta(before.to(weight.device), weight)
        self.keep(name, weight)
        return found if found is not None and len(found) < weight.nbytes else None

    def changed(self, name: str, octets: torch.Tensor) -> torch.Tensor:
        """Applies a delta to the stored weight, and returns the updated weight on the device of the delta."""
        weight = self.weights[name].to(octets.device)
        apply(weight, octets)
        self.keep(name, weight)
        return weight


def delta(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the delta from `before` to `after`, of equal dtype and shape, on their device."""
    words = WORDS[after.itemsize]
    old, new = (each.detach().contiguous().view(-1).view(words) for each in (before, after))
    changed = old != new
    if not changed.any():
        return torch.empty(0, dtype=torch.uint8, device=after.device)
    mask = _packed(changed)
    return torch.cat([_packed(mask != 0), mask[mask != 0], new[changed].view(torch.uint8)])


def apply(weight: torch.Tensor, octets: torch.Tensor) -> None:
    """Applies a delta to a contiguous weight. Bytes of a wrong length change nothing, and the checksum detects this."""
    words = weight.view(-1).view(WORDS[weight.itemsize])
    size = -(-len(words) // 8)
    tops, mask = -(-size // 8), torch.zeros(size, dtype=torch.uint8, device=octets.device)
    if len(octets) < tops:
        return
    used = _unpacked(octets[:tops], size)
    end = tops + int(used.sum())
    if len(octets) < end:
        return
    mask[used] = octets[tops:end]
    changed = _unpacked(mask, len(words))
    if len(octets) - end == weight.itemsize * int(changed.sum()):
        words[changed] = octets[end:].clone().view(words.dtype)  # a copy is aligned


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Packs eight bits into a byte: bool [n] to uint8 [n / 8, rounded up]."""
    table = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (table << _places(bits.device)).sum(1, dtype=torch.uint8)


def _unpacked(octets: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` bits of packed bytes."""
    return ((octets[:, None] >> _places(octets.device)) & 1).view(-1)[:count].bool()


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
