# SPDX-License-Identifier: Apache-2.0
"""One run in a folder, of one config, without loss of its files."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.raising import raises
from whet.checkpoints import checkpoint
from whet.config import SFTConfig, TrainConfig, load_config, to_yaml
from whet.errors import CheckpointError, ConfigError, StorageError
from whet.trainers.frame import run_folder
from whet.trainers.run_dir import RunDir, is_begun, open_run_dir, scoring_digest

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


def opened(run_dir: Path, resume: str = "auto", inputs: dict[str, str] | None = None, **changes: object) -> Path | None:
    folder: RunDir = open_run_dir(run_dir, config_of(run_dir, trainer__resume=resume, **changes), inputs)
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
    assert (found,) in [record.args for record in caplog.records]
    for name in ("metrics.jsonl", "timings.jsonl"):
        assert [json.loads(line)["step"] for line in (run_dir / name).read_text().splitlines()] == [1, 2, 3]
    assert sorted(path.name for path in (run_dir / "rollouts").iterdir()) == [f"step_00000{i}.jsonl" for i in (1, 2, 3)]
    assert [path.name for path in (run_dir / "tokens").iterdir()] == ["step_000003.jsonl"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["total_steps"] == 9
    assert ("trainer.total_steps", 9, 4) in [record.args for record in caplog.records]
    # the damaged one is out of the way: it neither is found again nor counts for save_limit
    assert (run_dir / "checkpoints" / "global_step_4.left_behind").is_dir()
    assert "global_step_4.left_behind" in caplog.text


def test_a_start_removes_what_an_earlier_run_left(run_dir: Path) -> None:
    """The file that stopped it, and a checkpoint that a kill left unfinished."""
    (run_dir / "stop").touch()
    left = run_dir / "checkpoints" / ".global_step_7.partial"
    left.mkdir()
    (left / "actor.state").touch()
    assert opened(run_dir) == run_dir / "checkpoints" / "global_step_4"
    assert not left.exists() and not (run_dir / "stop").exists()


def test_scores_depend_on_reward_and_filter(run_dir: Path) -> None:
    def digest(inputs: dict[str, str] | None = None, **changes: object) -> str:
        return scoring_digest(config_of(run_dir, **changes), inputs or {})

    same = [digest({"data.train_files, rows": "1"}), digest(reward__num_workers=1), digest(trainer__total_steps=99)]
    assert set(same) == {digest()}
    other = [{"reward__kwargs": {"a": 1}}, {"algorithm__filter__name": "dapo"}, {"reward__correct_threshold": 0.5}]
    codes = [digest({"reward.given, code": code}) for code in "ab"]
    assert len({digest(), *codes, *(digest(**changes) for changes in other)}) == 6


def test_a_run_that_names_a_module_by_its_old_name_goes_on(run_dir: Path) -> None:
    old, new = "whet.trainers.quickstart_pretrained:last_word", "whet.plugins.lessons.quickstart_pretrained:last_word"
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump(config_of(run_dir, reward__function=old).model_dump(mode="json"))
    )
    with raises(ConfigError, "reward.function"):
        opened(run_dir, reward__function="gsm8k")
    assert opened(run_dir, reward__function=new) == run_dir / "checkpoints" / "global_step_4"


def test_a_folder_without_a_checkpoint_starts_afresh(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shutil.rmtree(run_dir / "checkpoints")
    assert opened(run_dir) is None
    assert (run_dir,) in [record.args for record in caplog.records]
    assert (run_dir / "metrics.jsonl").read_text() == "" and not list((run_dir / "rollouts").iterdir())


def test_never_does_not_write_into_an_earlier_run(run_dir: Path, train_config: MakeConfig, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    change = re.compile(r"trainer\.resume=overwrite, .*trainer\.resume=auto, .*trainer\.run_dir")
    with raises(ConfigError, key=str(run_dir), expected=re.compile(r"trainer\.resume=never$"), change=change):
        opened(run_dir, "never")
    (run_dir / "metrics.jsonl").unlink()
    with raises(ConfigError, key=str(run_dir), change=change):
        opened(run_dir, "never")
    del before[run_dir / "metrics.jsonl"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    fresh = open_run_dir(tmp_path / "new", train_config({"trainer.resume": "never"}))
    fresh.close()
    assert fresh.found is None


def test_a_run_that_is_taken_back_leaves_the_rest_behind_and_says_what_it_deletes(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    taken_back = run_dir / "checkpoints" / "global_step_2"
    assert opened(run_dir, str(taken_back), actor__optim__lr=1e-7) == taken_back
    said = "after step 2: 2 lines of metrics.jsonl, 2 lines of timings.jsonl, 2 files of rollouts"
    assert f"deleted what {run_dir} holds {said}" in caplog.text
    caplog.clear()
    assert opened(run_dir, str(taken_back), actor__optim__lr=1e-7) == taken_back
    assert "deleted" not in caplog.text
    assert opened(run_dir, "auto", actor__optim__lr=1e-7, trainer__save_limit=1) == taken_back
    assert f"deleted {run_dir}/checkpoints/global_step_1: trainer.save_limit=1" in caplog.text
    shutil.copytree(taken_back, run_dir / "checkpoints" / "global_step_1")
    assert checkpoint.newest(run_dir) == taken_back
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"global_step_1", "global_step_2", "global_step_3.left_behind", "global_step_4.left_behind"}


def test_the_same_command_goes_on_from_there_also_where_it_names_a_checkpoint(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that started from a path continues from its own later checkpoints; with other settings it starts at the
    path again, and earlier files stay."""
    caplog.set_level(logging.INFO)
    taken, kept = run_dir / "checkpoints" / "global_step_2", shutil.copytree(run_dir / "checkpoints", tmp_path / "kept")
    assert opened(run_dir, str(taken), actor__optim__lr=1e-7) == taken
    shutil.copytree(kept / "global_step_3", run_dir / "checkpoints" / "global_step_3")  # what it saved since
    assert opened(run_dir, str(taken)) == run_dir / "checkpoints" / "global_step_3"
    assert (run_dir / "checkpoints" / "global_step_3", str(taken)) in [record.args for record in caplog.records]
    shutil.rmtree(taken)  # save_limit may delete where it came from
    assert opened(run_dir, str(taken)) == run_dir / "checkpoints" / "global_step_3"
    shutil.copytree(kept / "global_step_2", taken)
    assert opened(run_dir, str(taken), actor__optim__lr=1e-3) == taken
    names = {path.name for path in (run_dir / "checkpoints").glob("*left*")}
    assert names == {"global_step_3.left_behind", "global_step_3.left_behind1", "global_step_4.left_behind"}


