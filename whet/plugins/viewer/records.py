# SPDX-License-Identifier: Apache-2.0
"""Reads the trajectories of a run. It indexes line positions, so that a page reads only the lines that it shows."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

from whet.tracking.rollouts import place_of, task_of

KINDS = ("step", "validation", "dropped")  # of files in rollouts/: KIND_STEP.jsonl
SNIPPET = 160  # characters of a text in a list
INDEX_SECONDS = 0.15  # that one request reads files; a longer query tells how many it has read
KEPT_QUERIES = 8


Record = dict[str, Any]  # a line of a file, or what a page gets
Stamp = tuple[int, int, int]  # of a file: changes with its content


class ListedTrajectory(NamedTuple):
    """A trajectory in a list: its position in the file, and the values for sorting and filtering."""

    kind: str
    step: int
    line: int
    offset: int  # in bytes
    group: str
    reward: float | None
    accuracy: float | None
    tokens: int
    turns: int
    truncated: bool
    failed: bool
    log_prob: float | None  # mean of its tokens


@dataclass(frozen=True)
class Query:
    """A query for a list of trajectories; without a step it covers all steps."""

    kind: str = "step"
    step: int | None = None
    show: str = "all"  # of SHOWN
    sort: str = "file"  # of SORTED
    text: str = ""


SHOWN: dict[str, Callable[[ListedTrajectory], bool]] = {
    "all": lambda row: True,
    "right": lambda row: (row.accuracy or 0) > 0,
    "wrong": lambda row: not row.failed and row.accuracy == 0,
    "failed": lambda row: row.failed,
    "truncated": lambda row: row.truncated,
}
SORTED: dict[str, Callable[[ListedTrajectory], float | tuple[bool, float]]] = {
    "best": lambda row: (row.failed, -(row.reward or 0.0)),
    "worst": lambda row: (row.failed, row.reward or 0.0),
    "longest": lambda row: -row.tokens,
    "turns": lambda row: -row.turns,
    "unlikely": lambda row: row.log_prob or 0.0,
}


class Records:
    """The trajectories in a run's folder. Files are read on request, and read again after a change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[Path, tuple[Stamp, list[ListedTrajectory]]] = {}
        self._queries: OrderedDict[tuple[Query, tuple[Stamp, ...]], list[ListedTrajectory]] = OrderedDict()
        self._lock = threading.RLock()

    def steps(self) -> dict[str, list[int]]:
        """Returns by kind the steps that have files of trajectories; under `tokens` the steps with token files."""
        found = {kind: self._steps_of("rollouts", kind) for kind in KINDS}
        return {**found, "tokens": self._steps_of("tokens", "step")}

    def page(self, query: Query, offset: int, limit: int) -> Record:
        """Returns a part of a query's list, the length of the whole list, and the number of files read so far. A query
        over many files returns before all files are read; the page then sends the query again."""
        with self._lock:
            steps = self._steps_of("rollouts", query.kind) if query.step is None else [query.step]
            paths, until = [self._path(query.kind, step) for step in steps], time.monotonic() + INDEX_SECONDS
            stamps = list[Stamp]()
            for path, step in zip(paths, steps, strict=True):
                if stamps and time.monotonic() > until:
                    break
                stamps.append(self._index(path, query.kind, step))
            paths = paths[: len(stamps)]
            key = (query, tuple(stamps))
            if key not in self._queries:
                self._queries[key] = list(self._chosen(query, paths))
                while len(self._queries) > KEPT_QUERIES:
                    self._queries.popitem(last=False)
            rows = self._queries[key]
        shown = [self._shown(row) for row in rows[max(offset, 0) : max(offset, 0) + limit]]
        return {"total": len(rows), "rows": shown, "files": len(steps), "read": len(paths)}

    def trajectory(self, kind: str, step: int, line: int) -> Record:
        """Returns a trajectory: its record, its rows of tokens, and its group.  Raises: LookupError."""
        with self._lock:
            path = self._path(kind, step)
            self._index(path, kind, step)
            row = self._rows[path][1][line]
            group = [each for each in self._rows[path][1] if each.group == row.group]
        record = _line_at(path, row.offset)
        members = [{"line": each.line, "reward": each.reward, "failed": each.failed} for each in group]
        return {"record": record, "tokens": self._token_rows(kind, step, str(record.get("uid"))), "group": members}

    def beside(self, kind: str, step: int, record: Mapping[str, object]) -> Record:
        """Finds the trajectory of this run to show beside `record` of another run: of the same step and prompt. It has
        the same row and number in the group; else the same number; else it is the first.  Raises: LookupError."""
        prompt, whole = str(record.get("prompt")), place_of(record)
        with self._lock:
            path = self._path(kind, step)
            self._index(path, kind, step)
            rows = self._rows[path][1]
            hits = [rows[number] for number in _lines_with(path, prompt, [row.offset for row in rows])]
        records = ((row.line, _line_at(path, row.offset)) for row in sorted(hits))
        found = {place_of(each): line for line, each in reversed([*records]) if task_of(each) == task_of(record)}
        if not found:
            raise LookupError(prompt)
        numbered = [line for other, line in found.items() if other.rpartition(":")[2] == whole.rpartition(":")[2]]
        return self.trajectory(kind, step, found.get(whole, min(numbered or found.values())))

    def media(self, name: str) -> Path:
        """Returns the file of an image or video, named by its digest.  Raises: LookupError."""
        if not re.fullmatch(r"[0-9a-f]{16,128}", name):
            raise LookupError(name)
        for path in (self.folder / "media").glob(f"{name}.*"):
            return inside(self.folder, path)
        raise LookupError(name)

    def _steps_of(self, folder: str, kind: str) -> list[int]:
        if kind not in KINDS:
            raise LookupError(kind)
        paths = (each for each in (self.folder / folder).glob(f"{kind}_*.jsonl") if is_inside(self.folder, each))
        numbers = (re.fullmatch(rf"{kind}_(\d{{6}}|[1-9]\d{{6,8}})", path.stem, re.ASCII) for path in paths)
        return sorted(int(each[1]) for each in numbers if each)

    def _path(self, kind: str, step: int) -> Path:
        if kind not in KINDS:
            raise LookupError(kind)
        return inside(self.folder, self.folder / "rollouts" / f"{kind}_{step:06}.jsonl")

    def _index(self, path: Path, kind: str, step: int) -> Stamp:
        """Indexes the lines of a new or changed file. Returns the stamp of its content.  Raises: LookupError."""
        stamp = _stamp(path)
        if path not in self._rows or self._rows[path][0] != stamp:
            with path.open("rb") as file:
                self._rows[path] = stamp, list(_rows(file, kind, step))
        return stamp

    def _chosen(self, query: Query, paths: Sequence[Path]) -> list[ListedTrajectory]:
        chosen: list[ListedTrajectory] = []
        for path in paths:
            rows = self._rows[path][1]
            if query.text:
                hits = _lines_with(path, query.text, [row.offset for row in rows])
                rows = [row for place, row in enumerate(rows) if place in hits]
            chosen += filter(SHOWN[query.show], rows)
        return sorted(chosen, key=SORTED[query.sort]) if query.sort in SORTED else chosen

    def _shown(self, row: ListedTrajectory) -> Record:
        record = _line_at(self._path(row.kind, row.step), row.offset)
        failure = record["failure"] if isinstance(record.get("failure"), dict) else {}
        return {
            **{name: getattr(row, name) for name in ("kind", "step", "line", "group", "reward", "accuracy")},
            **{name: getattr(row, name) for name in ("tokens", "turns", "truncated", "failed")},
            "uid": record.get("uid"),
            "prompt": _plain(str(record.get("prompt", ""))[-20 * SNIPPET :])[-SNIPPET:],
            "response": str(failure.get("message") or record.get("response", ""))[:SNIPPET],
            "has_media": bool(record.get("media")),
            "agents": _agents(record),
        }

    def _token_rows(self, kind: str, step: int, uid: str) -> list[Record]:
        """Reads the rows of a trajectory, and of its players, from tokens/."""
        path = self.folder / "tokens" / f"step_{step:06}.jsonl"
        if kind != "step" or not is_inside(self.folder, path):
            return []
        places = _places_by_uid(path, _stamp(path))
        names = [name for name in places if name == uid or name.startswith(f"{uid}/")]
        return [_line_at(path, offset) for name in names for offset in places[name]]


