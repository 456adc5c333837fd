# SPDX-License-Identifier: Apache-2.0
"""An unmodified vLLM server as the teacher of `whet distill`."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from whet.config import DistillConfig, load_config
from whet.devices import HOST
from whet.plugins.inference.servers.environment import find_environment
from whet.plugins.inference.vllm.engine import PACKAGE, command, environment
from whet.plugins.lessons.init_model import init_model
from whet.trainers.distill import distill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = [{"prompt": f"say {x}=", "response": y} for x in "xyz" for y in ("aab", "cb")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A student, and a teacher whose distributions are far from even."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: folder / name for name in ("student", "teacher")}
    for seed, each in enumerate(made.values()):
        init_model(each, "qwen3", "nano", num_layers=2, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(made["teacher"])
    with torch.no_grad():
        model.model.norm.weight.mul_(6.0)
    model.save_pretrained(made["teacher"])
    return made


@pytest.fixture(scope="module")
def address(has_vllm: None, folders: dict[str, Path]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = find_environment(PACKAGE, None)
    served = {"model": str(folders["teacher"]), "dtype": "float32", "max_logprobs": 6, "max_model_len": 64}
    words = command(found.python, port, {**served, "enforce_eager": True}, found)
    variables = {**os.environ, **environment(1, HOST, 1, is_plain=True), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folders["teacher"].parent / "log"
    with log.open("w") as file, subprocess.Popen(words, env=variables, stdout=file, stderr=file) as process:
        try:
            until = time.monotonic() + 240
            while True:
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def test_a_served_teacher_has_the_numbers_of_its_folder(address: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Six likeliest tokens of each place and the mass of the others, on rows of the data and on the student's own."""

    def history(name: str, teacher: str) -> list[dict[str, float]]:
        settings: dict[str, Any] = {
            "model.path": str(folders["student"]), "model.dtype": "float32", "teachers": {"*": teacher}, "top_k": 6,
            "on_policy": 0.5, "data.apply_chat_template": False, "data.train_batch_size": 3, "data.max_length": 24,
            "optim.eps": 1.0, "optim.lr": 0.1, "optim.weight_decay": 0.0, "trainer.total_steps": 3,
            "trainer.logger": ["jsonl"], "trainer.run_dir": str(tmp_path / name),
        }  # fmt: skip
        return distill(load_config(DistillConfig, None, settings, given={"data"}).config, data=ROWS).history

    served, own = history("served", address), history("own", str(folders["teacher"]))
    assert len(served) == 3 and served[0]["distill/loss"] > 0.1
    for mine, theirs in zip(own, served, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
