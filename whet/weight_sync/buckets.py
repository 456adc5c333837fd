# SPDX-License-Identifier: Apache-2.0
"""Buckets: weights in buffers of a fixed size that describe their own content, so that every link can carry them.

A bucket has two numbers (characters of the header, bytes in use), the header as JSON, and from HEADER_BYTES on pieces
of weights. A weight that does not fit into the rest of a bucket continues in the next one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel, ValidationError

from whet.errors import WeightSyncError
from whet.weight_sync.digest import Digest, bytes_of
from whet.weight_sync.link import Inlet, Outlet

Weights = Iterable[tuple[str, torch.Tensor]]

HEADER_BYTES = 2**16
ALIGNMENT = 64  # of a piece, whose bytes are viewed in place as numbers
LARGEST = 2**64 - 1  # checksum
_SIZES = struct.Struct("<QQ")


def send(weights: Weights, version: int, outlets: Sequence[Outlet], dtype: torch.dtype) -> str | None:
    """Sends all weights, floating-point ones in `dtype`.  Returns their digest.

    A rank without outlets iterates over all weights too (gathering them may need every rank), and returns None.
    Raises: DeadlineError, LinkClosedError.
    """
    digest = Digest()
    packers = [_Packer(outlet, version, digest) for outlet in outlets]
    for name, weight in weights:
        if packers:
            converted = in_dtype(weight, dtype)
            digest.add(name, converted)
            for packer in packers:
                packer.add(name, converted)
    for packer in packers:
        packer.post(is_last=True)
    for outlet in outlets:
        outlet.finish()
    return str(digest) if outlets else None


def receive(inlet: Inlet, version: int, digest: Digest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields whole weights as they arrive, each after its checksum was verified, and adds them to `digest`.

    A weight may be a view of the bucket: copy it before the next one is requested.
    Raises: WeightSyncError for another version, a wrong checksum or digest; DeadlineError.
    """
    begun = torch.empty(0)  # the bytes of a weight that continues in the next bucket
    due: tuple[str, int] | None = None  # its name, and its next byte
    header = Header(version=version, digest=None, pieces=[])
    while header.digest is None:
        bucket = inlet.bucket()
        header = Header.read(bucket)
        if header.version != version:
            raise WeightSyncError(f"version {header.version} of the weights arrived; expected version {version}")
        for piece in header.pieces:
            if (piece.name, piece.start) != (due or (piece.name, 0)):
                raise WeightSyncError(
                    f"version {version}: byte {piece.start} of {piece.name} arrived; expected {due or 0}: a bucket "
                    "was lost or came twice"
                )
            octets, end = bucket[piece.offset : piece.offset + piece.size], piece.start + piece.size
            if piece.size < piece.whole_size:
                if due is None:
                    begun = torch.empty(piece.whole_size, dtype=torch.uint8, device=bucket.device)
                begun[piece.start : end] = octets
                octets, due = begun, (piece.name, end)
            if end == piece.whole_size:
                weight, due = octets.view(piece.torch_dtype).view(piece.shape), None
                digest.add(piece.name, weight)
                if (checksum := digest.checksum(piece.name)) != piece.checksum:
                    raise WeightSyncError(
                        f"{piece.name} of version {version} arrived with checksum {checksum:016x}, and was sent with "
                        f"{piece.checksum:016x}: its {piece.whole_size} bytes are not those that the trainer sent"
                    )
                yield piece.name, weight
        if header.digest is not None and header.digest != str(digest):
            raise WeightSyncError(
                f"version {version} of the weights arrived with digest {digest}, and was sent with {header.digest}"
            )
        inlet.release()
    inlet.finish()


def in_dtype(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts a weight to the rollout's dtype; integer weights stay as they are."""
    return weight.to(dtype) if weight.is_floating_point() else weight


class Piece(NamedTuple):
    """A range of one weight's bytes in a bucket, with the weight's name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int  # of the whole weight
    start: int  # in the weight
    size: int
    offset: int  # in the bucket

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of that name."""
        dtype = vars(torch)[self.dtype]
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def whole_size(self) -> int:
        """Bytes of the whole weight."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize


class Header(BaseModel):
    """The header of a bucket. The last one of a version has the digest of all weights."""

    version: int
    digest: str | None
    pieces: list[Piece]

    @classmethod
    def read(cls, bucket: torch.Tensor) -> Header:
        """Reads the header of a bucket.  Raises: WeightSyncError where it cannot be parsed."""
        octets = bucket[:HEADER_BYTES].cpu().numpy().tobytes()
        length, _ = _SIZES.unpack_from(octets)
        try:
            return cls.model_validate_json(octets[_SIZES.size : _SIZES.size + length])
        except ValidationError as error:
            raise WeightSyncError(f"a bucket of weights has a header that cannot be read: {error}") from error


def used_bytes(bucket: torch.Tensor) -> int:
    """Number of bytes of a bucket that are in use; only its start must have arrived."""
    used: int = _SIZES.unpack(bucket[: _SIZES.size].cpu().numpy().tobytes())[1]
    return used


class _Packer:
    """Fills the buckets of one outlet."""

    def __init__(self, outlet: Outlet, version: int, digest: Digest) -> None:
        self._outlet, self._version, self._digest = outlet, version, digest
        self._bucket: torch.Tensor | None = None
        self._pieces: list[Piece] = []  # with the largest checksum in place of theirs, which `post` reads
        self._header_room = self._end = 0

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Writes a weight into this bucket and as many more as it needs."""
        octets, start = bytes_of(weight), 0
        described = (name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), LARGEST)
        while True:
            bucket = self._bucket_with_room(len(json.dumps(described)) + 64)  # 64: three numbers more
            size = min(len(octets) - start, len(bucket) - self._end)
            bucket[self._end : self._end + size].copy_(octets[start : start + size])
            self._pieces.append(Piece(*described, start, size, self._end))
            self._header_room -= len(json.dumps(self._pieces[-1])) + 2
            self._end += -(-size // ALIGNMENT) * ALIGNMENT
            start += size
            if start == len(octets):
                return

    def post(self, is_last: bool = False) -> None:
        """Sends the bucket; the last one carries the digest of all weights."""
        bucket = self._bucket_with_room(0) if self._bucket is None else self._bucket
        pieces = [piece._replace(checksum=self._digest.checksum(piece.name)) for piece in self._pieces]
        header = Header(version=self._version, digest=str(self._digest) if is_last else None, pieces=pieces)
        text, used = header.model_dump_json().encode(), min(self._end, len(bucket))
        front = bytearray(_SIZES.pack(len(text), used) + text)
        bucket[: len(front)] = torch.frombuffer(front, dtype=torch.uint8).to(bucket.device)
        self._outlet.post(used)
        self._bucket = None

    def _bucket_with_room(self, header_chars: int) -> torch.Tensor:
        """The current bucket, or the next one where it or its header is full."""
        if self._bucket is not None and (self._end >= len(self._bucket) or self._header_room < header_chars):
            self.post()
        if self._bucket is None:
            self._bucket, self._pieces, self._end = self._outlet.buffer(), [], HEADER_BYTES
            self._header_room = HEADER_BYTES - _SIZES.size - 128  # 128: version, digest and brackets
        return self._bucket
