# SPDX-License-Identifier: Apache-2.0
"""The tracker protocol; several trackers as one (`Trackers`); the JSONL tracker, which writes one JSON object a line.

A killed run may leave an incomplete last line; a run that resumes truncates the file to its step."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from whet import files
from whet.errors import DataError

Record = dict[str, Any]  # a line of a JSONL file of metrics: the step, and numbers by name
TableRow = Mapping[str, str | float | None]  # the same fields in every row of a table
Tables = Mapping[str, Sequence[TableRow]]
NO_TABLES: Tables = MappingProxyType({})
METRIC_FILES = ("metrics.jsonl", "timings.jsonl")  # of a run's folder


class Tracker(Protocol):
    """Stores or shows the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Logs the metrics of one step by name (`area/what`), and tables of its trajectories."""

    def close(self, failed: bool = False) -> None:
        """Writes pending metrics, and whether the run `failed`. The caller makes no further calls."""


class Trackers:
    """Several trackers as one: passes every call to each of them."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)
        self._tables = defaultdict[int, dict[str, Sequence[TableRow]]](dict)  # by step

    def add_table(self, step: int, name: str, rows: Sequence[TableRow]) -> None:
        """Keeps a table until the `log` of its step, which passes it on; so an interrupted step logs no table."""
        if rows:
            self._tables[step][name] = rows

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Passes metrics and tables to each tracker, in order."""
        tables = {**tables, **self._tables.pop(step, {})}
        for tracker in self._trackers:
            tracker.log(step, metrics, tables)

    def close(self, failed: bool = False) -> None:
        """Closes every tracker, even if another one fails.  Raises: the first failure."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close, failed)


class JsonlTracker:
    """Appends a line for each step: the step, then the metrics sorted by name, so that equal runs write equal bytes.

    NaN and infinities are written as null. `log` passes each line to the operating system before it returns, so lines
    survive a killed process. An incomplete last line of a killed run is removed at the start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)  # no buffer: a failed write is not repeated by `close`

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Appends the line of one step; tables are ignored, since rollouts/ has the trajectories."""
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        line = (json.dumps({"step": step, **numbers}) + "\n").encode()
        while line:  # a full disk writes a part of it, and raises at the next write
            line = line[self._file.write(line) :]

    def close(self, failed: bool = False) -> None:
        self._file.close()


def json_line(value: object) -> str:
    """Formats a value as a line of a JSONL file. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    return printable(json.dumps(value, ensure_ascii=False, default=str)) + "\n"


def printable(text: str) -> str:
    """Escapes lone surrogates in a text, so that every file and terminal accepts it."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_records(path: Path) -> list[Record]:
    """Reads the objects of a JSONL file of metrics, without an incomplete last line.

    Raises: DataError for a line that is not an object with a step."""
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            expected = "a JSON object with a step"
            raise DataError(f"{path}, line {number}", repr(line[:80]), expected, "delete the line")
        records.append(record)
    return records


def with_nan(record: Record) -> Record:
    """Replaces null in a record by NaN."""
    return {name: math.nan if value is None else value for name, value in record.items()}


def cut_back(path: Path, step: int) -> list[Record]:
    """Removes the records after `step` from a JSONL file of metrics.  Returns the remaining records. A missing file is
    not created.

    The file is replaced atomically.  Raises: DataError for a damaged line."""
    if not path.exists():
        return []
    kept = [record for record in read_records(path) if record["step"] <= step]
    files.write(path, "".join(json.dumps(record) + "\n" for record in kept), synced=True)
    return kept
