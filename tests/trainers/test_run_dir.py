# SPDX-License-Identifier: Apache-2.0
"""One run in a folder, of one config, and nothing lost of what it holds."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from whet.config import TrainConfig, load_config
from whet.errors import CheckpointError, ConfigError, StorageError
from whet.trainers import checkpoint
from whet.trainers.run_dir import RunDir, open_run_dir

MakeConfig = Callable[..., TrainConfig]


def sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def config_of(run_dir: Path, **changes: object) -> TrainConfig:
    """The config that the run was started with, changed."""
    values = yaml.safe_load((run_dir / "config.yaml").read_text())
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    return TrainConfig.model_validate(values)


def opened(run_dir: Path, resume: str = "auto", **changes: object) -> Path | None:
    folder: RunDir = open_run_dir(run_dir, config_of(run_dir, trainer__resume=resume, **changes))
    folder.close()
    return folder.found


def test_auto_says_what_it_does_and_cuts_the_files_back(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (run_dir / "checkpoints" / "global_step_4" / "manifest.json").unlink()
    (run_dir / "tokens").mkdir()
    for step in (3, 4):
        (run_dir / "tokens" / f"step_00000{step}.jsonl").touch()
    found = opened(run_dir, trainer__total_steps=9)
    assert found == run_dir / "checkpoints" / "global_step_3"
    assert f"resuming from {found}" in caplog.text
    for name in ("metrics.jsonl", "timings.jsonl"):
        assert [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()] == [1, 2, 3]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == [f"step_00000{i}.jsonl" for i in (1, 2, 3)]
    assert [path.name for path in (run_dir / "tokens").iterdir()] == ["step_000003.jsonl"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["total_steps"] == 9
    assert "the run goes on with trainer.total_steps=9 (it was 4)" in caplog.text
    # the damaged one is out of the way: it neither is found again nor counts for save_limit
    assert (run_dir / "checkpoints" / "global_step_4.left_behind").is_dir()
    assert "global_step_4.left_behind" in caplog.text


def test_a_folder_without_a_checkpoint_starts_afresh(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shutil.rmtree(run_dir / "checkpoints")
    assert opened(run_dir) is None
    assert f"starting afresh in {run_dir}" in caplog.text
    assert (run_dir / "metrics.jsonl").read_text() == "" and not list((run_dir / "rollouts").iterdir())


def test_never_does_not_write_into_an_earlier_run(run_dir: Path, train_config: MakeConfig, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match=r"trainer\.resume=never, and .*/run holds an earlier run; choose another"):
        opened(run_dir, "never")
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        opened(run_dir, "never")
    del before[run_dir / "metrics.jsonl"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    fresh = open_run_dir(tmp_path / "new", train_config({"trainer.resume": "never"}))
    fresh.close()
    assert fresh.found is None


def test_a_run_that_is_taken_back_leaves_the_rest_behind(run_dir: Path) -> None:
    taken_back = run_dir / "checkpoints" / "global_step_2"
    assert opened(run_dir, str(taken_back), actor__optim__lr=1e-7) == taken_back
    assert checkpoint.newest(run_dir) == taken_back
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"global_step_1", "global_step_2", "global_step_3.left_behind", "global_step_4.left_behind"}


def test_a_run_of_another_config_is_not_gone_on_with(run_dir: Path) -> None:
    """Only what a step computes counts: how long the run is and how fast it goes may change."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError) as refused:
        opened(run_dir, actor__optim__lr=0.5, rollout__n=8, trainer__seed=3, trainer__val_freq=0, cluster__processes=2)
    newest = run_dir / "checkpoints" / "global_step_4"
    assert str(refused.value) == (
        f"{run_dir} holds a run of another config:\n  rollout.n: 4, now 8\n  actor.optim.lr: 1e-06, now 0.5\n"
        "  trainer.seed: 0, now 3\ngo on with the old values, choose another trainer.run_dir or "
        f"trainer.experiment_name, or go on with the new ones on purpose: trainer.resume={newest}"
    )
    assert {path: path.read_bytes() for path in before} == before


