# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that verl's and EasyR1's own managers write are exported bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.nano import nano_model
from tests.peers.checkouts import checkout
from tests.peers.peer import DEADLINE_SECONDS, ROOT, interpreter
from whet.checkpoints.export import export

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("checkpoint_worker.py")
MANAGER = "verl/utils/checkpoint/fsdp_checkpoint_manager.py"
UNEVEN = {"vocab_size": 67, "hidden_size": 36, "intermediate_size": 50}  # three ranks have unequal parts


def saved(model: Path, actor: Path, *given: Any) -> Path:
    """The folder in which a peer's manager saved the model."""
    actor.parent.mkdir(parents=True)
    python = interpreter("WHET_PEERS", ".venv-peers")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(python), str(WORKER), str(model), str(actor), *map(str, given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    return actor


def check_exported(model: Path, source: Path, out: Path) -> None:
    """Checks that the export has all weights of the model, in its dtype, and the other files."""
    export(source, out)
    written, started = (AutoModelForCausalLM.from_pretrained(each, dtype="auto").state_dict() for each in (out, model))
    assert written.keys() == started.keys()
    assert all(torch.equal(written[name], started[name]) for name in started)
    assert all(weight.dtype == torch.float32 for weight in written.values())
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(model).get_vocab()


@pytest.mark.parametrize(
    ("model_type", "changed", "given"),
    [
        ("qwen3", {"tie_word_embeddings": True, **UNEVEN}, (3, 3, "fsdp")),
        ("qwen2", UNEVEN, (3, 3, "fsdp2")),
        ("qwen3_moe", {}, (4, 2, "fsdp2")),
        ("llama", {}, (4, 2, "fsdp")),
    ],
)
def test_verl(model_type: str, changed: dict[str, Any], given: tuple[Any, ...], tmp_path: Path) -> None:
    model = nano_model(tmp_path / "model", model_type, **changed)
    actor = saved(model, tmp_path / "run" / "global_step_10" / "actor", *given)
    check_exported(model, tmp_path / "run", tmp_path / "out")
    export(actor, tmp_path / "rounded", dtype="bfloat16")
    merged = load_file(actor / "merged" / "model.safetensors")  # verl's merger, which rounds
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert merged.keys() == rounded.keys()
    assert all(torch.equal(merged[name], rounded[name]) for name in merged)


@pytest.mark.parametrize("given", [(3, 3, "fsdp"), (4, 2, "fsdp")])
def test_easyr1(given: tuple[Any, ...], tmp_path: Path) -> None:
    folder = checkout("WHET_EASYR1", MANAGER)
    model = nano_model(tmp_path / "model", "qwen3", **UNEVEN)
    saved(model, tmp_path / "run" / "global_step_10" / "actor", *given, folder)
    check_exported(model, tmp_path / "run", tmp_path / "out")
