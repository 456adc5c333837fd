# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.first import first
from tests.tracking.test_runs import OLD_RUN, make_run
from whet.cli.app import main
from whet.cli.arguments import split_recipe
from whet.cli.runs import next_command
from whet.config import SFTConfig, TrainConfig
from whet.config.load import load_config, to_yaml
from whet.tracking.runs import main_metrics, read_run, write_state


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whet.cli.runs.program", lambda: "whet")


def whet(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def on_the_page() -> list[dict[str, Any]]:
    """The runs that `whet view` lists."""
    from whet.plugins.viewer.server import Site

    return list(Site(Path("runs")).runs({})["runs"])


STEPS = [{"step": n, "val/accuracy": n / 4, "critic/score/mean": 1 - n / 4, "actor/entropy": 2000.0} for n in range(4)]


def test_runs_are_listed_with_their_state_best_metric_and_command(capsys: pytest.CaptureFixture[str]) -> None:
    config = to_yaml(TrainConfig.model_validate({"data": {"train_files": ["x.jsonl"]}}))
    write_state(make_run(Path("runs/a"), *STEPS, config=config), "failed", 8, RuntimeError("no memory"))
    write_state(make_run(Path("runs/b"), *STEPS[:2]), "finished", 1)
    assert whet("runs", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "path": "runs/a",
        "state": "failed",
        "step": 3,
        "total_steps": 8,
        "best_metric": "val/accuracy",
        "best": 0.75,
        "best_step": 3,
        "error": "RuntimeError: no memory",
        "trainer": "train",
        "command": "whet train runs/a/config.yaml trainer.run_dir=runs/a",
    }
    assert second["state"] == "finished" and second["command"] == "whet export runs/b runs/b_model"
    assert whet("runs") == 0
    shown = capsys.readouterr().out
    assert "a             failed      3/8           0.75         3" in shown and "val/accuracy" in shown
    assert "runs/a failed: RuntimeError: no memory\nto go on:\n  whet train runs/a/config.yaml" in shown


def test_on_80_columns_no_name_of_a_run_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    names = [f"a_project_with_a_name/and_an_experiment_whose_name_is_long_{number}" for number in range(2)]
    for name in names:
        make_run(Path("runs") / name, *STEPS)
    monkeypatch.setattr("whet.tracking.console.shared_console", lambda: Console(width=80, highlight=False))
    assert whet("runs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(name in line for line in lines) for name in names)
    assert any(line.split()[:2] == ["2", "ended"] for line in lines)


def test_a_single_run_is_shown_with_first_last_and_best(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(Path("one"), *STEPS)
    (folder / "timings.jsonl").write_text(
        '{"step": 1, "time/step": 60.0, "time/rollout": 50.0, "system/driver/memory_gib": 2.0}\n'
    )
    assert whet("runs", "one") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "val/accuracy 0 0.75 0.75 3" in lines and "critic/score/mean 1 0.25 1 0" in lines
    assert "actor/entropy 2,000 2,000" in lines and "time 1:00, rollout 0:50" in lines
    assert "at most 2.0 GiB of memory, 0.0 CPU cores" in lines
    assert whet("runs", "nowhere") == 2
    assert re.match("DataError: nowhere: .*`whet runs FOLDER`", capsys.readouterr().err)


def test_the_command_to_go_on_fits_the_kind_of_run() -> None:
    given = make_run(Path("given"), config=to_yaml(TrainConfig()))  # its rows came from Python
    write_state(given, "stopped")
    assert next_command(read_run(given)) == "call whet.run('train', ...) again: the data of given came from Python"
    values = {
        "data": {"train_files": ["x.jsonl"]},
        "trainer": {"resume": "never", "project_name": "p", "experiment_name": "e"},
    }
    sft = make_run(Path("runs/p/e"), config=to_yaml(SFTConfig.model_validate(values)))
    write_state(sft, "stopped")
    assert next_command(read_run(sft)) == "whet sft runs/p/e/config.yaml trainer.resume=auto"


@pytest.mark.parametrize("name", first(1, ["lr=1,2 [a]", "1e5", 'it\'s "${x}"'], others=pytest.mark.slow))
def test_the_command_to_go_on_is_read_back_for_any_name_of_the_folder(name: str) -> None:
    config = to_yaml(TrainConfig.model_validate({"data": {"train_files": ["x.jsonl"]}}))
    for path in (Path(name), Path("runs", name)):
        write_state(make_run(path, config=config), "stopped")
        _, _, *words = shlex.split(next_command(read_run(path)))
        found = load_config(TrainConfig, *split_recipe(words, None), checked=False).config
        assert found.trainer.run_dir == str(path)


def test_the_main_metrics_are_those_that_a_run_has() -> None:
    run = read_run(make_run(Path("a"), *STEPS))
    assert main_metrics([run]) == ["critic/score/mean", "val/accuracy", "~actor/entropy"]


def test_plot_and_view_have_one_list_of_panels_without_twins() -> None:
    """The mean of all sampled scores first, not of the groups that a filter kept; accuracy and reward once."""
    twins = {"reward/accuracy": 0.5, "filter/sampled_accuracy": 0.75, "val/reward": 0.25, "val/accuracy": 0.25}
    steps = [
        {
            **{name: value + n for name, value in twins.items()},
            "step": n,
            "critic/score/mean": 1.0,
            "filter/sampled_score": n / 8,
        }
        for n in range(3)
    ]
    folder = make_run(Path("runs/a"), *steps)
    [listed] = on_the_page()
    expected = ["filter/sampled_score", "filter/sampled_accuracy", "val/accuracy"]
    assert listed["main"] == [name.lstrip("-~") for name in main_metrics([read_run(folder)])] == expected


def test_a_run_that_ended_early_has_the_same_steps_in_view_and_in_runs() -> None:
    folder = make_run(
        Path("runs/a"), *STEPS, config=to_yaml(TrainConfig.model_validate({"trainer": {"total_steps": 1000}}))
    )
    write_state(folder, "finished", 3)
    [listed] = on_the_page()
    run = read_run(folder)
    assert (
        (listed["step"], listed["total"], listed["state"])
        == (run.step, run.total_steps, run.state)
        == (3, 3, "finished")
    )


@pytest.mark.slow
def test_plot_draws_the_metrics_of_runs_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("runs/a"), *STEPS)
    make_run(Path("runs/b"), *STEPS)
    assert whet("plot", "runs", "-m", "val/accuracy", "-m", "actor/*", "-o", "deep/two.png") == 0
    assert capsys.readouterr().out == "wrote deep/two.png: val/accuracy, actor/entropy of 2 runs\n"
    assert imread("deep/two.png").shape[:2] == (675, 1500)
    make_run(Path("runs/failed"))
    assert whet("plot", "runs", "-m", "val/accuracy", "-o", "two.png") == 0
    left_out, wrote = capsys.readouterr().out.splitlines()
    assert left_out.endswith(" runs/failed") and wrote == "wrote two.png: val/accuracy of 2 runs"
    assert whet("plot", "runs", "runs/failed", "-m", "val/accuracy") == 2
    assert "DataError: runs/failed: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plot", "a", "-m", "val/acc"], "val/acc.*val/accuracy"),
        (["plot", "empty"], "empty: .*trainer.logger"),
        (["plot", "nowhere"], "nowhere.* config.yaml and inputs.json"),
        (["plot", "a", "-o", "x.jpg"], r"--output: x\.jpg .*\.jpg; .*\.png"),
    ],
)
def test_mistakes_are_explained(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(Path("a"), *STEPS)
    make_run(Path("empty"))
    assert whet(*words) == 2
    assert re.match(f"DataError: .*{error}", capsys.readouterr().err)


@pytest.mark.slow
def test_every_command_reads_a_run_of_the_first_version(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(OLD_RUN, "runs/old")
    assert whet("runs", "runs/old") == 0 and "val/accuracy" in capsys.readouterr().out
    assert whet("runs", "--json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["path"], listed["state"], listed["step"]) == ("runs/old", "ended", 2)
    assert whet("plot", "runs/old", "-o", "old.png") == 0 and imread("old.png").any()
    capsys.readouterr()
    assert whet("show", "runs/old") == 0 and "4 responses" in capsys.readouterr().out
    [listed] = on_the_page()
    assert (listed["id"], listed["step"], listed["files"]["step"]) == ("old", 2, [1, 2])
