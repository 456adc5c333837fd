# SPDX-License-Identifier: Apache-2.0
"""Weights in parts, read by another process that imports nothing of whet."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

sys.path.append(str(Path(__file__).parents[4] / "whet" / "plugins" / "inference" / "servers" / "inside"))
import whet_weight_parts

from whet.plugins.inference.servers.weights import SHARED, Part, in_parts, packed

Reader = subprocess.Popen[str]
INSIDE = str(Path(whet_weight_parts.__file__).parent)
READ = """
import json, sys
from whet_weight_parts import weights_in
for line in sys.stdin:
    found = {name: [str(weight.dtype), weight.tolist()] for name, weight in weights_in(json.loads(line))}
    print(json.dumps(found), flush=True)
"""
SIZES = {"a": (3,), "b": (5, 1), "c": (), "d": (2, 3)}
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float16)
VALUES = {
    "a": ["torch.float32", [0.0, 1.0, 2.0]],
    "b": ["torch.bfloat16", [[0.0], [1.0], [2.0], [3.0], [4.0]]],
    "c": ["torch.int64", 0],
    "d": ["torch.float16", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]],
}


def weights(device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of several dtypes; each is a view that the next one overwrites, and no copy in a row."""
    memory = torch.empty(64, dtype=torch.uint8, device=device)
    for (name, shape), dtype in zip(SIZES.items(), DTYPES, strict=True):
        count = torch.Size(shape).numel()
        wide = memory.view(dtype)[: 2 * count].view(*shape, 2)
        wide[..., 0] = torch.arange(count).view(shape)
        yield name, wide[..., 0]
        memory.fill_(255)


@contextmanager
def reading(count: int) -> Iterator[list[Reader]]:
    """Other processes that read until the block ends."""
    command = [sys.executable, "-c", READ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as running:  # leaving it closes the pipes, and waits for the processes
        environment = {**os.environ, "PYTHONPATH": INSIDE}
        yield [running.enter_context(subprocess.Popen(command, env=environment, **pipes)) for _ in range(count)]


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Reader]]:
    """Two: torch takes seconds to load."""
    with reading(2) as processes:
        yield processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part_bytes", "names"),
    [
        (1, ["a", "b", "c", "d"]),
        (13, ["ab", "cd"]),
        (22, ["ab", "cd"]),
        (23, ["abc", "d"]),
        (99, ["abcd"]),
    ],
)
def test_another_process_reads_them(part_bytes: int, names: list[str], readers: list[Reader]) -> None:
    """12 + 10 + 8 + 12 bytes, in parts that end as soon as they have as many bytes as they should."""
    found = read_elsewhere(in_parts(weights(), 2, part_bytes=part_bytes), readers)
    assert ["".join(each) for each in found] == names
    assert {name: value for part in found for name, value in part.items()} == VALUES


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA and --on-device: handles of an accelerator's memory"
)
@pytest.mark.parametrize("part_bytes", [1, 23, 99])
def test_another_process_reads_them_on_an_accelerator(part_bytes: int) -> None:
    """Nothing is left on it when they have read."""
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with reading(2) as readers:
            found = read_elsewhere(in_parts(weights("cuda"), 2, part_bytes=part_bytes), readers)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    assert {name: value for part in found for name, value in part.items()} == VALUES


def test_parts_end_with_a_layer() -> None:
    """Loaders collect weights of a layer that they fuse."""
    names = ["embed", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "model.layers.1.b", "head"]
    told = in_parts(((name, torch.ones(2)) for name in names), part_bytes=12)
    found = [[name.removeprefix("model.layers.") for name, _ in whet_weight_parts.weights_in(part)] for [part] in told]
    assert found == [["embed", "0.a", "0.b"], ["1.a", "1.b"], ["head"]]


def read_elsewhere(told: Iterator[list[Part]], readers: Sequence[Reader]) -> list[dict[str, Any]]:
    """The weights that other processes read from each part, all equal, before the next part comes."""
    found = list[dict[str, Any]]()
    for part in told:
        for process, each in zip(readers, part, strict=True):
            print(json.dumps(each), file=process.stdin, flush=True)
        answers = [json.loads(process.stdout.readline()) for process in readers if process.stdout is not None]
        assert answers == answers[:1] * len(readers)
        found.append(answers[0])
    return found


def test_what_breaks_off_raises_what_broke() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(2)
        raise OSError("the link broke")

    told = in_parts(broken(), part_bytes=16)
    assert [name for name, _ in whet_weight_parts.weights_in(next(told)[0])] == ["a"]
    with pytest.raises(OSError, match="the link broke"):
        next(told)


def test_weights_lie_one_behind_the_other() -> None:
    """Each begins at a multiple of 16 bytes, where a view of any dtype may begin, and is read as it was."""
    octets, places = packed(weights())
    assert len(octets) == 64 and [place[3:] for place in places] == [[0, 12], [16, 26], [32, 40], [48, 60]]
    found = whet_weight_parts.unpacked(octets, json.loads(json.dumps(places)))
    assert {name: [str(weight.dtype), weight.tolist()] for name, weight in found} == VALUES


def test_a_handle_begins_where_torch_wants_it() -> None:
    """`rebuild_cuda_tensor` takes the arguments of the memory after the arguments of the tensor."""
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[SHARED] == "storage_handle"


def test_an_accelerator_that_a_server_does_not_see() -> None:
    """Here it sees none, or another one."""
    told = {"places": [], "memory": {"device": "that of the trainer"}}
    with pytest.raises(ValueError, match="that of the trainer"):
        list(whet_weight_parts.weights_in(told))
