# SPDX-License-Identifier: Apache-2.0
"""Objects over a stream socket: pickle protocol 5, the bytes of tensors and arrays beside it and copied by nobody."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whet.serialization import out_of_band

Frame = bytes | memoryview
_SIZE = struct.Struct("<Q")


def encode(value: Any) -> list[Frame]:
    """The pickle of `value`, then the buffers that it refers to, which are views of the tensors' own memory.
    Raises: whatever pickle raises for an object that cannot travel (a lambda, an open file)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def decode(frames: Sequence[Frame]) -> Any:
    """What was encoded; its tensors live in the frames and may be written to."""
    return pickle.loads(frames[0], buffers=frames[1:])


def send(connection: socket.socket, frames: Sequence[Frame]) -> None:
    """Writes one message.  Raises: OSError; TimeoutError at the socket's own timeout."""
    sizes = [_SIZE.pack(number) for number in (len(frames), *(len(frame) for frame in frames))]
    connection.sendall(b"".join(sizes))
    for frame in frames:
        connection.sendall(frame)


def receive(connection: socket.socket) -> list[Frame]:
    """Reads one message.  Raises: EOFError where the other side is gone; OSError."""
    (count,) = _SIZE.unpack(_read(connection, _SIZE.size))
    sizes = struct.unpack(f"<{count}Q", _read(connection, _SIZE.size * count))
    return [_read(connection, size) for size in sizes]


def _read(connection: socket.socket, size: int) -> memoryview:
    buffer = np.empty(size, dtype=np.uint8).data  # a bytearray would be filled with zeros first
    filled = 0
    while filled < size:
        count = connection.recv_into(buffer[filled:])
        if count == 0:
            raise EOFError("the other side closed the connection")
        filled += count
    return buffer


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Plain tensors wherever they stand leave their bytes out of band; all else pickles as it likes."""
        return out_of_band(value).__reduce_ex__(5) if type(value) is torch.Tensor else NotImplemented
