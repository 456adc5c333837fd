# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the bytes of the tinker SDK: its protobuf messages, and zstd."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from whet.errors import DataError
from whet.guard import RefusedError
from whet.rollout.protocol import Completion

Array = npt.NDArray[np.generic]
Likeliest = Sequence[Sequence[tuple[int, float]]]  # of each place, the likeliest first
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
NO_TOKEN = -99999.0  # log-prob of an empty cell of a table of likeliest tokens
MOST_ROWS = 1024  # of a request; the SDK sends no more at once
MOST_CELLS = 2**24  # of the sparse tensors of a request: few bytes may name a large one
# The fields that are read and written. An enum has the bytes of an int32, a map those of repeated keys and values.
MESSAGES = """
ForwardBackwardRequest: string model_id 1, int32 seq_id 2, repeated Datum data 3, string loss_fn 4, repeated Number
    loss_fn_config 5, bool forward_only 6, repeated Option loss_fn_config_v2 7
Number: string key 1, double value 2
Option: string key 1, OptionValue value 2
OptionValue: double number 1, string text 2
Datum: repeated Chunk model_input 1, repeated Input loss_fn_inputs 2
Chunk: EncodedTextChunk encoded_text 1
EncodedTextChunk: bytes tokens 1
Input: string key 1, Tensor value 2
Tensor: bytes dense 1, SparseCsr sparse_csr 2, int32 dtype 3, repeated int64 shape 4
SparseCsr: bytes values 1, bytes crow_indices 2, bytes col_indices 3
ForwardBackwardOutput: string loss_fn_output_type 1, repeated ArrayRecord loss_fn_outputs 2, repeated Number metrics 3
ArrayRecord: string type_tag 1, repeated Field fields 2, int64 num_datums 3
Field: string key 1, BatchedTensor value 2
BatchedTensor: bytes data 1, bytes offsets 2, int32 dtype 3, repeated int64 trailing_shape 4
SampleResponse: repeated SampledSequence sequences 1, bytes prompt_logprobs 2, TopkLogprobs topk_prompt_logprobs 3
SampledSequence: int32 stop_reason 1, bytes tokens 2, bytes logprobs 3, TopkLogprobs topk_sampled_logprobs 4
TopkLogprobs: bytes token_ids 1, bytes logprobs 2, uint32 k 3, uint32 length 4
"""


def _classes() -> dict[str, Any]:
    """Returns the protobuf classes of `MESSAGES` by name."""
    file, kinds = descriptor_pb2.FileDescriptorProto(name="whet_tinker.proto"), descriptor_pb2.FieldDescriptorProto
    for name, fields in re.findall(r"^(\w+): (.*(?:\n +.*)*)", MESSAGES, re.MULTILINE):
        message = file.message_type.add(name=name)
        for label, kind, own, number in re.findall(r"(repeated\s+)?(\w+)\s+(\w+) (\d+)", fields):
            added = message.field.add(name=own, number=int(number), label=3 if label else 1)
            if kind[0].isupper():
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return dict(message_factory.GetMessageClassesForFiles([file.name], pool))


CLASSES = _classes()


@dataclass(frozen=True)
class Datum:
    """A sequence to train on. Position t reads `tokens[: t + 1]` and predicts `inputs["target_tokens"][t]`."""

    tokens: npt.NDArray[np.int64]  # [n]
    inputs: Mapping[str, Array]  # [n] or [n, K], by name


class LossRequest:
    """A request for a forward pass, or for forward and backward. Its rows are parsed on first use."""

    def __init__(self, body: bytes) -> None:
        """Parses a ForwardBackwardRequest.  Raises: DataError."""
        try:
            found = CLASSES["ForwardBackwardRequest"].FromString(body)
        except DecodeError as error:
            raise DataError("body", str(error), "protobuf") from error
        if len(found.data) > MOST_ROWS:
            raise DataError("data", f"{len(found.data)} rows", f"at most {MOST_ROWS} in a request", "send several")
        self.body, self.rows, self.loss, self.forward_only = body, found.data, found.loss_fn, found.forward_only
        self.model_id, self.seq_id = found.model_id, found.seq_id
        self.options: dict[str, float | str] = {each.key: each.value for each in found.loss_fn_config}
        for each in found.loss_fn_config_v2:
            self.options[each.key] = each.value.text if each.value.HasField("text") else each.value.number

    def __reduce__(self) -> tuple[Any, ...]:
        return LossRequest, (self.body,)

    @cached_property
    def data(self) -> tuple[Datum, ...]:
        """The rows of the request.  Raises: DataError."""
        tensors = [each.value for row in self.rows for each in row.loss_fn_inputs]
        cells = sum(math.prod(map(abs, each.shape)) for each in tensors if each.HasField("sparse_csr"))
        if cells > MOST_CELLS:
            raise DataError("sparse tensors", f"have {cells:,} cells", f"at most {MOST_CELLS:,} in a request")
        return tuple(_datum(row, f"datum {number}") for number, row in enumerate(self.rows))


def _datum(row: Any, where: str) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in row.model_input):
        raise DataError(where, "an image or audio", "text, which this server trains on", "leave the chunk out")
    tokens = [_array(chunk.encoded_text.tokens, INT32, where) for chunk in row.model_input]
    inputs = {each.key: read_tensor(each.value, f"{where}: {each.key}") for each in row.loss_fn_inputs}
    return Datum(np.concatenate([np.empty(0, "<i4"), *tokens]).astype(np.int64), inputs)


