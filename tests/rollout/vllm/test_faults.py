# SPDX-License-Identifier: Apache-2.0
"""vLLM's processes killed and stopped, and models that it takes in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite
from conftest import Start, random_model

from whet.errors import EngineError
from whet.rollout.protocol import generate
from whet.rollout.vllm.engine import VLLMEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG = {"stop_token_ids": (), "max_new_tokens": 1900}


def processes(engine: VLLMEngine) -> dict[str, psutil.Process]:
    """The server's processes by what they do."""
    server = psutil.Process(engine.server.process.pid)
    others = {process.name(): process for process in server.children(recursive=True)}
    core = next(each for name, each in others.items() if "Engine" in name)
    worker = next(each for name, each in others.items() if "Worker" in name)
    return {"server": server, "core": core, "worker": worker}


def test_experts_are_updated(start: Start, tmp_path: Path) -> None:
    """A CPU's kernel wants experts packed; transformers keeps those of a layer together, vLLM loads them one by one."""
    model = random_model(tmp_path, "qwen3_moe", num_layers=2)
    engine, draw = start(tmp_path / "sharp"), torch.Generator().manual_seed(0)
    for version in range(1, 4):
        suite.check_log_probs(engine, model, suite.requests(seed=version))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2 * weight.std())
        engine.load(model.named_parameters(), version)
    suite.check_log_probs(engine, model, suite.requests())


def test_a_server_on_two_devices(start: Start, tmp_path: Path) -> None:
    """Each process of it takes its own part of the weights that come."""
    model = random_model(tmp_path, "qwen3", num_layers=2)
    engine, draw = start(tmp_path / "sharp", num_devices=2), torch.Generator().manual_seed(0)
    for version in range(1, 4):
        suite.check_log_probs(engine, model, suite.requests(seed=version))
        suite.check_choices(engine, model, suite.requests(seed=version))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2 * weight.std())
        engine.load(model.named_parameters(), version)
    suite.check_log_probs(engine, model, suite.requests())


@pytest.mark.parametrize("victim", ["worker", "core", "server"])
def test_a_killed_process_is_heard_of_within_seconds(start: Start, tmp_path: Path, victim: str) -> None:
    random_model(tmp_path, "qwen3")
    engine = start(tmp_path / "sharp", answer_seconds=20.0)
    made = suite.requests(groups=2, n=2, **LONG)
    generate(engine, suite.requests(groups=1))
    if victim == "worker":  # which stands still at first: no token comes
        worker = processes(engine)["worker"]
        engine._answer_seconds = 3.0
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"gave no token to 4 requests for 3 s"):
            generate(engine, made)
        engine._answer_seconds = 20.0
        worker.send_signal(signal.SIGCONT)
    found, began = processes(engine), time.monotonic()
    for request in made:
        engine.submit(request)
    found[victim].kill()
    with pytest.raises(EngineError, match="the vLLM server"):
        while True:
            engine.poll(1.0)
    assert time.monotonic() - began < 15
    engine.close()
    assert not psutil.wait_procs(list(found.values()), timeout=10)[1]


def test_no_process_outlives_whoever_started_it(has_vllm: None, tmp_path: Path) -> None:
    random_model(tmp_path, "qwen3")
    script = tmp_path / "run.py"
    script.write_text(
        "import time, torch\n"
        "from whet.config.schema import ModelConfig\n"
        "from whet.rollout.vllm.engine import VLLMEngine\n"
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
