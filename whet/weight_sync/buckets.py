# SPDX-License-Identifier: Apache-2.0
"""Buckets: buffers of a fixed size, with pieces of weights and a header that describes them, for links of every kind;
and the two ends of a link, one sender and one or several receivers.

A bucket has two numbers (characters of the header, bytes in use), the header as JSON, and from HEADER_BYTES on pieces
of weights. A weight that does not fit into the rest of a bucket continues in the next one. A digest of all weights is
cheap enough for every update, on any device."""

from __future__ import annotations

import hashlib
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ValidationError
from torch import nn
from transformers import PreTrainedModel

from whet.errors import DeadlineError, WeightSyncError
from whet.rollout.protocol import SharesModule, Weights
from whet.weight_sync.delta import DeltaBase

HEADER_BYTES = 2**16
ALIGNMENT = 64  # of a piece, so that its bytes can be viewed in place as numbers
LARGEST = 2**64 - 1  # checksum
_SIZES = struct.Struct("<QQ")
TABLE_WIDTH = 512  # 64-bit words
COLUMN_FACTOR, ROW_FACTOR = -7046029254386353131, -4658895280553007687  # odd, so that no bit of a sum is lost


def send(
    weights: Weights, version: int, outlets: Sequence[Outlet], dtype: torch.dtype, base: DeltaBase | None = None
) -> str | None:
    """Sends all weights, floating-point weights in `dtype`. If `base` has the version that the receivers have, sends
    deltas; `base` then becomes the new version.  Returns the digest of the weights.

    Every rank iterates over all weights, because gathering them may need all ranks. This includes a rank without
    outlets, which returns None, and a rank whose link broke.

    Raises: DeadlineError, LinkClosedError."""
    digest, before = Digest(), None if base is None else base.begin()
    packers = [_Packer(outlet, version, digest, before) for outlet in outlets]
    broken: DeadlineError | LinkClosedError | None = None
    for name, weight in weights:
        if packers and broken is None:
            converted = in_dtype(weight, dtype)
            digest.add(name, converted)
            change = None if base is None else base.replace(name, converted)
            try:
                for packer in packers:
                    packer.add(name, converted, change)
            except (DeadlineError, LinkClosedError) as error:
                broken = error
    if broken is not None:
        raise broken
    for packer in packers:
        packer.post(is_last=True)
    for outlet in outlets:
        outlet.finish()
    if base is not None:
        base.version = version
    return str(digest) if outlets else None


