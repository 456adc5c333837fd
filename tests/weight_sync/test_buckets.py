# SPDX-License-Identifier: Apache-2.0
"""Weights put into buckets come out of them, or an error names the missing ones."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.raising import raises
from whet.errors import WeightSyncError
from whet.weight_sync.buckets import HEADER_BYTES, Digest, Header, receive, send


class Tape:
    """Both ends of a link: buckets are kept as they are posted and handed out in order."""

    address = ""

    def __init__(self, room: int = 1000) -> None:
        self.slot = torch.zeros(HEADER_BYTES + room, dtype=torch.uint8)
        self.kept: list[torch.Tensor] = []
        self.finished = 0

    def buffer(self) -> torch.Tensor:
        return self.slot.fill_(255)

    def post(self, used: int) -> None:
        self.kept.append(self.slot.clone())
        self.kept[-1][used:] = 7  # what lies behind is nobody's

    def bucket(self) -> torch.Tensor:
        return self.kept.pop(0)

    def release(self) -> None: ...

    def finish(self) -> None:
        self.finished += 1

    def close(self) -> None: ...


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    made = {f"layers.{index}.weight": torch.randn(index, 3, generator=draw) for index in range(9)}
    made["large"] = torch.randn(40, 33, generator=draw)  # 5,280 bytes: six buckets
    made["scalar"] = torch.tensor(2.5)
    made["ids"] = torch.arange(5)
    made["exactly.full"] = torch.randn(250, generator=draw)
    made["transposed"] = torch.randn(7, 11, generator=draw).T
    return made


def taken(tape: Tape, version: int = 3) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in receive(tape, version, Digest())}


@pytest.mark.parametrize("room", [64, 1000, 10**6])
def test_weights_of_any_size_come_out_as_they_went_in(room: int) -> None:
    tape, made, digest = Tape(room), weights(), Digest()
    said = send(made.items(), 3, [tape], torch.float32)
    assert (len(tape.kept) > 50, len(tape.kept) == 1) == (room == 64, room == 10**6)
    got = {name: weight.clone() for name, weight in receive(tape, 3, digest)}
    assert list(got) == list(made) and str(digest) == said and tape.finished == 2
    for name, weight in made.items():
        assert got[name].dtype == weight.dtype and torch.equal(got[name], weight), name


def test_numbers_travel_in_the_dtype_of_the_rollout() -> None:
    tape, made = Tape(), weights()
    send(made.items(), 3, [tape], torch.bfloat16)
    for name, weight in taken(tape).items():
        assert torch.equal(weight, made[name].bfloat16() if name != "ids" else made[name]), name


def test_a_rank_that_sends_to_nobody_takes_part_all_the_same() -> None:
    drawn = []
    assert (
        send(((name, drawn.append(name) or weight) for name, weight in weights().items()), 3, [], torch.bfloat16)
        is None
    )
    assert drawn == list(weights())


def test_many_small_weights_fill_the_header_first() -> None:
    tape = Tape(room=10**6)
    made = {f"model.layers.{index}.a.rather.long.name.weight": torch.tensor([float(index)]) for index in range(1500)}
    send(made.items(), 3, [tape], torch.float32)
    assert len(tape.kept) == 3
    assert all(torch.equal(weight, made[name]) for name, weight in taken(tape).items())


def flipped(tape: Tape) -> None:
    tape.kept[4][Header.read(tape.kept[4]).pieces[0].offset + 17] ^= 1


def stale(tape: Tape) -> None:
    """Changes a tape as if the sender wrote on before the bucket was read: its data belong to the next bucket."""
    tape.kept[5][HEADER_BYTES:] = tape.kept[6][HEADER_BYTES:]


def garbled(tape: Tape) -> None:
    tape.kept[1][20:40] = 0


@pytest.mark.parametrize(
    ("damage", "key", "fields"),
    [
        (flipped, "version 3: checksum of large",
         {"found": re.compile("^[0-9a-f]{16}$"), "expected": re.compile("^[0-9a-f]{16} .* 5280 ")}),
        (stale, "version 3: checksum of large", {}),
        (garbled, "bucket of weights", {}),
        (lambda tape: tape.kept.pop(4), "version 3: large",
         {"found": re.compile(r"^byte \d+ "), "expected": re.compile(r"^\('large', \d+\): ")}),
        (lambda tape: tape.kept.insert(0, tape.kept[0]), "version 3: layers.0.weight",
         {"found": re.compile("^byte 0 ")}),
    ],
)  # fmt: skip
def test_what_is_damaged_on_the_way_is_named(
    damage: Callable[[Tape], object], key: str, fields: dict[str, object]
) -> None:
    tape, made = Tape(), {name: weight for name, weight in weights().items() if name != "large"}
    made["large"] = weights()["large"]
    send(made.items(), 3, [tape], torch.float32)
    damage(tape)
    with raises(WeightSyncError, key, **fields):
        taken(tape)
    assert tape.finished == 1  # the sender's


@pytest.mark.parametrize(
    "damage", [lambda kept: kept.pop(1), lambda kept: kept.insert(1, kept[1])], ids=["lost", "twice"]
)
def test_a_bucket_of_whole_weights_is_missed(damage: Callable[[list[torch.Tensor]], object]) -> None:
    tape = Tape()
    send(((str(index), torch.full((250,), float(index))) for index in range(4)), 3, [tape], torch.float32)
    assert len(tape.kept) == 4
    damage(tape.kept)
    digest = re.compile(r"^\w{16}")
    with raises(WeightSyncError, "version 3: digest", found=digest, expected=digest):
        taken(tape)


def test_another_version_is_refused() -> None:
    tape = Tape()
    send(weights().items(), 4, [tape], torch.float32)
    with raises(WeightSyncError, "weights: version", found=4, expected="3"):
        taken(tape)
