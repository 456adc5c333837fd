# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped anywhere goes on to the bits of one that never was."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.first import first
from tests.raising import raises
from tests.rewards.judge_server import judging
from whet import serialization
from whet.checkpoints import checkpoint
from whet.checkpoints.export import export
from whet.config import SFTConfig, TrainConfig, load_config
from whet.errors import CheckpointError
from whet.trainers.build import build, build_scorer, train
from whet.trainers.rl import fit
from whet.trainers.run import Run
from whet.trainers.sft import train_sft

SHAPER = {"kl_controller": {}, "running": {}}
MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
GRPO = {"trainer.total_steps": 4, "trainer.save_freq": 1, "trainer.save_limit": None, "actor.mini_batch_size": 2}
PPO = {
    **GRPO,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl.where": "reward",
    "algorithm.kl.controller": "adaptive",
    "algorithm.kl.horizon": 10,
    "actor.optim.schedule": "cosine",
    "critic.epochs": 2,
}


def score(solution_str: str) -> dict[str, float]:
    return {"reward": float(solution_str.count("7")), "length": float(len(solution_str))}


def finish(config: TrainConfig, additions: Rows) -> Run:
    return train(config, reward=score, data=additions)


def states(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and moments of each role in a checkpoint, by name."""
    found = {}
    for path in sorted(folder.glob("*.state")):
        state = serialization.load(path)
        moments = {
            f"{name} {index}": value
            for index, each in state["optimizer"]["state"].items()
            for name, value in each.items()
        }
        found[path.stem] = {**state["model"], **moments, "steps_done": torch.tensor(state["steps_done"])}
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    expected, got = states(one), states(other)
    assert expected.keys() == got.keys()
    for role in expected:
        assert expected[role].keys() == got[role].keys()
        assert all(torch.equal(expected[role][name], got[role][name]) for name in expected[role])


@pytest.mark.slow
def test_a_checkpoint_holds_what_it_says(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    config = train_config({"algorithm.adv_estimator": "gae"})
    finish(config, additions)
    [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    assert folder.name == "global_step_2"
    assert {path.name for path in folder.iterdir()} == {
        "actor.state",
        "critic.state",
        "trainer.json",
        "model",
        "manifest.json",
    }
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert manifest.keys() == files.keys() - {"manifest.json"}
    assert all(manifest[name]["bytes"] == files[name].stat().st_size for name in manifest)
    checkpoint.verify(folder)
    state = json.loads((folder / "trainer.json").read_text())
    assert state["health"].pop("actor/grad_norm")[1] > 0.0 and len(state["health"].pop("critic/grad_norm")) == 2
    assert state == {
        "step": 2,
        "score": None,
        "is_good": True,
        "start": str(config.model.path),
        "dtype": "float32",
        "rollouts": {"epoch": 0, "index": 8, "spent": {}},
        "shaper": SHAPER,
        "entropy": {},
        "health": {"actor/ppo_kl": [0.0, 0.0]},
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(GRPO, id="grpo"),
        pytest.param(PPO, id="gae with a critic", marks=pytest.mark.slow),
        pytest.param(
            {**GRPO, "algorithm.filter.name": "first_finished", "algorithm.filter.options.extra": 0.5},
            id="the first to end",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("stopped_after", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_stopped_run_goes_on_to_the_bits_of_one_that_never_stopped(
    algorithm: dict[str, object], stopped_after: int, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    """Stopped as a kill stops it: behind the last checkpoint, with more written than it knows of."""
    straight = train_config({**algorithm, "trainer.run_dir": str(tmp_path / "straight")})
    finish(straight, additions)

    killed = train_config(algorithm)
    run = build(killed, build_scorer(killed.reward, score), additions)
    run.callbacks = [Stop(after=stopped_after + 1)]
    with pytest.raises(Killed):
        fit(run)
    run.close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 9, "torn')
    assert [record["step"] for record in run.history] == list(range(1, stopped_after + 2))

    resumed = finish(train_config(algorithm), additions)
    assert [record["step"] for record in resumed.history] == [1, 2, 3, 4]
    assert resumed.history[stopped_after]["step"] == stopped_after + 1
    last = Path("checkpoints", "global_step_4")
    assert_same_bits(tmp_path / "straight" / last, tmp_path / "run" / last)
    assert metrics.read_bytes() == (tmp_path / "straight" / "metrics.jsonl").read_bytes()
    for path in (tmp_path / "straight" / "rollouts").iterdir():
        assert path.read_bytes() == (tmp_path / "run" / "rollouts" / path.name).read_bytes()
    trainer = last / "trainer.json"
    assert (tmp_path / "straight" / trainer).read_text() == (tmp_path / "run" / trainer).read_text()


@pytest.mark.slow
def test_what_judges_cost_is_summed_over_a_resume(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """A judge behind HTTP takes 100 and 10 tokens a reply; a checkpoint of earlier versions has no sums."""
    (tmp_path / "val.jsonl").write_text(json.dumps(additions[0]))
    with judging(["Verdict: yes"]) as judge:
        asked = {"endpoint": judge.address, "model": "m", "input_price": 1.0, "output_price": 10.0}
        both = {**GRPO, "reward.function": "llm_judge", "reward.kwargs": asked, "rollout.n": 2, "trainer.val_freq": 1}
        both |= {"trainer.total_steps": 3, "data.val_files": [str(tmp_path / "val.jsonl")]}
        straight = train(train_config({**both, "trainer.run_dir": str(tmp_path / "straight")}), data=additions)
        num_asked = len(judge.bodies)

        killed = train_config(both)
        run = build(killed, build_scorer(killed.reward), additions)
        run.callbacks = [Stop(after=2)]
        with pytest.raises(Killed):
            fit(run)
        run.close()
        resumed = train(train_config(both), data=additions)
        assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_1"
        names = ("reward/judge_tokens_total", "reward/judge_cost_total")
        totals, theirs = (
            [[record[name] for name in names] for record in run.history if record["step"]]
            for run in (resumed, straight)
        )
        assert totals == theirs
        assert num_asked == 4 * 1 + 3 * 4 * 2  # four validations, three steps
        known = num_asked - 1  # a step is counted before its validation
        assert totals[-1] == pytest.approx([110 * known, 200e-6 * known])

        state = tmp_path / "run" / "checkpoints" / "global_step_2" / "trainer.json"
        before = json.loads(state.read_text())
        assert before["rollouts"].pop("spent") == pytest.approx({"judge_tokens": 2090.0, "judge_cost": 19 * 200e-6})
        state.write_text(json.dumps(before))
        renew(state.parent)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "global_step_3")
        old = train(train_config(both), data=additions)
        assert old.history[-1]["reward/judge_tokens_total"] == 110 * 8  # of the last step


def renew(folder: Path) -> None:
    """Writes the size and checksum of trainer.json into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    content = (folder / "trainer.json").read_bytes()
    manifest["trainer.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


KILLED = """
import json, sys
from whet.config import SFTConfig, TrainConfig, load_config
from whet.trainers.build import train

def score(solution_str):
    return {"reward": float(solution_str.count("7")), "length": float(len(solution_str))}

with open(sys.argv[1]) as file:
    given = json.load(file)
train(TrainConfig.model_validate(given["config"]), reward=score, data=given["data"])
"""


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_to_the_same_bits(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    overrides = {**PPO, "trainer.total_steps": 12}
    finish(train_config({**overrides, "trainer.run_dir": str(tmp_path / "straight")}), additions)
    config = train_config(overrides)
    (tmp_path / "given.json").write_text(json.dumps({"config": config.model_dump(mode="json"), "data": additions}))
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "given.json")])
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()

    resumed = finish(config, additions)
    assert resumed.opened.found is not None and 1 <= checkpoint.number(resumed.opened.found) < 12
    last = Path("checkpoints", "global_step_12")
    assert_same_bits(tmp_path / "straight" / last, tmp_path / "run" / last)
    assert metrics.read_bytes() == (tmp_path / "straight" / "metrics.jsonl").read_bytes()


