# SPDX-License-Identifier: Apache-2.0
"""Weights in parts, read by another process that imports nothing of whet."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

sys.path.append(str(Path(__file__).parents[3] / "whet" / "rollout" / "servers" / "inside"))
import whet_parts

from whet.rollout.servers import parts
from whet.rollout.servers.parts import in_parts

INSIDE = str(Path(whet_parts.__file__).parent)
READ = """
import json, sys
from whet_parts import weights_in
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


@pytest.mark.parametrize(
    ("part_bytes", "names"),
    [(1, ["a", "b", "c", "d"]), (13, ["ab", "cd"]), (22, ["ab", "cd"]), (23, ["abc", "d"]), (99, ["abcd"])],
)
def test_another_process_reads_them(part_bytes: int, names: list[str]) -> None:
    """12 + 10 + 8 + 12 bytes, in parts that end as soon as they have as many bytes as they should."""
    found = read_elsewhere(in_parts(weights(), 2, part_bytes=part_bytes), 2)
    assert ["".join(each) for each in found] == names
    assert {name: value for part in found for name, value in part.items()} == VALUES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: handles of an accelerator's memory")
@pytest.mark.parametrize("part_bytes", [1, 23, 99])
def test_another_process_reads_them_on_an_accelerator(part_bytes: int) -> None:
    """Nothing is left on it when they have read."""
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        found = read_elsewhere(in_parts(weights("cuda"), 2, part_bytes=part_bytes), 2)
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before
    assert {name: value for part in found for name, value in part.items()} == VALUES


def test_parts_end_with_a_layer() -> None:
    """Loaders collect weights of a layer that they fuse."""
    names = ["embed", "model.layers.0.a", "model.layers.0.b", "model.layers.1.a", "model.layers.1.b", "head"]
    told = in_parts(((name, torch.ones(2)) for name in names), part_bytes=12)
    found = ["+".join(name.removeprefix("model.layers.") for name, _ in whet_parts.weights_in(part)) for [part] in told]
    assert found == ["embed+0.a+0.b", "1.a+1.b", "head"]


def read_elsewhere(told: Iterator[list[parts.Part]], readers: int = 1) -> list[dict[str, Any]]:
    """What other processes find in each part, all the same, before the next one comes."""
    command, found = [sys.executable, "-c", READ], list[dict[str, Any]]()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": INSIDE}}
    with ExitStack() as running:
        started = [running.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(readers)]
        for part in told:
            for process, each in zip(started, part, strict=True):
                print(json.dumps(each), file=process.stdin, flush=True)
            answers = [json.loads(process.stdout.readline()) for process in started]
            assert answers == answers[:1] * readers
            found.append(answers[0])
        for process in started:
            process.stdin.close()
    return found


def test_what_breaks_off_raises_what_broke() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(2)
        raise OSError("the link broke")

    told = in_parts(broken(), part_bytes=16)
    assert [name for name, _ in whet_parts.weights_in(next(told)[0])] == ["a"]
    with pytest.raises(OSError, match="the link broke"):
        next(told)


def test_handles_name_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sender tells is what torch's own function wants to rebuild the tensor, on the device of the same
    identifier, whatever its number is, with a handle for each reader. Here the memory is the host's, and torch's own
    functions for handles are replaced, which need CUDA: the test above has the real ones."""
    memory, calls, collected = dict[bytes, torch.Tensor](), list[dict[str, Any]](), list[bool]()
    uuids = ["first", "second"]
    signature = inspect.signature(reductions.rebuild_cuda_tensor)
    assert list(signature.parameters)[parts.SHARED] == "storage_handle"

    def reduce(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = bytes([0, 255, len(memory)])
        memory[handle] = tensor
        shape = torch.Tensor, tensor.shape, tensor.stride(), 0, torch.TypedStorage, torch.uint8, 7
        return reductions.rebuild_cuda_tensor, (*shape, handle, len(tensor), 0, False, b"\x01", 2, b"", True)

    def rebuild(*arguments: Any) -> torch.Tensor:
        calls.append(signature.bind(*arguments).arguments)
        return memory[calls[-1]["storage_handle"]]

    class Device:
        """The module of a kind of devices."""

        @staticmethod
        def get_device_properties(index: object) -> SimpleNamespace:
            """The second device of the sender is the reader's first."""
            return SimpleNamespace(uuid=uuids[index] if isinstance(index, int) else "first")

        @staticmethod
        def ipc_collect() -> None:
            """Memory that all readers have let go of is freed."""
            collected.append(True)

        @staticmethod
        def synchronize(device: object) -> None:
            """Nothing is under way."""

    monkeypatch.setattr(parts, "reduce_tensor", reduce)
    monkeypatch.setattr(parts.torch, "get_device_module", lambda _: Device)
    monkeypatch.setattr(whet_parts.torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(whet_parts.torch.cuda, "get_device_properties", Device.get_device_properties)
    monkeypatch.setattr(whet_parts.torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    with parts._on_accelerator(weights(), 2) as both:
        told = json.loads(json.dumps(both))
        for each in told:
            found = {name: [str(weight.dtype), weight.tolist()] for name, weight in whet_parts.weights_in(each)}
            assert found == VALUES and [place[3:] for place in each["places"]] == [
                [0, 12],
                [16, 26],
                [32, 40],
                [48, 60],
            ]
    assert [call["storage_handle"] for call in calls] == [b"\x00\xff\x00", b"\x00\xff\x01"] and collected
    for call in calls:
        assert call["storage_device"] == 0 and call["tensor_size"] == (64,) and call["dtype"] == torch.uint8
        assert (call["storage_size_bytes"], call["ref_counter_handle"], call["event_handle"]) == (64, b"\x01", b"")
    uuids[:] = ["third"]
    with pytest.raises(ValueError, match=r"lie on the accelerator first, and this server sees \['third'\]"):
        list(whet_parts.weights_in(told[0]))
