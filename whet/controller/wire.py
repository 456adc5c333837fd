# SPDX-License-Identifier: Apache-2.0
"""Converts objects to the frames of a message: a pickle, then the bytes of tensors and arrays, not copied."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet import serialization
from whet.processes import frames
from whet.processes.frames import Frame


def encode(value: Any) -> list[Frame]:
    """Returns the pickle of `value`, then the buffers that it refers to.  Raises: as `serialization.dumps`."""
    stream, buffers = serialization.dumps(value)
    return [stream, *(buffer.raw() for buffer in buffers)]


def decode(content: Sequence[Frame]) -> Any:
    """Decodes an object from its frames. Its tensors are writable and use the memory of the frames."""
    return pickle.loads(content[0], buffers=content[1:])


def receive(connection: socket.socket) -> tuple[int, list[Frame]]:
    """Reads one message into uninitialised memory.  Raises: as `frames.receive`."""
    return frames.receive(connection, lambda size: np.empty(size, dtype=np.uint8).data)