def test_data_and_code_belong_to_the_run(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (run_dir / "inputs.json").unlink()  # as in folders of earlier versions
    opened(run_dir, inputs={"data.train_files, rows": "sha256 a", "data.val_files, rows": "sha256 b"})
    was = re.compile("^'sha256 a' ")
    with raises(ConfigError, key="data.train_files, rows", found="sha256 c", expected=was):
        opened(run_dir, inputs={"data.train_files, rows": "sha256 c"})
    opened(run_dir, inputs={"data.train_files, rows": "sha256 a", "data.val_files, rows": "sha256 d"})
    assert ("data.val_files, rows", "sha256 d", "sha256 b") in [record.args for record in caplog.records]
    newest = run_dir / "checkpoints" / "global_step_4"
    assert opened(run_dir, str(newest), inputs={"data.train_files, rows": "sha256 c"}) == newest


def test_metrics_that_end_before_the_checkpoint_are_missed(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    assert opened(run_dir) == run_dir / "checkpoints" / "global_step_4"
    assert (metrics, 2, 4) in [record.args for record in caplog.records]


def test_what_was_logged_is_read_back(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({**line, "odd": None}) + "\n" for line in lines))
    folder = open_run_dir(run_dir, config_of(run_dir))
    folder.close()
    assert [each["step"] for each in folder.history] == [1, 2, 3, 4]
    assert all(math.isnan(each.pop("odd")) for each in folder.history) and folder.history == lines


@pytest.mark.parametrize("name", ["rollouts/step_000001.jsonl", "checkpoints", ".lock", ".config.yaml.partial", "new"])
def test_a_link_out_of_the_folder_is_refused_and_not_written_through(run_dir: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    link = run_dir / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(victim if name == "checkpoints" else victim / "file")
    with raises(ConfigError, key=str(link), found=re.compile(f" {victim}"), change=re.compile(r"trainer\.run_dir")):
        opened(run_dir)
    assert [path.name for path in victim.iterdir()] == ["file"] and (victim / "file").read_text() == "mine"


def test_links_inside_the_folder_and_to_it_are_fine(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "latest").symlink_to("checkpoints/global_step_4")
    (run_dir / "wandb").mkdir()
    (run_dir / "wandb" / "saved").symlink_to("/etc/hostname")  # a tracker's own
    (tmp_path / "link").symlink_to(run_dir)
    assert opened(tmp_path / "link") == tmp_path / "link" / "checkpoints" / "global_step_4"


def test_files_of_others_are_left_alone(run_dir: Path) -> None:
    """Only files that a run writes itself end in a step."""
    (run_dir / "rollouts" / "my_notes.jsonl").write_text("{}")
    (run_dir / "rollouts" / "kept_000009.jsonl").mkdir()
    (run_dir / "checkpoints" / "global_step_9").write_text("no folder")
    assert opened(run_dir) == run_dir / "checkpoints" / "global_step_4"
    assert (run_dir / "rollouts" / "my_notes.jsonl").exists() and (run_dir / "rollouts" / "kept_000009.jsonl").exists()


@pytest.mark.parametrize("kind", ["a file", "below a file", "too long", "a dangling link", "no lock"])
def test_a_folder_that_cannot_be_one_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "odd" / ".lock").mkdir(parents=True)
    names = {"a file": "file", "below a file": "file/run", "too long": "r" * 300, "a dangling link": "link"}
    with raises(StorageError, change=re.compile(r"trainer\.run_dir$")):
        open_run_dir(tmp_path / names.get(kind, "odd"), TrainConfig())


def test_a_run_of_the_other_command_is_named(tmp_path: Path) -> None:
    open_run_dir(tmp_path, SFTConfig()).close()
    (tmp_path / "metrics.jsonl").touch()
    found, expected = re.compile("`whet sft`$"), re.compile("`whet train`$")
    with raises(ConfigError, key=str(tmp_path), found=found, expected=expected):
        open_run_dir(tmp_path, TrainConfig())
    assert run_folder(SFTConfig().trainer) == Path("runs/whet/sft")


def test_a_run_of_another_config_is_not_gone_on_with(run_dir: Path) -> None:
    """Only settings that change a step's numbers count: the run's length and speed may change."""
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    newest = run_dir / "checkpoints" / "global_step_4"
    with raises(ConfigError, key=str(run_dir), change=re.compile(f"trainer.resume={newest}$")) as refused:
        opened(run_dir, actor__optim__lr=0.5, rollout__n=8, trainer__seed=3, trainer__val_freq=0, cluster__processes=2)
    found = [(each.key, each.found, each.expected.split()[0]) for each in refused.value.others]
    assert found == [("rollout.n", 8, "4"), ("actor.optim.lr", 0.5, "1e-06"), ("trainer.seed", 3, "0")]
    assert {path: path.read_bytes() for path in before} == before


def test_where_every_checkpoint_is_damaged_nothing_is_cut_back(run_dir: Path) -> None:
    for state in (run_dir / "checkpoints").glob("*/actor.state"):
        state.write_bytes(state.read_bytes()[:-1])
    before = (run_dir / "metrics.jsonl").read_bytes()
    with raises(CheckpointError, f"{run_dir / 'checkpoints'}", found=re.compile(r" 4 .*\(global_step_4 ")):
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


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    run_dir = tmp_path / "shared"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with raises(ConfigError, key=str(run_dir), found=re.compile(f" {holder.pid} ")):
            open_run_dir(run_dir, TrainConfig())
        holder.kill()
        holder.wait(10)
    open_run_dir(run_dir, TrainConfig()).close()


FORKER = """
import os, sys, time
from pathlib import Path
from whet.config import TrainConfig
from whet.trainers.run_dir import open_run_dir

held = open_run_dir(Path(sys.argv[1]), TrainConfig())
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_of_a_fork_does_not_hold_the_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "shared"
    with subprocess.Popen([sys.executable, "-c", FORKER, str(run_dir)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        with raises(ConfigError, key=str(run_dir), found=re.compile(f" {holder.pid} ")):
            open_run_dir(run_dir, TrainConfig())
        holder.kill()
        holder.wait(10)
    try:
        open_run_dir(run_dir, TrainConfig()).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_is_done_says_so(
    train_config: MakeConfig, additions: list[dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    from whet.trainers.build import train

    first = train(train_config(), reward=sevens, data=additions)
    again = train(train_config(), reward=sevens, data=additions)
    assert (first.run_dir, 2, 2) in [record.args for record in caplog.records]
    assert again.history == first.history and [record["step"] for record in again.history] == [1, 2]
    longer = train(train_config({"trainer.total_steps": 3}), reward=sevens, data=additions)
    assert [record["step"] for record in longer.history] == [1, 2, 3] and longer.history[:2] == first.history


@pytest.mark.slow
def test_other_rows_and_other_code_are_told_from_those_of_the_run(
    train_config: MakeConfig, additions: list[dict[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from whet.trainers.build import train

    caplog.set_level(logging.INFO)
    code = tmp_path / "rewards.py"
    code.write_text("def score(solution_str):\n    return float(solution_str.count('7'))\n")
    config = {"reward.function": f"{code}:score"}
    train(train_config(config), data=additions)
    of_rows, was = re.compile("^sha256 "), re.compile("^'sha256 ")
    with raises(ConfigError, key="data.train_files, rows", found=of_rows, expected=was):
        train(train_config(config), data=[{**row, "answer": "0"} for row in additions])
    train(train_config(config), data=additions)
    code.write_text("def score(solution_str):\n    return float(solution_str.count('8'))\n")
    with raises(ConfigError, key="reward.function, code in rewards.py", found=of_rows, expected=was):
        train(train_config(config), data=additions)

    given = {"trainer.run_dir": str(tmp_path / "given")}
    train(train_config(given), reward=sevens, data=additions)
    train(train_config(given), reward=lambda solution_str: 1.0, data=additions)
    assert "reward.given, code" in [record.args[0] for record in caplog.records if record.args]


@pytest.mark.slow
def test_other_code_in_a_file_that_the_reward_imports_is_told_from_that_of_the_run(
    train_config: MakeConfig, additions: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.trainers.build import train

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "__init__.py").touch()
    (tmp_path / "far" / "counted.py").write_text("DIGIT = '7'\n")
    (tmp_path / "helper_of_it.py").write_text("import torch\nfrom far import counted\n\nimport helper_of_it\n")
    code = tmp_path / "rewards.py"
    code.write_text(
        "def score(solution_str):\n    import helper_of_it\n"
        "    return float(solution_str.count(helper_of_it.counted.DIGIT))\n"
    )
    config = train_config({"reward.function": f"{code}:score"})
    train(config, data=additions)
    train(config, data=additions)
    (tmp_path / "far" / "counted.py").write_text("DIGIT = '8'\n")
    with raises(ConfigError, key="reward.function, code in far/counted.py", found=re.compile("^sha256 ")):
        train(config, data=additions)


def test_user_code_may_change_the_working_folder(
    train_config: MakeConfig, additions: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.trainers.build import train

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    config = train_config({"trainer.run_dir": "here/run"})
    relative = os.path.relpath(str(config.model.path))

    def leaves(solution_str: str) -> float:
        os.chdir(elsewhere)
        return 1.0

    train(train_config({"trainer.run_dir": "here/run", "model.path": relative}), reward=leaves, data=additions)
    assert not list(elsewhere.iterdir())
    assert checkpoint.newest(tmp_path / "here" / "run") is not None
    assert {path.name for path in (tmp_path / "here" / "run").iterdir()} >= {"rollouts", "metrics.jsonl", "config.yaml"}


def test_a_run_lets_go_of_its_folder(train_config: MakeConfig, additions: list[dict[str, str]]) -> None:
    from whet.trainers.build import train

    for steps in (1, 2):
        run = train(train_config({"trainer.total_steps": steps}), reward=lambda solution_str: 1.0, data=additions)
        assert run.step == steps


@pytest.mark.slow
def test_what_is_written_is_read_back_as_the_same_config(run_dir: Path) -> None:
    assert load_config(TrainConfig, str(run_dir / "config.yaml"), given={"reward", "data"}).config == config_of(run_dir)


@pytest.mark.slow
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
        with raises(StorageError, found=re.compile("File too large .* MiB"), change=re.compile("global_step_2$")):
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
        command += [
            f"trainer.run_dir={disk / 'run'}",
            "trainer.save_freq=1",
            "trainer.total_steps=6",
            "model.dtype=float32",
        ]
        full = subprocess.run([*command, "trainer.save_limit=4"], capture_output=True, text=True, timeout=200)
        assert full.returncode == 2
        said = r"CheckpointError: \S*global_step_3: .*No space left on device.* MiB .*trainer\.save_limit"
        assert re.search(said, full.stderr), full.stderr
        goes_on = subprocess.run([*command, "trainer.save_limit=1"], capture_output=True, text=True, timeout=200)
        assert goes_on.returncode == 0, goes_on.stderr
        assert checkpoint.newest(disk / "run") == disk / "run" / "checkpoints" / "global_step_6"
        assert (disk / "run" / "metrics.jsonl").read_text().count("\n") == 6
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_text_with_a_dollar_is_the_same_as_at_the_start_of_the_run(tmp_path: Path) -> None:
    config, other = (TrainConfig.model_validate({"model": {"path": f"models/${{{name}}}"}}) for name in "xy")
    for written in (to_yaml(config), to_yaml(config).replace(r"\${", "${")):  # an older run has no escapes
        (tmp_path / "config.yaml").write_text(written)
        assert is_begun(tmp_path, config, {})
        with raises(ConfigError, "model.path", found="models/${y}"):
            is_begun(tmp_path, other, {})
