# SPDX-License-Identifier: Apache-2.0
"""Reads rows from a pickle without running its code: lists of mappings, and tables of pandas and numpy."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.data.sources import DataRow
from whet.errors import DataError

# Constructors of plain values, which call nothing that a pickle names.
INERT = {
    "builtins": {"slice", "set", "frozenset", "bytearray", "complex", "list", "dict", "tuple", "object"},
    "collections": {"OrderedDict"},
    "copyreg": {"_reconstructor"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "pandas": {"Categorical", "CategoricalDtype", "DataFrame", "Index", "RangeIndex", "Series", "StringDtype"},
    "pandas.arrays": {"ArrowStringArray", "DatetimeArray"},
    "pandas._libs.arrays": {"__pyx_unpickle_NDArrayBacked"},
    "pandas._libs.internals": {"_unpickle_block"},
    "pandas.core.arrays.string_": {"StringArray", "StringDtype"},
    "pandas.core.frame": {"DataFrame"},  # here and below: their homes before pandas 3
    "pandas.core.indexes.base": {"_new_Index", "Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.internals.managers": {"BlockManager", "SingleBlockManager"},
    "pandas.core.series": {"Series"},
    "pyarrow.lib": {"_restore_array", "py_buffer", "type_for_alias"},
    "_codecs": {"encode"},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = {"copy_reg": "copyreg", "__builtin__": "builtins"}.get(module, module)  # of protocols before 3
        if name not in INERT.get(module, ()):
            raise _RefusedError(f"{module}.{name}")
        return super().find_class(module, name)


class _RefusedError(pickle.UnpicklingError):
    """A pickle names a function or class that is not among `INERT`."""


def read_pickle(path: Path) -> list[DataRow]:
    """Reads a list of mappings, a mapping of columns, or a DataFrame. A pickle is a program; of its calls, those of
    `INERT` alone are made.  Raises: DataError."""
    try:
        with path.open("rb") as file:
            content = _Reader(file).load()
    except _RefusedError as error:
        expected = "numbers, texts, lists, mappings, and tables of numpy and pandas"
        raise DataError(
            f"{path}", f"would call {error}", expected, "write it as JSON lines where it was made"
        ) from error
    except Exception as error:  # damaged or hostile bytes raise nearly anything
        raise DataError(f"{path}", f"not a readable pickle: {error}", "", "write or fetch it again") from error
    if hasattr(content, "to_dict") and hasattr(content, "columns"):
        content = content.to_dict("records")
    elif isinstance(content, Mapping):
        columns = {name: [*column] for name, column in content.items() if isinstance(column, list | tuple)}
        if len(columns) < len(content) or len({*map(len, columns.values())}) != 1:
            raise DataError(f"{path}", f"a mapping with {', '.join(map(str, content))}", "columns of one length")
        content = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if not isinstance(content, list) or not all(isinstance(row, Mapping) for row in content):
        raise DataError(f"{path}", f"a {type(content).__name__}", "a table, or a list of mappings")
    return [_plain(row) for row in content]


def _plain(value: Any) -> Any:
    """Returns the value with Python's own numbers, texts, lists and mappings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if type(value).__module__.partition(".")[0] == "numpy":
        return _plain(value.tolist())
    return value
