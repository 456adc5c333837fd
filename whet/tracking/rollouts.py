# SPDX-License-Identifier: Apache-2.0
"""Reads the files in a run's rollouts/: one JSON object a trajectory (`whet.evaluation.answers.readable`)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

from whet.errors import DataError
from whet.tracking.runs import nearest, unknown

Record = Mapping[str, Any]
ALIASES = {"length": "tokens", "score": "reward"}
CONDITION = re.compile(r"\s*([\w./-]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.*)", re.DOTALL)
COMPARISONS = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


def find_rollouts(run: Path, step: int | None = None, *, kind: str | None = None) -> Path:
    """Finds the file of a step's trajectories, by default of the last step.

    `kind` is "step" (trained), "validation" or "dropped" (by the filter); by default "step", or if the step has no such
    file, "validation". `run` may also be the folder of an evaluation, or such a file itself.  Raises: DataError naming
    the nearest steps that have a file."""
    if run.is_file():
        return run
    if (run / "answers.jsonl").is_file() and not (run / "rollouts").is_dir():
        return run / "answers.jsonl"
    kinds = (kind,) if kind else ("step", "validation")
    found = {
        (int(path.stem.rpartition("_")[2]), each): path
        for each in kinds
        for path in (run / "rollouts").glob(f"{each}_*.jsonl")
        if path.stem.rpartition("_")[2].isdecimal() and path.is_file()
    }
    if not found:
        names = " or ".join(f"{each}_*.jsonl" for each in kinds)
        expected = "a run of `whet train` with trainer.log_rollouts above 0, or an evaluation"
        raise DataError(f"{run}/rollouts", f"no files {names}", expected, "find the runs with `whet runs`")
    number = max(at for at, _ in found) if step is None else step
    for each in kinds:
        if (number, each) in found:
            return found[number, each]
    near = ", ".join(map(str, sorted({at for at, _ in found}, key=lambda at: (abs(at - number), at))[:5]))
    expected = f"a step that was written (trainer.log_rollouts sets how often); the nearest are {near}"
    raise DataError(f"{run}/rollouts", f"nothing of step {number}", expected)


def read_rollouts(file: Path) -> list[Record]:
    """Reads the trajectories of a file, without an incomplete last line.  Raises: DataError."""
    rows: list[Record] = []
    for number, line in enumerate(file.read_text("utf-8", "replace").split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            change = "name a file of rollouts/"
            raise DataError(f"{file}, line {number}", repr(line[:80]), "a JSON object", change)
        rows.append(row)
    if not rows:
        raise DataError(str(file), "no trajectories", change="choose another step")
    return rows


def selected(rows: Sequence[Record], conditions: Iterable[str] = (), sort: str | None = None) -> list[Record]:
    """Selects the rows that meet all conditions, sorted by a field (`-field`: largest first; rows without it last).

    Raises: DataError for a field that no row has, and for an unreadable condition."""
    kept = list(rows)
    for condition in conditions:
        kept = [row for row in kept if holds(condition, row, rows)]
    if sort is None:
        return kept
    name = _known(sort.removeprefix("-"), rows)
    has = [row for row in kept if field_of(row, name) is not None]
    without = [row for row in kept if field_of(row, name) is None]
    keys = {id(row): _comparable(field_of(row, name)) for row in has}
    is_number = all(isinstance(key, float) for key in keys.values())
    ordered = sorted(has, key=lambda row: keys[id(row)] if is_number else str(keys[id(row)]), reverse=sort[0] == "-")
    return [*ordered, *without]


def holds(condition: str, row: Record, rows: Sequence[Record]) -> bool:
    """Tells whether a row meets a condition: `field<1`, `field=text`, `field~part of its text`, `field` or `!field`.
    (`field` holds unless it is missing, empty or false; the number 0 holds.) Numbers are compared as numbers."""
    found = CONDITION.fullmatch(condition)
    if found is None:
        name = _known(condition.strip().removeprefix("!").strip(), rows)
        value = field_of(row, name)
        return (type(value) in (int, float) or bool(value)) != condition.strip().startswith("!")
    name, sign, wanted = _known(found[1], rows), found[2], found[3].strip()
    value = field_of(row, name)
    if sign == "~":
        return wanted in _text(value)
    if value is None:
        return sign == "!="
    left, right = _comparable(value), _comparable(wanted)
    if isinstance(left, float) != isinstance(right, float):
        if isinstance(left, float) and sign not in ("=", "!="):
            problem = f"{name} is a number, and {wanted!r} is not"
            raise DataError(f"--where {condition}", problem, change="compare it with a number")
        left, right = str(value), wanted
    return bool(COMPARISONS[sign](left, right))


def field_of(row: Record, name: str) -> Any:
    """Returns a field of a row, or with a name such as `parts.format` a field of a mapping in the row."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def task_of(row: Record) -> tuple[str, ...]:
    """Identifies the task of a trajectory: its prompt, and with one turn the digests of its media."""
    media = row.get("media") if row.get("turns", 1) == 1 else ()
    return str(row.get("prompt")), *(str(each.get("digest")) for each in media or ())


