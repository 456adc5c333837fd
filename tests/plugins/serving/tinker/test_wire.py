# SPDX-License-Identifier: Apache-2.0
"""The SDK's messages, byte by byte. tests/plugins/serving/tinker/test_sdk.py compares them with the SDK's own."""

from __future__ import annotations

import random
import re

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from tests.plugins.serving.tinker.rows import answer, body, datum, double, part, varint
from tests.raising import raises
from whet.errors import DataError
from whet.guard import RefusedError
from whet.plugins.serving.tinker.wire import (
    CLASSES,
    MOST_ROWS,
    NO_TOKEN,
    LossRequest,
    PromptScores,
    read_tensor,
    unpacked,
    write_loss_output,
    write_samples,
)
from whet.rollout.protocol import Completion


def test_a_request() -> None:
    weights = np.float32([0.0, 0.5])
    rows = [datum([1, 300], target_tokens=[300, 2], weights=weights), datum([7], target_tokens=[[1, 2]])]
    unknown = part(9, -1) + double(8, 0.5)
    v2 = (
        unknown
        + part(7, part(1, b"how") + part(2, part(2, b"so")))
        + part(7, part(1, b"beta") + part(2, double(1, 0.25)))
    )
    found = LossRequest(body("s:train:0", rows, "ppo", {"beta": 0.5}, seq=70000, forward_only=True) + v2)
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("s:train:0", 70000, "ppo", True)
    assert found.options == {"beta": 0.25, "how": "so"}
    first, second = found.data
    assert first.tokens.tolist() == [1, 300] and first.inputs["target_tokens"].tolist() == [300, 2]
    assert first.inputs["weights"].dtype == np.float32 and first.inputs["weights"].tolist() == [0.0, 0.5]
    assert second.inputs["target_tokens"].tolist() == [[1, 2]]


def read(message: bytes) -> npt.NDArray[np.generic]:
    return read_tensor(CLASSES["Tensor"].FromString(message), "x")


def sparse(values: list[int], rows: list[int], columns: list[int], shape: list[int]) -> bytes:
    parts = [np.asarray(each, "<i8").tobytes() for each in (values, rows, columns)]
    csr = b"".join(part(number, each) for number, each in enumerate(parts, start=1))
    return part(2, csr) + part(3, 2) + part(4, b"".join(map(varint, shape)))


def test_a_sparse_tensor_is_made_whole() -> None:
    assert read(sparse([5, 6, 7], [0, 2, 2, 3], [0, 2, 1], [3, 3])).tolist() == [
        [5, 0, 6],
        [0, 0, 0],
        [0, 7, 0],
    ]


@pytest.mark.parametrize(
    "message",
    [
        sparse([5], [0, 1], [9], [1, 3]),
        sparse([5], [0, 2], [0], [1, 3]),
        sparse([5], [0, 1], [0], [3]),
        part(1, b"abc") + part(3, 2),
        part(1, b"abcd") + part(3, 9),
        part(1, np.zeros(2, "<i8").tobytes()) + part(3, 2) + part(4, bytes([3])),
        part(3, 2) + part(4, 2 * varint(2**32)),
    ],
)
def test_a_tensor_that_lies_is_refused(message: bytes) -> None:
    with pytest.raises(DataError):
        read(message)


def test_bfloat16() -> None:
    halves = (np.float32([1.5, -2.0]).view(np.uint32) >> 16).astype("<u2")
    assert read(part(1, halves.tobytes()) + part(3, 4)).tolist() == [1.5, -2.0]


def test_an_image_is_refused_when_its_row_is_read() -> None:
    found = LossRequest(body("m", [part(1, part(2, b"png"))], "cross_entropy"))
    with raises(DataError, "datum 0", found=re.compile("image")):
        _ = found.data


def test_log_probs_of_rows_of_several_widths() -> None:
    rows = [np.float32([-1, -2]), np.float32([-3]), np.float32([[-4, -5], [-6, -7]])]
    found, metrics = answer(write_loss_output(rows, {"loss:sum": 1.5}))
    assert [each.tolist() for each in found] == [[-1, -2], [-3], [[-4, -5], [-6, -7]]] and metrics == {"loss:sum": 1.5}


def test_samples() -> None:
    """Sequences, log-probs of the prompt, and tables with empty cells."""
    samples = [
        Completion((5, 6), (-0.5, -1.5), "length", (), likeliest=(((5, -0.5), (9, -2.0)), ((6, -1.5),))),
        Completion((), (), "stop", ()),
    ]
    prompt = PromptScores(np.float32([np.nan, -3.0]), [[], [(1, -1.0)]])
    found = CLASSES["SampleResponse"].FromString(write_samples(samples, prompt, 2, 1))
    first, second = found.sequences
    assert (first.stop_reason, second.stop_reason) == (1, 0) and first.tokens == np.asarray([5, 6], "<i4").tobytes()
    table = first.topk_sampled_logprobs
    assert table.token_ids == np.asarray([5, 9, 6, 0], "<i4").tobytes() and (table.k, table.length) == (2, 2)
    assert np.frombuffer(table.logprobs, "<f4").tolist() == [-0.5, -2.0, -1.5, NO_TOKEN]
    assert np.isnan(np.frombuffer(found.prompt_logprobs, "<f4")).tolist() == [True, False]
    assert (found.topk_prompt_logprobs.k, found.topk_prompt_logprobs.length) == (1, 2)


def test_rows_of_a_sparse_tensor_are_checked_before_they_are_made() -> None:
    """A few bytes that ask for 2^40 entries are refused, instead of an error of too little memory."""
    for crow in ([0, 2**40], [0, -1], [1, 0], [0, 2**62, 0], [], [-(2**63), 0], [2**63 - 1, -(2**63)]):
        for shape in ([1, 4], [2, 4], [0, 4], [2]):
            with raises(DataError, "x"):
                read(sparse([], crow, [], shape))


def test_few_bytes_do_not_make_much_work() -> None:
    """More rows than the SDK sends, and sparse tensors that are large together, are refused unread."""
    with raises(DataError, "data"):
        LossRequest(body("m", [b""] * (MOST_ROWS + 1), "ppo"))
    entry = part(1, b"weights") + part(2, sparse([], [0, 0], [], [1, 2**23]))
    found = LossRequest(body("m", [part(2, entry)] * 3, "ppo"))
    with raises(DataError, "sparse tensors"):
        _ = found.data


def test_any_bytes_are_read_or_refused() -> None:
    """A request with random bytes changed, cut or added is read, or an error of data."""
    draw = random.Random(0)
    whole = body("m", [datum([1, 2], target_tokens=[2, 3])], "ppo", {"beta": 1.0})
    for _ in range(2000):
        broken = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            _ = LossRequest(bytes(broken[: draw.randint(0, len(broken))])).data
        except DataError:
            continue


def test_zstd_and_its_bombs() -> None:
    packed = pa.compress(b"a" * 10_000_000, codec="zstd", asbytes=True)
    assert unpacked(packed, 10_000_000) == b"a" * 10_000_000
    for bad, most in ((packed, 9_999_999), (b"nothing", 100)):
        with pytest.raises(RefusedError):
            unpacked(bad, most)
