# SPDX-License-Identifier: Apache-2.0
"""vLLM's processes killed and stopped, and models that it takes in its own way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers

from whet.errors import EngineError
from whet.rollout.protocol import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_experts_are_updated(start: servers.Start, tmp_path: Path) -> None:
    """A CPU's kernel needs packed experts; transformers keeps a layer's experts together, vLLM loads them one by
    one."""
    model = servers.random_model(tmp_path, "qwen3_moe", num_layers=2)
    engine, draw = start(tmp_path / "sharp"), torch.Generator().manual_seed(0)
    for version in range(1, 4):
        suite.check_log_probs(engine, model, suite.requests(seed=version))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2 * weight.std())
        engine.load(model.named_parameters(), version)
    suite.check_log_probs(engine, model, suite.requests())


def test_a_server_on_two_devices(start: servers.Start, tmp_path: Path) -> None:
    """Each process of it takes its own part of the weights that come."""
    model = servers.random_model(tmp_path, "qwen3", num_layers=2)
    engine, draw = start(tmp_path / "sharp", num_devices=2), torch.Generator().manual_seed(0)
    for version in range(1, 4):
        suite.check_log_probs(engine, model, suite.requests(seed=version))
        suite.check_choices(engine, model, suite.requests(seed=version))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2 * weight.std())
        engine.load(model.named_parameters(), version)
    suite.check_log_probs(engine, model, suite.requests())


@pytest.mark.parametrize("victim", ["Worker", "Engine", servers.SERVER])
def test_a_killed_process_is_heard_of_within_seconds(start: servers.Start, tmp_path: Path, victim: str) -> None:
    servers.check_kill(start, tmp_path, victim)


def test_a_worker_that_stands_still_is_heard_of(start: servers.Start, tmp_path: Path) -> None:
    """No token comes."""
    servers.random_model(tmp_path, "qwen3")
    engine = start(tmp_path / "sharp", answer_seconds=20.0)
    generate(engine, suite.requests(groups=1))
    worker = servers.process_of(engine, "Worker")
    engine._answer_seconds = 3.0
    worker.send_signal(signal.SIGSTOP)
    with raises(EngineError, key=re.compile("^vLLM server "), found=re.compile(" 4 .* 3 s$")):
        generate(engine, servers.long_requests(engine, 2, 2))
    worker.send_signal(signal.SIGCONT)
    engine.close()


def test_no_process_outlives_whoever_started_it(has_vllm: None, tmp_path: Path) -> None:
    servers.random_model(tmp_path, "qwen3")
    script = tmp_path / "run.py"
    script.write_text(
        "import time, torch\n"
        "from whet.config.schema import ModelConfig\n"
        "from whet.plugins.inference.vllm.engine import VLLMEngine\n"
        f"model = ModelConfig(path={str(tmp_path / 'sharp')!r})\n"
        "engine = VLLMEngine(torch.float32, 8, torch.device('cpu'), model, kv_cache_bytes=2**26, threads=1)\n"
        "engine.ready()\n"
        "print(engine.server.process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=os.environ) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        all_of_them = [server, *server.children(recursive=True)]
        assert len(all_of_them) >= 3
        parent.kill()
        assert not psutil.wait_procs(all_of_them, timeout=10)[1]