def test_where_every_checkpoint_is_damaged_nothing_is_cut_back(run_dir: Path) -> None:
    for state in (run_dir / "checkpoints").glob("*/actor.state"):
        state.write_bytes(state.read_bytes()[:-1])
    before = (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match=r"none of the 4 checkpoints in .* is whole \(global_step_4 is the newest"
    ):
        opened(run_dir)
    assert (run_dir / "metrics.jsonl").read_bytes() == before


HOLDER = """
import sys, time
from pathlib import Path
from whet.config import TrainConfig, load_config
from whet.trainers.run_dir import open_run_dir

held = open_run_dir(Path(sys.argv[1]), TrainConfig())
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run_dir = tmp_path / "shared"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(
            ConfigError, match=rf"is in use by process {holder.pid} on .*: two runs cannot write to one"
        ):
            open_run_dir(run_dir, TrainConfig())
        holder.kill()
        holder.wait(10)
    open_run_dir(run_dir, TrainConfig()).close()


def test_a_run_lets_go_of_its_folder(train_config: MakeConfig, additions: list[dict[str, str]]) -> None:
    from whet.trainers.build import train

    for steps in (1, 2):
        run = train(train_config({"trainer.total_steps": steps}), reward=lambda solution_str: 1.0, data=additions)
        assert run.step == steps


def test_what_is_written_is_read_back_as_the_same_config(run_dir: Path) -> None:
    assert load_config(TrainConfig, str(run_dir / "config.yaml"), given={"reward", "data"}).config == config_of(run_dir)


def test_metrics_that_find_no_room_end_the_run_with_advice(
    train_config: MakeConfig, additions: list[dict[str, str]], tmp_path: Path
) -> None:
    """A file may not grow over a limit, which stands for a full disk: the line of a step is torn in the middle."""
    from whet.trainers.build import train

    def run(folder: str, steps: int) -> Path:
        changes = {"trainer.total_steps": steps, "trainer.run_dir": str(tmp_path / folder), "trainer.log_rollouts": 0}
        return train(train_config(changes), reward=sevens, data=additions).run_dir

    straight, short = run("straight", 9), run("short", 2)
    size = (short / "config.yaml").stat().st_size
    assert size < (straight / "metrics.jsonl").stat().st_size - 1500
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, old[1]))
    try:
        with pytest.raises(
            StorageError, match=r"File too large .* MiB are free there\); make room, then .*global_step_2"
        ):
            run("short", 9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not (short / "metrics.jsonl").read_bytes().endswith(b"\n")
    run("short", 9)
    assert (short / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_disk_that_runs_full(model_folder: Path, additions: list[dict[str, str]], tmp_path: Path) -> None:
    """A real one of 12 MiB, where a checkpoint takes 5: with two kept beside the one that is written it is full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system of its own needs root")
    try:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions))
        command = [sys.executable, "-m", "whet", "train", f"model.path={model_folder}", "reward.function=exact_match"]
        command += [f"data.train_files={tmp_path / 'rows.jsonl'}", "data.apply_chat_template=false", "rollout.n=4"]
        command += ["data.max_prompt_length=16", "data.max_response_length=8", "data.train_batch_size=4"]
        command += [f"trainer.run_dir={disk / 'run'}", "trainer.save_freq=1", "trainer.total_steps=6"]
        full = subprocess.run([*command, "trainer.save_limit=4"], capture_output=True, text=True, timeout=200)
        assert full.returncode == 2
        assert "could not be written: " in full.stderr and "No space left on device" in full.stderr
        assert "global_step_2 is whole; make room (fewer checkpoints: trainer.save_limit)" in full.stderr
        goes_on = subprocess.run([*command, "trainer.save_limit=1"], capture_output=True, text=True, timeout=200)
        assert goes_on.returncode == 0, goes_on.stderr
        assert checkpoint.newest(disk / "run") == disk / "run" / "checkpoints" / "global_step_6"
        assert (disk / "run" / "metrics.jsonl").read_text().count("\n") == 6
    finally:
        subprocess.run(["umount", str(disk)], check=True)
