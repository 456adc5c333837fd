# SPDX-License-Identifier: Apache-2.0
"""The tracker protocol, and several trackers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Protocol

TableRow = Mapping[str, str | float | None]  # the same fields in every row of a table
Tables = Mapping[str, Sequence[TableRow]]
NO_TABLES: Tables = MappingProxyType({})


class Tracker(Protocol):
    """Stores or shows the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Logs the metrics of one step by name (`area/what`), and tables of its trajectories."""

    def close(self, failed: bool = False) -> None:
        """Writes what is not written yet, and the end state of the run. The last call."""


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)
        self._tables: dict[str, Sequence[TableRow]] = {}

    def add_table(self, name: str, rows: Sequence[TableRow]) -> None:
        """Keeps a table for the next `log`, so that an interrupted step logs nothing."""
        if rows:
            self._tables[name] = rows

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Passes metrics and tables to each tracker, in order."""
        tables, self._tables = {**tables, **self._tables}, {}
        for tracker in self._trackers:
            tracker.log(step, metrics, tables)

    def close(self, failed: bool = False) -> None:
        """Closes every tracker, even if another one fails.  Raises: the first failure."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close, failed)
