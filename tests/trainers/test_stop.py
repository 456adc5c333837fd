# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to end saves, says how to go on, and goes on to the bits of one that was not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.raising import raises
from tests.trainers.test_checkpoint import assert_same_bits
from whet.config import SFTConfig, TrainConfig, load_config
from whet.engines.single import SingleEngine
from whet.errors import LostWorkerError, WorkerError
from whet.tracking.runs import read_run
from whet.trainers.build import train
from whet.trainers.run import Run as TrainRun
from whet.trainers.sft import train_sft
from whet.trainers.stop import Stopped, StopSignals

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
FOUR = {"trainer.total_steps": 4}


def sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


@pytest.fixture
def straight(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> Path:
    """The folder of a run that nobody stopped."""
    config = train_config({**FOUR, "trainer.run_dir": str(tmp_path / "straight")})
    return train(config, reward=sevens, data=additions).run_dir


def assert_equal_runs(one: Path, other: Path) -> None:
    last = Path("checkpoints", "global_step_4")
    assert_same_bits(one / last, other / last)
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    rollouts = {path.name: path.read_bytes() for path in (one / "rollouts").iterdir()}
    assert {path.name: path.read_bytes() for path in (other / "rollouts").iterdir()} == rollouts


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_a_rollout_saves_the_step_before_at_once(
    number: signal.Signals, straight: Path, train_config: MakeConfig, additions: Rows
) -> None:
    calls = 0

    def reward(solution_str: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 2 * 16 + 3:  # in the third step, whose groups the loader has already handed out
            os.kill(os.getpid(), number)
        return sevens(solution_str)

    before = signal.getsignal(number)
    config = train_config(FOUR)
    with pytest.raises(Stopped, match=r" 2, .*global_step_2 "):
        train(config, reward=reward, data=additions)
    assert calls < 3 * 16  # nothing more was judged
    assert signal.getsignal(number) is before
    resumed = train(config, reward=sevens, data=additions)
    assert resumed.opened.found is not None and resumed.opened.found.name == "global_step_2"
    assert_equal_runs(straight, resumed.run_dir)


@pytest.mark.slow
def test_a_signal_outside_of_a_rollout_waits_for_the_step(
    straight: Path, train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, updates = SingleEngine.step, 0

    def signalled(*arguments: object) -> object:
        nonlocal updates
        updates += 1
        if updates == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SingleEngine, "step", signalled)
    config = train_config(FOUR)
    with pytest.raises(Stopped, match=r"SIGTERM .* 2, "):
        train(config, reward=sevens, data=additions)
    assert_equal_runs(straight, train(config, reward=sevens, data=additions).run_dir)


def test_a_file_stops_a_run_too(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    stop = tmp_path / "run" / "stop"

    def reward(solution_str: str) -> float:
        stop.touch()
        return sevens(solution_str)

    with pytest.raises(Stopped, match=r" .*/run/stop .* 1, "):
        train(train_config(FOUR), reward=reward, data=additions)
    assert (read_run(tmp_path / "run").state, read_run(tmp_path / "run").step) == ("stopped", 1)
    run = train(train_config(FOUR), reward=sevens, data=additions)  # the file is gone with the start
    assert (read_run(tmp_path / "run").state, read_run(tmp_path / "run").total_steps) == ("finished", 4)
    assert run.opened.found is not None and run.opened.found.name == "global_step_1" and run.step == 4


def test_a_file_that_comes_while_models_load_stops_a_run(train_config: MakeConfig, additions: Rows) -> None:
    """Also where a worker is lost beside it, which starts the run again otherwise."""
    calls = 0

    def reward(solution_str: str) -> float:
        nonlocal calls
        calls += 1
        return 0.0

    config = train_config({**FOUR, "trainer.max_restarts": 1})
    with pytest.MonkeyPatch.context() as patch:
        loads = TrainRun.start

        def start(run: TrainRun) -> None:
            loads(run)
            run.signals.file.touch()

        patch.setattr(TrainRun, "start", start)
        with pytest.raises(Stopped):
            train(config, reward=reward, data=additions)
    assert calls == 0


def test_a_run_that_is_asked_to_end_is_not_started_again(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = 0

    def lost(*arguments: object) -> object:
        nonlocal starts
        starts += 1
        os.kill(os.getpid(), signal.SIGTERM)
        raise LostWorkerError("rank 1 died")

    monkeypatch.setattr(SingleEngine, "step", lost)
    with pytest.raises(Stopped, match=r"SIGTERM.*rank 1 died") as stopped:
        train(train_config({**FOUR, "trainer.max_restarts": 2}), reward=sevens, data=additions)
    assert (starts, stopped.value.number) == (1, signal.SIGTERM)


def test_a_run_notes_that_it_runs_and_how_it_failed(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []

    def broken(*arguments: object) -> object:
        states.append(read_run(tmp_path / "run").state)
        raise ValueError("no more")

    monkeypatch.setattr(SingleEngine, "step", broken)
    with raises(WorkerError, key="actor rank 0, update", found=re.compile("ValueError: no more")):
        train(train_config(FOUR), reward=sevens, data=additions)
    noted = read_run(tmp_path / "run")
    assert states == ["running"] and noted.state == "failed"
    assert re.match("WorkerError: actor rank 0, update: .*ValueError: no more", noted.error)


def test_before_the_first_step_there_is_nothing_to_save(train_config: MakeConfig, additions: Rows) -> None:
    def reward(solution_str: str) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    with pytest.raises(Stopped) as stopped:
        train(train_config(), reward=reward, data=additions)
    assert stopped.value.number == signal.SIGTERM and "global_step" not in str(stopped.value)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_validation_before_the_first_step_is_left_at_once(
    command: str, train_config: MakeConfig, additions: Rows, tmp_path: Path, model_folder: Path
) -> None:
    """Whatever is left of it."""
    held_out = tmp_path / "val.jsonl"
    held_out.write_text("".join(json.dumps({**row, "response": row["answer"]}) + "\n" for row in additions))
    calls = 0

    def reward(solution_str: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return 1.0

    settings = {"data.val_files": [str(held_out)], "trainer.val_freq": 0}
    with pytest.raises(Stopped, match="Ctrl-C"):
        if command == "train":
            train(train_config(settings), reward=reward, data=additions)
        else:
            small = {"model.path": str(model_folder), "data.apply_chat_template": False, "trainer.logger": ["jsonl"]}
            small |= {"data.max_length": 32, "trainer.run_dir": str(tmp_path / "run")}
            config = load_config(SFTConfig, None, settings | small, given={"data"})
            forward = SingleEngine.forward
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    SingleEngine, "forward", lambda *given: [reward("") for _ in range(9)] and forward(*given)
                )
                train_sft(config.config, data=[{**row, "response": "1"} for row in additions])
    assert calls == 3
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_a_signal_that_has_to_wait_is_answered_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals(tmp_path / "stop") as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err.startswith("Ctrl-C: ")
        with pytest.raises(Stopped):
            signals.here()


def test_a_run_that_never_resumes_is_told_how_to_go_on(train_config: MakeConfig, additions: Rows) -> None:
    calls = 0

    def reward(solution_str: str) -> float:
        nonlocal calls
        calls += 1
        if calls == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return sevens(solution_str)

    never = {**FOUR, "trainer.resume": "never"}
    with pytest.raises(Stopped, match=r"trainer\.resume=auto"):
        train(train_config(never), reward=reward, data=additions)
    assert train(train_config({**FOUR, "trainer.resume": "auto"}), reward=sevens, data=additions).step == 4


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="twice"), StopSignals(tmp_path / "stop") as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.file == tmp_path / "stop"
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_supervised_runs_stop_in_the_same_way(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)]

    def config(folder: str) -> SFTConfig:
        overrides = {
            "model.path": str(model_folder),
            "data.apply_chat_template": False,
            "data.train_batch_size": 4,
            "data.max_length": 32,
            "trainer.total_steps": 4,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / folder),
        }
        return load_config(SFTConfig, None, overrides, given={"data"}).config

    train_sft(config("straight"), data=rows)
    with pytest.raises(Stopped, match=r"SIGTERM .* 2, "):
        train_sft(
            config("stopped"),
            data=rows,
            callbacks=[lambda run: os.kill(os.getpid(), signal.SIGTERM) if run.step == 2 else None],
        )
    train_sft(config("stopped"), data=rows)
    last = Path("checkpoints", "global_step_4")
    assert_same_bits(tmp_path / "straight" / last, tmp_path / "stopped" / last)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_at_the_command_line_says_how_to_go_on(
    processes: int, model_folder: Path, additions: Rows, tmp_path: Path
) -> None:
    """As a terminal sends it: to every process of the group."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions))
    command = [sys.executable, "-m", "whet", "train", f"model.path={model_folder}", "reward.function=exact_match"]
    command += [f"data.train_files={tmp_path / 'rows.jsonl'}", "data.apply_chat_template=false", "rollout.n=4"]
    command += ["data.max_prompt_length=16", "data.max_response_length=32", "data.train_batch_size=4"]
    command += [f"trainer.run_dir={tmp_path / 'run'}", f"cluster.processes={processes}", "trainer.total_steps=100000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60) == 130
    assert "stopped by Ctrl-C after step " in said and "the same command goes on from there:\n  whet train " in said
    assert "Traceback" not in said
