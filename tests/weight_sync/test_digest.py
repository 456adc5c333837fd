# SPDX-License-Identifier: Apache-2.0
"""A checksum detects faults on the way; a digest does not depend on the order."""

from __future__ import annotations

import pytest
import torch

from whet.weight_sync.buckets import COLUMN_FACTOR, ROW_FACTOR, Digest


def checksum(weight: torch.Tensor) -> int:
    """Of one weight."""
    digest = Digest()
    digest.add("weight", weight)
    return digest.checksum("weight")


def test_a_checksum_by_hand() -> None:
    # One row of 512 words: 5, -3, 0, ...: 1 * 5 + 3 * -3 = -4 by column, 1 * 2 for the row, and 16 bytes.
    expected = -4 * COLUMN_FACTOR + 2 * ROW_FACTOR + 16
    assert checksum(torch.tensor([5, -3])) == expected % 2**64
    assert checksum(torch.tensor([[5], [-3]])) == expected % 2**64  # shapes are the digest's


def test_a_checksum_over_several_rows_is_the_slow_sum() -> None:
    words = torch.randint(-(2**62), 2**62, (1300,), generator=torch.Generator().manual_seed(0))
    total = 1300 * 8
    for index, word in enumerate(words.tolist()):
        row, column = divmod(index, 512)
        total += (2 * column + 1) * COLUMN_FACTOR * word + (2 * row + 1) * ROW_FACTOR * word
    assert checksum(words) == total % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("count", [1, 3, 2048, 4099, 50_001])
def test_whatever_changes_is_seen(dtype: torch.dtype, count: int) -> None:
    draw = torch.Generator().manual_seed(count)
    octets = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=draw)
    found = {checksum(octets.view(dtype))}
    assert found == {checksum(octets.clone().view(dtype))}
    for index in (0, len(octets) // 2, len(octets) - 1):
        changed = octets.clone()
        changed[index] ^= 1
        found.add(checksum(changed.view(dtype)))
    assert len(found) == len({0, len(octets) // 2, len(octets) - 1}) + 1
    if count > 3:
        moved = [octets.roll(8), octets.flip(0), torch.cat([octets[16:32], octets[:16], octets[32:]])]
        zeroed = octets.clone()
        zeroed[count // 3 : count // 2] = 0
        found |= {checksum(each.view(dtype)) for each in (*moved, zeroed)}
        assert len(found) == 8


def test_where_a_tensor_lies_does_not_matter() -> None:
    whole = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    assert checksum(whole[3:, 1:7]) == checksum(whole[3:, 1:7].contiguous()) == checksum(whole[3:, 1:7].clone())
    assert checksum(torch.empty(0)) == 0


def test_a_digest_is_of_names_dtypes_shapes_and_bits_in_any_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2, 3)

    def digest(*weights: tuple[str, torch.Tensor]) -> str:
        made = Digest()
        for name, weight in weights:
            made.add(name, weight)
        return str(made)

    expected = digest(("a", a), ("b", b))
    assert len(expected) == 16 and digest(("b", b), ("a", a)) == expected
    others = [
        digest(("a", a)),
        digest(("a", b), ("b", a)),
        digest(("a", a), ("b", b.view(3, 2))),
        digest(("a", a), ("b", b.bfloat16())),
        digest(("a", a), ("b", b), ("b", b)),
        digest(("a", a.view(torch.int32)), ("b", b)),
    ]
    assert len({expected, *others}) == 7
