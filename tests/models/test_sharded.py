# SPDX-License-Identifier: Apache-2.0
"""Models that are read in parts, here all by one process: bit for bit the weights of `load_policy`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.first import first
from tests.raising import raises
from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.controller.worker import Placement
from whet.engines.role import RoleSettings
from whet.errors import ConfigError, ModelError
from whet.models.load import load_policy
from whet.models.sequence_parallel import heads_ranks
from whet.roles.workers import TrainWorker


def worker(folder: Path, name: str = "fsdp", **changes: object) -> TrainWorker:
    engine = EngineConfig(name=name)  # type: ignore[arg-type]
    settings = RoleSettings(**{"model_path": str(folder), "engine": engine, "dtype": "float32", **changes})  # type: ignore[arg-type]
    return TrainWorker(Placement("actor"), settings)


NEW_HEAD = {"is_reward_model": True, "optim": OptimConfig(), "seed": 3}


@pytest.mark.parametrize(
    "changes", [{}, {"is_value_model": True}, NEW_HEAD, {"lora": LoraConfig(rank=4), "seed": 3}], ids=str
)
@pytest.mark.parametrize("folder", first(1, ["model_folder", "qwen25_folder"], others=pytest.mark.slow))
def test_weights_buffers_and_adapters_are_those_of_a_whole_model(
    folder: str, changes: dict[str, object], request: pytest.FixtureRequest
) -> None:
    one, parts = (worker(request.getfixturevalue(folder), name, **changes) for name in ("single", "fsdp"))
    expected, got = (dict(each.engine.named_weights()) for each in (one, parts))
    assert list(expected) == list(got)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    buffers = [dict(each.engine.model.named_buffers()) for each in (one, parts)]
    assert buffers[0].keys() == buffers[1].keys() and buffers[0]
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    assert [type(each) for each in one.engine.model.modules()][-3:] == [
        type(each) for each in parts.engine.model.modules()
    ][-3:]
    if one.start is not None and parts.start is not None:
        assert one.start == parts.start
        trained = [
            {name: weight for name, weight in each.engine.model.named_parameters() if weight.requires_grad}
            for each in (one, parts)
        ]
        assert trained[0].keys() == trained[1].keys()
        assert all(torch.equal(trained[0][name], trained[1][name].to_local()) for name in trained[0])


def test_a_folder_of_several_files_and_one_of_pickles(model_folder: Path, tmp_path: Path) -> None:
    split, pickled = (shutil.copytree(model_folder, tmp_path / name) for name in ("split", "pickled"))
    weights = load_file(model_folder / "model.safetensors")
    for folder in (split, pickled):
        (folder / "model.safetensors").unlink()
    torch.save(weights, pickled / "pytorch_model.bin")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, split / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, chosen in parts.items() for name in chosen}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = dict(load_policy(model_folder).named_parameters())
    for folder, allow_pickle in ((split, False), (pickled, True)):
        got = dict(worker(folder, allow_pickle=allow_pickle).engine.named_weights())
        assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)


def test_a_folder_that_lacks_weights_is_named(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    lost = re.compile(r"1 weights of Qwen3ForCausalLM, .*model\.layers\.1\.mlp\.up_proj")
    with raises(ModelError, f"{folder}", found=lost):
        worker(folder)


def test_ranks_that_share_heads(model_folder: Path) -> None:
    config = load_policy(model_folder).config  # 4 heads, 2 of keys and values
    assert [heads_ranks(config, size) for size in (1, 2, 3, 4, 6, 8, 12)] == [1, 2, 1, 4, 2, 4, 4]
    assert heads_ranks(config, 4, tensor=2) == 2  # each has 2 heads, and one of keys and values
    config.layer_types = ["linear_attention", "full_attention"]
    with raises(ConfigError, "engine.options.mesh.context", found=2, expected=re.compile("linear_attention")):
        heads_ranks(config, 2)
