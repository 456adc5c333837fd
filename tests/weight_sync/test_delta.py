# SPDX-License-Identifier: Apache-2.0
"""A delta gives the bits of the new weights, whatever the numbers, and is as small as its bytes by hand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.raising import raises
from whet.errors import WeightSyncError
from whet.weight_sync.buckets import Digest, Header, receive, send
from whet.weight_sync.delta import DeltaBase, apply, delta

sys.path.insert(0, str(Path(__file__).parent))
from test_buckets import Tape, weights


def test_the_bytes_by_hand() -> None:
    before = torch.tensor([1.0] * 20)
    after = before.clone()
    after[0], after[9], after[11] = 2.0, -1.0, 3.0
    # The mask has the bytes 0b1, 0b1010 and 0, of which the first two are there.
    expected = [0b11, 0b1, 0b1010, *torch.tensor([2.0, -1.0, 3.0]).view(torch.uint8).tolist()]
    assert delta(before, after).tolist() == expected
    assert delta(before, before.clone()).tolist() == []


DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_arrives(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in [(), (0, 3), (1,), (7,), (8,), (64,), (65,), (33, 41)]:
        for share in (0.0, 0.01, 0.5, 1.0):
            before, other = ((10 * torch.randn(shape, generator=draw)).to(dtype) for _ in range(2))
            after = torch.where(torch.rand(shape, generator=draw) < share, other, before)
            found = before.clone()
            apply(found, delta(before, after))
            assert torch.equal(found, after), (shape, share)


def test_bits_are_compared_and_not_numbers() -> None:
    nan, other_nan = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    before, after = torch.cat([nan, nan, torch.zeros(1)]), torch.cat([nan, other_nan, -torch.zeros(1)])
    found = before.clone()
    apply(found, delta(before, after))
    assert found.view(torch.int32).tolist() == after.view(torch.int32).tolist()
    assert len(delta(before, after)) == 1 + 1 + 8  # without the first one, which is the same


def test_a_weight_that_is_not_contiguous() -> None:
    before, after = torch.zeros(5, 6), torch.zeros(6, 5).T
    after[2, 3] = 1.0
    found = before.clone()
    apply(found, delta(before, after))
    assert torch.equal(found, after)


def updated(made: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights behind an update of every 30th element of some of them, and of all elements of another."""
    new = {name: weight.clone() for name, weight in made.items()}
    new["large"].view(-1)[::30] += 1.0
    new["layers.8.weight"] *= 2.0
    new["scalar"] += 1.0
    return new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("room", [64, 1000, 10**6])
def test_versions_come_as_deltas_over_a_link(room: int, dtype: torch.dtype) -> None:
    sent, here, sizes = DeltaBase(), DeltaBase(), []
    made = weights()
    for version in (3, 4, 9):
        tape, digest = Tape(room), Digest()
        said = send(made.items(), version, [tape], dtype, sent)
        headers = [Header.read(bucket) for bucket in tape.kept]
        assert {header.base for header in headers} == {{3: None, 4: 3, 9: 4}[version]}
        sizes.append(sum(piece.size for header in headers for piece in header.pieces))
        is_delta = {piece.name: piece.delta_size is not None for header in headers for piece in header.pieces}
        # All of its elements changed: the whole weight has fewer bytes.
        chosen = [is_delta[name] for name in ("large", "layers.7.weight", "layers.8.weight")]
        assert chosen == ([False] * 3 if version == 3 else [True, True, False])
        got = {name: weight.clone() for name, weight in receive(tape, version, digest, here)}
        assert list(got) == list(made) and str(digest) == said and sent.version == here.version == version
        for name, weight in made.items():
            expected = weight.to(dtype) if weight.is_floating_point() else weight
            assert torch.equal(got[name], expected) and torch.equal(here.weights[name], expected), name
        made = updated(made)
    assert sizes[2] == sizes[1] < sizes[0] / 10


def test_a_receiver_of_another_version_refuses_the_delta() -> None:
    sent, here, tape = DeltaBase(), DeltaBase(), Tape()
    made = weights()
    send(made.items(), 3, [tape], torch.float32, sent)
    for _ in receive(tape, 3, Digest(), here):
        pass
    send(updated(made).items(), 4, [Tape()], torch.float32, sent)  # lost
    send(updated(updated(made)).items(), 5, [tape], torch.float32, sent)
    with raises(WeightSyncError, re.compile(r"^version 5\b"), found=3, expected=re.compile("^4")):
        list(receive(tape, 5, Digest(), here))
    assert here.version is None


def test_after_a_version_that_broke_off_the_next_one_is_whole() -> None:
    sent, made = DeltaBase(), weights()
    send(made.items(), 3, [Tape()], torch.float32, sent)

    def broken() -> object:
        yield from list(updated(made).items())[:5]
        raise ValueError("broke off")

    with pytest.raises(ValueError, match="broke off"):
        send(broken(), 4, [Tape()], torch.float32, sent)  # type: ignore[arg-type]
    tape = Tape()
    send(updated(made).items(), 5, [tape], torch.float32, sent)
    assert {Header.read(bucket).base for bucket in tape.kept} == {None}
    got = {name: weight.clone() for name, weight in receive(tape, 5, Digest())}
    assert all(torch.equal(got[name], weight) for name, weight in updated(made).items())


@pytest.mark.parametrize("byte", [0, 1, 6, -1])  # of top, mask, and values
def test_a_delta_that_changed_on_its_way_names_the_weight(byte: int) -> None:
    sent, here = DeltaBase(), DeltaBase()
    made = {"norm": torch.ones(3), "large": weights()["large"]}
    for version, each in ((3, made), (4, {**made, "large": updated(weights())["large"]})):
        tape = Tape(10**6)
        send(each.items(), version, [tape], torch.float32, sent)
        if version == 4:
            [piece] = [piece for piece in Header.read(tape.kept[0]).pieces if piece.name == "large"]
            assert piece.delta_size is not None
            tape.kept[0][piece.offset + byte % piece.delta_size] ^= 64
            checksum = re.compile("^[0-9a-f]{16}")
            with raises(WeightSyncError, "version 4: checksum of large", found=checksum, expected=checksum):
                list(receive(tape, version, Digest(), here))
        else:
            assert len(list(receive(tape, version, Digest(), here))) == 2


def test_an_update_at_a_small_learning_rate_is_a_small_part_in_bfloat16() -> None:
    """AdamW at 1e-6 changes a weight of 0.02 by 1e-6, where the numbers of bfloat16 are 1.2e-4 apart. In float32, where
    nearly all change, weights are sent whole."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(0.02 * torch.randn(256, 512))
    optimizer = torch.optim.AdamW([weight], lr=1e-6)
    narrow, wide, sizes, shares = DeltaBase(), DeltaBase(), [], []
    for _ in range(3):
        before = narrow.weights["w"].clone() if narrow.weights else torch.zeros(256, 512, dtype=torch.bfloat16)
        shares.append(float((before != weight.bfloat16()).float().mean()))
        pair = ((narrow, torch.bfloat16), (wide, torch.float32))
        sizes.append([base.replace("w", weight.detach().to(dtype)) for base, dtype in pair])
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert sizes[0] == [None, None]
    for share, (of_bfloat16, of_float32) in zip(shares[1:], sizes[1:], strict=True):
        assert share < 0.05 and of_float32 is None
        assert of_bfloat16 is not None and len(of_bfloat16) < 2 * weight.numel() / 12
        by_formula = weight.numel() * (1 / 64 + (1 - (1 - share) ** 8) / 8 + 2 * share)
        assert len(of_bfloat16) == pytest.approx(by_formula, rel=0.02)
