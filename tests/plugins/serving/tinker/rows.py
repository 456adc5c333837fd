# SPDX-License-Identifier: Apache-2.0
"""Messages as the SDK sends them, made by a small protobuf of their own, and replies."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from whet.plugins.serving.tinker.wire import CLASSES, LossRequest

DTYPES = {"f": (1, "<f4"), "i": (2, "<i8")}


def varint(number: int) -> bytes:
    """A number, 7 bits a byte."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def part(number: int, value: bytes | int) -> bytes:
    """A field: bytes or a number."""
    if isinstance(value, int):
        return varint(number * 8) + varint(value % 2**64)
    return varint(number * 8 + 2) + varint(len(value)) + value


def double(number: int, value: float) -> bytes:
    """A field with a double."""
    return varint(number * 8 + 1) + struct.pack("<d", value)


def tensor(values: Any) -> bytes:
    """A dense tensor."""
    array = np.asarray(values, np.int64 if not isinstance(values, np.ndarray) else None)
    code, dtype = DTYPES[array.dtype.kind]
    shape = b"".join(map(varint, array.shape))
    return part(1, array.astype(dtype).tobytes()) + part(3, code) + part(4, shape)


def datum(tokens: Sequence[int], **inputs: Any) -> bytes:
    """A datum of text."""
    text = part(1, part(1, np.asarray(tokens, "<i4").tobytes()))
    entries = [part(2, part(1, name.encode()) + part(2, tensor(each))) for name, each in inputs.items()]
    return part(1, text) + b"".join(entries)


def body(
    model: str, data: Sequence[bytes], loss: str, options: Mapping[str, float] | None = None, seq: int = 1,
    forward_only: bool = False,
) -> bytes:  # fmt: skip
    """The body of a forward_backward."""
    out = part(1, model.encode()) + part(2, seq) + b"".join(part(3, each) for each in data) + part(4, loss.encode())
    for name, value in (options or {}).items():
        out += part(5, part(1, name.encode()) + double(2, value))
    return out + (part(6, 1) if forward_only else b"")


def request(
    model: str, data: Sequence[bytes], loss: str, options: Mapping[str, float] | None = None, forward_only: bool = False
) -> LossRequest:
    """A request, as the server reads it."""
    return LossRequest(body(model, data, loss, options, forward_only=forward_only))


def answer(reply: bytes) -> tuple[list[npt.NDArray[np.float32]], dict[str, float]]:
    """Log-probs of each datum, and metrics."""
    found, rows = CLASSES["ForwardBackwardOutput"].FromString(reply), list[npt.NDArray[np.float32]]()
    for record in found.loss_fn_outputs:
        [each] = [each.value for each in record.fields]
        whole, offsets = np.frombuffer(each.data, "<f4"), np.frombuffer(each.offsets, "<i8")
        rows += [whole[a // 4 : b // 4].reshape(-1, *each.trailing_shape) for a, b in pairwise(offsets)]
    return rows, {each.key: each.value for each in found.metrics}
