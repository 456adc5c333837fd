# SPDX-License-Identifier: Apache-2.0
"""Bytes of the tinker SDK: the protobuf messages that it sends and reads, and zstd.

A message is a sequence of fields, each a key (number * 8 + kind) and a value: a varint, 8 bytes, bytes with their
length, or 4 bytes (https://protobuf.dev/programming-guides/encoding). Unknown fields are skipped, as protobuf does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from whet.errors import DataError
from whet.guard import RefusedError

Array = npt.NDArray[np.generic]
Value = int | memoryview
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}
NO_TOKEN = -99999.0  # log-prob of an empty cell of a table of likeliest tokens
MOST_CELLS = 2**28  # of a sparse tensor: few bytes may name a large one


@dataclass(frozen=True)
class Datum:
    """A sequence to train on: position t reads `tokens[: t + 1]` and predicts `inputs["target_tokens"][t]`."""

    tokens: npt.NDArray[np.int64]  # [n]
    inputs: Mapping[str, Array]  # [n] or [n, K], by name


@dataclass(frozen=True)
class LossRequest:
    """A request for a forward or a forward and backward pass; its rows are read when they are asked for."""

    model_id: str
    seq_id: int
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool
    rows: tuple[memoryview, ...]

    @classmethod
    def read(cls, body: bytes) -> LossRequest:
        """Reads a ForwardBackwardRequest.  Raises: DataError."""
        found: dict[int, Value] = {}
        rows, options = list[memoryview](), dict[str, float | str]()
        for number, value in fields(body):
            if number == 3:
                rows.append(_bytes(value))
            elif number == 5:
                key, number_of = _entry(value)
                options[key] = _double(number_of)
            elif number == 7:
                key, either = _entry(value)
                options.update((key, _option(kind, each)) for kind, each in fields(_bytes(either)))
            else:
                found[number] = value
        names = [str(_bytes(found.get(number, memoryview(b""))), "utf-8") for number in (1, 4)]
        return cls(names[0], _int(found.get(2, 0)), names[1], options, bool(found.get(6, 0)), tuple(rows))

    @cached_property
    def data(self) -> tuple[Datum, ...]:
        """Its rows.  Raises: DataError."""
        return tuple(_datum(row, f"datum {number}") for number, row in enumerate(self.rows))


def _option(number: int, value: Value) -> float | str:
    return _double(value) if number == 1 else str(_bytes(value), "utf-8")


def _datum(row: memoryview, where: str) -> Datum:
    tokens, inputs = list[Array](), dict[str, Array]()
    for number, value in fields(row):
        if number == 1:
            for kind, chunk in fields(_bytes(value)):
                if kind != 1:
                    found = "an image" if kind == 2 else "audio"
                    raise DataError(where, found, "text, which this server trains on", "leave the chunk out")
                tokens += [_array(each, INT32) for which, each in fields(_bytes(chunk)) if which == 1]
        elif number == 2:
            name, tensor = _entry(value)
            inputs[name] = read_tensor(_bytes(tensor), f"{where}: {name}")
    return Datum(np.concatenate([np.empty(0, "<i4"), *tokens]).astype(np.int64), inputs)


def read_tensor(message: memoryview, where: str) -> Array:
    """Reads a Tensor, a sparse one made whole.  Raises: DataError."""
    found: dict[int, Value] = {}
    shape = list[int]()
    for number, value in fields(message):
        if number == 4:
            shape += [value] if isinstance(value, int) else _varints(value)
        else:
            found[number] = value
    dtype = _int(found.get(3, 0))
    if dtype not in DTYPES:
        raise DataError(where, f"has dtype {dtype}", "float32, int64, int32 or bfloat16")
    if 2 in found:
        parts = dict(fields(_bytes(found[2])))
        values, rows, columns = (
            _array(parts.get(n, memoryview(b"")), kind) for n, kind in ((1, dtype), (2, 2), (3, 2))
        )
        whole = dense(values, rows, columns, shape, where)
    else:
        whole = _array(found.get(1, memoryview(b"")), dtype)
    if shape and int(np.prod(shape)) != whole.size:
        raise DataError(where, f"has {whole.size} numbers", f"those of shape {shape}")
    if dtype == BFLOAT16:
        whole = (whole.astype(np.uint32) << 16).view(np.float32)
    return whole.reshape(shape) if shape else whole


def dense(values: Array, rows: Array, columns: Array, shape: Sequence[int], where: str) -> Array:
    """A matrix in compressed sparse rows, made whole with zeros.  Raises: DataError."""
    height, width = shape if len(shape) == 2 else (-1, -1)
    starts, places = rows.astype(np.int64), columns.astype(np.int64)
    fits = height >= 0 and 0 <= height * width <= MOST_CELLS and len(starts) == height + 1
    fits = fits and len(places) == len(values) and bool((np.diff(starts) >= 0).all())
    if not fits or starts[0] != 0 or starts[-1] != len(values) or bool(((places < 0) | (places >= width)).any()):
        raise DataError(where, f"does not fit its shape {list(shape)}", "a matrix in compressed sparse rows")
    whole = np.zeros((height, width), values.dtype)
    whole[np.repeat(np.arange(height), np.diff(starts)), places] = values
    return whole


def write_loss_output(log_probs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput with the log-probs [n] or [n, K] of each datum; rows of one width share a record."""
    records, start = list[bytes](), 0
    for end in range(1, len(log_probs) + 1):
        if end == len(log_probs) or log_probs[end].shape[1:] != log_probs[start].shape[1:]:
            records.append(_bytes_field(2, _record(log_probs[start:end])))
            start = end
    told = [_bytes_field(3, _text_field(1, name) + _double_field(2, value)) for name, value in metrics.items()]
    return _text_field(1, "ArrayRecord") + b"".join(records + told)


