# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.raising import raises
from whet import column_rules
from whet.errors import DataError
from whet.plugins.migration.protocol import (
    DataProto,
    DataProtoItem,
    deserialize_single_tensor,
    deserialize_tensordict,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    serialize_tensordict,
    unpad_dataproto,
)
from whet.types import Failure


def batch_of(rows: int) -> DataProto:
    """Row i holds 10 i, 10 i + 1 in `ids`, i in `uid`, i / 2 in `score`, and [i] in `tags`."""
    return DataProto.from_dict(
        {
            "ids": torch.arange(rows)[:, None] * 10 + torch.arange(2),
            "uid": torch.arange(rows),
            "score": torch.arange(rows).to(torch.bfloat16) / 2,
        },
        {"tags": [[row] for row in range(rows)]},
        {"temperature": 0.7},
    )


def uids(data: DataProto) -> list[int]:
    """The rows that `data` holds; every column must agree on them."""
    result: list[int] = data["uid"].tolist()
    assert data["ids"].tolist() == [[10 * uid, 10 * uid + 1] for uid in result]
    assert data["score"].tolist() == [uid / 2 for uid in result]
    assert data["tags"].tolist() == [[uid] for uid in result]
    return result


def assert_same(one: DataProto, other: DataProto) -> None:
    names = one.keys()
    assert other.keys() == names
    assert len(one) == len(other)
    assert all(column_rules.equal(one[name], other[name]) for name in names)
    assert column_rules.equal(one.meta_info, other.meta_info)
    assert (one.batch is None) == (other.batch is None)


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# Construction and reading


def test_from_dict_keeps_tensors_and_objects_as_they_are() -> None:
    ids, nested = torch.zeros(2, 3), [[1, 2], [3, 4]]
    data = DataProto.from_dict({"ids": ids}, {"lists": nested, "names": np.array(["a", "b"])}, {"k": 1})
    assert data["ids"] is ids
    assert data["lists"].shape == (2,)
    assert data["lists"][1] is nested[1]
    assert data["names"].dtype == object
    assert data["names"].tolist() == ["a", "b"]
    assert data.batch is not None
    assert data.batch.batch_size == (2,)
    assert data.meta_info == {"k": 1}
    assert data.keys() == ["ids", "lists", "names"]
    assert "lists" in data
    assert "other" not in data


def test_from_single_dict_tells_the_kinds_apart() -> None:
    data = DataProto.from_single_dict({"a": [1, 2], "b": torch.tensor([3, 4]), "c": np.array([5, 6])}, {"k": 1})
    assert data.batch is not None
    assert list(data.batch.keys()) == ["b"]
    assert data.non_tensor_batch["a"].tolist() == [1, 2]
    assert data.non_tensor_batch["c"].tolist() == [5, 6]
    assert data.meta_info == {"k": 1}


def test_containers_of_the_result_are_its_own() -> None:
    meta, data = {"k": 1}, batch_of(2)
    DataProto.from_dict(meta_info=meta).meta_info["k"] = 2
    assert meta == {"k": 1}
    for other in (data.select(), data[:], data.to("cpu"), copy.copy(data), DataProto.concat([data])):
        assert other.batch is not None
        other.batch["new"] = torch.zeros(2)
        other.non_tensor_batch["more"] = np.array([1, 2], dtype=object)
        other.meta_info["temperature"] = 2.0
        assert other["ids"] is data["ids"] or shares_storage(other["ids"], data["ids"])
    assert data.keys() == ["ids", "uid", "score", "tags"]
    assert data.meta_info == {"temperature": 0.7}


def test_column_sizes_that_disagree_are_named() -> None:
    with raises(DataError, "rows of columns", found={"a": 2, "b": 3, "c": 4}):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3, 1)}, {"c": [1] * 4})
    with raises(DataError, "rows of columns", found={"a": 3, "the batch": 2}):
        DataProto(TensorDict({}, [2]), {"a": np.array([1, 2, 3], dtype=object)})
    with raises(DataError, "batch size", found=[2, 3]):
        DataProto(TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))


def test_what_is_not_a_column_is_refused() -> None:
    with raises(DataError, "tensor column 'a'"):
        DataProto.from_dict({"a": torch.tensor(1)})
    with raises(DataError, "tensor column 'a'", found="a list"):
        DataProto.from_dict({"a": [1, 2]})  # type: ignore[dict-item]
    with raises(DataError, "tensor column 'a'", found="a TensorDict"):
        DataProto(TensorDict({"a": {"b": torch.zeros(2)}}, [2]))
    with raises(DataError, "object column 'a'", found="a str"):
        DataProto.from_dict(non_tensors={"a": "text"})
    with raises(DataError, "column 'a'", found="a ndarray of int64"):
        DataProto(None, {"a": np.array([1, 2])})
    with raises(DataError, "columns", found=re.compile(r"^\['a'\]")):
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": [1]})
    with raises(DataError, "column 'a'", expected="one of ['b']"):
        DataProto.from_dict({"b": torch.zeros(1)})["a"]


