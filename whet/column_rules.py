# SPDX-License-Identifier: Apache-2.0
"""Checks and operations for the columns of a batch: kinds, numbers of rows, names, equality. Errors name the column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from whet.errors import DataError

ObjectArray = npt.NDArray[np.object_]
Tensors = Mapping[str, torch.Tensor]
Names = str | Iterable[str]
RowIndex = slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any] | torch.Tensor
Column = torch.Tensor | ObjectArray
V = TypeVar("V")


def check_columns(tensors: Tensors, objects: Mapping[str, ObjectArray], batch_size: int | None = None) -> int:
    """Checks the columns of a batch, and returns their number of rows; 0 without columns. `batch_size`, if given, must
    equal this number.

    Raises: DataError for a value that is not a column, or if the numbers of rows differ."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            found = "a single number" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
            raise DataError(f"tensor column {name!r}", found, "a tensor [B, ...]", "pass objects as non_tensors")
    for name, array in objects.items():
        if not isinstance(array, np.ndarray) or array.dtype != object or array.ndim == 0:
            found = f"a {type(array).__name__}" + (f" of {array.dtype}" if isinstance(array, np.ndarray) else "")
            raise DataError(f"column {name!r}", found, "an object array [B]", "make one with DataProto.from_dict")
    if both := sorted(tensors.keys() & objects.keys()):
        raise twice(both)
    columns: dict[str, Any] = {**tensors, **objects}
    sizes = {name: len(column) for name, column in columns.items()}
    if batch_size is not None:
        sizes["the batch"] = batch_size
    if len(set(sizes.values())) > 1:
        raise DataError("rows of columns", sizes, "equal numbers", "give every column one entry for each row")
    return next(iter(sizes.values()), 0)


def twice(names: Sequence[str]) -> DataError:
    """Returns the error for names that both a tensor column and an object column have."""
    return DataError("columns", f"{names} are both a tensor and an object column", change="rename one of each pair")


def check_same_columns(first: Mapping[str, Any], part: Mapping[str, Any], kind: str, number: int) -> None:
    """Checks that part `number` of a concat has the columns of part 0, with equal dtypes and trailing sizes.

    Raises: DataError."""
    if first.keys() != part.keys():
        found = f"it lacks {sorted(first.keys() - part.keys())} and adds {sorted(part.keys() - first.keys())}"
        raise DataError(f"part {number} of concat", found, f"the {kind}s of part 0", "rename or drop those that differ")
    for name, one in first.items():
        other = part[name]
        if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
            found, expected = _shown(other), f"{_shown(one)}, as in part 0, except the number of rows"
            raise DataError(f"{kind} {name!r}: part {number} of concat", found, expected, "pad or convert it first")


def object_array(name: str, values: ObjectArray | Sequence[Any]) -> ObjectArray:
    """Makes an object array with one entry for each of `values`; an object array is returned unchanged."""
    if isinstance(values, np.ndarray):
        return values.astype(object, copy=False)
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        found = f"a {type(values).__name__}"
        raise DataError(f"object column {name!r}", found, "a list or array, one entry a row", "convert it")
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):  # array[:] = values would split nested lists
        array[row] = value
    return array


def tensors_of(columns: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Selects the columns that are tensors."""
    return {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}


def row_numbers(index: RowIndex, rows: int) -> slice | npt.NDArray[np.int64]:
    """Converts `index` to a slice with step > 0, which tensors support, or to valid row numbers.

    Raises: DataError for an invalid index; IndexError for a row that does not exist.
    """
    if isinstance(index, slice):
        return index if index.step is None or index.step > 0 else np.arange(rows)[index].copy()
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        found = f"{type(index).__name__} of {array.dtype} with shape {list(array.shape)}"
        raise DataError("index of rows", found, "an int, a slice, a list of row numbers or a mask [B]", "convert it")
    if array.dtype == bool:
        if len(array) != rows:
            raise DataError("mask entries", len(array), str(rows), "give the mask one entry for each row")
        return np.flatnonzero(array)
    outside = array[(array < -rows) | (array >= rows)]
    if outside.size:
        raise IndexError(f"rows {outside[:8].tolist()} of a batch with {rows} rows")
    return array.astype(np.int64)


Places = Sequence[npt.NDArray[np.int64]]


def joined(parts: Sequence[Any], places: Places | None) -> Column:
    """Joins the parts of a column in order; with `places`, puts row j of part i at row `places[i][j]` of the result."""
    is_tensor = torch.is_tensor(parts[0])
    if places is None:
        return torch.cat(list(parts)) if is_tensor else np.concatenate(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    whole: Any = parts[0].new_empty(shape) if is_tensor else np.empty(shape, dtype=object)
    for part, rows in zip(parts, places, strict=True):
        if is_tensor:
            whole.index_copy_(0, torch.from_numpy(rows).to(whole.device), part)
        else:
            whole[rows] = part
    return whole


def check_places(places: Sequence[Sequence[int]], sizes: Sequence[int]) -> Places:
    """Converts `places` of `joined` to arrays.  Raises: DataError unless they have each row number exactly once."""
    found = [np.asarray(each, dtype=np.int64) for each in places]
    total = sum(sizes)
    if list(map(len, found)) != list(sizes) or not np.array_equal(np.sort(np.concatenate(found)), np.arange(total)):
        found_sizes, expected = [len(each) for each in found], f"each of the row numbers 0 to {total - 1} once"
        raise DataError("places of concat", f"{found_sizes} rows for parts of {list(sizes)}", expected)
    return found


def pick(columns: Mapping[str, V], keys: Names | None, kind: str) -> dict[str, V]:
    """Selects columns by name (None: all) into a new dict.  Raises: DataError for an unknown name."""
    if keys is None:
        return dict(columns)
    names = [keys] if isinstance(keys, str) else list(keys)
    if missing := [name for name in names if name not in columns]:
        raise DataError(kind, f"there is no {missing}", f"some of {list(columns)}", "correct the name")
    return {name: columns[name] for name in names}


def merged(one: Mapping[str, V], other: Mapping[str, V], kind: str) -> dict[str, V]:
    """Merges two dicts into a new one.  Raises: DataError if a name in both has different values."""
    for name in other:
        if name in one and not equal(one[name], other[name]):
            found = f"differs: {_shown(one[name])} and {_shown(other[name])}"
            raise DataError(f"{kind} {name!r}", found, "equal values in both", "pop or rename one of them")
    return {**one, **other}


def equal(one: Any, other: Any, above: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Tells whether two nested values have equal types, dtypes, shapes and values; NaN equals NaN.

    `above` has the ids of the pairs that contain this pair; it ends the recursion of values that contain themselves."""
    if one is other or (id(one), id(other)) in above:
        return True
    if type(one) is not type(other):
        return False
    above = above | {(id(one), id(other))}
    if isinstance(one, torch.Tensor | np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if isinstance(one, np.ndarray) and one.dtype == object:
            return all(equal(*each, above) for each in zip(one.flat, other.flat, strict=True))
        other = other.to(one.device) if isinstance(one, torch.Tensor) else other
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key], above) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(*each, above) for each in zip(one, other, strict=True))
    return bool(one == other) or bool(one != one and other != other)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