def receive(
    inlet: Inlet, version: int, digest: Digest, base: DeltaBase | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields full weights as they arrive, each after its checksum was verified, and adds them to `digest`. Deltas are
    changes of the version in `base`, which then becomes the new version.

    A weight may be a view of the bucket: copy it before the next one is requested.
    Raises: WeightSyncError for another version, a wrong checksum or digest; DeadlineError."""
    held = None if base is None else base.begin()
    begun = torch.empty(0)  # the bytes of a weight that continues in the next bucket
    due: tuple[str, int] | None = None  # name of the weight `begun`, and number of its next byte
    header = Header(version=version, base=None, digest=None, pieces=[])
    while header.digest is None:
        bucket = inlet.bucket()
        header = Header.read(bucket)
        if header.version != version:
            raise WeightSyncError("weights: version", header.version, f"{version}")
        if header.base not in (None, held):
            raise WeightSyncError(f"version {version}: base of its delta", held, f"{header.base}, which it changes")
        for piece in header.pieces:
            if (piece.name, piece.start) != (due or (piece.name, 0)):
                expected = f"{due or 0}: a bucket was lost or arrived twice"
                raise WeightSyncError(f"version {version}: {piece.name}", f"byte {piece.start} arrived", expected)
            octets, end = bucket[piece.offset : piece.offset + piece.size], piece.start + piece.size
            if piece.size < piece.sent_size:
                if due is None:
                    begun = torch.empty(piece.sent_size, dtype=torch.uint8, device=bucket.device)
                begun[piece.start : end] = octets
                octets, due = begun, (piece.name, end)
            if end == piece.sent_size:
                due = None
                if base is not None and piece.delta_size is not None:
                    weight = base.changed(piece.name, octets)
                else:
                    weight = octets.view(piece.torch_dtype).view(piece.shape)
                    if base is not None:
                        base.keep(piece.name, weight)
                digest.add(piece.name, weight)
                if (checksum := digest.checksum(piece.name)) != piece.checksum:
                    expected = f"{piece.checksum:016x} of the {piece.whole_size} bytes that the trainer sent"
                    raise WeightSyncError(f"version {version}: checksum of {piece.name}", f"{checksum:016x}", expected)
                yield piece.name, weight
        if header.digest is not None and header.digest != str(digest):
            raise WeightSyncError(f"version {version}: digest", str(digest), f"{header.digest}, the one sent")
        inlet.release()
    if base is not None:
        base.version = version
    inlet.finish()


def in_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a weight to the rollout's dtype; integer weights and buffers stay as they are."""
    return weight.to(dtype) if weight.is_floating_point() and not isinstance(weight, nn.Buffer) else weight


class WeightRange(NamedTuple):
    """A range of one weight's bytes in a bucket, with the weight's name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int  # of the whole weight
    delta_size: int | None  # bytes of its delta; None if the weight itself is sent
    start: int  # first byte of the range, in the bytes of the weight or delta
    size: int
    offset: int  # in the bucket

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype named by `dtype`."""
        dtype = vars(torch)[self.dtype]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def whole_size(self) -> int:
        """The number of bytes of the whole weight."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def sent_size(self) -> int:
        """The number of bytes of the weight or its delta in all buckets together."""
        return self.whole_size if self.delta_size is None else self.delta_size


class Header(BaseModel):
    """The header of a bucket. A version's last header has the digest of all weights."""

    version: int
    base: int | None  # version that deltas change
    digest: str | None
    pieces: list[WeightRange]

    @classmethod
    def read(cls, bucket: torch.Tensor) -> Header:
        """Reads the header of a bucket.  Raises: WeightSyncError if it cannot be parsed."""
        octets = bucket[:HEADER_BYTES].cpu().numpy().tobytes()
        length, _ = _SIZES.unpack_from(octets)
        try:
            return cls.model_validate_json(octets[_SIZES.size : _SIZES.size + length])
        except ValidationError as error:
            found = f"has an unreadable header: {error}"
            raise WeightSyncError("bucket of weights", found, "a header of the trainer") from error


def used_bytes(bucket: torch.Tensor) -> int:
    """Returns the number of used bytes of a bucket, from its first bytes; the rest need not have arrived."""
    used: int = _SIZES.unpack(bucket[: _SIZES.size].cpu().numpy().tobytes())[1]
    return used


class _Packer:
    """Fills the buckets of one outlet."""

    def __init__(self, outlet: Outlet, version: int, digest: Digest, base: int | None) -> None:
        self._outlet, self._version, self._digest, self._base = outlet, version, digest, base
        self._bucket: torch.Tensor | None = None
        self._pieces: list[WeightRange] = []  # with a placeholder as checksum, which `post` replaces
        self._header_room = self._end = 0

    def add(self, name: str, weight: torch.Tensor, delta: torch.Tensor | None = None) -> None:
        """Writes a weight, or its delta, into this bucket and as many further buckets as it needs."""
        delta = None if self._base is None else delta
        octets, start = bytes_of(weight) if delta is None else delta, 0
        delta_size = None if delta is None else len(delta)
        described = (name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), LARGEST, delta_size)
        while True:
            bucket = self._bucket_with_room(len(json.dumps(described)) + 64)  # 64: three numbers more
            size = min(len(octets) - start, len(bucket) - self._end)
            bucket[self._end : self._end + size].copy_(octets[start : start + size])
            self._pieces.append(WeightRange(*described, start, size, self._end))
            self._header_room -= len(json.dumps(self._pieces[-1])) + 2
            self._end += -(-size // ALIGNMENT) * ALIGNMENT
            start += size
            if start == len(octets):
                return

    def post(self, is_last: bool = False) -> None:
        """Sends the bucket; the last one carries the digest of all weights."""
        bucket = self._bucket_with_room(0) if self._bucket is None else self._bucket
        pieces = [piece._replace(checksum=self._digest.checksum(piece.name)) for piece in self._pieces]
        digest = str(self._digest) if is_last else None
        header = Header(version=self._version, base=self._base, digest=digest, pieces=pieces)
        text, used = header.model_dump_json().encode(), min(self._end, len(bucket))
        front = bytearray(_SIZES.pack(len(text), used) + text)
        bucket[: len(front)] = torch.frombuffer(front, dtype=torch.uint8).to(bucket.device)
        self._outlet.post(used)
        self._bucket = None

    def _bucket_with_room(self, header_chars: int) -> torch.Tensor:
        """Returns the current bucket, or the next one if the current bucket or its header is full."""
        if self._bucket is not None and (self._end >= len(self._bucket) or self._header_room < header_chars):
            self.post()
        if self._bucket is None:
            self._bucket, self._pieces, self._end = self._outlet.buffer(), [], HEADER_BYTES
            self._header_room = HEADER_BYTES - _SIZES.size - 160  # 160: versions, digest and brackets
        return self._bucket


class Digest:
    """A digest of weights, independent of their order: the sum, modulo 2^64, of a hash of each weight's name, dtype,
    shape and checksum. Checksums are computed on the weights' device; the host reads all at once, when it needs one."""

    def __init__(self) -> None:
        self._sum = 0
        self._checksums: dict[str, int] = {}
        self._unread: list[tuple[str, str, torch.Tensor, int]] = []  # name, dtype and shape, two sums, bytes

    @classmethod
    def of(cls, weights: Weights) -> Digest:
        """Computes the digest of all weights."""
        digest = cls()
        for name, weight in weights:
            digest.add(name, weight)
        return digest

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Adds a weight with its current values."""
        self._unread.append((name, f"{weight.dtype} {tuple(weight.shape)}", *_sums(weight)))

    def checksum(self, name: str) -> int:
        """Returns sum_j c_j sum_i x_ij + sum_i r_i sum_j x_ij modulo 2^64. x is the bits of an added weight as a table
        of 64-bit words with 512 columns. Changed, moved or missing words change it; it does not resist an attack."""
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
    """Computes the two sums of a checksum, [2] on the weight's device, and the weight's number of bytes."""
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
    """Returns the tensor's bytes, 8-byte aligned: a view if the tensor is contiguous and aligned, else a copy."""
    flat = weight.detach().contiguous().view(-1)
    octets = flat.view(torch.uint8)
    return octets if octets.storage_offset() % 8 == 0 else octets.clone()


def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, device=device)


