# SPDX-License-Identifier: Apache-2.0
"""Every link is held to the same: weights arrive, version after version, and nobody waits for ever."""

from __future__ import annotations

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.raising import raises
from whet.errors import DeadlineError, WeightSyncError
from whet.weight_sync import routes
from whet.weight_sync.buckets import HEADER_BYTES, SLOTS, Digest, Inlet, LinkClosedError, Outlet, receive, send
from whet.weight_sync.routes import CollectiveInlet, CollectiveOutlet, SharedMemoryInlet, SharedMemoryOutlet

BUCKET = HEADER_BYTES + 2**14
LINKS = ("memory", "broadcast")


def link(way: str, receivers: int, seconds: float = 20.0) -> tuple[Outlet, list[Inlet]]:
    if way == "memory":
        memory = SharedMemoryOutlet(receivers, seconds, BUCKET)
        return memory, [SharedMemoryInlet(memory.address, seconds) for _ in range(receivers)]
    broadcast = CollectiveOutlet(receivers, "127.0.0.1", seconds, bucket_bytes=BUCKET)
    size, ranks = 1 + receivers, range(1, 1 + receivers)
    return broadcast, [CollectiveInlet(broadcast.address, r, size, seconds, bucket_bytes=BUCKET) for r in ranks]


def weights(version: int) -> dict[str, torch.Tensor]:
    """Some 300 kB."""
    draw = torch.Generator().manual_seed(version)
    return {f"{index}.weight": torch.randn(index * 7, 61, generator=draw) for index in range(1, 19)}


def take(inlet: Inlet, version: int, seconds: float = 0.0) -> tuple[dict[str, torch.Tensor], str]:
    digest, got = Digest(), {}
    for name, weight in receive(inlet, version, digest):
        got[name] = weight.clone()
        time.sleep(seconds)
    return got, str(digest)


@pytest.mark.parametrize("way", LINKS)
@pytest.mark.parametrize("receivers", [1, 3])
def test_every_receiver_gets_every_version(way: str, receivers: int) -> None:
    outlet, inlets = link(way, receivers)
    with ThreadPoolExecutor(receivers) as threads:
        for version in (0, 1, 7):
            slow = [threads.submit(take, inlet, version, 0.002 * number) for number, inlet in enumerate(inlets)]
            said = send(weights(version).items(), version, [outlet], torch.float32)
            for each in slow:
                got, digest = each.result()
                assert digest == said
                assert all(torch.equal(got[name], weight) for name, weight in weights(version).items())
    for end in (outlet, *inlets):
        end.close()
        end.close()


def test_a_temporary_folder_may_have_a_longer_path_than_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    outlet, inlets = link("memory", 1)
    both([outlet], inlets)
    assert Path(str(outlet.address)).is_relative_to(folder)
    for end in (outlet, *inlets):
        end.close()


class Nccl:
    """A stand-in for ProcessGroupNCCL, which records its calls; gloo carries the bytes."""

    made: list[Nccl] = []  # noqa: RUF012

    class Options:
        _timeout: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        self.group, self.rank, self.calls = dist.ProcessGroupGloo(store, rank, size, gloo), rank, list[str]()
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        assert all(each.is_contiguous() and each.dtype == torch.uint8 for each in tensors) and options.rootRank == 0
        self.calls.append(f"broadcast {sum(each.numel() for each in tensors)}")
        work: dist.Work = self.group.broadcast(tensors, options)
        return work

    def barrier(self) -> dist.Work:
        self.calls.append("barrier")
        work: dist.Work = self.group.barrier()
        return work

    def abort(self) -> None:
        self.calls.append("abort")


