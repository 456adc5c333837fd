# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from whet.models.positions import next_position, position_ids

# Two tokens of text, an image of 2 x 3 patches, one token of text: time, height and width of each, as in Qwen2-VL.
# The image takes as many positions as its longer side.
IMAGE = torch.tensor(
    [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
)


def test_real_tokens_count_from_nought_between_their_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 1, 2, 2]]


def test_a_response_goes_on_behind_the_largest_position_of_the_media() -> None:
    mask = torch.tensor([[0, *[1] * 12, 0], [*[0] * 8, *[1] * 4, 0, 0]])
    rows = position_ids(mask, [IMAGE, None])
    assert rows.shape == (2, 3, 14)
    assert torch.equal(rows[0, :, 1:10], IMAGE)
    assert rows[0, :, 10:].tolist() == [[6, 7, 8, 8]] * 3  # and padding
    assert rows[1].tolist() == [[*[0] * 8, 0, 1, 2, 3, 3, 3]] * 3
    assert next_position(IMAGE) == 6 and next_position(torch.arange(4)) == 4 and next_position(torch.empty(3, 0)) == 0


def test_without_media_all_three_axes_are_the_plain_ones() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.equal(position_ids(mask, [None, None]), position_ids(mask)[:, None].expand(2, 3, 4))
