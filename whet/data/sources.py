# SPDX-License-Identifier: Apache-2.0
"""Reads rows from files (JSON lines, JSON and parquet, by suffix). With the package `datasets` also reads data sets on
the hub, folders in the hub's layout, and folders that `save_to_disk` wrote."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from whet import files
from whet.config.sources import PICKLES
from whet.errors import DataError, DeadlineError
from whet.processes.background import within

log = logging.getLogger(__name__)
DataRow = dict[str, Any]
OFFLINE = (
    "download the data set once with a network (it is cached below HF_HOME), or name a folder or file instead; "
    "HF_HUB_OFFLINE=1 reads the cache without waiting"
)


def read_rows(source: str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]) -> list[DataRow]:
    """Reads the rows of one file, of several files in order, or of a list of mappings.

    Files: `.jsonl` (an object a line), `.json` (a list of objects, or `{"data": [...]}`), both also as `.gz`, and
    `.parquet`. Row numbers in later errors count from 0 over all files.  Raises: DataError, with file and line."""
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    if not all(isinstance(item, str | Path) for item in source):
        return [_checked(row, f"row {index}") for index, row in enumerate(source)]
    return [row for file in cast(Sequence[str | Path], source) for row in _read_file(Path(file))]


def _read_file(path: Path) -> list[DataRow]:
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix in PICKLES:
        change = f"`whet data convert {path}` reads it without running code, and writes JSON lines"
        raise DataError(
            f"{path}", "a pickle, which can run code when it is read", f"one of {', '.join(_READERS)}", change
        )
    if suffix not in _READERS:
        raise DataError(f"{path}", "cannot tell the format from the name", f"one of {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}", "is a folder" if path.is_dir() else "does not exist", "a file", "correct the path")
    return _READERS[suffix](path)


def _read_jsonl(path: Path) -> list[DataRow]:
    rows, number = [], 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_checked(_parse(line, path, number), f"{path}:{number}"))
    except _UNREADABLE as error:
        raise DataError(f"{path}", f"cannot be read after line {number}: {error}", "a whole file of UTF-8") from error
    return rows


def _read_json(path: Path) -> list[DataRow]:
    try:
        with _open_text(path) as file:
            text = file.read()
    except _UNREADABLE as error:
        raise DataError(f"{path}", f"cannot be read: {error}", "a whole file of UTF-8") from error
    content = _parse(text, path)
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        kind = f"a value of type {type(content).__name__}"
        found = f"an object with {', '.join(content)}" if isinstance(content, dict) else kind
        raise DataError(f"{path}", found, 'a list of objects or {"data": [...]}')
    return [_checked(row, f"{path}: row {index}") for index, row in enumerate(rows)]


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    """Parses the JSON value of a file, or of one line.  Raises: DataError."""
    place = f"{path}" if line is None else f"{path}:{line}"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        is_lines, found = line is None and error.msg == "Extra data", f"not JSON: {error.msg} at column {error.colno}"
        change = "name the file .jsonl, which has one object a line" if is_lines else "correct it"
        raise DataError(f"{path}:{line or error.lineno}", found, "", change) from error
    except RecursionError as error:
        raise DataError(place, "nested too deeply to be read", "", "reduce the nesting") from error
    except ValueError as error:  # Python rejects long numbers: the time to read one grows with its length squared
        raise DataError(place, "a number of over 4,300 digits", "", "write it as text") from error


def _read_parquet(path: Path) -> list[DataRow]:
    import pyarrow.parquet  # heavy, and most runs read JSON

    try:
        return cast(list[DataRow], pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise DataError(f"{path}", f"not a readable parquet file: {error}", "", "write or fetch it again") from error


def _open_text(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return cast(IO[str], opener(path, "rt", encoding="utf-8-sig"))


def write_rows(path: Path, rows: Sequence[DataRow]) -> Path:
    """Writes rows as JSON lines, or as parquet if they have bytes.  Returns the file, with the matching suffix.

    Raises: DataError if parquet has no column for the values of a field."""
    try:
        content = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    except TypeError:  # bytes, dates
        import pyarrow.parquet

        path, fields = (
            path.with_suffix(".parquet"),
            {name: None for row in rows for name in row},
        )  # pyarrow reads row 0's
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**fields, **row} for row in rows]), path)
        except pyarrow.ArrowException as error:
            raise DataError(
                f"{path}", str(error), "values of one type in each field", "write them all as text"
            ) from error
        return path
    files.write(path, content)
    return path


def _checked(row: object, place: str) -> DataRow:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: type", type(row).__name__, "an object with fields")
    return dict(row)


_READERS = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".parquet": _read_parquet,
}
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)


def read_hub(
    path: str, config: str | None, split: str | None, *, default_split: str | None, deadline_seconds: float
) -> list[DataRow]:
    """Reads the rows of one split of a data set on the hub, or in a folder.  Raises: DataError, DeadlineError."""
    name = f"{path}{f':{config}' if config else ''}{f'@{split}' if split else ''}"
    found = f"was not downloaded within data.hub_deadline_seconds={deadline_seconds:g}"
    late = DeadlineError(name, found, "", f"raise it; or {OFFLINE}")
    try:
        return within(deadline_seconds, lambda: _read_datasets(path, config, split, default_split), late)
    except (DataError, DeadlineError):
        raise
    except ConnectionError as error:
        found = f"cannot be fetched ({error}): there is no network, or the hub does not respond"
        raise DataError(name, found, "", OFFLINE) from error
    except Exception as error:  # `datasets` raises whatever the libraries below it do
        found = f"cannot be read: {' '.join(str(error).split())[:500]}"
        raise DataError(name, found, "", _hub_hint(path, str(error))) from error


def _read_datasets(path: str, config: str | None, split: str | None, default_split: str | None) -> list[DataRow]:
    import datasets

    folder = Path(path).expanduser()
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        if config is not None:
            raise DataError(path, "was written by save_to_disk and has no configs", "", f"remove :{config}")
        found = datasets.load_from_disk(str(folder))
        if split is not None and not isinstance(found, dict):
            raise DataError(path, "has a single split without a name", "", f"remove @{split}")
    else:  # without a split all of them, which are downloaded together; listing their names does not work offline
        found = datasets.load_dataset(str(folder) if folder.is_dir() else path, config, split=split)
    if isinstance(found, dict):
        found = found[_split_of(path, split, default_split, list(found))]
    return cast(list[DataRow], found.to_list())


def _split_of(path: str, split: str | None, default: str | None, known: list[str]) -> str:
    """Returns the given split; else the only split; else the default split.  Raises: DataError."""
    wanted = split or (known[0] if len(known) == 1 else default)
    if wanted not in known:
        found = f"has no split {split!r}" if split else f"has {len(known)} splits"
        raise DataError(path, found, f"one of {', '.join(known)}", f"write {path}@{known[0]} for one of them")
    if split is None:
        log.info("%s: reading its split %s", path, wanted)
    return wanted


def _hub_hint(path: str, message: str) -> str:
    if "onfig" in message:
        return f"write {path}:CONFIG to choose one"
    if "split" in message:
        return f"write {path}@SPLIT to choose one"
    return "check the name, and for a set with restricted access `huggingface-cli login`"


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
    "pandas.core.frame": {"DataFrame"},  # here and below: module names before pandas 3
    "pandas.core.indexes.base": {"_new_Index", "Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.internals.managers": {"BlockManager", "SingleBlockManager"},
    "pandas.core.series": {"Series"},
    "pyarrow.lib": {"_restore_array", "py_buffer", "type_for_alias"},
    "_codecs": {"encode"},
}


class _InertReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = {"copy_reg": "copyreg", "__builtin__": "builtins"}.get(module, module)  # of protocols before 3
        if name not in INERT.get(module, ()):
            raise _RefusedError(f"{module}.{name}")
        return super().find_class(module, name)


class _RefusedError(pickle.UnpicklingError):
    """Raised if a pickle names a function or class that is not in `INERT`."""


def read_pickle(path: Path) -> list[DataRow]:
    """Reads a list of mappings, a mapping of columns, or a DataFrame from a pickle. A pickle is a program; it may call
    only the functions in `INERT`.  Raises: DataError."""
    try:
        with path.open("rb") as file:
            content = _InertReader(file).load()
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
    """Converts the value to Python's own numbers, texts, lists and mappings."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if type(value).__module__.partition(".")[0] == "numpy":
        return _plain(value.tolist())
    return value
