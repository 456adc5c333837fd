# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

from whet.plugins.viewer.server import Curves, find_runs, thinned
from whet.tracking.runs import write_state


def test_runs_are_found_by_their_paths_and_not_through_links(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to(tmp_path)
    assert list(find_runs(folder)) == ["deep/two", "one"]
    assert find_runs(folder / "one") == {".": folder / "one"}


def test_what_is_appended_is_read_from_the_last_byte_and_a_torn_line_later(folder: Path) -> None:
    path = folder / "one" / "metrics.jsonl"
    curves = Curves(folder / "one")
    curves.refresh()
    assert curves.points(["critic/score/mean", "val/accuracy", "none"], 99) == {
        "critic/score/mean": ([1, 2], [0.25, 0.5])
    }
    before = path.read_bytes()
    path.write_bytes(b" " * len(before))  # the same length in place: what was read is not read again
    with path.open("ab") as file:
        file.write(b'{"step": 3, "critic/score/mean": 0.75}\n{"step": 4, "cri')
    curves.refresh()
    assert curves.points(["critic/score/mean"], 99)["critic/score/mean"] == ([1, 2, 3], [0.25, 0.5, 0.75])
    with path.open("ab") as file:
        file.write(b'tic/score/mean": 1.0}\n')
    curves.refresh()
    assert curves.points(["critic/score/mean"], 99)["critic/score/mean"][0] == [1, 2, 3, 4]


def test_a_file_that_a_resumed_run_replaced_is_read_from_its_start(folder: Path) -> None:
    curves = Curves(folder / "one")
    curves.refresh()
    path = folder / "one" / "metrics.jsonl"
    partial = path.with_name("partial")
    partial.write_text(json.dumps({"step": 1, "critic/score/mean": 0.125}) + "\n" * 200, encoding="utf-8")
    partial.replace(path)
    curves.refresh()
    assert curves.points(["critic/score/mean"], 99) == {"critic/score/mean": ([1], [0.125])}


def test_thinning_keeps_ends_and_peaks() -> None:
    y = [0.0] * 10_000
    y[4321], y[8765] = 5.0, -5.0
    steps, values = thinned(range(10_000), y, 100)
    assert len(steps) <= 102 and steps == sorted(steps)
    assert {0, 4321, 8765, 9999} <= set(steps) and (max(values), min(values)) == (5.0, -5.0)
    assert thinned([1, 2], [3.0, 4.0], 2) == ([1, 2], [3.0, 4.0])


def test_seconds_are_summed_over_stretches_of_steps(folder: Path) -> None:
    path = folder / "one" / "timings.jsonl"
    lines = [{"step": s, "time/rollout": 1.0, **({"time/validation": 5.0} if s == 7 else {})} for s in range(1, 11)]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    curves = Curves(folder / "one")
    curves.refresh()
    # 11 steps, 0 to 10, in at most 4 stretches: 3 each. The first one lacks step 0.
    assert curves.seconds(["time/rollout", "time/validation"], 4) == {
        "width": 3,
        "steps": [0, 3, 6, 9],
        "sums": {"time/rollout": [2.0, 3.0, 3.0, 2.0], "time/validation": [0.0, 0.0, 5.0, 0.0]},
    }


def test_a_run_is_live_while_its_files_change_and_it_has_steps_left(folder: Path) -> None:
    curves = Curves(folder / "one")
    curves.refresh()
    assert curves.summary() == {"step": 2, "total": 9, "state": "", "error": "", "live": True}
    make_old(folder / "one")
    assert curves.summary() == {"step": 2, "total": 9, "state": "", "error": "", "live": False}


def make_old(run: Path) -> None:
    for name in ("metrics.jsonl", "timings.jsonl"):
        os.utime(run / name, (0, 0))


def test_the_state_that_a_run_notes_says_whether_it_is_live(folder: Path) -> None:
    curves = Curves(folder / "one")
    curves.refresh()

    def shown() -> tuple[str, bool]:
        summary = curves.summary()
        return summary["state"], summary["live"]

    write_state(folder / "one", "finished", 9)
    assert shown() == ("finished", False)  # whatever the age of its files
    write_state(folder / "one", "failed", 9, ValueError("the reward broke\nlong story"))
    assert curves.summary()["error"] == "ValueError: the reward broke" and shown() == ("failed", False)
    write_state(folder / "one", "running", 2)
    assert shown() == ("running", True)  # whatever its steps
    make_old(folder / "one")
    assert shown() == ("killed", False)
    with (folder / "one/.lock").open("w") as lock:  # a long step: the process is there
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shown() == ("running", True)
    for damaged in ("[]", "{", '{"state": ["running"]}', '{"state": "<b>"}'):
        (folder / "one/run.json").write_text(damaged)
        assert shown() == ("", False)
