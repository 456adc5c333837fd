# SPDX-License-Identifier: Apache-2.0
"""Messages over a stream socket. A message has the number of the call that it belongs to, a body, and buffers.

    header    magic, number, count of buffers, bytes and checksum of the body, checksum of the header
    body      the size of each buffer, then the content
    buffers   raw bytes of tensors, neither copied nor checked

The checksums detect bytes that another writer put into the connection, usually by accident."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from zlib import crc32

Frame = bytes | memoryview
Octets = TypeVar("Octets", bytearray, memoryview)
MAGIC = b"whet"
_FIELDS = struct.Struct("<4sQIQI")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class BrokenMessageError(Exception):
    """Raised for bytes on a connection that are not a valid message."""


def send(connection: socket.socket, number: int, frames: Sequence[Frame]) -> None:
    """Writes one message: the content, then the buffers.  Raises: OSError; TimeoutError at the socket's own timeout."""
    content, *buffers = frames
    connection.sendall(pack(number, content, [len(buffer) for buffer in buffers]))
    for buffer in buffers:
        connection.sendall(buffer)


def receive(connection: socket.socket, allocate: Callable[[int], memoryview]) -> tuple[int, list[Frame]]:
    """Reads one message: its number, then content and buffers, into memory from `allocate`.

    Raises: EOFError if the other side closed; BrokenMessageError; OSError."""
    header = _read(connection, memoryview(bytearray(_HEADER_BYTES)))
    number, count, size, checksum = _parse(header)
    body = _checked(_read(connection, allocate(size)), checksum)
    sizes = struct.unpack_from(f"<{count}Q", body)
    return number, [body[8 * count :], *(_read(connection, allocate(each)) for each in sizes)]


def pack(number: int, content: Frame, sizes: Sequence[int] = ()) -> bytes:
    """Returns header and body of a message whose buffers have `sizes` bytes."""
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + content
    fields = _FIELDS.pack(MAGIC, number, len(sizes), len(body), crc32(body))
    return fields + _CHECKSUM.pack(crc32(fields)) + body


class FrameReader:
    """Splits a stream of bytes into messages without buffers."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields number and content of each complete message.  Raises: BrokenMessageError, after yielding the complete
        messages before it."""
        self._arrived += data
        start = 0
        try:
            while len(self._arrived) - start >= _HEADER_BYTES:
                body = start + _HEADER_BYTES
                number, _, size, checksum = _parse(self._arrived[start:body])
                if len(self._arrived) < body + size:
                    return
                start = body + size
                yield number, bytes(_checked(self._arrived[body:start], checksum))
        finally:
            del self._arrived[:start]


def _parse(header: Octets) -> tuple[int, int, int, int]:
    magic, number, count, size, checksum = _FIELDS.unpack_from(header)
    (own,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    if magic != MAGIC or own != crc32(header[: _FIELDS.size]):
        raise BrokenMessageError
    return number, count, size, checksum


def _checked(body: Octets, checksum: int) -> Octets:
    if crc32(body) != checksum:
        raise BrokenMessageError
    return body


def _read(connection: socket.socket, memory: memoryview) -> memoryview:
    filled = 0
    while filled < len(memory):
        count = connection.recv_into(memory[filled:])
        if count == 0:
            raise EOFError("the other side closed the connection")
        filled += count
    return memory