def _record(rows: Sequence[npt.NDArray[np.float32]]) -> bytes:
    parts = [np.ascontiguousarray(row, "<f4").tobytes() for row in rows]
    offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
    shape = b"".join(map(_varint, rows[0].shape[1:]))
    tensor = _bytes_field(1, b"".join(parts)) + _bytes_field(2, offsets) + _int_field(3, FLOAT32)
    tensor += _bytes_field(4, shape) if shape else b""
    entry = _text_field(1, "logprobs") + _bytes_field(2, tensor)
    return _text_field(1, "ArrayRecord") + _bytes_field(2, entry) + _int_field(3, len(rows))


Likeliest = Sequence[Sequence[tuple[int, float]]]  # of each place, the likeliest first


@dataclass(frozen=True)
class SampledTokens:
    """A sampled sequence; `is_cut`: it ended at the limit of tokens."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    is_cut: bool
    likeliest: Likeliest = ()


@dataclass(frozen=True)
class PromptScores:
    """Log-probs of a prompt of n tokens; NaN where nothing is known."""

    log_probs: npt.NDArray[np.float32] | None = None  # [n]
    likeliest: Likeliest = ()  # of n places


def write_samples(samples: Sequence[SampledTokens], prompt: PromptScores, width: int, prompt_width: int) -> bytes:
    """A SampleResponse; tables of likeliest tokens have `width` and `prompt_width` columns."""
    out = b"".join(_bytes_field(1, _sequence(sample, width)) for sample in samples)
    if prompt.log_probs is not None:
        out += _bytes_field(2, prompt.log_probs.astype("<f4").tobytes())
    if prompt_width:
        out += _bytes_field(3, _table(prompt.likeliest, prompt_width))
    return out


def _sequence(sample: SampledTokens, width: int) -> bytes:
    out = _int_field(1, int(sample.is_cut)) + _bytes_field(2, np.asarray(sample.tokens, "<i4").tobytes())
    out += _bytes_field(3, np.asarray(sample.log_probs, "<f4").tobytes())
    return out + (_bytes_field(4, _table(sample.likeliest, width)) if width else b"")


def _table(places: Likeliest, width: int) -> bytes:
    tokens, log_probs = np.zeros((len(places), width), "<i4"), np.full((len(places), width), NO_TOKEN, "<f4")
    for row, place in enumerate(places):
        for column, (token, log_prob) in enumerate(place[:width]):
            tokens[row, column], log_probs[row, column] = token, log_prob
    out = _bytes_field(1, tokens.tobytes()) + _bytes_field(2, log_probs.tobytes())
    return out + _int_field(3, width) + _int_field(4, len(places))


def fields(message: bytes | memoryview) -> Iterator[tuple[int, Value]]:
    """Yields the number and value of each field of a message.  Raises: DataError."""
    view, at = memoryview(message), 0
    while at < len(view):
        key, at = _read_varint(view, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _read_varint(view, at)
            yield number, value
            continue
        size = {EIGHT: 8, FOUR: 4}.get(kind, -1)
        if kind == BYTES:
            size, at = _read_varint(view, at)
        if size < 0 or at + size > len(view):
            raise DataError("message", f"broken off or of an unknown kind at byte {at}", "protobuf")
        yield number, view[at : at + size]
        at += size


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at byte `at`, as a signed one of 64 bits, and the byte after it."""
    number = shift = 0
    while at < len(view) and shift < 70:
        byte = view[at]
        number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            number &= 2**64 - 1
            return number - (number >> 63 << 64), at
    raise DataError("message", f"broken off in a number at byte {at}", "protobuf")


def _varints(packed: memoryview) -> list[int]:
    numbers, at = list[int](), 0
    while at < len(packed):
        number, at = _read_varint(packed, at)
        numbers.append(number)
    return numbers


def _entry(value: Value) -> tuple[str, Value]:
    """Key and value of an entry of a map."""
    parts = dict(fields(_bytes(value)))
    return str(_bytes(parts.get(1, memoryview(b""))), "utf-8"), parts.get(2, memoryview(b""))


def _bytes(value: Value) -> memoryview:
    if isinstance(value, int):
        raise DataError("message", "a number", "bytes")
    return value


def _int(value: Value) -> int:
    if not isinstance(value, int):
        raise DataError("message", "bytes", "a number")
    return value


def _double(value: Value) -> float:
    """The value of a double, which is left out where it is 0."""
    number: float = struct.unpack("<d", _bytes(value))[0] if len(_bytes(value)) else 0.0
    return number


def _array(value: Value, dtype: int) -> Array:
    try:
        return np.frombuffer(_bytes(value), DTYPES[dtype])
    except ValueError as error:
        raise DataError("message", f"a tensor of {len(_bytes(value))} bytes", "whole numbers of its dtype") from error


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | BYTES) + _varint(len(value)) + value


def _text_field(number: int, text: str) -> bytes:
    return _bytes_field(number, text.encode())


def _int_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _double_field(number: int, value: float) -> bytes:
    return _varint(number << 3 | EIGHT) + struct.pack("<d", value)


def unpacked(body: bytes, most: int) -> bytes:
    """The bytes that zstd made `body` of.  Raises: RefusedError for other bytes, or more than `most`."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            whole: bytes = stream.read(most + 1)
    except (OSError, pa.ArrowInvalid) as error:
        raise RefusedError(400, f"the body is not zstd: {error}") from error
    if len(whole) > most:
        raise RefusedError(413, f"the body has more than {most:,} bytes; send smaller chunks")
    return whole
