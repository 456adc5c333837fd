# SPDX-License-Identifier: Apache-2.0
"""DataProto: a batch in the form of verl's protocol."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from whet import column_rules as rules, keyed, serialization
from whet.batch import Batch
from whet.column_rules import Names, ObjectArray, RowIndex, tensors_of
from whet.errors import DataError, of_extra
from whet.serialization import pack_tensor, unpack_tensor

if TYPE_CHECKING:  # a TensorDict is made where verl's form is asked for: importing it takes 2.5 CPU seconds
    from tensordict import TensorDict, TensorDictBase

_AUTO_PADDING = "auto_padding"  # in meta_info
PackedDict = tuple[tuple[int, ...], str | None, dict[str, Any]]  # batch size, device, tensors
_PARTS = ("batch", "non_tensor_batch", "meta_info", "rows")  # of a file, in the order of `_from_parts`


@dataclass(frozen=True)
class DataProtoItem:
    """A row: tensors without the batch dimension, and objects."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


class DataProto(Batch):
    """A batch with verl's names and methods. `union`, `rename`, `reorder` and `pop` do not change it: use their result.

    `batch` has the tensor columns as a TensorDict, None without any; writes to it change the batch. A DataProto without
    columns has no rows, and can be united with any other batch."""

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, ObjectArray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        if batch is not None and len(batch.batch_size) != 1:
            raise DataError("batch size", list(batch.batch_size), "one dimension, [B]", "flatten the others")
        tensors: Any = {} if batch is None else batch
        objects, size = (
            {} if non_tensor_batch is None else non_tensor_batch,
            None if batch is None else batch.batch_size[0],
        )
        rows = rules.check_columns(dict(tensors.items()), objects, size)
        made = {"_tensors": tensors, "non_tensor_batch": objects, "_rows": size or rows}
        vars(self).update(**made, meta_info={} if meta_info is None else meta_info)

    @property
    def batch(self) -> TensorDict | None:
        """The tensor columns as a TensorDict, verl's form."""
        if not isinstance(self._tensors, dict):
            return cast("TensorDict", self._tensors)
        if not self._tensors and (self.non_tensor_batch or not self._rows):
            return None
        vars(self)["_tensors"] = self.tensor_dict()
        return cast("TensorDict", self._tensors)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, ObjectArray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Makes a batch from tensors [B, ...] and from arrays or lists of B objects. A nested list is one object.

        `auto_padding` is stored in `meta_info` and lets `chunk` take any number of rows. `num_batch_dims` is always
        1."""
        if num_batch_dims != 1:
            raise DataError("num_batch_dims", num_batch_dims, "1, the dimension of rows, [B]")
        marks = {_AUTO_PADDING: True} if auto_padding else {}
        return cls.of(tensors, non_tensors, {**(meta_info or {}), **marks})

    @classmethod
    def from_batch(cls, batch: Batch) -> Self:
        """Returns the same rows and columns with verl's methods."""
        return cls._assemble(batch.columns(), batch.meta_info, len(batch))

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | ObjectArray | Sequence[Any]],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Makes a batch from one dict that has both tensor and object columns."""
        tensors = tensors_of(data)
        objects: Any = {name: column for name, column in data.items() if name not in tensors}
        return cls.from_dict(tensors, objects, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDictBase, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Makes a batch from a TensorDict with batch size [B], which has tensors and stacks of B objects. Objects of
        the whole batch are added to `meta_info`."""
        if tensor_dict.batch_dims != 1:
            raise DataError("batch size", list(tensor_dict.batch_size), "one dimension, [B]", "flatten the others")
        from tensordict import NonTensorData, NonTensorStack

        values = dict(tensor_dict.items())
        columns = tensors_of(values)
        objects = {name: value.tolist() for name, value in values.items() if isinstance(value, NonTensorStack)}
        of_batch = {name: value.data for name, value in values.items() if isinstance(value, NonTensorData)}
        if other := sorted(values.keys() - {*columns, *objects, *of_batch}):
            raise DataError("TensorDict", f"entries {other}", "tensors and objects", "flatten it first")
        made = cls.from_dict(columns, objects, {**of_batch, **(meta_info or {})}, num_batch_dims)
        return made if made.keys() else cls._assemble({}, made.meta_info, len(tensor_dict))

    def to_tensordict(self) -> TensorDict:
        """Returns the batch as a TensorDict with batch size [B]. Object columns become stacks of B objects; the values
        of `meta_info` become objects of the whole batch. `from_tensordict` converts it back."""
        if both := sorted(self.meta_info.keys() & set(self.keys())):
            raise DataError("meta_info", f"{both} are columns too", "names of its own", "rename one of each")
        with of_extra("verl", "tensordict"):
            from tensordict import NonTensorData, NonTensorStack
        result = self.tensor_dict()
        for name, column in self.non_tensor_batch.items():
            result[name] = NonTensorStack(*map(NonTensorData, column))
        for name, value in self.meta_info.items():
            result.set_non_tensor(name, value)
        return result

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def select(
        self,
        batch_keys: Names | None = None,
        non_tensor_batch_keys: Names | None = None,
        meta_info_keys: Names | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Selects the named columns and keys; None selects all of that kind. `deepcopy` copies them too."""
        tensors = rules.pick(self.tensors(), batch_keys, "tensor column")
        objects = rules.pick(self.non_tensor_batch, non_tensor_batch_keys, "object column")
        meta_info = rules.pick(self.meta_info, meta_info_keys, "meta_info key")
        chosen = self._assemble({**tensors, **objects}, meta_info, len(self))
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Names | None = None,
        non_tensor_batch_keys: Names | None = None,
        meta_info_keys: Names | None = None,
    ) -> tuple[Self, Self]:
        """Splits into two batches: the named columns and keys, and all others. None names no column or key."""
        taken = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch, objects, meta_info = (() if keys is None else keys for keys in taken)
        popped = self.select(batch, objects, meta_info)
        rest = self.select(
            [name for name in self.tensors() if name not in popped],
            [name for name in self.non_tensor_batch if name not in popped],
            [name for name in self.meta_info if name not in popped.meta_info],
        )
        return popped, rest

    def rename(self, old_keys: Names, new_keys: Names) -> Self:
        """Renames columns, the i-th of `old_keys` to the i-th of `new_keys`; the order stays."""
        old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise DataError("rename", f"{old} to {new}", "one new name for each old", "pass as many of each")
        if missing := [name for name in old if name not in self]:
            raise DataError("rename", f"there is no column {missing}", f"some of {self.keys()}", "correct the name")
        new_name = dict(zip(old, new, strict=True))
        result = [new_name.get(name, name) for name in self.keys()]
        if twice := sorted({name for name in result if result.count(name) > 1}):
            found = f"{old} to {new} gives more than one column {twice}"
            raise DataError("rename", found, change="pop or rename the other first")
        return self._assemble(dict(zip(result, self.columns().values(), strict=True)), self.meta_info, len(self))

    def union(self, other: DataProto) -> Self:
        """Merges the columns and meta_info of both batches. A name in both must hold equal values (NaN equals NaN)."""
        blank = [data for data in (self, other) if not data.keys() and not len(data)]
        if len(self) != len(other) and not blank:
            found = f"{len(other)} rows (columns {other.keys()})"
            expected = f"the {len(self)} rows (columns {self.keys()}) of the batch, in the same order"
            raise DataError("union", found, expected, "choose the rows first")
        both = {**self.tensors(), **other.tensors()}.keys() & {**self.non_tensor_batch, **other.non_tensor_batch}.keys()
        if both:
            raise rules.twice(sorted(both))
        columns = rules.merged(self.columns(), other.columns(), "column")
        meta_info = rules.merged(self.meta_info, other.meta_info, "meta_info")
        return self._assemble(columns, meta_info, max(len(self), len(other)))

    def chunk(self, chunks: int) -> list[Self]:
        """Splits into `chunks` consecutive equal parts. With `auto_padding` the first parts may have one row more.

        Raises: DataError if the rows do not divide."""
        if chunks < 1 or (len(self) % chunks and not self.meta_info.get(_AUTO_PADDING)):
            expected = f"a divisor of the {len(self)} rows"
            raise DataError("chunks", chunks, expected, "use pad_to_divisor first, or split(sizes)")
        size, more = divmod(len(self), chunks)
        return self.split([size + (part < more) for part in range(chunks)])

    def split(self, split_size: int | Sequence[int]) -> list[Self]:
        """Splits into consecutive parts of `split_size` rows, the last one smaller; or into parts of these sizes.

        Parts are views. Without rows there is one empty part, so that `concat` of the parts is always the whole.
        """
        rows = len(self)
        if isinstance(split_size, int):
            if split_size < 1:
                raise DataError("split_size", split_size, "at least 1 row", "raise it")
            return [self[start : start + split_size] for start in range(0, max(rows, 1), split_size)]
        if sum(split_size) != rows or min(split_size, default=0) < 0:
            expected = f"sizes with the sum {rows}, the number of rows, not {sum(split_size)}"
            raise DataError("split_size", list(split_size), expected, "correct them")
        ends = np.cumsum(split_size, dtype=np.int64).tolist()
        return [self[end - size : end] for size, end in zip(split_size, ends, strict=True)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeats each row `repeat_times` times: rows 0 0 1 1 interleaved, else 0 1 0 1."""
        order = np.arange(len(self))
        return self.rows(order.repeat(repeat_times) if interleave else np.tile(order, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | npt.NDArray[Any] | torch.Tensor) -> Self:
        """Repeats row i `repeat_times[i]` times: [2, 0, 1] gives rows 0 0 2."""
        times = np.asarray(repeat_times)
        if times.shape != (len(self),) or (times.size and (times.dtype.kind not in "iu" or times.min() < 0)):
            expected = f"a count of at least 0 for each of {len(self)} rows"
            raise DataError("repeat_times", times.tolist(), expected, "correct it")
        return self.rows(np.arange(len(self)).repeat(times))

    def unfold_column_chunks(self, n_split: int, split_keys: Names | None = None) -> Self:
        """Splits each row into `n_split` rows: [B, L, ...] -> [B * n_split, L / n_split, ...] in the columns
        `split_keys`, lists of objects likewise; all other columns repeat each row."""
        repeated = self.repeat(n_split)
        picked = rules.pick(self.columns(), () if split_keys is None else split_keys, "column")
        split = {name: split_second(name, column, n_split) for name, column in picked.items()}
        return self._assemble({**repeated.columns(), **split}, self.meta_info, len(repeated))

    def reorder(self, indices: RowIndex) -> Self:
        """Reorders the rows: row i of the result is row `indices[i]`; the indices are a permutation."""
        rows = np.arange(len(self))
        order = rows[rules.row_numbers(indices, len(self))]
        if not np.array_equal(np.sort(order), rows):
            found = f"{len(order)} indices, {len(np.unique(order))} of them different"
            expected = f"a permutation of {len(self)} rows"
            raise DataError("reorder", found, expected, "use data[indices] to choose rows")
        return self.rows(order)

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[Self]:
        """Yields mini-batches of `mini_batch_size` rows, each row once an epoch; an epoch's last one may be smaller.

        With a seed every epoch has its own order, a function of (seed, epoch); without a seed rows stay in order.
        """
        if mini_batch_size < 1:
            raise DataError("mini_batch_size", mini_batch_size, "at least 1 row", "raise it")
        for epoch in range(epochs):
            rows = self
            if seed is not None:
                generator = torch.Generator().manual_seed(keyed.key(seed, "mini_batches", epoch))
                rows = self[torch.randperm(len(self), generator=generator)]
            yield from rows.split(mini_batch_size)

    def pad_to_divisor(self, size_divisor: int) -> tuple[Self, int]:
        """Pads to a multiple of `size_divisor` rows; returns (batch, number of added rows). `unpad` removes them.

        Added rows repeat the first rows, so that a model can run on them. They would count in a loss: pad batches for
        generation or scoring, not for training. An empty batch stays empty.
        """
        if size_divisor < 1:
            raise DataError("size_divisor", size_divisor, "at least 1", "raise it")
        pad_size = -len(self) % size_divisor
        return (self[np.arange(len(self) + pad_size) % len(self)] if pad_size else self.select()), pad_size

    def unpad(self, pad_size: int) -> Self:
        """Removes the last `pad_size` rows."""
        if not 0 <= pad_size <= len(self):
            raise DataError("pad_size", pad_size, f"0 to {len(self)}, the number of rows", "correct it")
        return self.rows(slice(len(self) - pad_size))

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """Folds consecutive rows into one in every column: [B, ...] -> [new_batch_size, B / new_batch_size, ...]."""
        if new_batch_size < 1 or len(self) % new_batch_size:
            raise DataError("new_batch_size", new_batch_size, f"a divisor of the {len(self)} rows", "correct it")
        lead = (new_batch_size, len(self) // new_batch_size)
        return self._map(lambda column: column.reshape(*lead, *column.shape[1:]), new_batch_size)

    def unfold_batch_dim(self) -> Self:
        """[B, K, ...] -> [B * K, ...] in every column: undoes `fold_batch_dim`."""
        leads = {name: tuple(self[name].shape[:2]) for name in self.keys()}
        if len(set(leads.values())) != 1 or len(next(iter(leads.values()))) != 2:
            raise DataError("unfold_batch_dim", leads, "the same first two sizes [B, K] in every column", "pad some")
        rows, width = next(iter(leads.values()))
        return self._map(lambda column: column.reshape(rows * width, *column.shape[2:]), rows * width)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the batch to a file, without gradients; `whet.serialization` lists the supported types of objects."""
        serialization.save(path, self._parts())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file of `save`, tensors on the CPU, without running code from the file.

        Raises: FileNotFoundError; DataError for a file that is damaged or not a DataProto.
        """
        parts = serialization.load(path)
        try:
            tensors, objects, meta_info, rows = (parts[name] for name in _PARTS)
            is_whole = len(parts) == len(_PARTS) and isinstance(rows, int) and rows >= 0
            if is_whole and all(isinstance(each, str) for each in (*tensors, *objects)):
                return cls._from_parts(tensors, objects, dict(meta_info), rows)
            found = "it has other parts than a DataProto"
        except (RuntimeError, *serialization.MALFORMED) as error:
            found = f"it is no DataProto ({error})"
        raise DataError(str(path), found, "a file that DataProto.save wrote", "name another file")

    save_to_disk, load_from_disk = save, load  # verl's names

    def __copy__(self) -> Self:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        objects, meta_info = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        tensors = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return self._from_parts(tensors, objects, meta_info, len(self))

    def _row(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a DataProto with {len(self)} rows")
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={name: array[row] for name, array in self.non_tensor_batch.items()},
            meta_info=dict(self.meta_info),
        )


def split_second(name: str, column: Any, parts: int) -> rules.Column:
    """Splits dimension 1 of a column: [B, L, ...] -> [B * parts, L / parts, ...]; of an object array [B], each entry.

    Raises: DataError for a size that `parts` does not divide."""
    is_nested = isinstance(column, np.ndarray) and column.ndim == 1
    sizes = {len(each) if isinstance(each, Sequence) else 0 for each in column} if is_nested else {*column.shape[1:2]}
    if parts < 1 or not sizes or any(size < 1 or size % parts for size in sizes):
        raise DataError(
            f"sizes of column {name!r}", sorted(sizes), f"multiples of {parts}", "pad it, or split otherwise"
        )
    if not is_nested:
        split: rules.Column = column.reshape(len(column) * parts, column.shape[1] // parts, *column.shape[2:])
        return split
    widths = [(row, len(row) // parts) for row in column]
    return rules.object_array(name, [row[at * size : (at + 1) * size] for row, size in widths for at in range(parts)])


def pack_tensordict(batch: TensorDict) -> PackedDict:
    """Returns batch size, device and the tensors as `pack_tensor` packs them; a nested tensor as (layout, list)."""
    packed = {
        name: (str(tensor.layout).removeprefix("torch."), [pack_tensor(each) for each in tensor.unbind()])
        if tensor.is_nested
        else pack_tensor(tensor)
        for name, tensor in cast("dict[str, torch.Tensor]", dict(batch.items())).items()
    }
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), packed


def unpack_tensordict(packed: PackedDict) -> TensorDict:
    """Returns the TensorDict that `pack_tensordict` packed, on its device."""
    with of_extra("verl", "tensordict"):
        from tensordict import TensorDict
    batch_size, device, items = packed
    tensors = {
        name: torch.nested.as_nested_tensor([unpack_tensor(each) for each in item[1]], layout=getattr(torch, item[0]))
        if len(item) == 2
        else unpack_tensor(item)
        for name, item in items.items()
    }
    return TensorDict(tensors, batch_size=batch_size, device=device)


# verl's functions
pad_dataproto_to_divisor, unpad_dataproto = DataProto.pad_to_divisor, DataProto.unpad
serialize_single_tensor, deserialize_single_tensor = pack_tensor, unpack_tensor
serialize_tensordict, deserialize_tensordict = pack_tensordict, unpack_tensordict