def attach(rollout: SharesModule, module: PreTrainedModel, weights: Weights, version: int) -> str:
    """Makes the rollout sample with `module` itself.  Returns the digest of its `weights`."""
    digest = Digest.of(weights)
    rollout.attach(module, version)
    return str(digest)


def copy(load: Callable[[Weights, int], None], weights: Weights, version: int, dtype: torch.dtype) -> str:
    """Copies weights one at a time into the rollout by its `load`.  Returns the digest of the copied weights."""
    digest = Digest()

    def converted_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            converted = in_dtype(weight, dtype)
            digest.add(name, converted)
            yield name, converted

    load(converted_weights(), version)
    return str(digest)


BUCKET_BYTES = 2**26
SLOTS = 2  # buckets in the sender's memory: it fills one while the other is being sent


class LinkClosedError(WeightSyncError):
    """Raised when the other side has closed the link. The other side's own error has the reason."""


@dataclass(frozen=True)
class Broken:
    """A broken link, returned instead of a digest. If it were raised as an error, all ranks would end, although only
    one rank was lost and the links of other ranks can be opened again."""

    error: DeadlineError | LinkClosedError


class LinkEnd(ABC):
    """An end of a link. Each wait for the other end is limited to `deadline_seconds`."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds

    @abstractmethod
    def finish(self) -> None:
        """Ends a version: each receiver confirms that its weights are verified, and the sender waits for all of them.
        Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def close(self) -> None:
        """Closes the link. May be called twice."""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Converts errors of the connection to DeadlineError or LinkClosedError, which name the wait `doing`."""
        try:
            yield
        except (OSError, EOFError, ValueError, RuntimeError) as error:  # gloo raises RuntimeError for everything
            if isinstance(error, TimeoutError) or "timed out" in str(error).lower() or "timeout" in str(error).lower():
                found = f"nothing arrived within {self.deadline_seconds:g} s ({error})"
                raise DeadlineError(doing, found, "", "raise cluster.deadline_seconds if it may take longer") from error
            raise LinkClosedError(doing, f"the other side ended ({error})", "", "see its own error") from error


class Outlet(LinkEnd):
    """The sender's end of a link."""

    address: str  # to which receivers connect

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """Returns the memory for the next bucket. Waits until its previous content has been read.  Raises:
        DeadlineError, LinkClosedError."""

    @abstractmethod
    def post(self, used: int) -> None:
        """Sends the first `used` bytes of the buffer."""


class Inlet(LinkEnd):
    """A receiver's end of a link."""

    @abstractmethod
    def bucket(self) -> torch.Tensor:
        """Waits for the next bucket.  Returns its bytes.  Raises: DeadlineError, LinkClosedError."""

    @abstractmethod
    def release(self) -> None:
        """Allows the sender to overwrite the bucket."""
