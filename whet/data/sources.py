# SPDX-License-Identifier: Apache-2.0
"""Reads rows from files: JSON lines, JSON and parquet, by the suffix of the file's name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from whet.errors import DataError

Row = dict[str, Any]


def read_rows(source: str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of one file, of several files in order, or of a list of mappings.

    Files: `.jsonl` (an object a line), `.json` (a list of objects, or `{"data": [...]}`), both also as `.gz`, and
    `.parquet`. Row numbers in later errors count from 0 over all files. Raises: DataError, with file and line.
    """
    if isinstance(source, str | Path):
        return _read_file(Path(source))
    if any(isinstance(item, Mapping) for item in source):
        return [_checked(row, f"row {index}") for index, row in enumerate(source)]
    return [row for file in cast(Sequence[str | Path], source) for row in _read_file(Path(file))]


def _read_file(path: Path) -> list[Row]:
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if suffix not in _READERS:
        raise DataError(f"{path}: cannot tell the format from the name; expected one of {', '.join(_READERS)}")
    if not path.is_file():
        raise DataError(f"{path}: {'is a folder, not a file' if path.is_dir() else 'no such file'}")
    return _READERS[suffix](path)


def _read_jsonl(path: Path) -> list[Row]:
    rows, number = [], 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_checked(_parse(line, path, number), f"{path}:{number}"))
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from error
    return rows


def _read_json(path: Path) -> list[Row]:
    try:
        with _open_text(path) as file:
            text = file.read()
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    content = _parse(text, path)
    rows = content.get("data") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        found = f"an object with {', '.join(content)}" if isinstance(content, dict) else type(content).__name__
        raise DataError(f'{path}: expected a list of objects or {{"data": [...]}}, found {found}')
    return [_checked(row, f"{path}: row {index}") for index, row in enumerate(rows)]


def _parse(text: str, path: Path, line: int | None = None) -> Any:
    """The JSON value of a file, or of one line of it.  Raises: DataError."""
    place = path if line is None else f"{path}:{line}"
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one object a line is .jsonl" if line is None and error.msg == "Extra data" else ""
        found = f"{error.msg} at column {error.colno}{hint}"
        raise DataError(f"{path}:{line or error.lineno}: not JSON: {found}") from error
    except RecursionError as error:
        raise DataError(f"{place}: nested too deeply to be read; reduce the nesting") from error
    except ValueError as error:  # Python rejects long numbers: the time to read one grows with its length squared
        raise DataError(f"{place}: a number has more than 4,300 digits; write it as text") from error


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet  # heavy, and most runs read JSON

    try:
        return cast(list[Row], pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _open_text(path: Path) -> IO[str]:
    opener = gzip.open if path.suffix == ".gz" else open
    return cast(IO[str], opener(path, "rt", encoding="utf-8-sig"))


def _checked(row: object, place: str) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{place}: expected an object with fields, found {type(row).__name__}")
    return dict(row)


_READERS = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".parquet": _read_parquet,
}
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError)
