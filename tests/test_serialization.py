# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import multiprocessing
import pickle
import re
import stat
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from tests.raising import raises
from whet import serialization
from whet.column_rules import equal
from whet.errors import DataError
from whet.types import Failure, Group, Message, Prompt, Trajectory, Turn

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$type") | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(value: Any, folder: Path) -> Any:
    serialization.save(folder / "file", value)
    return serialization.load(folder / "file")


@given(value=plain)
def test_plain_objects_come_back_equal_and_of_the_same_type(
    value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert equal(round_trip(value, tmp_path_factory.getbasetemp()), value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert equal(round_trip({"a": [tensor, tensor.mT if tensor.ndim == 2 else tensor]}, tmp_path)["a"][0], tensor)


def test_arrays_and_tensors_that_share_storage(tmp_path: Path) -> None:
    tensor = torch.arange(12.0)
    value = {
        "views": [tensor, tensor[3:5], tensor.view(3, 4).T, tensor[:1].expand(4)],
        "arrays": (np.arange(6).reshape(2, 3)[:, ::-1], np.float32(1.5) * np.ones(2), np.array(["a", None], object)),
        "nested": np.array([[{"a": tensor}, 1], [None, (tensor,)]], dtype=object),
    }
    loaded = round_trip(value, tmp_path)
    assert equal(loaded, value)
    assert loaded["arrays"][0].dtype == np.int64
    assert loaded["nested"].shape == (2, 2)


def test_an_object_that_stands_in_many_rows_is_stored_once(tmp_path: Path) -> None:
    tensor = torch.zeros(100_000)
    serialization.save(tmp_path / "file", [{"pixels": tensor}] * 50)
    assert (tmp_path / "file").stat().st_size < 410_000


def test_types_of_whet_come_back(tmp_path: Path) -> None:
    prompt = Prompt("0:1", 1, (Message("user", "2+2?", {"name": "a"}),), (1, 2), "sums", "4", {"level": 1})
    turn = Turn((1, 2), (3,), (-0.5,), "stop", ((0, 1),))
    trajectory = Trajectory("0:1:0", prompt, (turn,), 0, failure=Failure("tool", "no calculator"))
    group = Group(prompt, (trajectory,))
    assert round_trip([group], tmp_path) == [group]


def test_subclasses_and_numpy_numbers_come_back_plain(tmp_path: Path) -> None:
    loaded = round_trip([OrderedDict(a=1), np.float32(0.5), np.int64(3), np.bool_(True)], tmp_path)
    assert loaded == [{"a": 1}, 0.5, 3, True]
    assert [type(value) for value in loaded] == [dict, float, int, bool]


@pytest.mark.parametrize(
    ("value", "key", "found"),
    [
        ({"a": [0, {"b": {1, 2}}]}, "a[1].b", "builtins.set"),
        ({"a": np.array(["x"])}, "a", "numpy.ndarray"),
        ({"a": Path("x")}, "a", "pathlib"),
    ],
)
def test_what_a_file_cannot_hold_is_named(value: Any, key: str, found: str, tmp_path: Path) -> None:
    with raises(DataError, key, found=re.compile(f"^a {found}")):
        serialization.save(tmp_path / "file", value)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_readable_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    serialization.save(tmp_path / "file", {"a": torch.tensor([1, 2])})
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    tensors = safetensors.torch.load_file(tmp_path / "file")
    assert tensors["0:a"].tolist() == [1, 2]
    assert json.loads(tensors["json"].numpy().tobytes())["value"] == {"a": {"$type": "tensor", "name": "0:a"}}


def write_json(path: Path, document: Any) -> None:
    octets = np.frombuffer(json.dumps(document).encode(), np.uint8).copy()
    safetensors.torch.save_file({"json": torch.from_numpy(octets)}, path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, path)
    with raises(DataError, str(path)):
        serialization.load(path)
    write_json(path, {"version": 2, "value": 1})
    with raises(DataError, f"{path}: file version", found=2, expected="1"):
        serialization.load(path)
    for value in ({"$type": "os.system", "fields": {}}, {"$type": "Failure", "fields": {"x": 1}}, {"$type": "tensor"}):
        write_json(path, {"version": 1, "value": value})
        with raises(DataError, str(path)):
            serialization.load(path)
    for document in ([1], "text", {"version": 1}):
        write_json(path, document)
        with raises(DataError, str(path)):
            serialization.load(path)


def save_for_ever(path: Path) -> None:
    number = 0
    while True:
        number += 1  # few enough elements that torch uses no thread pool, which a fork would not survive
        serialization.save(path, {"number": number, "tensor": torch.full((20_000,), number)})


def test_a_reader_and_a_killed_writer_leave_no_half_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "file", {0}
    serialization.save(path, {"number": 0, "tensor": torch.zeros(20_000, dtype=torch.int64)})
    writer = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
    writer.start()
    try:
        deadline = time.monotonic() + 10
        while len(seen) < 20 and time.monotonic() < deadline:
            loaded = serialization.load(path)
            assert (loaded["tensor"] == loaded["number"]).all()
            seen.add(loaded["number"])
    finally:
        writer.kill()
        writer.join(timeout=10)
    loaded = serialization.load(path)
    assert (loaded["tensor"] == loaded["number"]).all()
    assert len(seen) == 20


@pytest.mark.parametrize("tensor", [torch.tensor(3.5).expand(1), torch.arange(6.0).view(3, 2)[1:2, 1]])
def test_one_element_with_a_stride_of_its_own_travels(tensor: torch.Tensor) -> None:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(serialization.OutOfBand(tensor), protocol=5, buffer_callback=buffers.append)
    assert torch.equal(pickle.loads(payload, buffers=buffers), tensor)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool, torch.uint16, torch.complex64]
)
def test_what_is_written_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(3, 4).to(dtype)
    state = {"odd": torch.ones(3, dtype=torch.uint8), "column": whole[:, 1], "whole": whole, "none": whole[:0]}
    serialization.save(tmp_path / "file", state)
    read = safetensors.torch.load_file(tmp_path / "file")
    assert {name.partition(":")[2] for name in read} == {*state, ""}  # the last is "json"
    for name, tensor in read.items():
        if name != "json":
            expected = state[name.partition(":")[2]]
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def test_saving_copies_no_tensor(tmp_path: Path) -> None:
    """Twice the size, allocated in between, would show as a peak in torch's allocator."""
    state = {"weights": torch.ones(2**20)}
    with torch.profiler.profile(profile_memory=True) as profile:
        serialization.save(tmp_path / "file", state)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) < 2**16


def test_a_dtype_that_files_do_not_have_is_named(tmp_path: Path) -> None:
    with raises(DataError, "a", found=re.compile(r"torch\.complex128$")):
        serialization.save(tmp_path / "file", {"a": torch.zeros(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())