def is_inside(folder: Path, path: Path) -> bool:
    """Tells whether a path is a plain file inside `folder`, also after following links. Reading a pipe could block
    forever."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())


def inside(folder: Path, path: Path) -> Path:
    """Returns `path`, which has to be inside the folder.  Raises: LookupError if it is not."""
    if not is_inside(folder, path):
        raise LookupError(path)
    return path


def _rows(file: BinaryIO, kind: str, step: int) -> Iterator[ListedTrajectory]:
    """Yields a ListedTrajectory for each line; damaged lines are left out."""
    offset, number = 0, 0
    for line in file:
        try:
            record = json.loads(line)
            uid = str(record.get("uid", ""))
            yield ListedTrajectory(
                *(kind, step, number, offset, uid.rpartition(":")[0]),
                *(_finite(record.get("reward")), _finite(record.get("accuracy"))),
                *(int(record.get("tokens") or 0), int(record.get("turns") or 0)),
                *(record.get("finish_reason") == "length", record.get("failure") is not None),
                _finite(record.get("mean_log_prob")),
            )
            number += 1
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            pass
        offset += len(line)


def _lines_with(path: Path, text: str, offsets: Sequence[int]) -> set[int]:
    """Returns the numbers of the lines that contain `text` in JSON form, ignoring the case of ASCII letters."""
    needle = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").lower()
    content, found, place = path.read_bytes().lower(), set[int](), 0
    while (place := content.find(needle, place)) >= 0:
        number = bisect_right(offsets, place) - 1
        found.add(number)
        place = offsets[number + 1] if number + 1 < len(offsets) else len(content)
    return found


@lru_cache(KEPT_QUERIES)
def _places_by_uid(path: Path, stamp: Stamp) -> Mapping[str, Sequence[int]]:
    """Returns the positions of each trajectory's lines in a file of tokens. Each line begins with the uid. `stamp` is
    part of the cache key: a changed file is read again."""
    places: dict[str, list[int]] = {}
    offset, decoder = 0, json.JSONDecoder()
    with path.open("rb") as file:
        for line in file:
            try:
                uid, _ = decoder.raw_decode(line[:1000].decode("utf-8", "replace"), len('{"uid": '))
                places.setdefault(str(uid), []).append(offset)
            except (ValueError, RecursionError):
                pass
            offset += len(line)
    return places


def _line_at(path: Path, offset: int) -> Record:
    """Reads the JSON object of the line at a position.  Raises: LookupError if the line has no object."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record = json.loads(file.readline(), parse_constant=_number, parse_float=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise LookupError(f"{path}: {error}") from error
    if not isinstance(record, dict):
        raise LookupError(path)
    return record


def _agents(record: Record) -> list[str]:
    """Returns the names of the sub-agents and players that took turns, in the order of their first turns."""
    steps = record["steps"] if isinstance(record.get("steps"), list) else []
    found = (each.get(name) for each in steps if isinstance(each, dict) for name in ("agent", "player"))
    return list(dict.fromkeys(str(name) for name in found if name))


def _plain(text: str) -> str:
    """Removes the special tokens of chat templates from a text."""
    return re.sub(r"<\|[^|<>]{1,40}\|>", "", text).strip()


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        raise LookupError(path.name) from error
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def is_number(value: object) -> TypeGuard[float]:
    """Tells whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _finite(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _number(text: str) -> float | None:
    return _finite(float(text))
