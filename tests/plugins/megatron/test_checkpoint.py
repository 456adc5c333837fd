# SPDX-License-Identifier: Apache-2.0
"""States in Megatron-Core's form: resumed by other meshes, exported, converted in both directions; a killed run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
import engine_conformance as suite
from tiny import KINDS, folder_of
from typer.testing import CliRunner

from whet.config.schema import EngineConfig
from whet.controller.dispatch import register
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.errors import EngineError, WorkerError
from whet.trainers.objectives import ValueObjective

sizes = pytest.importorskip("whet.plugins.megatron.sizes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sizes.is_installed(), reason="no megatron-core: make megatron"),
]
SHARDED = {"distributed_optimizer": True}
# A run goes on with other processes and another mesh each time.
CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "layers": [(2, {"tensor": 2}), (2, {"pipeline": 2, "virtual": 2, **SHARDED}), (1, {})],
    "experts": [
        (2, {"expert": 2}),
        (2, {"expert": 2, "tensor": 2, **SHARDED}),
        (2, {"pipeline": 2}),
        (2, {"expert": 2}),
        (1, SHARDED),
    ],
}


def megatron(options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(name="megatron", logits_chunk_tokens=16, options=options)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_state_goes_on_on_another_mesh(chain: str, tmp_path: Path) -> None:
    model, steps = folder_of("qwen3_moe", tmp_path), 2 * len(CHAINS[chain])
    expected = suite.drive(suite.launched({"actor": suite.settings(model)}, 1)["actor"], steps=range(steps))
    metrics: list[dict[str, float]] = []
    for part, (count, options) in enumerate(CHAINS[chain]):
        group = suite.launched({"actor": suite.settings(model, megatron(options))}, count)["actor"]
        if part:
            group.load(str(tmp_path / f"{part}.state"))
        got = suite.drive(group, steps=range(2 * part, 2 * part + 2))
        metrics += got.metrics
        group.save(str(tmp_path / f"{part + 1}.state"))
        group.close()
    plain = [{name: value for name, value in each.items() if "router" not in name} for each in expected.metrics]
    suite.check_records(
        suite.Record(plain, expected.outputs, expected.weights), suite.Record(metrics, got.outputs, got.weights)
    )
    saved = load_file(tmp_path / f"{len(CHAINS[chain])}.state" / "model-00001.safetensors")
    assert saved.keys() == {f"model.{name}" for name in got.weights}
    assert all(torch.equal(saved[f"model.{name}"], weight) for name, weight in got.weights.items())


@pytest.mark.timeout(600)
def test_a_value_model_in_stages_with_shared_heads(tmp_path: Path) -> None:
    model, records = folder_of("qwen2", tmp_path), []
    for engine, count in ((None, 1), (megatron({"pipeline": 2}), 2), (megatron({"tensor": 2}), 2)):
        group = suite.launched({"critic": suite.settings(model, engine, is_value_model=True)}, count)["critic"]
        records.append(suite.drive(group, ValueObjective(), range(3), needs=("values",)))
        group.close()
    suite.check_records(records[0], records[1])
    suite.check_records(records[0], records[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_goes_into_shards_of_the_optimizer_and_back(dtype: str, tmp_path: Path) -> None:
    from whet.plugins.megatron.engine import MegatronEngine

    role = suite.settings(folder_of("qwen3_moe", tmp_path), dtype=dtype)
    first, *others = (MegatronEngine(role, **options) for options in ({}, SHARDED, {}))
    suite.update(first, suite.ragged_batch(seed=0), suite.OBJECTIVES[1])
    for step, other in enumerate(others, start=1):
        (tmp_path / f"{step}").mkdir()
        first.save(tmp_path / f"{step}", None)
        other.load(tmp_path / f"{step}")
        for each in (first, other):
            suite.update(each, suite.ragged_batch(seed=step), suite.OBJECTIVES[1])
        assert torch.equal(suite.weights_of(first), suite.weights_of(other))
        first = other


def test_a_state_of_another_engine(tmp_path: Path) -> None:
    from test_conformance import made

    model = folder_of("qwen2", tmp_path)
    (tmp_path / "state").mkdir()
    with raises(EngineError, f"{tmp_path / 'state'}"):
        made("megatron", {}, model, suite.VARIANTS[0]).load(tmp_path / "state")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_same_file(kind: str, tmp_path: Path) -> None:
    from whet.cli.app import app

    model, run = folder_of(kind, tmp_path), CliRunner()
    done = run.invoke(app, ["export", str(model), str(tmp_path / "core"), "--to", "megatron"])
    assert done.exit_code == 0, done.output
    done = run.invoke(app, ["export", str(tmp_path / "core"), str(tmp_path / "back"), "--from", "megatron"])
    assert done.exit_code == 0, done.output
    before, after = (load_file(each / "model.safetensors") for each in (model, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Told(suite.Probe):
    """Tells its process."""

    @register()
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.timeout(900)
def test_a_killed_rank_and_a_run_that_goes_on(tmp_path: Path) -> None:
    """The state saved before a rank was killed leads to the bits of ranks that were not."""
    settings = suite.settings(folder_of("qwen2", tmp_path), megatron({"tensor": 2, **SHARDED}))

    def group_of() -> Any:
        return launch([WorkerSpec("actor", Told, (settings,))], ResourcePool(2), deadline_seconds=480)["actor"]

    killed = group_of()
    suite.drive(killed, steps=range(2))
    killed.save(str(tmp_path / "state"))
    expected = suite.drive(killed, steps=range(2, 4))
    os.kill(killed.pid()[1], signal.SIGKILL)
    with pytest.raises(WorkerError):
        suite.drive(killed, steps=range(4, 5))
    resumed = group_of()
    resumed.load(str(tmp_path / "state"))
    got = suite.drive(resumed, steps=range(2, 4))
    resumed.close()
    assert got.metrics == expected.metrics
    assert all(torch.equal(got.weights[name], weight) for name, weight in expected.weights.items())
