# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.tracking.tracker import JsonlTracker, cut_back, read_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def write_steps(path: Path, *steps: int) -> None:
    tracker = JsonlTracker(path)
    for step in steps:
        tracker.log(step, {"critic/score/mean": step / 4})
    tracker.close()


def test_a_step_is_one_line_step_first_then_names_in_order(path: Path) -> None:
    tracker = JsonlTracker(path)
    tracker.log(1, {"b/two": 2.0, "a/one": 1e-7})
    tracker.log(2, {"a/one": float("nan"), "b/two": float("inf")})
    tracker.close()
    assert path.read_text() == (
        '{"step": 1, "a/one": 1e-07, "b/two": 2.0}\n{"step": 2, "a/one": null, "b/two": null}\n'
    )


def test_numbers_come_back_to_the_bit(path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    tracker = JsonlTracker(path)
    for step, value in enumerate(values):
        tracker.log(step, {"x": value})
    cut_back(path, len(values))
    assert [record["x"].hex() for record in read_records(path)] == [value.hex() for value in values]


def test_a_line_is_there_as_soon_as_it_is_logged_even_if_the_process_is_killed(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from whet.tracking.tracker import JsonlTracker\n"
        "JsonlTracker(Path(sys.argv[1])).log(1, {'x': 1.0}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    assert read_records(path) == [{"step": 1, "x": 1.0}]


def test_cutting_back_keeps_the_records_up_to_the_step(path: Path) -> None:
    write_steps(path, 1, 2, 3, 4)
    before = path.read_bytes()
    cut_back(path, 4)
    assert path.read_bytes() == before
    cut_back(path, 2)
    assert [record["step"] for record in read_records(path)] == [1, 2]
    assert path.read_bytes() == before[: len(path.read_bytes())]
    cut_back(path, 0)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", ['{"step": 3, "critic/sc', '{"step": 3}', "{", "\0\0\0"])
def test_a_torn_last_line_is_dropped_by_all(path: Path, torn: str) -> None:
    write_steps(path, 1, 2)
    with path.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_records(path)] == [1, 2]
    JsonlTracker(path).close()
    assert path.read_text().endswith("\n") and len(path.read_text().splitlines()) == 2
    with path.open("a") as file:
        file.write(torn)
    cut_back(path, 5)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("damaged", ["not json", "[1, 2]", '{"x": 1}', "", '{"step": "one"}', "[" * 9999])
def test_a_damaged_line_before_the_last_is_refused_and_nothing_is_lost(path: Path, damaged: str) -> None:
    write_steps(path, 1)
    with path.open("a") as file:
        file.write(f'{damaged}\n{{"step": 2}}\n')
    before = path.read_bytes()
    with raises(DataError, re.compile(r"metrics\.jsonl, line 2$")):
        cut_back(path, 1)
    assert path.read_bytes() == before


def test_the_old_file_stays_whole_where_the_new_one_cannot_be_written(path: Path) -> None:
    write_steps(path, 1, 2)
    before = path.read_bytes()
    (path.parent / ".metrics.jsonl.partial").mkdir()  # as if the disk refused
    with pytest.raises(OSError):
        cut_back(path, 1)
    assert path.read_bytes() == before


def test_no_file_is_made_where_there_is_none_to_cut(path: Path) -> None:
    cut_back(path, 3)
    assert not path.exists() and not os.path.lexists(path.parent)
