# SPDX-License-Identifier: Apache-2.0
"""Runs whose vLLM server is killed, hangs or is slow: the result equals an undisturbed run's."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.errors import EngineError, WeightSyncError
from whet.models.load import load_policy
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MakeConfig = Callable[..., TrainConfig]
OPTIONS = {"kv_cache_bytes": 2**26, "threads": 1, "answer_seconds": 10.0}
RUN = {
    "rollout.engine.name": "vllm",
    "rollout.engine.options": OPTIONS,
    "trainer.total_steps": 5,
    "trainer.log_rollouts": 1,
    "actor.optim.lr": 1e-2,
    "data.max_response_length": 48,
}
TWO = {"train": {"roles": ["actor"]}, "sample": {"processes": 2, "roles": ["rollout"]}}


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def trained(config: TrainConfig, additions: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The tokens and rewards of all steps, in a fixed order, when no server is left."""
    train(config, reward=pays_for_sevens, data=additions)
    assert not psutil.wait_procs(servers(), 20)[1]
    files = sorted((Path(str(config.trainer.run_dir)) / "rollouts").glob("step_*.jsonl"))
    assert len(files) == config.trainer.total_steps
    rows = [(number, json.loads(line)) for number, file in enumerate(files) for line in file.open()]
    return sorted((number, row["prompt"], row["response"], row["reward"]) for number, row in rows)


def servers() -> list[psutil.Process]:
    """The vLLM servers below this process."""
    found = psutil.Process().children(recursive=True)
    servers = []
    for each in found:
        with suppress(psutil.Error):  # it has ended
            if "vllm.entrypoints" in " ".join(each.cmdline()):
                servers.append(each)
    return servers


def part_of(server: psutil.Process, name: str) -> psutil.Process:
    others = {each.name(): each for each in server.children(recursive=True)}
    return server if name == "server" else next(each for title, each in others.items() if name in title)


def kill(server: psutil.Process, name: str) -> None:
    part_of(server, name).kill()


def hang(server: psutil.Process, name: str) -> None:
    part_of(server, name).send_signal(signal.SIGSTOP)


def slow_down(server: psutil.Process, name: str) -> None:
    victim = part_of(server, name)
    for _ in range(10):
        victim.send_signal(signal.SIGSTOP)
        time.sleep(0.8)
        victim.send_signal(signal.SIGCONT)
        time.sleep(0.1)


FAULTS = {
    "killed": (kill, "server"),
    "core killed": (kill, "Engine"),
    "worker killed, as where memory runs out": (kill, "Worker"),
    "hung": (hang, "Engine"),
    "slow": (slow_down, "Worker"),
}


@contextmanager
def after_step_1(run_dir: Path, work: Callable[[], None]) -> Iterator[None]:
    """Does something to a run in the middle."""
    metrics, ended = run_dir / "metrics.jsonl", threading.Event()

    def wait_and_work() -> None:
        while not (metrics.exists() and metrics.read_text()) and not ended.wait(0.02):
            pass
        if not ended.is_set():
            work()

    thread = threading.Thread(target=wait_and_work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(30)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The result of a run that nothing happens to, once there is one."""
    return {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_changes_no_result(
    has_vllm: None,
    undisturbed: dict[str, Any],
    train_config: MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    if not undisturbed:
        undisturbed["rows"] = trained(train_config({**RUN, "trainer.run_dir": tmp_path / "alone"}), additions)
    act, name = FAULTS[fault]
    with after_step_1(tmp_path / "run", lambda: act(servers()[0], name)):
        rows = trained(train_config({**RUN, "trainer.run_dir": tmp_path / "run"}), additions)
    assert rows == undisturbed["rows"]
    was_restarted = re.search(r"rank 0\b.* again: .*vLLM server", caplog.text)
    assert (was_restarted is not None) == (fault != "slow")
    assert not psutil.wait_procs(servers(), 20)[1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_other_replica_goes_on(
    has_vllm: None,
    undisturbed: dict[str, Any],
    train_config: MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    staleness: int,
) -> None:
    """One of two replicas is killed, and comes back with the weights of the time. Without stale samples the result is
    that of one replica which nothing happened to."""
    if not staleness and not undisturbed:
        undisturbed["rows"] = trained(train_config({**RUN, "trainer.run_dir": tmp_path / "alone"}), additions)
    settings: dict[str, Any] = {**RUN, "cluster.placement": TWO, "trainer.run_dir": tmp_path / "run"}
    settings["trainer.total_steps"] = 200 if staleness else 5
    if staleness:
        settings |= {"rollout.max_staleness": 1, "algorithm.correction.weight": "importance"}
    with after_step_1(tmp_path / "run", lambda: servers()[1].kill()):
        rows = trained(train_config(settings), additions)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, settings["trainer.total_steps"] + 1))
    assert re.search(r"rank \d\b.* again: .*vLLM server", caplog.text)
    if not staleness:
        assert rows == undisturbed["rows"]
    else:
        assert re.search(r"rank \d\b.* samples again", caplog.text)
        assert max(line["staleness/max"] for line in lines) <= 1
        # the log-probs of both sides agree where a token is of the newest weights, also at the end
        assert min(line["correction/abs_mean"] for line in lines[-20:]) < 1e-2


def test_without_restarts_the_run_ends(
    has_vllm: None, train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {**RUN, "rollout.engine.options": {**OPTIONS, "restarts": 0}, "trainer.run_dir": tmp_path / "run"}
    with (
        after_step_1(tmp_path / "run", lambda: servers()[0].kill()),
        raises(EngineError, key=re.compile("vLLM server "), found=re.compile(" -9$")),
    ):
        trained(train_config(settings), additions)


def test_a_cache_that_does_not_fit_is_told(start: Callable[..., Any], tmp_path: Path) -> None:
    """The server's own words are in the error."""
    init_model(tmp_path / "model", "qwen3", "nano", num_layers=1)
    engine = start(tmp_path / "model", kv_cache_bytes=2**44)
    with raises(EngineError, key=re.compile("^vLLM server "), change=re.compile("emory")):
        engine.load(load_policy(tmp_path / "model").named_parameters(), 1)


def test_weights_of_another_model_are_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    init_model(tmp_path / "own", "qwen3", "nano", num_layers=1)
    init_model(tmp_path / "other", "qwen3", "nano", num_layers=1, hidden_size=64)
    engine = start(tmp_path / "own")
    with raises(WeightSyncError, key="version 1 of the weights", expected=re.compile("vLLM")):
        engine.load(load_policy(tmp_path / "other").named_parameters(), 1)
    assert engine.server.process.poll() is None
