# SPDX-License-Identifier: Apache-2.0
"""A 64-bit digest of a set of weights, cheap enough for every update, on any device."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F

TABLE_WIDTH = 512  # 64-bit words
COLUMN_FACTOR, ROW_FACTOR = -7046029254386353131, -4658895280553007687  # odd, so that no bit of a sum is lost


class Digest:
    """The sum, modulo 2^64, of a hash of each weight's name, dtype, shape and checksum: equal for equal weights in any
    order. Checksums are computed on the weights' device; the host reads all of them at once, when one is needed."""

    def __init__(self) -> None:
        self._sum = 0
        self._checksums: dict[str, int] = {}
        self._unread: list[tuple[str, str, torch.Tensor, int]] = []  # name, dtype and shape, two sums, bytes

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Adds a weight with its current values."""
        self._unread.append((name, f"{weight.dtype} {tuple(weight.shape)}", *_sums(weight)))

    def checksum(self, name: str) -> int:
        """sum_j c_j sum_i x_ij + sum_i r_i sum_j x_ij modulo 2^64, over the bits of an added weight as a table x of
        64-bit words with 512 columns. Changed, moved or missing words change it; it does not resist an attack."""
        self._read()
        return self._checksums[name]

    def __str__(self) -> str:
        self._read()
        return f"{self._sum % 2**64:016x}"

    def _read(self) -> None:
        if not self._unread:
            return
        read = torch.stack([sums for _, _, sums, _ in self._unread]).tolist()
        for (name, kind, _, size), (columns, rows) in zip(self._unread, read, strict=True):
            checksum = self._checksums[name] = (columns * COLUMN_FACTOR + rows * ROW_FACTOR + size) % 2**64
            text = f"{name} {kind} {checksum}"
            self._sum += int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        self._unread.clear()


def _sums(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The two sums of a checksum, [2] on the weight's device, and the weight's number of bytes."""
    octets = bytes_of(weight)
    size, row_bytes = len(octets), 8 * TABLE_WIDTH
    whole = size // row_bytes
    last = F.pad(octets[whole * row_bytes :], (0, (whole + 1) * row_bytes - size)).view(torch.int64)
    by_row = last.sum() * (2 * whole + 1)
    if whole:
        table = octets[: whole * row_bytes].view(torch.int64).view(whole, TABLE_WIDTH)
        by_row += (table.sum(1) * _odd_numbers(whole, octets.device)).sum()
        last += table.sum(0)
    return torch.stack([(last * _odd_numbers(TABLE_WIDTH, octets.device)).sum(), by_row]), size


def bytes_of(weight: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in order, 8-byte aligned: a view where the tensor is contiguous and aligned, else a copy."""
    flat = weight.detach().contiguous().view(-1)
    octets = flat.view(torch.uint8)
    return octets if octets.storage_offset() % 8 == 0 else octets.clone()


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, device=device)