class Killed(BaseException):
    """Raised, and caught by no one."""


class Stop:
    """A callback that ends the run after the metrics of a step, before its checkpoint."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, run: Run, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.after:
            raise Killed


def newest(run_dir: Path, resume: str = "auto") -> str | None:
    found = checkpoint.find(run_dir, resume)
    return None if found is None else found.name


@pytest.mark.slow
def test_the_newest_whole_checkpoint_is_found(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / ".global_step_5.partial").mkdir()  # what a kill leaves
    (checkpoints / "global_step_11").mkdir()  # newer by number, not by name, and without a manifest
    assert newest(run_dir) == "global_step_4"
    with (checkpoints / "global_step_4" / "actor.state").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    assert newest(run_dir) == "global_step_3"
    (checkpoints / "global_step_3" / "trainer.json").write_text("{}")
    assert newest(run_dir) == "global_step_2"
    (checkpoints / "global_step_2" / "manifest.json").write_text('{"actor.state": {"byt')
    assert newest(run_dir) == "global_step_1"
    (checkpoints / "global_step_1" / "actor.state").unlink()
    with raises(CheckpointError, key=f"{checkpoints}", found=re.compile(" 5 "), change=re.compile("trainer.run_dir")):
        newest(run_dir)
    told = [each for record in caplog.records for each in record.args or ()]
    passed_over = [each.key for each in told if isinstance(each, CheckpointError)]
    assert passed_over[0] == f"{checkpoints / 'global_step_11'}"
    damaged = ("4: actor.state", "3: trainer.json", "2: manifest.json", "1: actor.state")
    assert {f"{checkpoints}/global_step_{each}" for each in damaged} <= {*passed_over}


@pytest.mark.slow
def test_a_path_is_resumed_from_under_any_name(
    run_dir: Path, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    kept = shutil.copytree(run_dir / "checkpoints" / "global_step_2", tmp_path / "kept")
    overrides = {
        **GRPO,
        "actor.optim.lr": 1e-6,
        "trainer.resume": str(kept),
        "trainer.run_dir": str(tmp_path / "other"),
    }
    run = finish(train_config(overrides), additions)
    assert [record["step"] for record in run.history] == [3, 4]
    last = Path("checkpoints", "global_step_4")
    assert_same_bits(run_dir / last, tmp_path / "other" / last)


@pytest.mark.parametrize("name", ["global_step_7", "."])
def test_a_path_without_a_checkpoint_is_refused(run_dir: Path, name: str) -> None:
    folder = run_dir / "checkpoints" / name
    with raises(CheckpointError, key=f"{folder}", expected=re.compile("manifest.json")):
        checkpoint.find(run_dir, str(folder))


@pytest.mark.slow
def test_the_best_is_kept_beside_the_newest(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """Scores of the steps as validation would give them; of equals the newer one is the best."""
    config = train_config({**GRPO, "trainer.total_steps": 6, "trainer.save_limit": 2})
    run = build(config, build_scorer(config.reward, score), additions)
    run.callbacks = [lambda run, step, _: setattr(run, "score", {1: 0.1, 2: 0.7, 3: 0.7, 5: 0.4}.get(step))]
    fit(run)
    run.close()
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"global_step_3", "global_step_5", "global_step_6"}
    best = checkpoint.best(checkpoints)
    assert best is not None and best.name == "global_step_3"


def _scored(checkpoints: Path, *scores: tuple[float | None, str | None]) -> None:
    """Complete checkpoints as far as the best is concerned, with score and metric of each step; None: an older form."""
    for step, (value, metric) in enumerate(scores, start=1):
        folder = checkpoints / f"global_step_{step}"
        folder.mkdir(parents=True)
        state = {"step": step, "score": value, **({} if metric is None else {"metric": metric})}
        (folder / "trainer.json").write_text(json.dumps(state))
        (folder / checkpoint.MANIFEST).write_text("{}")


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([(0.9, "val/accuracy"), (-3.0, "-val/loss"), (-2.0, "-val/loss"), (-2.5, "-val/loss")], 3),
        ([(-0.5, "-val/loss"), (0.1, "val/accuracy"), (0.3, "val/accuracy"), (0.2, "val/accuracy")], 3),
        ([(0.9, "val/accuracy"), (0.2, "val/reward")], 2),
        ([(0.9, "val/accuracy"), (0.2, "val/accuracy"), (None, "val/reward")], 1),  # the new one is not known yet
        ([(0.9, None), (0.2, None)], 1),
        ([(0.9, None), (0.2, "val/accuracy"), (0.1, "val/accuracy")], 2),
        ([(0.9, "val/accuracy"), (0.1, "-val/loss"), (0.5, "val/accuracy")], 1),  # back to the first metric
    ],
)
def test_scores_of_two_metrics_are_not_compared(
    scores: list[tuple[float | None, str | None]], best: int, tmp_path: Path
) -> None:
    _scored(tmp_path, *scores)
    found = checkpoint.best(tmp_path)
    assert found is not None and checkpoint.number(found) == best
    kept = {checkpoint.number(each) for each in checkpoint.folders(tmp_path)} - {
        checkpoint.number(each) for each in checkpoint.over_limit(tmp_path, 1)
    }
    assert kept == {best, len(scores)}


@pytest.mark.slow
def test_a_resume_with_another_best_metric_says_so_and_keeps_its_best(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ended(steps: int, **trainer: Any) -> None:
        named = {f"trainer.{name}": value for name, value in trainer.items()}
        config = train_config({**GRPO, "trainer.total_steps": steps, "trainer.save_limit": 1, **named})
        run = build(config, build_scorer(config.reward, score), additions)
        run.callbacks = [lambda run, step, _: setattr(run, "score", {1: 0.9, 2: 0.5, 3: -0.3, 4: -0.6}.get(step))]
        fit(run)
        run.close()

    checkpoints = tmp_path / "run" / "checkpoints"
    ended(2)
    assert {path.name for path in checkpoints.iterdir()} == {"global_step_1", "global_step_2"}
    assert "best_metric" not in caplog.text
    ended(4, best_metric="-val/response_length")
    assert {path.name for path in checkpoints.iterdir()} == {"global_step_3", "global_step_4"}
    assert "val/accuracy" in caplog.text and "-val/response_length" in caplog.text


@pytest.mark.slow
def test_a_full_disk_names_what_is_whole_and_the_same_command_goes_on(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    """A file may not grow over a limit, which stands for a disk that has no room: the write fails in the middle."""
    finish(train_config({**GRPO, "trainer.run_dir": str(tmp_path / "straight")}), additions)
    finish(train_config({**GRPO, "trainer.total_steps": 2}), additions)
    before = checkpoint.find(tmp_path / "run", "auto")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
    try:
        with raises(CheckpointError, re.compile("global_step_3$"), found=re.compile("MiB .*global_step_2")):
            finish(train_config(GRPO), additions)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert checkpoint.find(tmp_path / "run", "auto") == before
    assert finish(train_config(GRPO), additions).opened.found == before
    last = Path("checkpoints", "global_step_4")
    assert_same_bits(tmp_path / "straight" / last, tmp_path / "run" / last)


def test_a_checkpoint_of_another_model_is_named(
    run_dir: Path, train_config: MakeConfig, qwen25_folder: Path, tmp_path: Path
) -> None:
    taken = run_dir / "checkpoints" / "global_step_2"
    config = train_config(
        {
            **GRPO,
            "model.path": str(qwen25_folder),
            "trainer.resume": str(taken),
            "trainer.run_dir": str(tmp_path / "other"),
        }
    )
    found = re.compile(rf"model\.path={qwen25_folder}$")
    with raises(CheckpointError, key=str(taken), found=found) as caught:
        finish(config, [{"prompt": "1+1=", "answer": "2"}] * 4)
    assert [each.key for each in caught.value.others] == ["state"]


@pytest.mark.slow
def test_only_the_newest_are_kept(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    finish(train_config({**GRPO, "trainer.save_limit": 2}), additions)
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"global_step_3", "global_step_4"}


def test_a_damaged_newer_checkpoint_does_not_crowd_out_a_good_one(
    run_dir: Path, train_config: MakeConfig, additions: Rows
) -> None:
    (run_dir / "checkpoints" / "global_step_4" / "manifest.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "global_step_3")
    config = train_config({**GRPO, "actor.optim.lr": 1e-6, "trainer.total_steps": 3, "trainer.save_limit": 1})
    finish(config, additions)
    assert newest(run_dir) == "global_step_3"


@pytest.mark.slow
def test_a_kill_while_saving_leaves_what_was_there(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config({**GRPO, "trainer.total_steps": 2})
    plain = checkpoint._write_manifest

    def killed(folder: Path) -> None:
        if "global_step_2" in folder.name:
            raise Killed
        plain(folder)

    monkeypatch.setattr(checkpoint, "_write_manifest", killed)
    with pytest.raises(Killed):
        finish(config, additions)
    assert newest(tmp_path / "run") == "global_step_1"
    partial = tmp_path / "run" / "checkpoints" / ".global_step_2.partial"
    assert not partial.exists()  # an exception removes it, SIGKILL leaves it
    partial.mkdir()
    (partial / "actor.state").touch()
    monkeypatch.setattr(checkpoint, "_write_manifest", plain)
    assert finish(config, additions).opened.found == tmp_path / "run" / "checkpoints" / "global_step_1"
    assert newest(tmp_path / "run") == "global_step_2"
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_checkpoint_without_a_role_that_the_run_has_is_named(
    run_dir: Path, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    taken = {"trainer.resume": str(run_dir / "checkpoints" / "global_step_4"), "trainer.run_dir": str(tmp_path / "ppo")}
    with raises(CheckpointError, key=re.compile(r"critic\.state$"), expected=re.compile("'critic'")):
        finish(train_config({**PPO, **taken}), additions)


@pytest.mark.parametrize(
    "content",
    first(1, ["", "[]", "{}", '{"step": "four"}', "[" * 9999, '{"step": 2, "score": "high"'], others=pytest.mark.slow),
)
def test_a_damaged_file_in_any_checkpoint_is_passed_over(
    content: str, run_dir: Path, train_config: MakeConfig, additions: Rows
) -> None:
    """Searches for the best, the newest good and the oldest checkpoint pass it over too, before any is verified."""
    for step in (2, 4):
        (run_dir / "checkpoints" / f"global_step_{step}" / "trainer.json").write_text(content)
    newest_good = checkpoint.newest(run_dir, good=True)
    assert newest_good is not None and newest_good.name == "global_step_3"
    assert checkpoint.score_of(run_dir / "checkpoints" / "global_step_4") is None
    overrides = {**GRPO, "actor.optim.lr": 1e-6, "trainer.save_limit": 2}
    assert finish(train_config(overrides), additions).step == 4
    assert newest(run_dir) == "global_step_4"


@pytest.mark.parametrize("content", ["{}", "[1]", '{"trainer.json": 3}', '{"../../x": {"bytes": 0, "sha256": ""}}'])
def test_a_manifest_that_is_no_manifest_is_damage(content: str, run_dir: Path) -> None:
    (run_dir / "checkpoints" / "global_step_4" / "manifest.json").write_text(content)
    with raises(CheckpointError, re.compile(r"global_step_4: manifest\.json$")):
        checkpoint.verify(run_dir / "checkpoints" / "global_step_4")
    assert newest(run_dir) == "global_step_3"


@pytest.mark.slow
def test_a_link_in_a_checkpoint_is_not_followed(run_dir: Path, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", run_dir / "checkpoints" / "global_step_4"
    secret.write_text("mine alone")
    (folder / "model" / "notes.txt").symlink_to(secret)
    with raises(CheckpointError, re.compile(r"notes\.txt$"), found=re.compile("/secret")):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert newest(run_dir) == "global_step_3"


@pytest.mark.slow
def test_a_checkpoint_of_supervised_training_is_named(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, model_folder: Path
) -> None:
    small = {"model.path": str(model_folder), "data.apply_chat_template": False, "trainer.logger": ["jsonl"]}
    small |= {"trainer.run_dir": str(tmp_path / "sft"), "trainer.total_steps": 1, "data.max_length": 32}
    rows = [{"prompt": "1", "response": "2"}] * 4
    trained = train_sft(load_config(SFTConfig, None, small, given={"data"}).config, data=rows)
    folder = checkpoint.newest(trained.run_dir)
    found = "dtype, is_good, loader, score, start, step"
    change = re.compile(f"`whet export {folder} OUT`")
    with raises(CheckpointError, f"{folder}", found=f"holds {found}", expected=re.compile("rollouts"), change=change):
        finish(train_config({**GRPO, "trainer.resume": str(folder)}), additions)