def test_int_gives_a_row_without_batch_dimension() -> None:
    row = batch_of(3)[-1]
    assert isinstance(row, DataProtoItem)
    assert row.batch is not None
    assert row.batch["ids"].tolist() == [20, 21]
    assert row.batch.batch_size == ()
    assert row.non_tensor_batch == {"tags": [2]}
    assert row.meta_info == {"temperature": 0.7}
    assert [row.non_tensor_batch["tags"] for row in batch_of(3)] == [[0], [1], [2]]
    with pytest.raises(IndexError, match="row 3 of a DataProto with 3 rows"):
        batch_of(3)[3]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(None, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(-2, None), [2, 3]),
        (slice(9, None), []),
        ([3, 0, 0, -1], [3, 0, 0, 3]),
        ([], []),
        ([True, False, True, False], [0, 2]),
        (np.array([2, 1], dtype=np.int32), [2, 1]),
        (np.array([False, False, True, True]), [2, 3]),
        (torch.tensor([1, 1]), [1, 1]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=str,
)
def test_indexing_by_slice_row_numbers_and_mask(index: Any, rows: list[int]) -> None:
    data = batch_of(4)[index]
    assert uids(data) == rows
    assert data.meta_info == {"temperature": 0.7}
    assert data["score"].dtype == torch.bfloat16


def test_slices_are_views() -> None:
    data = batch_of(4)
    part = data[1:3]
    assert shares_storage(part["ids"], data["ids"])
    assert np.shares_memory(part["tags"], data["tags"])
    assert not shares_storage(data[[1, 2]]["ids"], data["ids"])


def test_bad_indices_say_what_is_wrong() -> None:
    data = batch_of(3)
    with pytest.raises(IndexError, match=r"rows \[3, -4\] of a batch with 3 rows"):
        data[[0, 3, -4]]
    with raises(DataError, "mask entries", found=2, expected="3"):
        data[[True, False]]
    with raises(DataError, "index of rows", found=re.compile("float64")):
        data[[0.0, 1.0]]  # type: ignore[list-item]
    with raises(DataError, "index of rows", found=re.compile(r"\[1, 2\]$")):
        data[torch.tensor([[0, 1]])]


# Columns


