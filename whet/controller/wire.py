# SPDX-License-Identifier: Apache-2.0
"""Objects as frames of a message: pickle protocol 5, the bytes of tensors and arrays beside it and copied by nobody."""

from __future__ import annotations

import io
import pickle
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from whet.processes import frames
from whet.processes.frames import Frame
from whet.serialization import out_of_band


def encode(value: Any) -> list[Frame]:
    """The pickle of `value`, then the buffers that it refers to, which are views of the tensors' own memory.
    Raises: whatever pickle raises for an object that cannot travel (a lambda, an open file)."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def decode(content: Sequence[Frame]) -> Any:
    """Returns the object that was encoded; its tensors live in the frames and may be written to."""
    return pickle.loads(content[0], buffers=content[1:])


def receive(connection: socket.socket) -> tuple[int, list[Frame]]:
    """Reads one message, into memory that is not filled with zeros first.  Raises: as `frames.receive`."""
    return frames.receive(connection, lambda size: np.empty(size, dtype=np.uint8).data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Plain tensors wherever they stand leave their bytes out of band; all else pickles as it likes."""
        return out_of_band(value).__reduce_ex__(5) if type(value) is torch.Tensor else NotImplemented