def place_of(row: Record) -> str:
    """Returns the place of a trajectory, its data row and its number in the group, without the epoch: `12:3`."""
    return str(row.get("uid")).partition(":")[2]


def beside(left: Sequence[Record], right: Sequence[Record], name: str, other: str) -> list[tuple[Record, Record]]:
    """Pairs trajectories of two files that have the same prompt: first by equal `place_of`, then in order.

    Raises: DataError if no prompt is in both."""
    waiting: defaultdict[tuple[str, ...], list[Record]] = defaultdict(list)
    for row in right:
        waiting[task_of(row)].append(row)
    found: dict[int, Record] = {}
    for is_same in (lambda one, two: place_of(one) == place_of(two), lambda one, two: True):
        for number, row in enumerate(left):
            those = waiting[task_of(row)]
            hit = next((at for at, each in enumerate(those) if number not in found and is_same(row, each)), None)
            if hit is not None:
                found[number] = those.pop(hit)
    if left and not found:
        change = "compare validations (--validation), or runs with the same data and trainer.seed"
        raise DataError(f"{name} and {other}", "no prompt in common", change=change)
    return [(left[number], found[number]) for number in sorted(found)]


def reasons(row: Record) -> list[str]:
    """Explains the reward of a trajectory: its failure, the limit that cut it off, the extracted final answer."""
    why = []
    if failure := row.get("failure"):
        late = " (deadline)" if failure.get("timed_out") else ""
        why.append(f"failed in {failure.get('source')}{late}: {failure.get('message')}")
    if row.get("dropped_by"):
        why.append(f"dropped by {row['dropped_by']}")
    if row.get("finish_reason") == "length":
        why.append("cut off: data.max_response_length")
    elif row.get("finish_reason") not in (None, "stop"):
        why.append(f"ended by {row['finish_reason']}")
    if row.get("limit"):
        why.append(f"limit: {row['limit']}")
    if row.get("ground_truth") is not None and not row.get("failure"):
        read = f"read {row['extracted']!r}, " if row.get("extracted") is not None else ""
        why.append(f"{read}expected {row['ground_truth']!r}")
    return why


def _known(name: str, rows: Sequence[Record]) -> str:
    """Returns the field with this name or alias.  Raises: DataError if no row has it."""
    name = ALIASES.get(name, name)
    fields = {key: None for row in rows for key in row}
    inner = [f"{key}.{part}" for row in rows for key, value in row.items() if isinstance(value, dict) for part in value]
    known = list(dict.fromkeys([*fields, *inner]))
    if name not in known:
        raise unknown("field of a trajectory", name, known, nearest(name, [*known, *ALIASES]))
    return name


def _comparable(value: Any) -> float | str:
    """Converts a value to a number, also from text; else to text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
