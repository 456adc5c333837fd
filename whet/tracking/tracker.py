# SPDX-License-Identifier: Apache-2.0
"""What the loop knows of trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self


class Tracker(Protocol):
    """Takes the numbers of each step and puts them somewhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by name (`area/what`)."""

    def close(self) -> None:
        """Writes what is still held back. Nothing is logged afterwards."""


class Trackers:
    """Several trackers as one; as a context manager it closes them all, whatever happens in between."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the numbers to each tracker, in order."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Closes every tracker, the later ones also where an earlier one fails.  Raises: the first failure."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
