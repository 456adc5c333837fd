# SPDX-License-Identifier: Apache-2.0
"""Effects on a run of several processes when a part breaks: docs/cluster.md has the table.

Nodes, networks and heads that are lost: tests/controller/test_ray_nodes.py. Weights that are damaged on their way:
tests/roles/test_rollout_worker.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.raising import check_fields, raises
from whet.checkpoints import checkpoint
from whet.config import TrainConfig
from whet.errors import CheckpointError, DeadlineError, LostWorkerError
from whet.trainers.build import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
NAMED_SECONDS = 10.0
SHARDED = {
    "cluster.processes": 2,
    "actor.engine.name": "fsdp",
    "actor.mini_batch_size": 2,  # so that log-probs are computed before the update
    "trainer.total_steps": 4,
    "trainer.save_freq": 2,
    "trainer.save_limit": None,
}
# A loop that does something to the second worker when a phase begins after so many steps, once.
STRIKES = """
import os, signal, time
from contextlib import contextmanager
from pathlib import Path
from whet.phases import watching
from whet.trainers import rl

def child_of(pid, number):
    return int(Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split()[number])

def fit(run):
    mark = Path({mark!r})

    @contextmanager
    def watch(name):
        saved = (run.run_dir / "checkpoints" / "global_step_2").exists()
        if saved and name == {phase!r} and run.step == {steps_done} and not mark.exists():
            pid = child_of(child_of(run.roles["actor"]._transport._server._template.pid, 1), 0)
            mark.write_text(f"{{pid}} {{time.time()}}")
            os.kill(pid, signal.{number})
        yield

    with watching(watch):
        rl.fit(run)
"""


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def hangs_once(solution_str: str, extra_info: dict[str, Any]) -> float:
    """On the first answer that finds the mark missing."""
    mark = Path(os.environ["WHET_TEST_MARK"])
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return pays_for_sevens(solution_str)
    time.sleep(3600)
    return 0.0


def struck(tmp_path: Path, phase: str, number: str, steps_done: int = 2) -> dict[str, str]:
    path = tmp_path / "strikes.py"
    path.write_text(STRIKES.format(mark=str(tmp_path / "struck"), phase=phase, number=number, steps_done=steps_done))
    return {"trainer.loop": f"{path}:fit"}


def when_struck(tmp_path: Path) -> tuple[int, float]:
    """Whom, and when."""
    pid, moment = (tmp_path / "struck").read_text().split()
    return int(pid), float(moment)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with held-out problems, asked after every step."""
    path = tmp_path_factory.mktemp("faults") / "val.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(4)))
    return {**SHARDED, "data.val_files": [str(path)], "trainer.val_freq": 1}


@pytest.fixture
def calm(
    train_config: MakeConfig,
    additions: Rows,
    validated: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Path:
    """The folder of a run to which nothing happens; made once."""
    folder = tmp_path_factory.getbasetemp() / "calm"
    if not folder.exists():
        train(train_config({**validated, "trainer.run_dir": folder}), reward=pays_for_sevens, data=additions)
    return folder


@pytest.mark.parametrize(
    ("phase", "steps_done"),
    [
        *((f"time/{name}", 2) for name in ("rollout", "reward", "log_probs", "advantage", "update", "sync")),
        ("time/validation", 3),
        ("save", 4),
    ],
)
def test_a_worker_killed_in_any_phase_is_named_and_the_run_goes_on_as_if_it_never_was(
    phase: str,
    steps_done: int,
    calm: Path,
    validated: dict[str, Any],
    train_config: MakeConfig,
    additions: Rows,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {**validated, **struck(tmp_path, phase, "SIGKILL", steps_done), "trainer.max_restarts": 1}
    run = train(
        train_config({**config, "trainer.run_dir": tmp_path / "run"}), reward=pays_for_sevens, data=iter(additions)
    )
    _, moment = when_struck(tmp_path)
    [said] = [each for each in caplog.records if each.name == "whet.trainers.frame" and each.levelname == "WARNING"]
    assert said.args is not None
    error, where, left = said.args
    assert isinstance(error, LostWorkerError)
    check_fields(error, re.compile(r"\brank 1$"), found=re.compile("SIGKILL"))
    assert where.endswith("global_step_2") and left == 0
    assert said.created - moment < NAMED_SECONDS
    assert run.step == 4
    assert metrics_of(tmp_path / "run") == metrics_of(calm)


def test_a_worker_that_is_slow_changes_nothing(
    calm: Path, validated: dict[str, Any], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = {**validated, **struck(tmp_path, "time/update", "SIGSTOP"), "trainer.run_dir": tmp_path / "run"}
    released = threading.Thread(target=_release, args=(tmp_path, 3.0))
    released.start()
    train(train_config(config), reward=pays_for_sevens, data=additions)
    released.join()
    assert metrics_of(tmp_path / "run") == metrics_of(calm)


def test_a_worker_that_never_answers_is_named_at_the_deadline(
    validated: dict[str, Any], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = {**validated, **struck(tmp_path, "time/update", "SIGSTOP"), "trainer.run_dir": tmp_path / "run"}
    with raises(DeadlineError, re.compile(r"^actor rank (0, )?1, update$"), found=re.compile(r"\b90 s$")):
        train(train_config({**config, "cluster.deadline_seconds": 90}), reward=pays_for_sevens, data=additions)
    pid, moment = when_struck(tmp_path)
    assert time.time() - moment < 90 + NAMED_SECONDS
    assert not Path(f"/proc/{pid}").exists()


def test_a_reward_that_hangs_costs_its_answer(
    validated: dict[str, Any],
    train_config: MakeConfig,
    additions: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WHET_TEST_MARK", str(tmp_path / "hung"))
    config = {
        **validated,
        "trainer.run_dir": tmp_path / "run",
        "trainer.total_steps": 2,
        "trainer.val_before_train": False,
    }
    judged = {"reward.function": f"{__file__}:hangs_once", "reward.timeout_seconds": 3, "reward.num_workers": 2}
    train(train_config({**config, **judged}), data=additions)
    first, second = metrics_of(tmp_path / "run")
    assert (first["failures/reward"], first["failures/timed_out"]) == (1, 1)
    assert "failures/reward" not in second and second["actor/grad_norm"] >= 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, for one checkpoint and a half."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "whet", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named_and_with_room_the_same_command_goes_on(
    small_disk: Path, calm: Path, validated: dict[str, Any], train_config: MakeConfig, additions: Rows
) -> None:
    size = sum(file.stat().st_size for file in (calm / "checkpoints" / "global_step_2").rglob("*") if file.is_file())
    subprocess.run(["mount", "-o", f"remount,size={int(1.5 * size)}", small_disk], check=True)
    run_dir = small_disk / "run"
    config = train_config({**validated, "trainer.run_dir": run_dir})
    with raises(CheckpointError, re.compile("global_step_4$"), found=re.compile("MiB .*global_step_2")):
        train(config, reward=pays_for_sevens, data=additions)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["global_step_2"]
    assert checkpoint.find(run_dir, "auto") == run_dir / "checkpoints" / "global_step_2"
    subprocess.run(["mount", "-o", f"remount,size={8 * size}", small_disk], check=True)
    train(config, reward=pays_for_sevens, data=additions)
    assert metrics_of(run_dir) == metrics_of(calm)


def _release(tmp_path: Path, seconds: float) -> None:
    until = time.monotonic() + 300
    while not (tmp_path / "struck").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(when_struck(tmp_path)[0], signal.SIGCONT)
