# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with a file of each rank, as verl and EasyR1 write them: merged bit for bit, and refused by file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import GroupMember
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.raising import raises
from whet.checkpoints.export import export
from whet.checkpoints.ranks import RankFiles, find_ranks
from whet.errors import CheckpointError

State = dict[str, Any]
GRID = torch.arange(35.0).view(5, 7)


def write(
    folder: Path,
    weights: State,
    mesh: Sequence[int] = (2,),
    placements: Callable[[str], Sequence[Placement]] = lambda name: [Shard(0)],
) -> Path:
    """Each rank's part of the weights, sharded over a mesh.  Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    world = torch.Size(mesh).numel()
    for rank in range(world):
        with group_of(rank, world):
            over = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("ddp", "fsdp")[-len(mesh) :])
            state = {
                name: distribute_tensor(weight, over, placements(name), src_data_rank=None)
                for name, weight in weights.items()
            }
            torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
    return folder


@contextmanager
def group_of(rank: int, world: int) -> Iterator[None]:
    """A group of ranks that do not exist, in the place of the group that other tests of this process may have."""
    before, GroupMember.WORLD = GroupMember.WORLD, None
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        made = GroupMember.WORLD
        if before is not None:
            GroupMember.WORLD = before
        dist.destroy_process_group(made)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((4,), [Shard(0)]),  # of 2, 2, 1 and no rows
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2,), [Replicate()]),
    ],
)
def test_parts_are_merged(mesh: Sequence[int], placements: Sequence[Placement], tmp_path: Path) -> None:
    folder = write(
        tmp_path / "actor",
        {"grid": GRID, "one": torch.tensor(3.0)},
        mesh,
        lambda name: placements if name == "grid" else [Replicate()] * len(mesh),
    )
    weights = RankFiles(folder)
    assert torch.equal(weights["grid"], GRID)
    assert torch.equal(weights["one"], torch.tensor(3.0))
    assert [*weights] == ["grid", "one"]
    assert (weights.shape("grid"), weights.dtype("grid")) == ((5, 7), torch.float32)


def test_whole_tensors_are_those_of_every_rank(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"grid": torch.nn.Parameter(GRID), "other": GRID + rank}, file_of(tmp_path, rank))
    weights = RankFiles(tmp_path)
    assert torch.equal(weights["grid"], GRID)
    with raises(CheckpointError, f"{file_of(tmp_path, 1)}: other"):
        _ = weights["other"]


def file_of(folder: Path, rank: int, world: int = 2) -> Path:
    return folder / f"model_world_size_{world}_rank_{rank}.pt"


def test_the_newest_step_is_found(tmp_path: Path) -> None:
    assert find_ranks(tmp_path) is None
    for step in (90, 100, 110):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    for step in (90, 100):
        file_of(tmp_path / f"global_step_{step}" / "actor", 0).touch()
    assert find_ranks(tmp_path) == tmp_path / "global_step_100" / "actor"
    assert find_ranks(tmp_path / "global_step_90") == tmp_path / "global_step_90" / "actor"


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "actor", {"grid": GRID}, [3])
    first, second = file_of(folder, 0, 3), file_of(folder, 1, 3)
    whole = second.read_bytes()

    second.write_bytes(whole[: len(whole) // 2])
    with raises(CheckpointError, f"{second}"):
        RankFiles(folder)
    second.unlink()
    with raises(CheckpointError, f"{second}", found="is missing"):
        RankFiles(folder)
    second.write_bytes(whole)
    file_of(folder, 0, 4).write_bytes(whole)
    with raises(CheckpointError, f"{folder}", found=re.compile(r"\b3, 4\b")):
        RankFiles(folder)
    file_of(folder, 0, 4).unlink()

    shutil.copy(first, second)
    with raises(CheckpointError, f"{folder}: grid", found=re.compile(r"\b21 of .*\b35\b")):
        _ = RankFiles(folder)["grid"]
    write(tmp_path / "other", {"grid": GRID[:, :3]}, [3])
    shutil.copy(file_of(tmp_path / "other", 1, 3), second)
    with raises(CheckpointError, f"{second}: grid", expected="shape (2, 7)"):
        _ = RankFiles(folder)["grid"]
    torch.save({"other": GRID}, second)
    with raises(CheckpointError, f"{second}"):
        RankFiles(folder)
    torch.save({"grid": Hostile(tmp_path / "made")}, second)
    with raises(CheckpointError, f"{second}", found="would call posix.mkdir"):
        RankFiles(folder)
    assert not (tmp_path / "made").exists()


def test_what_is_no_part_of_a_weight_is_refused(tmp_path: Path) -> None:
    with group_of(0, 1):
        sums = DTensor.from_local(GRID, init_device_mesh("cpu", (1,)), [Partial()], run_check=False)
    for state in ({"grid": sums}, {"grid": 3}, {"grid": {"deeper": GRID}}, [GRID], {"a.lora_A.default.weight": GRID}):
        torch.save(state, file_of(tmp_path, 0, 1))
        with raises(CheckpointError, f"{file_of(tmp_path, 0, 1)}"):
            RankFiles(tmp_path)


def test_export(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    folder = write(
        tmp_path / "run" / "global_step_1" / "actor", weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    )
    shutil.copytree(model_folder, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    out = export(tmp_path / "run", tmp_path / "out")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[each], weights[each]) for each in weights)
    assert {path.name for path in out.iterdir()} == {path.name for path in model_folder.iterdir()}
    rounded = load_file(export(folder, tmp_path / "rounded", dtype="bfloat16") / "model.safetensors")
    assert all(torch.equal(rounded[each], weights[each].bfloat16()) for each in weights)


def test_weights_that_do_not_fit_the_config(model_folder: Path, tmp_path: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    folder = write(tmp_path / "actor", weights)
    with raises(CheckpointError, f"{folder}: huggingface/config.json"):
        export(folder, tmp_path / "out")
    shutil.copytree(model_folder, folder / "huggingface")
    name = "model.norm.weight"
    with raises(CheckpointError, f"{folder}", change=re.compile("--adapter .*--base")):
        export(folder, tmp_path / "out", adapter=True)
    write(folder, weights | {name: weights[name].repeat(2)})
    with raises(CheckpointError, f"{folder}: {name}", found=f"shape ({2 * len(weights[name])},)"):
        export(folder, tmp_path / "out")
    del weights[name]
    write(folder, weights)
    with raises(CheckpointError, f"{folder}: weights"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
