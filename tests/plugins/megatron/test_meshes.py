# SPDX-License-Identifier: Apache-2.0
"""Meshes of two and four processes against one process: log-probs, gradients, steps, weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
import engine_conformance as suite
from tiny import KINDS, folder_of

from whet.config.schema import EngineConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup

sizes = pytest.importorskip("whet.plugins.megatron.sizes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sizes.is_installed(), reason="no megatron-core: make megatron"),
]
Where, Options, Tensors = tuple[str, int], dict[str, Any], dict[str, torch.Tensor]
SHARDED = {"distributed_optimizer": True}
SPLIT: list[Options] = [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual": 2}, SHARDED]
EXPERTS: list[Options] = [{"expert": 2}, {"expert": 2, "tensor": 2}]
HEADS = {"context_by": "heads"}
MESHES: dict[Where, list[Options]] = {
    ("qwen2", 2): [*SPLIT, {}, {"context": 2, **HEADS}, {"context": 2}],
    ("qwen3", 2): SPLIT,
    ("llama", 2): SPLIT,
    ("qwen3_moe", 2): [*SPLIT, *EXPERTS, {}, {"context": 2, "expert": 2, **HEADS}],
    ("mixtral", 2): [*SPLIT, *EXPERTS],
    ("qwen2", 4): [
        {"tensor": 2},
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "virtual": 2},
        {"pipeline": 2, **SHARDED},
        {"pipeline": 4},
        {"tensor": 2, **SHARDED},
        {"tensor": 2, "context": 2, **HEADS},
        {"context": 2, "pipeline": 2, **SHARDED, **HEADS},
        {"tensor": 2, "context": 2},
        {"context": 2, "pipeline": 2, "virtual": 2, **SHARDED},
        {"context": 4},
    ],
    ("qwen3_moe", 4): [
        {"expert": 2},
        {"expert": 4, **SHARDED},
        {"expert": 2, "tensor": 2},
        {"expert": 2, "pipeline": 2, "virtual": 2},
        {"expert": 2, "tensor": 2, **SHARDED},
        {"tensor": 2, "pipeline": 2},
        {"context": 2, "expert": 2},
    ],
}
CASES = [(where, options) for where, each in MESHES.items() for options in each]


def named(options: Options) -> str:
    return " ".join(f"{name}={size}" for name, size in options.items()) or "rows"


def megatron(options: Options) -> EngineConfig:
    return EngineConfig(name="megatron", logits_chunk_tokens=16, options=options)


def without_routers(record: suite.Record) -> suite.Record:
    """Megatron-Core's routers are not measured."""
    kept = [{name: value for name, value in each.items() if "router" not in name} for each in record.metrics]
    return replace(record, metrics=kept)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: folder_of(kind, root) for kind in KINDS}


@pytest.fixture(scope="module")
def reference_of(folders: dict[str, Path]) -> Callable[[str], tuple[Tensors, Tensors, suite.Record]]:
    """Log-probs, gradients and three steps of one process."""

    @cache
    def made(kind: str) -> tuple[Tensors, Tensors, suite.Record]:
        one = suite.launched({"actor": suite.settings(folders[kind])}, 1)["actor"]
        return *before(one), without_routers(suite.drive(one, steps=range(3)))

    return made


def before(group: WorkerGroup) -> tuple[Tensors, Tensors]:
    """Log-probs and gradients of the first weights."""
    batch = suite.ragged_batch()
    return group.forward(batch, suite.NEEDS, 0.9), group.gradients(batch)[0]


@pytest.fixture(scope="module")
def groups_of(folders: dict[str, Path]) -> Iterator[Callable[[Where], dict[str, WorkerGroup]]]:
    """A group for each mesh of a model, all in the same processes, which end when another model is asked for."""
    from whole import Whole

    made: dict[Where, dict[str, WorkerGroup]] = {}

    def close() -> None:
        for each in made.values():
            next(iter(each.values())).close()
        made.clear()

    def groups(where: Where) -> dict[str, WorkerGroup]:
        if where not in made:
            close()
            kind, count = where
            roles = {named(each): suite.settings(folders[kind], megatron(each)) for each in MESHES[where]}
            specs = [WorkerSpec(role, Whole, (each,)) for role, each in roles.items()]
            made[where] = launch(specs, ResourcePool(count), deadline_seconds=480)
        return made[where]

    yield groups
    close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("where", "options"), CASES, ids=[f"{kind} on {count}, {named(options)}" for (kind, count), options in CASES]
)
def test_a_mesh_is_one_process(
    where: Where,
    options: Options,
    groups_of: Callable[[Where], dict[str, WorkerGroup]],
    reference_of: Callable[[str], tuple[Tensors, Tensors, suite.Record]],
) -> None:
    """Log-probs within 1e-5, each gradient within 1e-5 of its largest number, and steps."""
    outputs, gradients, record = reference_of(where[0])
    group = groups_of(where)[named(options)]
    got, got_gradients = before(group)
    for name, values in outputs.items():
        torch.testing.assert_close(got[name], values, atol=1e-5, rtol=0, msg=name)
    assert got_gradients.keys() == gradients.keys()
    for name, values in gradients.items():
        gap, largest = float((got_gradients[name] - values).abs().max()), float(values.abs().max())
        assert gap <= 1e-5 * max(1.0, largest), f"{name}: {gap} of {largest}"
    suite.check_records(record, suite.drive(group, steps=range(3)))


@pytest.mark.parametrize("virtual", [1, 2])
def test_interleaved_stages_never_send_in_batches(virtual: int, folders: dict[str, Path]) -> None:
    """In batches, gradients would belong to other micro-batches, without an error."""
    from transformers import AutoConfig

    from whet.plugins.megatron.model import config_of

    own = config_of(
        AutoConfig.from_pretrained(folders["qwen2"]),
        sizes.Sizes(pipeline=2, virtual=virtual),
        torch.device("cpu"),
        torch.float32,
        False,
    )
    assert (own.batch_p2p_comm, own.virtual_pipeline_model_parallel_size) in [(True, None), (False, 2)]