def test_select_and_pop_by_kind() -> None:
    data = batch_of(2)
    some = data.select(batch_keys=["uid", "ids"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert some.keys() == ["uid", "ids"]
    assert some.meta_info == {}
    assert data.select(non_tensor_batch_keys="tags").keys() == data.keys()
    popped, rest = data.pop(batch_keys=["ids"], meta_info_keys=["temperature"])
    assert popped.keys() == ["ids"]
    assert popped.meta_info == {"temperature": 0.7}
    assert rest.keys() == ["uid", "score", "tags"]
    assert rest.meta_info == {}
    assert popped["ids"] is data["ids"]
    assert data.keys() == ["ids", "uid", "score", "tags"]
    with raises(
        DataError, "tensor column", found=re.compile(r"\['tags'\]$"), expected="some of ['ids', 'uid', 'score']"
    ):
        data.select(batch_keys=["tags"])


def test_rows_are_known_without_columns() -> None:
    data = batch_of(3)
    for bare in (data.select([], []), data.select([], []).repeat(2)[:3], data.pop(("ids", "uid", "score"), "tags")[1]):
        assert len(bare) == 3
        assert bare.keys() == []
    assert data.select(batch_keys=[]).batch is None
    with raises(DataError, "rows of columns", found={"a": 2, "the batch": 3}):
        data.select([], []).with_columns(a=[1, 2])


def test_rename_keeps_values_and_order() -> None:
    data = batch_of(2)
    renamed = data.rename(["ids", "tags"], ["input_ids", "labels"])
    assert renamed.keys() == ["input_ids", "uid", "score", "labels"]
    assert renamed["input_ids"] is data["ids"]
    assert data.rename("ids", "x").keys()[0] == "x"
    swapped = data.rename(["ids", "uid"], ["uid", "ids"])
    assert swapped["ids"] is data["uid"]
    with raises(DataError, "rename", found=re.compile(r"\['uid'\]$")):
        data.rename("ids", "uid")
    with raises(DataError, "rename", found=re.compile(r"\['x'\]$")):
        data.rename("x", "y")
    with raises(DataError, "rename", found="['ids'] to ['x', 'y']"):
        data.rename("ids", ["x", "y"])


def test_union_takes_equal_duplicates_and_names_conflicts() -> None:
    one = DataProto.from_dict(
        {"a": torch.tensor([1.0, float("nan")])}, {"o": [{"x": float("nan")}, np.array([1])]}, {"k": [1, 2]}
    )
    other = DataProto.from_dict(
        {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([3, 4])},
        {"o": [{"x": float("nan")}, np.array([1])]},
        {"k": [1, 2], "l": None},
    )
    both = one.union(other)
    assert both.keys() == ["a", "b", "o"]
    assert both["b"].tolist() == [3, 4]
    assert both.meta_info == {"k": [1, 2], "l": None}
    assert one.keys() == ["a", "o"]
    conflicting: dict[str, Any] = {
        "a": torch.tensor([1.0, 2.0]),  # value
        "b": torch.tensor([3.0, 4.0]),  # dtype
        "o": [{"x": 1.0}, np.array([1])],
    }
    for name, column in conflicting.items():
        with raises(DataError, f"column '{name}'"):
            both.union(DataProto.from_single_dict({name: column}))
    with raises(DataError, "meta_info 'k'", found=re.compile(r" \[1, 2\] and \[1\]$")):
        one.union(DataProto.from_dict(meta_info={"k": [1]}))
    with raises(
        DataError, "union", found="3 rows (columns ['c'])", expected=re.compile(r"^the 2 rows \(columns \['a', 'o'\]\)")
    ):
        one.union(DataProto.from_dict({"c": torch.zeros(3)}))
    with raises(DataError, "columns", found=re.compile(r"^\['o'\]")):
        one.union(DataProto.from_dict({"o": torch.zeros(2)}))


def test_union_with_a_batch_without_columns() -> None:
    data, blank = batch_of(2), DataProto.from_dict(meta_info={"k": 1})
    assert len(blank) == 0
    assert uids(blank.union(data)) == uids(data.union(blank)) == [0, 1]
    assert data.union(blank).meta_info == {"temperature": 0.7, "k": 1}


def test_with_columns_adds_and_replaces() -> None:
    data = batch_of(2)
    more = data.with_columns(ids=torch.zeros(2), advantages=torch.ones(2, 3), score=["a", "b"])
    assert more.keys() == ["uid", "ids", "advantages", "tags", "score"]
    assert more["ids"].tolist() == [0.0, 0.0]
    assert more["score"].tolist() == ["a", "b"]
    assert more.meta_info == {"temperature": 0.7}
    assert uids(data) == [0, 1]
    with raises(DataError, "rows of columns", found={"values": 3, "the batch": 2}):
        data.with_columns(values=torch.zeros(3))


# Rows


def test_chunk_and_split() -> None:
    data = batch_of(6)
    assert [uids(part) for part in data.chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [uids(part) for part in data.split(4)] == [[0, 1, 2, 3], [4, 5]]
    assert [uids(part) for part in data.split([1, 0, 5])] == [[0], [], [1, 2, 3, 4, 5]]
    assert all(shares_storage(part["ids"], data["ids"]) for part in data.chunk(2))
    with raises(DataError, "chunks", found=4, expected=re.compile("6")):
        data.chunk(4)
    with raises(DataError, "split_size", found=[1, 2], expected=re.compile("6.*3")):
        data.split([1, 2])
    with raises(DataError, "split_size", found=0):
        data.split(0)


@given(rows=st.integers(0, 9), size=st.integers(1, 4))
def test_concat_undoes_split(rows: int, size: int) -> None:
    data = batch_of(rows)
    assert_same(DataProto.concat(data.split(size)), data)


def test_concat_puts_rows_at_their_places() -> None:
    data = batch_of(7)
    places = [[4, 0], [], [6, 1, 2], [3, 5]]
    parts = [data[rows] for rows in places]
    assert_same(DataProto.concat(parts, places), data)
    assert_same(DataProto.concat([data[[2, 0, 1, 3, 4, 5, 6]]], [[2, 0, 1, 3, 4, 5, 6]]), data)
    for wrong in ([[4, 0], [], [6, 1, 2], [3, 3]], [[4], [0], [6, 1, 2], [3, 5]], [[4, 0], [], [7, 1, 2], [3, 5]]):
        with raises(DataError, "places of concat", expected=re.compile("0 to 6")):
            DataProto.concat(parts, wrong)


def test_gradients_pass_through_rows() -> None:
    needs_gradient = DataProto.from_dict({"x": torch.ones(4, 2, requires_grad=True)})
    assert needs_gradient[[3, 1]]["x"].requires_grad
    assert DataProto.concat([needs_gradient[[0, 2]], needs_gradient[[1, 3]]], [[0, 2], [1, 3]])["x"].requires_grad


def test_concat_meta_info_and_conflicts() -> None:
    one, other = batch_of(2), batch_of(1)
    joined = DataProto.concat(
        [
            one.select(meta_info_keys=[]),
            other,
            DataProto.from_dict({name: one[name] for name in ("ids", "uid", "score")}, {"tags": one["tags"]}, {"k": 1}),
        ]
    )
    assert uids(joined) == [0, 1, 0, 0, 1]
    assert joined.meta_info == {"temperature": 0.7, "k": 1}
    other.meta_info["temperature"] = 1.0
    with raises(DataError, "meta_info 'temperature'"):
        DataProto.concat([one, other])
    with raises(DataError, "part 1 of concat", found=re.compile(r"\['ids'\].*\['x'\]$")):
        DataProto.concat([one, one.rename("ids", "x")])
    with raises(DataError, "part 1 of concat", found=re.compile(r"\['tags'\].*\[\]$")):
        DataProto.concat([one, one.pop(non_tensor_batch_keys="tags")[1]])
    with raises(
        DataError,
        "tensor column 'ids': part 1 of concat",
        found="torch.int64 [2, 3]",
        expected=re.compile(r"^torch\.int64 \[2, 2\]"),
    ):
        DataProto.concat([one, one.with_columns(ids=torch.zeros(2, 3, dtype=torch.int64))])
    with raises(
        DataError, "tensor column 'ids': part 1 of concat", found=re.compile("float32"), expected=re.compile("int64")
    ):
        DataProto.concat([one, one.with_columns(ids=torch.zeros(2, 2))])
    with raises(DataError, "concat", found="no parts"):
        DataProto.concat([])


def test_repeat_and_reorder() -> None:
    data = batch_of(3)
    assert uids(data.repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert uids(data.repeat(repeat_times=2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    order = torch.tensor([2, 0, 1])
    assert uids(data.reorder(order)) == [2, 0, 1]
    assert uids(data.reorder(order).reorder(order.argsort())) == [0, 1, 2]
    for indices in ([0, 1], [0, 1, 1], [0, 1, 2, 0], [True, True, False]):
        with raises(DataError, "reorder", expected=re.compile("3")):
            data.reorder(indices)


def test_make_iterator_in_order_and_shuffled() -> None:
    data = batch_of(5)
    assert [uids(part) for part in data.make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [4]] * 2
    state = torch.random.get_rng_state()
    shuffled = [uids(part) for part in data.make_iterator(2, epochs=3, seed=1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [len(part) for part in shuffled] == [2, 2, 1] * 3
    epochs = [[uid for part in shuffled[start : start + 3] for uid in part] for start in (0, 3, 6)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    torch.rand(3)
    assert [uids(part) for part in data.make_iterator(2, epochs=3, seed=1)] == shuffled
    assert [uids(part) for part in data.make_iterator(2, epochs=3, seed=2)] != shuffled
    with raises(DataError, "mini_batch_size", found=0):
        next(data.make_iterator(0))


@given(rows=st.integers(0, 7), divisor=st.integers(1, 10))
def test_unpad_undoes_pad(rows: int, divisor: int) -> None:
    data = batch_of(rows)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert uids(padded) == [row % rows for row in range(rows + pad_size)]
    assert_same(unpad_dataproto(padded, pad_size), data)


def test_pad_and_unpad_bounds() -> None:
    with raises(DataError, "pad_size", found=3, expected=re.compile("^0 to 2")):
        batch_of(2).unpad(3)
    with raises(DataError, "size_divisor", found=0):
        batch_of(2).pad_to_divisor(0)


def test_fold_and_unfold() -> None:
    data = batch_of(6)
    folded = data.fold_batch_dim(2)
    assert len(folded) == 2
    assert folded["uid"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded["ids"].shape == (2, 3, 2)
    assert folded["tags"].tolist() == [[[0], [1], [2]], [[3], [4], [5]]]
    assert shares_storage(folded["ids"], data["ids"])
    assert_same(folded.unfold_batch_dim(), data)
    assert_same(batch_of(0).fold_batch_dim(3).unfold_batch_dim(), batch_of(0))
    with raises(DataError, "new_batch_size", found=4, expected=re.compile("6")):
        data.fold_batch_dim(4)
    with raises(DataError, "unfold_batch_dim", found=re.compile(r"'ids': \(6, 2\), 'uid': \(6,\)")):
        data.unfold_batch_dim()


def test_every_operation_without_rows_and_without_tensors() -> None:
    objects_only = DataProto.from_dict(non_tensors={"tags": [[0], [1]]})
    assert objects_only.batch is None
    assert len(objects_only) == 2
    assert objects_only[[1]]["tags"].tolist() == [[1]]
    assert objects_only.repeat(2)["tags"].tolist() == [[0], [0], [1], [1]]
    assert objects_only[1].batch is None
    for data in (batch_of(0), objects_only[:0], DataProto()):
        assert len(data) == 0
        assert list(data) == []
        for same in (
            data[[]],
            data[torch.zeros(0, dtype=torch.bool)],
            data.repeat(3),
            data.reorder([]),
            data.pad_to_divisor(4)[0],
            DataProto.concat(data.chunk(2)),
            next(data.make_iterator(2, seed=0)),
            data.to("cpu"),
            pickle.loads(pickle.dumps(data)),
        ):
            assert_same(same, data)


def test_repr_shows_columns_and_sizes() -> None:
    assert repr(batch_of(3).select(["ids"])) == (
        "DataProto(rows=3, columns=[ids: int64[3, 2], tags: object[3]], meta_info=['temperature'])"
    )


# Devices, processes, files


def wide_batch() -> DataProto:
    pixels = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    same = {"pixels": pixels}
    return DataProto.from_dict(
        {
            "bf16": torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
            "mask": torch.tensor([True, False, True, True]),
            "ids": torch.arange(12).reshape(3, 4).T,  # not contiguous
            "one": torch.tensor([[7.0]]).expand(4, 5),
            "none": torch.zeros(4, 0),
        },
        {"inputs": [same, same, {"pixels": pixels[1:]}, None], "error": [None, Failure("tool", "é"), None, None]},
        {"names": ("a", "b"), "scale": torch.tensor(2.0), "rate": np.arange(3.0), "nan": float("nan")},
    )


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_in_band_gives_equal_writable_columns(protocol: int) -> None:
    data = wide_batch()
    loaded = pickle.loads(pickle.dumps(data, protocol=protocol))
    assert_same(loaded, data)
    loaded["bf16"][0, 0] = 3
    assert loaded["bf16"][0, 0] == 3
    assert loaded["inputs"][0] is loaded["inputs"][1]


@pytest.mark.parametrize("pickler", ["pickle", "cloudpickle"])  # Ray pickles with the latter
def test_pickle_out_of_band_copies_no_tensor(pickler: str) -> None:
    dumps = pytest.importorskip(pickler).dumps
    data = DataProto.from_dict(
        {"big": torch.ones(64, 4096, dtype=torch.bfloat16), "ids": torch.arange(64 * 512).reshape(64, 512)},
        {"inputs": [{"pixels": torch.rand(512)} for _ in range(64)]},
    )
    buffers: list[pickle.PickleBuffer] = []
    stream = dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 20_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 64 * 4096 * 2 + 64 * 512 * 8 + 64 * 512 * 4
    loaded = pickle.loads(stream, buffers=buffers)
    assert_same(loaded, data)
    for column in ("big", "ids"):  # in one process the buffers are the columns' own memory
        assert loaded[column].data_ptr() == data[column].data_ptr()
    assert loaded["inputs"][3]["pixels"].data_ptr() == data["inputs"][3]["pixels"].data_ptr()


def test_pickle_loads_from_read_only_memory_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    data = wide_batch()
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    stored = [bytes(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(stream, buffers=stored)
    assert_same(loaded, data)
    assert loaded["bf16"].data_ptr() in {np.frombuffer(octets, np.uint8).ctypes.data for octets in stored if octets}
    assert not recwarn.list


def test_pickle_of_a_slice_holds_the_slice_only() -> None:
    whole = DataProto.from_dict({"big": torch.zeros(1000, 100)}, {"views": [torch.zeros(10_000)[:2]] * 1000})
    assert len(pickle.dumps(whole[:2])) < 2000
    assert_same(pickle.loads(pickle.dumps(whole[998:])), whole[998:])


def test_pickle_leaves_the_graph_behind() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    loaded = pickle.loads(pickle.dumps(DataProto.from_dict({"log_probs": weight * 2})))
    assert loaded["log_probs"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert not loaded["log_probs"].requires_grad


def test_copy_shares_and_deepcopy_does_not() -> None:
    data = batch_of(2)
    assert copy.copy(data)["ids"] is data["ids"]
    other = copy.deepcopy(data)
    other["ids"][0, 0] = 99
    other["tags"][0].append(1)
    other.meta_info["temperature"] = 1.0
    assert uids(data) == [0, 1]
    assert data.meta_info == {"temperature": 0.7}


def test_save_and_load(tmp_path: Path) -> None:
    data, path = wide_batch(), tmp_path / "batch.safetensors"
    batch_of(2).save(path)
    data.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["batch.safetensors"]
    loaded = DataProto.load(path)
    assert_same(loaded, data)
    assert loaded["error"][1] == Failure("tool", "é")
    for other in (DataProto(), batch_of(0), batch_of(3).select([], []), batch_of(4).fold_batch_dim(2)):
        other.save(str(path))
        assert_same(DataProto.load(str(path)), other)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    batch_of(2).save(path)
    bad = batch_of(3).with_columns(images=[None, {"image": object()}, None])
    with raises(DataError, "non_tensor_batch.images[1].image", found="a builtins.object"):
        bad.save(path)
    assert uids(DataProto.load(path)) == [0, 1]
    assert len(list(tmp_path.iterdir())) == 1


def test_load_of_another_file(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    with pytest.raises(FileNotFoundError):
        DataProto.load(path)
    path.write_bytes(pickle.dumps(batch_of(2)))
    with raises(DataError, str(path)):
        DataProto.load(path)
    batch_of(2).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with raises(DataError, str(path)):
        DataProto.load(path)


TENSOR = {"$type": "tensor", "name": "t"}
OBJECTS = {"$type": "objects", "shape": [2], "items": ["a", "b"]}
WHOLE = {"batch": {"x": TENSOR}, "non_tensor_batch": {"o": OBJECTS}, "meta_info": {"a": 1}, "rows": 2}
NONE = {"batch": {}, "non_tensor_batch": {}}
LIES: list[Any] = [
    *({name: value for name, value in WHOLE.items() if name != left} for left in WHOLE),
    *(
        {**WHOLE, "batch": each}
        for each in ([1], "text", None, 5, {"x": 5}, {"x": [1, 2]}, {"x": "t"}, OBJECTS, TENSOR)
    ),
    *(
        {**WHOLE, "non_tensor_batch": each}
        for each in ([1], {"o": 5}, {"o": ["a", "b"]}, {"x": OBJECTS}, {"o": TENSOR})
    ),
    *({**WHOLE, "meta_info": each} for each in ([1], "text", None, 5)),
    *({**WHOLE, **NONE, "rows": each} for each in (-1, "two", None, 1.5, [2])),
    {**WHOLE, "batch": {"$type": "dict", "items": [[5, TENSOR]]}},
    {**WHOLE, "batch": {"$type": "dict", "items": [[1, 2, 3]]}},
    {**WHOLE, "batch": {"x": {"$type": "tensor", "name": "gone"}}},
    {**WHOLE, "batch": {"x": {"$type": "tensor"}}},
    {**WHOLE, "non_tensor_batch": {"o": {**OBJECTS, "shape": [3]}}},
    {**WHOLE, "non_tensor_batch": {"o": {**OBJECTS, "shape": [1e300]}}},
    {**WHOLE, "non_tensor_batch": {"o": {**OBJECTS, "shape": [10**30]}}},
    {**WHOLE, "non_tensor_batch": {"o": {**OBJECTS, "items": 5}}},
    {**WHOLE, "meta_info": {"a": {"$type": "Prompt", "fields": {"no": 1}}}},
    {**WHOLE, "meta_info": {"a": {"$type": "Prompt", "fields": [1]}}},
    {**WHOLE, "meta_info": {"a": {"$type": "os.system", "fields": {}}}},
    {**WHOLE, "meta_info": {"a": {"$type": ["tuple"]}}},
    {**WHOLE, "meta_info": {"a": {"$type": "tuple", "items": 5}}},
    {**WHOLE, "meta_info": {"a": {"$type": "bytes", "name": 5}}},
    [WHOLE],
    "text",
    None,
    5,
]


def write_lie(path: Path, document: bytes) -> None:
    tensors = {"t": torch.zeros(2, 3), "json": torch.frombuffer(bytearray(document), dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize("value", LIES, ids=range(len(LIES)))
def test_load_of_a_file_that_lies(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    write_lie(path, json.dumps({"version": 1, "value": value}).encode())
    with pytest.raises(DataError) as refused:
        DataProto.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "document",
    [
        b'{"version": 1}',
        b"[]",
        b"5",
        b"\xff",
        b'{"version": 1, "value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"version": 1, "value": ' + b"[" * 600 + b"]" * 600 + b"}",
        b'{"version": 1, "value": ' + b"9" * 5000 + b"}",
        b'{"version": 1, "value": {"$type": "objects", "items": [1], "shape": [1e400]}}',
    ],
    ids=range(8),
)
def test_load_of_a_document_that_lies(document: bytes, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    write_lie(path, document)
    with pytest.raises(DataError) as refused:
        DataProto.load(path)
    assert str(path) in str(refused.value)


def test_load_knows_parts_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    turned = dict(reversed(WHOLE.items()))
    write_lie(path, json.dumps({"version": 1, "value": turned}).encode())
    found = DataProto.load(path)
    assert (len(found), found.keys(), found.meta_info) == (2, ["x", "o"], {"a": 1})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA and --on-device")
def test_on_a_device() -> None:
    data = batch_of(3)
    there = data.to("cuda")
    assert there["ids"].device.type == "cuda"
    assert copy.deepcopy(there)["ids"].device.type == "cuda"
    assert uids(there[[2, 0]]) == [2, 0]
    assert uids(there[torch.tensor([True, False, True], device="cuda")]) == [0, 2]
    assert_same(pickle.loads(pickle.dumps(there)), data)
    assert_same(there.union(data).to("cpu"), data)


# Names and arguments of verl


class Own(DataProto):
    """A subclass without anything of its own."""


def test_every_operation_of_a_subclass_returns_the_subclass(tmp_path: Path) -> None:
    data = Own.from_single_dict({"x": torch.arange(4), "o": ["a", "b", "c", "d"]}, {"k": 1})
    data.save_to_disk(tmp_path / "data.pt")
    made = [
        *(data, data[1:], data[[0]], data.select(), *data.pop("x"), data.rename("x", "y"), data.union(data), *data),
        *(
            data.with_columns(z=[1, 2, 3, 4]),
            *data.chunk(2),
            data.repeat(2),
            data.reorder([3, 2, 1, 0]),
            data.to("cpu"),
        ),
        *(data.fold_batch_dim(2), Own.concat([data, data]), Own.concat([data]), pickle.loads(pickle.dumps(data))),
        *(copy.copy(data), copy.deepcopy(data), data.sample_level_repeat([1, 0, 0, 2]), data.unfold_column_chunks(2)),
        *(
            Own.load_from_disk(tmp_path / "data.pt"),
            Own.from_tensordict(data.to_tensordict()),
            next(data.make_iterator(2)),
        ),
    ]
    assert {type(each) for each in made} == {Own, DataProtoItem}
    assert type(DataProto.load_from_disk(tmp_path / "data.pt")) is DataProto
    assert_same(Own.load_from_disk(tmp_path / "data.pt"), data)


def test_the_batch_dimensions_of_verl() -> None:
    obs = {"obs": torch.zeros(4, 2, 3)}
    assert DataProto.from_dict(obs, num_batch_dims=1).batch.batch_size == (4,)  # type: ignore[union-attr]
    for dims in (0, 2, 3):
        with raises(DataError, "num_batch_dims", found=dims, expected=re.compile("^1")):
            DataProto.from_dict(obs, num_batch_dims=dims)
    assert len(DataProto(None, None, {"info": 1})) == 0  # type: ignore[arg-type]
    assert DataProto(TensorDict({}, [2]), None).non_tensor_batch == {}  # type: ignore[arg-type]


def test_arguments_of_verl() -> None:
    data = batch_of(3)
    assert uids(data.repeat()) == [0, 0, 1, 1, 2, 2]
    assert_same(data.select(deepcopy=True), data)
    assert data.select(deepcopy=True)["ids"].data_ptr() != data["ids"].data_ptr()
    assert_same(DataProto.concat(data=[data, data]), data.repeat(2, interleave=False))
    assert DataProto(data.batch, meta_info=None).meta_info == {}  # type: ignore[arg-type]


def test_auto_padding_lets_chunks_differ_by_a_row() -> None:
    rows = {"x": torch.arange(5), "o": list("abcde")}
    with raises(DataError, "chunks", found=3, expected=re.compile("5")):
        DataProto.from_single_dict(rows).chunk(3)
    parts = DataProto.from_single_dict(rows, {"k": 1}, auto_padding=True).chunk(3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["o"].tolist() for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert parts[0].meta_info == {"k": 1, "auto_padding": True}
    assert [len(part) for part in DataProto.from_dict({"x": torch.arange(2)}, auto_padding=True).chunk(3)] == [1, 1, 0]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_sample_level_repeat(kind: Any) -> None:
    data = batch_of(3)
    assert uids(data.sample_level_repeat(kind([3, 0, 2]))) == [0, 0, 0, 2, 2]
    assert data.sample_level_repeat(kind([0, 0, 0])).meta_info == data.meta_info
    for wrong in ([1, 2], [1, 2, -1], [1.0, 2.0, 3.0]):
        with raises(DataError, "repeat_times", expected=re.compile("3")):
            data.sample_level_repeat(kind(wrong))


def test_unfold_column_chunks() -> None:
    wide = torch.arange(24).reshape(3, 4, 2)
    labels = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    data = DataProto.from_dict({"wide": wide, "ids": torch.tensor([7, 8, 9])}, {"labels": labels}, {"name": "abc"})
    split = data.unfold_column_chunks(2, split_keys=["wide", "labels"])
    assert split["wide"].tolist() == [row.tolist() for pair in wide for row in (pair[:2], pair[2:])]
    assert split["ids"].tolist() == [7, 7, 8, 8, 9, 9]
    assert split["labels"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"], ["c1"], ["c2"]]
    assert split.meta_info == {"name": "abc"}
    assert_same(data.unfold_column_chunks(2), data.repeat(2))
    assert data.unfold_column_chunks(2, "labels")["wide"].tolist() == wide.repeat_interleave(2, dim=0).tolist()
    for keys, size in (("wide", [4]), ("labels", [2]), ("ids", [])):
        with raises(DataError, f"sizes of column '{keys}'", found=size, expected=re.compile("3")):
            data.unfold_column_chunks(3, keys)


def test_a_tensordict_and_back() -> None:
    data = DataProto.from_dict(
        {"obs": torch.tensor([1, 2, 3])},
        {
            "labels": ["a", "b", "c"],
            "same": [None, None, None],
            "turn_scores": [[], [0.5, 0.8], [0.9]],
            "info": [{"acc": 1.0}, {"acc": 0.0}, {}],
            "turns": np.array([1, 2, 3]),
            "prompt": [[{"role": "user"}], [], [{"role": "user"}, {"role": "assistant"}]],
        },
        {"name": "abc", "steps": [1, 2], "none": None},
    )
    made = data.to_tensordict()
    assert made.batch_size == (3,)
    assert made["obs"] is data["obs"]
    assert made["labels"] == ["a", "b", "c"]
    assert [list(each) for each in made["turn_scores"]] == [[], [0.5, 0.8], [0.9]]
    assert dict(made["info"][0]) == {"acc": 1.0}
    assert made["name"] == "abc"
    assert_same(DataProto.from_tensordict(made), data)
    assert DataProto.from_tensordict(made, {"name": "new"}).meta_info["name"] == "new"
    assert [each["labels"] for each in made] == ["a", "b", "c"]  # rows of the TensorDict

    theirs = TensorDict({"x": torch.arange(2)}, [2])
    theirs["labels"] = NonTensorStack.from_list([NonTensorData(each) for each in ("a", "b")])
    theirs["name"] = NonTensorData("abc", batch_size=[2])
    assert DataProto.from_tensordict(theirs)["labels"].tolist() == ["a", "b"]
    assert DataProto.from_tensordict(theirs).meta_info == {"name": "abc"}
    for bare in (batch_of(3).select([], []), DataProto.from_dict(non_tensors={"o": [1, [2]]}), DataProto()):
        assert_same(DataProto.from_tensordict(bare.to_tensordict()), bare)

    with raises(DataError, "meta_info", found=re.compile(r"^\['x'\]")):
        DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1}).to_tensordict()
    with raises(DataError, "batch size", found=[2, 3]):
        DataProto.from_tensordict(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))
    with raises(DataError, "TensorDict", found="entries ['inner']"):
        DataProto.from_tensordict(TensorDict({"inner": TensorDict({"x": torch.zeros(2)}, [2])}, [2]))


DTYPES = [torch.float32, torch.float64, torch.int32, torch.bool, torch.bfloat16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_as_bytes_and_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 4.0]]).to(dtype)
    name, shape, octets = serialize_single_tensor(tensor.t())  # not contiguous
    assert (name, shape, len(octets)) == (str(dtype)[6:], (3, 2), 6 * dtype.itemsize)
    back = deserialize_single_tensor((name, shape, octets))
    assert back.dtype == dtype
    assert back.float().tolist() == tensor.t().float().tolist()
    assert serialize_single_tensor(torch.tensor([258], dtype=torch.int32))[2].tolist() == [2, 1, 0, 0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensordict_as_bytes_and_back() -> None:
    pieces = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0).reshape(1, 4)]
    batch = TensorDict(
        {"flat": torch.arange(4).reshape(2, 2), "nested": torch.nested.as_nested_tensor(pieces)}, [2], device="cpu"
    )
    size, device, items = serialize_tensordict(batch)
    assert (size, device, list(items)) == ((2,), "cpu", ["flat", "nested"])
    assert (items["flat"][:2], items["nested"][0]) == (("int64", (2, 2)), "strided")
    back = deserialize_tensordict((size, device, items))
    assert (back.batch_size, back.device) == (batch.batch_size, batch.device)
    assert back["flat"].tolist() == [[0, 1], [2, 3]]
    assert [each.tolist() for each in back["nested"].unbind()] == [each.tolist() for each in pieces]


def test_union_of_columns_that_contain_themselves() -> None:
    def circular() -> DataProto:
        column = np.array([None, 1], dtype=object)
        column[0] = column
        return DataProto(None, {"o": column})

    data = circular()
    assert data.union(data)["o"] is data["o"]
    assert data.union(circular()).keys() == ["o"]
    with raises(DataError, "column 'o'"):
        data.union(DataProto.from_dict(non_tensors={"o": [None, 1]}))
