# SPDX-License-Identifier: Apache-2.0
"""From every mesh of two and four processes a rollout gets the bits of the Hugging Face export: whole, in parts, as
deltas."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
import engine_conformance as suite
from mesh_cases import Sizes, fsdp, named
from mesh_workers import Sender
from sync_workers import Rollout
from test_mesh import folders as folders

from whet.checkpoints.export import MergedShards, write_weights
from whet.config.schema import ModelConfig, RolloutConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.models.load import outline
from whet.weight_sync.routes import BetweenPools

SECONDS = 120.0
DENSE: dict[int, list[Sizes]] = {
    2: [{}, {"replicate": 2}, {"context": 2}, {"tensor": 2}],
    4: [
        {},
        {"replicate": 2},
        {"context": 2},
        {"context": 4},
        {"replicate": 2, "context": 2},
        {"tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"tensor": 2, "context": 2},
    ],
}
MIXTURE: dict[int, list[Sizes]] = {
    2: [{}, {"expert": 2}, {"context": 2, "expert": 2}, {"tensor": 2}],
    4: [
        {"expert": 2},
        {"expert": 4},
        {"expert": 2, "replicate": 2},
        {"expert": 2, "context": 2},
        {"expert": 4, "context": 2},
        {"expert": 2, "context": 2, "replicate": 2},
        {"expert": 2, "tensor": 2},
        {"tensor": 2, "replicate": 2},
        {"expert": 2, "tensor": 2, "context": 2},
    ],
}
STAGES: dict[int, list[Sizes]] = {
    2: [{"pipeline": 2}, {"pipeline": 2, "stages_per_rank": 2}],
    4: [
        {"pipeline": 4},
        {"pipeline": 2},
        {"pipeline": 2, "replicate": 2},
        {"pipeline": 2, "context": 2, "stages_per_rank": 2},
        {"pipeline": 2, "tensor": 2},
    ],
}
MIXED_STAGES: dict[int, list[Sizes]] = {4: [{"pipeline": 2, "expert": 2}, {"pipeline": 2, "expert": 2, "context": 2}]}
KINDS: dict[str, tuple[str, dict[int, list[Sizes]]]] = {
    "dense": ("qwen3", DENSE),
    "mixture": ("qwen3_moe", MIXTURE),
    "stages": ("qwen3 untied", STAGES),
    "stages of a mixture": ("qwen3_moe untied", MIXED_STAGES),
}
CASES = {
    f"{kind} on {count}, {named(sizes)}": (count, kind, sizes)
    for count in (2, 4)
    for kind, (_, meshes) in KINDS.items()
    for sizes in meshes.get(count, [])
}


@pytest.fixture(scope="module")
def group_of(folders: dict[str, Path]) -> Iterator[Callable[[str], WorkerGroup]]:
    """The group of a case."""

    def spec(case: str) -> WorkerSpec:
        _, kind, sizes = CASES[case]
        return WorkerSpec(case, Sender, (suite.settings(folders[KINDS[kind][0]], fsdp(sizes)),))

    def start(cases: list[str], count: int) -> dict[str, WorkerGroup]:
        return launch([spec(case) for case in cases], ResourcePool(count), deadline_seconds=480)

    with suite.launched_in_turn({case: count for case, (count, *_) in CASES.items()}, start) as of:
        yield of


def rollout_spec(folder: Path, dtype: str, **options: Any) -> WorkerSpec:
    config = RolloutConfig.model_validate({"dtype": dtype, "engine": {"name": "native", "options": options}})
    return WorkerSpec("rollout", Rollout, (config, str(folder), ModelConfig(path=str(folder), dtype="float32")))


def rollout_of(folder: Path, dtype: str, **options: Any) -> WorkerGroup:
    return launch([rollout_spec(folder, dtype, **options)], ResourcePool(1), SECONDS)["rollout"]


def exported(group: WorkerGroup, model: Path, out: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint of all ranks, written as the export writes them and read by plain transformers."""
    out.mkdir(exist_ok=True)
    group.save(str(out / "actor.state"))
    with torch.device("meta"):
        shapes = outline(model)
    saved = MergedShards(out / "actor.state")
    write_weights(out, ((name, saved[name]) for name, _ in shapes.named_parameters()), shapes, torch.float32, {})
    (out / "config.json").write_text((model / "config.json").read_text())
    return dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_the_export_arrive(
    case: str, group_of: Callable[[str], WorkerGroup], folders: dict[str, Path], tmp_path: Path
) -> None:
    model, actor = folders[KINDS[CASES[case][1]][0]], group_of(case)
    actor.update(suite.batch_of(0, 12), suite.OBJECTIVES[0])
    whole = exported(actor, model, tmp_path / "0")
    for in_parts, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        name = str(dtype).removeprefix("torch.")
        rollout = rollout_of(model, name, weight_delta=True)
        sync = BetweenPools(actor, rollout, name, SECONDS)
        actor.narrow(in_parts)
        sync(0)
        check([rollout.weights()[0]], whole, dtype)
        buckets, size = map(sum, zip(*actor.counts(), strict=True))
        assert (buckets > 10) == in_parts and size >= dtype.itemsize * sum(each.numel() for each in whole.values())
        actor.change_some()
        whole = exported(actor, model, tmp_path / f"{name} {in_parts}")
        sync(1)
        check([rollout.weights()[0]], whole, dtype)
        assert sum(sent for _, sent in actor.counts()) < size / 4


def check(found: list[dict[str, torch.Tensor]], whole: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    for weights in found:
        assert weights.keys() == whole.keys()
        for name, weight in whole.items():
            assert torch.equal(weights[name], weight.to(dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "processes", "sizes"),
    [
        ("qwen3", 2, {"tensor": 2}),
        ("qwen3_moe", 4, {"expert": 2, "context": 2}),
        ("qwen3_moe untied", 4, {"pipeline": 2, "expert": 2}),
    ],
    ids=str,
)
def test_beside_the_training_ranks(
    arch: str, processes: int, sizes: Sizes, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = folders[arch]
    actor = WorkerSpec("actor", Sender, (suite.settings(model, fsdp(sizes)),))
    launched = launch([actor, rollout_spec(model, "bfloat16")], ResourcePool(processes), deadline_seconds=480)
    group, rollout = launched["actor"], launched["rollout"]
    group.change_some()
    assert len(set(rollout.sync(0))) == 1
    check(rollout.weights(), exported(group, model, tmp_path), torch.bfloat16)
    group.close()
