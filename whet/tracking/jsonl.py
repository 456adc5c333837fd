# SPDX-License-Identifier: Apache-2.0
"""Metrics in a file: one JSON object a line, `{"step": 3, "actor/lr": 1e-06, ...}`, for any tool that reads JSON.

A run may be killed at any byte, so the last line may be torn; a run that resumes cuts the file back to its step."""

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
    """Appends one line a step: the step, then the numbers sorted by name, so that equal runs write equal bytes.

    What JSON has no number for (NaN, infinities) is written as null. Each line is handed to the operating system before
    `log` returns: it outlives a killed process. A torn line left by a killed run is dropped at the start."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)  # a line that could not be written is not tried again at the end

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Appends the line of one step; what was generated has files of its own, in rollouts/."""
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        line = (json.dumps({"step": step, **numbers}) + "\n").encode()
        while line:  # a disk may take a part of it, and says why at the next part
            line = line[self._file.write(line) :]

    def close(self, failed: bool = False) -> None:
        """Closes the file."""
        self._file.close()


def json_line(value: Any) -> str:
    """Returns the line of a JSONL file; half of a surrogate pair, which UTF-8 does not hold, is escaped."""
    return printable(json.dumps(value, ensure_ascii=False, default=str)) + "\n"


def printable(text: str) -> str:
    """Returns text that every file and terminal takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of the file; what follows the last line break is torn, and left out.

    Raises: DataError for a line that is no object with a step."""
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise DataError(f"{path}:{number} is {line[:80]!r}, expected a JSON object with a step; delete the line")
        records.append(record)
    return records


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Keeps the records of a JSONL file up to and including `step`, and returns them; where there is no file, none is
    made.

    The file is replaced as a whole: a kill in the middle leaves the old one.  Raises: DataError for a damaged line."""
    if not path.exists():
        return []
    kept = [record for record in read_records(path) if record["step"] <= step]
    files.write(path, "".join(json.dumps(record) + "\n" for record in kept), synced=True)
    return kept


def _drop_torn_line(path: Path) -> None:
    if path.exists():
        with path.open("r+b") as file:
            written = file.read()
            file.truncate(written.rfind(b"\n") + 1)