def test_between_accelerators_nccl_carries_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks ask for the same collectives in the same order, as NCCL wants it; it was not run on two cards."""
    monkeypatch.setattr(routes, "spans", lambda device: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(Nccl, "made", [])
    outlet, inlets = link("broadcast", 2)
    with ThreadPoolExecutor(2) as threads:
        for version in (3, 4):
            taken = [threads.submit(take, inlet, version) for inlet in inlets]
            said = send(weights(version).items(), version, [outlet], torch.float32)
            for each in taken:
                got, digest = each.result()
                assert digest == said and all(torch.equal(got[name], w) for name, w in weights(version).items())
    for end in (outlet, *inlets):
        end.close()
    first, *rest = [each.calls for each in Nccl.made]
    assert sorted(each.rank for each in Nccl.made) == [0, 1, 2] and rest == [first, first]
    assert first.count("barrier") == 2 and first[-1] == "abort" and first[0] == f"broadcast {HEADER_BYTES}"


def test_accelerators_of_nvidia_are_spanned_by_nccl() -> None:
    assert routes.spans(torch.device("cuda")) and not routes.spans(torch.device("cpu"))


@pytest.mark.parametrize("way", LINKS)
def test_the_sender_is_never_more_than_its_slots_ahead(way: str) -> None:
    outlet, (inlet,) = link(way, 1)
    asked: list[str] = []

    def weights_asked_for() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(12):
            asked.append(str(index))
            yield str(index), torch.full((2**12,), float(index))  # fills a bucket

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send, weights_asked_for(), 1, [outlet], torch.float32)
        for number, (name, weight) in enumerate(receive(inlet, 1, Digest())):
            time.sleep(0.02)
            assert name == str(number) and bool((weight == number).all())
            if way == "memory":  # gloo may have a bucket more in the buffers of sockets
                assert len(asked) <= number + SLOTS + 1
        assert sent.result(10) is not None


@pytest.mark.parametrize("way", LINKS)
def test_a_receiver_that_gives_up_is_heard(way: str) -> None:
    outlet, inlets = link(way, 2)

    def damaged(inlet: Inlet) -> None:
        with raises(WeightSyncError, "weights: version", found=4, expected="5"):
            take(inlet, 5)
        inlet.close()

    with ThreadPoolExecutor(2) as threads:
        gives_up, other = threads.submit(damaged, inlets[0]), threads.submit(take, inlets[1], 4)
        began = time.monotonic()
        with raises(LinkClosedError, re.compile("weights")):
            send(weights(4).items(), 4, [outlet], torch.float32)
        assert time.monotonic() - began < 60
        gives_up.result()
        outlet.close()
        with pytest.raises(LinkClosedError):
            other.result()


@pytest.mark.parametrize("way", LINKS)
def test_a_sender_that_gives_up_is_heard(way: str) -> None:
    outlet, (inlet,) = link(way, 1)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(0).items())[:9]
        raise ValueError("no more")

    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(take, inlet, 0)
        with pytest.raises(ValueError, match="no more"):
            send(breaks_off(), 0, [outlet], torch.float32)
        outlet.close()
        with pytest.raises(LinkClosedError):
            taking.result()


@pytest.mark.parametrize("way", LINKS)
def test_nobody_waits_for_ever(way: str) -> None:
    outlet, (inlet,) = link(way, 1, seconds=0.5)
    if way == "broadcast":  # once there is a group: making one has the same deadline, and is not what is tried here
        with ThreadPoolExecutor(1) as threads:
            taking = threads.submit(take, inlet, 0)
            send(weights(0).items(), 0, [outlet], torch.float32)
            taking.result()
    with raises(DeadlineError, "waiting for weights", found=re.compile(r" 0\.5 s")):
        take(inlet, 1)
    inlet.close()


def test_a_sender_waits_no_longer_for_one_that_reads_nothing() -> None:
    outlet, (inlet,) = link("memory", 1, seconds=0.3)
    with raises(DeadlineError, re.compile("read"), found=re.compile(r" 0\.3 s")):
        send(weights(0).items(), 0, [outlet], torch.float32)
    outlet.close()
    inlet.close()


def test_a_sender_waits_no_longer_for_one_that_never_connects() -> None:
    outlet = SharedMemoryOutlet(1, 0.2, BUCKET)
    with raises(DeadlineError, re.compile("connect"), found=re.compile(r" 0\.2 s")):
        send(weights(0).items(), 0, [outlet], torch.float32)
    outlet.close()
    with raises(LinkClosedError, re.compile(re.escape(str(outlet.address)))):
        SharedMemoryInlet(outlet.address, 0.2)


def both(outlets: Sequence[Outlet], inlets: Sequence[Inlet]) -> None:
    with ThreadPoolExecutor(len(inlets)) as threads:
        taking = [threads.submit(take, inlet, 2) for inlet in inlets]
        said = send(weights(2).items(), 2, outlets, torch.bfloat16)
        for each in taking:
            got, digest = each.result()
            assert digest == said
            assert all(torch.equal(got[name], weight.bfloat16()) for name, weight in weights(2).items())


def test_one_sender_by_both_ways_at_once() -> None:
    before = {*threading.enumerate()}  # those that other tests left too
    near, near_ends = link("memory", 2)
    far, far_ends = link("broadcast", 1)
    both([near, far], [*near_ends, *far_ends])
    assert {*threading.enumerate()} <= before, "no thread is left"