def read_tensor(tensor: Any, where: str) -> Array:
    """Reads a Tensor message; a sparse tensor becomes dense.  Raises: DataError."""
    shape = [*tensor.shape]
    if tensor.dtype not in DTYPES:
        raise DataError(where, f"has the dtype {tensor.dtype}", "float32, int64, int32 or bfloat16")
    if tensor.HasField("sparse_csr"):
        csr = tensor.sparse_csr
        crow, col = (
            torch.from_numpy(_array(each, INT64, where).copy()) for each in (csr.crow_indices, csr.col_indices)
        )
        values = torch.from_numpy(_array(csr.values, tensor.dtype, where).copy())
        try:
            _check_rows(crow, len(col), shape, where)
            places = torch.stack([torch.arange(len(crow) - 1).repeat_interleave(crow.diff()), col])
            whole = torch.sparse_coo_tensor(places, values, shape, check_invariants=True).to_dense().numpy()
        except (RuntimeError, TypeError) as error:
            raise DataError(where, f"does not fit its shape {shape}", "a matrix in compressed sparse rows") from error
    else:
        whole = _array(tensor.dense, tensor.dtype, where)
    if shape and (min(shape) < 0 or math.prod(shape) != whole.size):
        raise DataError(where, f"has {whole.size} numbers", f"those of shape {shape}")
    if tensor.dtype == BFLOAT16:
        whole = (whole.astype(np.uint32) << 16).view(np.float32)
    return whole.reshape(shape) if shape else whole


def _check_rows(crow: torch.Tensor, count: int, shape: list[int], where: str) -> None:
    """Checks where the rows of a sparse tensor begin among its `count` values, before rows are made of it.  Raises:
    DataError."""
    is_whole = len(shape) == 2 and len(crow) == shape[0] + 1 > 0 and crow[0] == 0 and crow[-1] == count
    if not is_whole or bool((crow[1:] < crow[:-1]).any()):
        raise DataError(where, f"does not fit its shape {shape}", f"rows that end at {count}, the number of values")


def _array(value: bytes, dtype: int, where: str) -> Array:
    try:
        return np.frombuffer(value, DTYPES[dtype])
    except ValueError as error:
        raise DataError(where, f"a tensor of {len(value)} bytes", "whole numbers of its dtype") from error


def write_loss_output(log_probs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encodes a ForwardBackwardOutput: log-probs [n] or [n, K] of each datum; rows of equal width share a record."""
    out = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for name, number in metrics.items():
        out.metrics.add(key=name, value=number)
    for width, group in groupby(log_probs, lambda row: row.shape[1:]):
        rows = [row.astype("<f4").tobytes() for row in group]
        record = out.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        tensor = record.fields.add(key="logprobs").value
        tensor.data, tensor.offsets = b"".join(rows), np.cumsum([0, *map(len, rows)]).astype("<i8").tobytes()
        tensor.dtype, tensor.trailing_shape[:] = FLOAT32, width
    return bytes(out.SerializeToString())


@dataclass(frozen=True)
class PromptScores:
    """The log-probs of a prompt of n tokens; NaN where unknown."""

    log_probs: npt.NDArray[np.float32] | None = None  # [n]
    likeliest: Likeliest = ()  # of n places


def write_samples(samples: Sequence[Completion], prompt: PromptScores, width: int, prompt_width: int) -> bytes:
    """Encodes a SampleResponse. Tables of the most probable tokens have `width` and `prompt_width` columns."""
    out = CLASSES["SampleResponse"]()
    for sample in samples:
        own = out.sequences.add(stop_reason=int(sample.finish_reason == "length"))
        own.tokens = np.asarray(sample.token_ids, "<i4").tobytes()
        own.logprobs = np.asarray(sample.log_probs, "<f4").tobytes()
        if width:
            _fill_table(own.topk_sampled_logprobs, sample.likeliest, width)
    if prompt.log_probs is not None:
        out.prompt_logprobs = prompt.log_probs.astype("<f4").tobytes()
    if prompt_width:
        _fill_table(out.topk_prompt_logprobs, prompt.likeliest, prompt_width)
    return bytes(out.SerializeToString())


def _fill_table(table: Any, places: Likeliest, width: int) -> None:
    tokens, log_probs = np.zeros((len(places), width), "<i4"), np.full((len(places), width), NO_TOKEN, "<f4")
    for row, place in enumerate(places):
        for column, (token, log_prob) in enumerate(place[:width]):
            tokens[row, column], log_probs[row, column] = token, log_prob
    table.token_ids, table.logprobs, table.k, table.length = tokens.tobytes(), log_probs.tobytes(), width, len(places)


def unpacked(body: bytes, most: int) -> bytes:
    """Decompresses a zstd body.  Raises: RefusedError if it is not zstd, or has more than `most` bytes."""
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
            whole: bytes = stream.read(most + 1)
    except (OSError, pa.ArrowInvalid) as error:
        raise RefusedError(400, f"the body is not zstd: {error}") from error
    if len(whole) > most:
        raise RefusedError(413, f"the body has more than {most:,} bytes; send smaller chunks")
    return whole
