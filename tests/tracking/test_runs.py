# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import re
from pathlib import Path

from tests.raising import raises
from whet.errors import DataError
from whet.tracking.runs import chosen_metrics, find_runs, nearest, read_run, short_names, write_state
from whet.trainers.run_dir import lock_folder

OLD_RUN = Path(__file__).parent / "old_run"  # written by commit 63aba1a, without its checkpoint


def make_run(folder: Path, *lines: dict[str, float | None], config: str = "trainer: {}\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "inputs.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_state_is_what_the_run_noted_unless_its_process_holds_or_lost_the_lock(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"step": 1, "a/b": 0.5})
    assert read_run(folder).state == "ended"  # written by an earlier version
    write_state(folder, "running", 9)
    with lock_folder(folder):
        assert (read_run(folder).state, read_run(folder).total_steps, read_run(folder).step) == ("running", 9, 1)
    assert read_run(folder).state == "killed"
    write_state(folder, "failed", 9, ValueError("no reward\nsecond line"))
    assert (read_run(folder).state, read_run(folder).error) == ("failed", "ValueError: no reward")
    (folder / ".lock").write_text("process 999999999 on elsewhere")  # its lock is asked for there
    assert read_run(folder).state == "failed"


def test_a_run_has_metrics_and_timings_by_step_and_the_best_of_them(tmp_path: Path) -> None:
    lines = [{"step": 0, "val/loss": 3.0}, {"step": 1, "val/loss": None, "x": 1.0}, {"step": 2, "val/loss": 2.0}]
    folder = make_run(tmp_path / "run", *lines, {"step": 3, "val/loss": 2.0})
    (folder / "timings.jsonl").write_text('{"step": 1, "time/step": 4.0}\n{"step": 2, "time')
    run = read_run(folder)
    assert run.curve("val/loss") == ([0, 2, 3], [3.0, 2.0, 2.0])
    assert math.isnan(run.records[1]["val/loss"]) and run.records[1]["time/step"] == 4.0
    assert run.best_metric == "-val/loss" and run.best("-val/loss") == (2.0, 2) and run.best("val/loss") == (3.0, 0)
    assert run.best("nothing") is None and run.metrics == ["time/step", "val/loss", "x"]
    chosen = make_run(tmp_path / "chosen", *lines, config="trainer: {best_metric: x}\n")
    assert read_run(chosen).best_metric == "x"


def test_a_run_without_the_tracker_jsonl_has_the_steps_of_its_checkpoints(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    assert read_run(folder).step == 0
    for name in ("global_step_40", "global_step_100", "global_step_120.partial"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    write_state(folder, "stopped", 300)
    assert read_run(folder).step == 100
    write_state(folder, "finished", 300)
    assert read_run(folder).step == 300


def test_runs_are_found_below_a_folder_and_not_inside_each_other(tmp_path: Path) -> None:
    outer = make_run(tmp_path / "b" / "one")
    make_run(outer / "inner")
    make_run(tmp_path / ".hidden" / "two")
    other = make_run(tmp_path / "a")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "config.yaml").write_text("{}")  # an evaluation has no inputs.json
    assert find_runs(tmp_path) == [other, outer]
    with raises(DataError, f"{tmp_path}/b", change=re.compile(r"/b/one\?")):
        read_run(tmp_path / "b")
    with raises(DataError, f"{tmp_path}/nowhere", found=re.compile("not exist")):
        read_run(tmp_path / "nowhere")
    for damaged in ("[]", "[" * 100_000):
        (other / "run.json").write_text(damaged)
        with raises(DataError, str(other), found=re.compile(r"run\.json")):
            read_run(other)


def test_values_that_are_no_numbers_belong_to_no_curve(tmp_path: Path) -> None:
    lines = [{"step": at + 1, "val/accuracy": value} for at, value in enumerate([0.5, {"a": 1}, "x", None, 0.75])]
    run = read_run(make_run(tmp_path / "run", *lines))
    assert run.curve("val/accuracy") == ([1, 5], [0.5, 0.75]) and run.best("val/accuracy") == (0.75, 5)


def test_a_run_of_the_first_version_is_one(tmp_path: Path) -> None:
    assert find_runs(OLD_RUN.parent) == [OLD_RUN]
    run = read_run(OLD_RUN)
    assert (run.state, run.step, run.total_steps) == ("ended", 2, None)
    assert run.best("val/accuracy") == (0.0, 0) and run.curve("response_length/mean") == ([1, 2], [3.75, 2.75])
    assert len(run.curve("time/step")[0]) == 2


def test_metrics_are_chosen_by_name_and_pattern_and_unknown_ones_name_the_nearest(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", {"step": 1, "val/accuracy": 1.0, "val/reward": 1.0, "actor/lr": 0.1}))
    assert chosen_metrics([run], ["actor/lr", "val/*", "val/reward"]) == ["actor/lr", "val/accuracy", "val/reward"]
    with raises(DataError, "metric", found="val/acuracy", change=re.compile("val/accuracy")):
        chosen_metrics([run], ["val/acuracy"])
    with raises(DataError, "metric", found="zzz", expected=re.compile("actor/lr, val/accuracy, val/reward$")):
        chosen_metrics([run], ["zzz"])
    assert nearest("accuracy", run.metrics) == ["val/accuracy"]


def test_short_names_are_as_long_as_it_takes_to_tell_folders_apart() -> None:
    assert short_names([Path("runs/a/rl"), Path("runs/b/sft")]) == ["rl", "sft"]
    assert short_names([Path("runs/a/rl"), Path("runs/b/rl")]) == ["a/rl", "b/rl"]
    assert short_names([]) == []
