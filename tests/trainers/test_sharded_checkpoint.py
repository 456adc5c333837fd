# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the sharded engine: whole or not there, read with any number of ranks, exported in little memory."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.raising import raises
from whet.checkpoints import checkpoint, export as exporting
from whet.checkpoints.export import export
from whet.config import SFTConfig, load_config
from whet.errors import CheckpointError
from whet.models.load import load_policy, outline
from whet.trainers.sft import SFTRun, train_sft

ROWS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(6) for b in range(6)]
MakeConfig = Callable[..., SFTConfig]


@pytest.fixture
def sft_config(model_folder: Path, tmp_path: Path) -> MakeConfig:
    def make(overrides: dict[str, Any] | None = None) -> SFTConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "data.apply_chat_template": False,
            "data.max_length": 16,
            "data.train_batch_size": 8,
            "engine.name": "fsdp",
            "optim.lr": 1e-3,
            "trainer.total_steps": 2,
            "trainer.save_freq": 1,
            "trainer.save_limit": None,
            "trainer.logger": ["jsonl"],
            "trainer.run_dir": str(tmp_path / "run"),
        }
        return load_config(SFTConfig, None, small | (overrides or {}), given={"data"}).config

    return make


def trained(config: SFTConfig) -> SFTRun:
    return train_sft(config, data=ROWS)


def test_a_run_in_shards_is_the_run_of_one_and_so_is_what_is_exported(
    sft_config: MakeConfig, tmp_path: Path, model_folder: Path
) -> None:
    one = trained(sft_config({"engine.name": "single", "trainer.run_dir": str(tmp_path / "single")}))
    shards = trained(sft_config())
    losses = [[record["sft/loss"] for record in run.history] for run in (one, shards)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    folder = checkpoint.newest(tmp_path / "run")
    assert folder is not None
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = "actor.state/shard-00001-model-00001-of-00001.safetensors"
    assert {shard, "actor.state/engine.json", "trainer.json"} <= manifest.keys()

    first, second = (export(tmp_path / name, tmp_path / f"{name} out") for name in ("single", "run"))
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    weights = [AutoModelForCausalLM.from_pretrained(out).state_dict() for out in (first, second)]
    start = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, weight in weights[0].items():
        assert (weights[1][name] - weight).norm() <= 1e-5 * (weight - start[name]).norm(), name


@pytest.mark.slow
def test_a_damaged_shard_sends_the_run_back_to_the_checkpoint_before(sft_config: MakeConfig, tmp_path: Path) -> None:
    straight = trained(sft_config({"trainer.run_dir": str(tmp_path / "straight")}))
    trained(sft_config())
    [shard] = (tmp_path / "run" / "checkpoints" / "global_step_2" / "actor.state").glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-1])
    with raises(CheckpointError, re.compile(r"global_step_2: actor\.state/shard-00001")):
        checkpoint.verify(tmp_path / "run" / "checkpoints" / "global_step_2")
    resumed = trained(sft_config())
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_1"
    assert resumed.history == straight.history


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoints_before_it_whole(sft_config: MakeConfig, tmp_path: Path) -> None:
    trained(sft_config({"trainer.total_steps": 1}))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, old[1]))
    try:
        with raises(CheckpointError, re.compile("global_step_2$"), found=re.compile("MiB .*global_step_1")):
            trained(sft_config())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert trained(sft_config()).opened.found == tmp_path / "run" / "checkpoints" / "global_step_1"


def test_another_engine_and_another_model_are_named(
    sft_config: MakeConfig, qwen25_folder: Path, tmp_path: Path
) -> None:
    trained(sft_config({"trainer.total_steps": 1}))
    taken = {"trainer.resume": str(tmp_path / "run/checkpoints/global_step_1"), "trainer.run_dir": str(tmp_path / "b")}
    with raises(CheckpointError, found=re.compile("folder"), change=re.compile(r"engine\.name ")):
        trained(sft_config({**taken, "engine.name": "single"}))
    found = re.compile(rf"model\.path={qwen25_folder}$")
    with raises(CheckpointError, key=taken["trainer.resume"], found=found):
        trained(sft_config({**taken, "model.path": str(qwen25_folder)}))


