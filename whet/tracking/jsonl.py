# SPDX-License-Identifier: Apache-2.0
"""The JSONL tracker: one JSON object a line, `{"step": 3, "actor/lr": 1e-06, ...}`.

A killed run may leave an incomplete last line; a run that resumes truncates the file to its step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet import files
from whet.errors import DataError
from whet.tracking.tracker import NO_TABLES, Tables

METRIC_FILES = ("metrics.jsonl", "timings.jsonl")  # of a run's folder


class JsonlTracker:
    """Appends one line a step: the step, then the metrics sorted by name, so that equal runs write equal bytes.

    NaN and infinities are written as null. `log` writes each line to the operating system before it returns, so lines
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


def json_line(value: Any) -> str:
    """Returns a value as a line of a JSONL file; lone surrogates, which UTF-8 cannot encode, are escaped."""
    return printable(json.dumps(value, ensure_ascii=False, default=str)) + "\n"


def printable(text: str) -> str:
    """Escapes lone surrogates in a text, so that every file and terminal accepts it."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_records(path: Path) -> list[dict[str, Any]]:
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


def with_nan(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with NaN in place of null."""
    return {name: math.nan if value is None else value for name, value in record.items()}


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Truncates a JSONL file of metrics to the records up to and including `step`, and returns these; does not create a
    file.

    The file is replaced atomically.  Raises: DataError for a damaged line."""
    if not path.exists():
        return []
    kept = [record for record in read_records(path) if record["step"] <= step]
    files.write(path, "".join(json.dumps(record) + "\n" for record in kept), synced=True)
    return kept
