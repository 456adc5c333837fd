# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.errors import ConfigError, DeadlineError, LostWorkerError
from whet.trainers.build import train
from whet.trainers.frame import with_restarts

MakeConfig = Callable[..., TrainConfig]
KILLS_A_WORKER = """
import os, signal
from pathlib import Path

def at_step_three(run, step, numbers):
    mark = Path({mark!r})
    if step == 3 and not mark.exists():
        mark.touch()
        transport = run.roles["actor"]._transport
        if run.config.cluster.backend == "ray":
            import ray

            pid = transport.peers[1].handle.__ray_call__.remote(lambda actor: os.getpid())
            os.kill(ray.get(pid), signal.SIGKILL)
        else:
            os.kill(child_of(child_of(transport._server._template.pid, 1), 0), signal.SIGKILL)

def child_of(pid, number):
    return int(Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split()[number])
"""


def config_of(run_dir: Path, **trainer: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": {"run_dir": str(run_dir), **trainer}})


def test_lost_workers_are_started_again_so_many_times(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resumed: list[str] = []
    losses = [LostWorkerError("rank 1"), DeadlineError("rank 0"), LostWorkerError("rank 0")]

    def attempt(config: TrainConfig) -> str:
        resumed.append(config.trainer.resume)
        if len(resumed) <= len(losses):
            raise losses[len(resumed) - 1]
        return "trained"

    config = config_of(tmp_path, max_restarts=3, resume="never")
    assert with_restarts(config, attempt) == "trained"
    assert resumed == ["never", "auto", "auto", "auto"]  # once begun, the folder is this run's own
    assert re.search(r"rank 1\b.*\b2 .*trainer\.max_restarts", caplog.text)
    resumed.clear()
    with raises(LostWorkerError, "rank 0"):
        with_restarts(config_of(tmp_path, max_restarts=2), attempt)
    assert len(resumed) == 3
    resumed.clear()
    with raises(LostWorkerError, "rank 1"):
        with_restarts(config_of(tmp_path), attempt)
    assert len(resumed) == 1


def test_other_errors_end_the_run(tmp_path: Path) -> None:
    calls: list[str] = []

    def attempt(config: TrainConfig) -> None:
        calls.append("called")
        raise ConfigError("a key")

    with raises(ConfigError, "a key"):
        with_restarts(config_of(tmp_path, max_restarts=3), attempt)
    assert len(calls) == 1


def test_it_starts_again_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With paths from the folder in which it began; a checkpoint that it started from stays in the config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    seen: list[tuple[Path, str]] = []

    def attempt(config: TrainConfig) -> None:
        seen.append((Path.cwd(), config.trainer.resume))
        os.chdir("elsewhere")
        raise LostWorkerError("rank 1 died")

    with pytest.raises(LostWorkerError):
        with_restarts(config_of(tmp_path, max_restarts=1, resume="before/global_step_4"), attempt)
    assert seen == [(tmp_path, "before/global_step_4")] * 2


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_restarted_run_is_that_of_one_never_disturbed(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, backend: str
) -> None:
    if backend == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    (tmp_path / "kills.py").write_text(KILLS_A_WORKER.format(mark=str(tmp_path / "killed")))
    shared = {"cluster.processes": 2, "trainer.total_steps": 5, "trainer.save_freq": 2, "trainer.save_limit": None}
    calm = train_config({**shared, "trainer.run_dir": tmp_path / "calm"})
    train(calm, reward=pays_for_sevens, data=additions)
    disturbed = {"trainer.max_restarts": 1, "trainer.callbacks": [f"{tmp_path / 'kills.py'}:at_step_three"]}
    disturbed |= {"cluster.backend": "ray", "cluster.address": "local"} if backend == "ray" else {}
    config = train_config({**shared, **disturbed, "trainer.run_dir": tmp_path / "again"})
    run = train(config, reward=pays_for_sevens, data=iter(additions))
    assert (tmp_path / "killed").exists()
    assert run.step == 5
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (tmp_path / "calm" / "metrics.jsonl").read_bytes()
    manifests = [
        json.loads((tmp_path / name / "checkpoints" / "global_step_5" / "manifest.json").read_text())
        for name in ("calm", "again")
    ]
    assert manifests[0]["actor.state"] == manifests[1]["actor.state"]  # weights and optimizer, by their checksum