@pytest.mark.slow
def test_an_adapter_is_exported_merged_and_alone(sft_config: MakeConfig, tmp_path: Path, model_folder: Path) -> None:
    lora = {"model.lora.rank": 4, "trainer.total_steps": 2}
    trained(sft_config({**lora, "engine.name": "single", "trainer.run_dir": str(tmp_path / "single")}))
    trained(sft_config(lora))
    merged = [load_policy(export(tmp_path / name, tmp_path / f"{name} out")) for name in ("single", "run")]
    start = load_policy(model_folder).state_dict()
    for name, weight in merged[0].state_dict().items():
        assert (merged[1].state_dict()[name] - weight).norm() <= 1e-5 * (weight - start[name]).norm() + 1e-7, name
    alone = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    with safe_open(alone / "adapter_model.safetensors", framework="pt") as file:
        names = list(file.keys())
    assert len(names) == 28 and "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight" in names


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURED = """
import sys
from pathlib import Path
from whet.checkpoints import export as exporting
from whet.checkpoints.export import export

def most():  # bytes that were resident at once; what getrusage says begins with the parent's
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

checkpoint, out, small = (Path(path) for path in sys.argv[1:4])
exporting.FILE_BYTES = int(sys.argv[4])
export(small, small.parent / "small_out")  # what it imports is none of the model's memory
before = most()
export(checkpoint, out)
print(before, most())
"""


def made_checkpoint(folder: Path, layers: int, hidden: int) -> int:
    """A checkpoint of a model that was on two ranks, each weight's rows halved.  Returns the bytes of the weights."""
    state, model = folder / "actor.state", folder / "model"
    state.mkdir(parents=True)
    config = Qwen3Config(
        vocab_size=8 * hidden,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(model)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in outline(model).named_parameters()}
    for rank in range(2):
        own, offsets = {}, {}
        for name, shape in shapes.items():
            half = -(-shape[0] // 2)
            rows = range(half) if rank == 0 else range(half, shape[0])
            own[f"model.{name}"] = torch.full((len(rows), *shape[1:]), 1.0 + rank)
            offsets[f"model.{name}"] = {"saved_offsets": [rows.start, *[0] * (len(shape) - 1)]}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
        save_file(own, state / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", info)
    (state / "engine.json").write_text(json.dumps({"start": None}))
    (folder / "trainer.json").write_text("{}")
    checkpoint._write_manifest(folder)
    return sum(4 * shape.numel() for shape in shapes.values())


def check_exported(out: Path, size: int, hidden: int) -> None:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size and len(set(index["weight_map"].values())) > 2
    weight = load_policy(out).model.layers[1].mlp.up_proj.weight
    assert (weight[: 2 * hidden] == 1).all() and (weight[2 * hidden :] == 2).all()


def test_shards_of_two_ranks_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = made_checkpoint(tmp_path / "checkpoint", layers=2, hidden=64)
    monkeypatch.setattr(exporting, "FILE_BYTES", size // 4)
    check_exported(export(tmp_path / "checkpoint", tmp_path / "out"), size, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "hidden", "file_bytes"), [(8, 384, 2**23), (13, 1536, 2**29)])
def test_an_export_holds_a_part_of_the_model_at_a_time(
    layers: int, hidden: int, file_bytes: int, tmp_path: Path
) -> None:
    """Of 61 MB in files of 8, and of 2 GB in files of 0.5 as they are by default: within 3 GB, all else included."""
    size = made_checkpoint(tmp_path / "checkpoint", layers, hidden)
    out, small = tmp_path / "out", tmp_path / "small"
    made_checkpoint(small, layers=1, hidden=32)
    arguments = [sys.executable, "-c", MEASURED, str(tmp_path / "checkpoint"), str(out), str(small), str(file_bytes)]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=240).stdout
    before, after = (int(number) for number in printed.split())
    assert after - before < 0.6 * size, f"{before} bytes before, {after} at most, {size} of the model"
    assert after < 3 * 2**30
    check_exported(out, size, hidden)
