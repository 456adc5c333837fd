# SPDX-License-Identifier: Apache-2.0
"""The batch that components exchange: rows as named columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

import numpy as np
import torch

from whet import column_rules as rules, serialization
from whet.column_rules import Column, ObjectArray, RowIndex
from whet.errors import DataError, of_extra

if TYPE_CHECKING:  # importing it takes 2.5 CPU seconds
    from tensordict import TensorDict


def blocks_of(column: torch.Tensor) -> list[list[int]]:
    """Groups row numbers by the value in a column [B], in the order of first rows."""
    found: dict[int, list[int]] = {}
    for row, value in enumerate(column.tolist()):
        found.setdefault(value, []).append(row)
    return list(found.values())


class Batch:
    """A batch of B rows: named columns, which are tensors [B, ...] or arrays of B objects. `meta_info` describes the
    batch.

    Every operation returns a new batch with its own containers. Columns share storage with the old ones if a view is
    possible (for a slice, not for a list of rows). So adding a column does not change the other batch, and columns must
    not be written in place: after Ray they may be in read-only memory.
    Raises: DataError with the names and sizes of columns."""

    _tensors: Mapping[str, torch.Tensor]
    non_tensor_batch: dict[str, ObjectArray]
    meta_info: dict[str, Any]
    _rows: int

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        objects: Mapping[str, ObjectArray | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Builds a batch from tensors [B, ...] and from arrays or lists of B objects. A nested list is one object."""
        arrays = {name: rules.object_array(name, values) for name, values in (objects or {}).items()}
        rows = rules.check_columns(tensors or {}, arrays)
        return cls._assemble({**(tensors or {}), **arrays}, meta_info or {}, rows)

    @classmethod
    def concat(cls, data: Sequence[Self], places: Sequence[Sequence[int]] | None = None) -> Self:
        """Joins the rows of all parts in order, or the rows of part i at the row numbers `places[i]` of the result.
        Columns, dtypes and trailing sizes must agree.

        `meta_info` is the union: a key may be missing in some parts, and must be equal in all others.
        """
        if not data:
            raise DataError("concat", "no parts", "at least one batch", "pass one")
        first, meta_info = data[0], dict(data[0].meta_info)
        for number, part in enumerate(data[1:], start=1):
            rules.check_same_columns(first.tensors(), part.tensors(), "tensor column", number)
            rules.check_same_columns(first.non_tensor_batch, part.non_tensor_batch, "object column", number)
            meta_info = rules.merged(meta_info, part.meta_info, "meta_info")
        if len(data) == 1 and places is None:
            return first._assemble(first.columns(), meta_info, len(first))
        where = None if places is None else rules.check_places(places, [len(part) for part in data])
        columns = [part.columns() for part in data]
        whole = {name: rules.joined([each[name] for each in columns], where) for name in columns[0]}
        return first._assemble(whole, meta_info, sum(map(len, data)))

    def __len__(self) -> int:
        return self._rows

    def keys(self) -> list[str]:
        """Lists the names of all columns, tensors first."""
        return list(self.columns())

    def columns(self) -> dict[str, Column]:
        """Returns the columns by name, tensors first."""
        return {**self.tensors(), **self.non_tensor_batch}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensor columns by name."""
        return dict(self._tensors.items())

    def tensor_dict(self) -> TensorDict:
        """Returns the tensor columns as a TensorDict with batch size [B].  Raises: ConfigError without `tensordict`."""
        with of_extra("verl", "tensordict"):
            from tensordict import TensorDict
        return TensorDict(self.tensors(), batch_size=[len(self)])

    def __contains__(self, name: str) -> bool:
        return name in self._tensors.keys() or name in self.non_tensor_batch  # noqa: SIM118  # a TensorDict has no `in`

    def __getitem__(self, index: Any) -> Any:
        """Returns a column by name, a batch by slice, row numbers or a mask [B], or one row by its number.

        A batch of one row is `data[i : i + 1]`.  Raises: IndexError for a row that does not exist."""
        if isinstance(index, str):
            if index not in self:
                expected = f"one of {self.keys()}"
                raise DataError(f"column {index!r}", "it does not exist", expected, "correct the name")
            return self.columns()[index]
        if isinstance(index, int | np.integer):
            return self._row(int(index))
        return self.rows(index)

    def _row(self, row: int) -> Any:
        """Returns a batch of one row."""
        return self.rows([row])

    def rows(self, index: RowIndex) -> Self:
        """Selects rows by slice, row numbers or a mask [B].  Raises: IndexError for a row that does not exist."""
        rows = rules.row_numbers(index, len(self))
        if isinstance(rows, slice):
            return self._map(lambda column: column[rows], len(range(len(self))[rows]))
        tensor_rows = torch.from_numpy(rows)
        return self._map(lambda column: column[tensor_rows if torch.is_tensor(column) else rows], len(rows))

    def with_columns(self, **columns: torch.Tensor | ObjectArray | Sequence[Any]) -> Self:
        """Adds columns, replacing columns with the same names."""
        added = {
            name: column if isinstance(column, torch.Tensor) else rules.object_array(name, column)
            for name, column in columns.items()
        }
        tensors = rules.tensors_of(added)
        objects: Any = {name: column for name, column in added.items() if name not in tensors}
        rows = rules.check_columns(tensors, objects, len(self) if self.keys() or len(self) else None)
        kept = {name: column for name, column in self.columns().items() if name not in added}
        return self._assemble({**kept, **added}, self.meta_info, rows)

    def to(self, device: torch.device | str) -> Self:
        """Moves tensor columns to `device`. Tensors inside object columns are not moved."""
        return self._map(lambda column: column.to(device) if torch.is_tensor(column) else column, len(self))

    def __repr__(self) -> str:
        columns = [
            f"{name}: {str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
            for name, column in self.columns().items()
        ]
        named = f"rows={len(self)}, columns=[{', '.join(columns)}], meta_info={list(self.meta_info)}"
        return f"{type(self).__name__}({named})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickles the batch, with tensors on the CPU and without gradients. With pickle protocol 5 and a buffer
        callback, as in Ray, the bytes of tensors are not part of the pickle, and loading does not copy them."""
        return self._from_parts, tuple(map(serialization.OutOfBand, self._parts().values()))

    def _parts(self) -> dict[str, Any]:
        """Returns the arguments of `_from_parts`, in its order."""
        return {
            "batch": self.tensors(),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
            "rows": len(self),
        }

    def _map(self, change: Callable[[Any], Any], rows: int) -> Self:
        return self._assemble({name: change(column) for name, column in self.columns().items()}, self.meta_info, rows)

    @classmethod
    def _from_parts(
        cls,
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[str, ObjectArray],
        meta_info: dict[str, Any],
        rows: int,
    ) -> Self:
        return cls._assemble({**tensors, **objects}, meta_info, rules.check_columns(tensors, objects) or rows)

    @classmethod
    def _assemble(cls, columns: Mapping[str, Column], meta_info: Mapping[str, Any], rows: int) -> Self:
        """Makes a batch of `rows` rows from checked columns, with new containers."""
        objects = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
        tensors = {name: cast("torch.Tensor", column) for name, column in columns.items() if name not in objects}
        made = cls.__new__(cls)
        vars(made).update(_tensors=tensors, non_tensor_batch=objects, meta_info=dict(meta_info), _rows=rows)
        return made
