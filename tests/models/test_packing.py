# SPDX-License-Identifier: Apache-2.0
"""Rows as the model reads them: the shift by one, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.raising import raises
from whet.errors import DataError
from whet.kernels.packed_attention import SpreadTokens
from whet.models.packing import LATER_MEDIA, MEDIA, layout, same_prompt
from whet.types import Media


def batch() -> dict[str, torch.Tensor]:
    # row 0: prompt 11 12, response 13 14 15, of which 14 is tool text
    # row 1: failed, nothing sampled
    # row 2: prompt 31, response 32 (left and right padding)
    return {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0], [0, 31, 32, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0]]),
    }


def test_every_real_token_is_read_once_and_rows_without_samples_not_at_all() -> None:
    where = layout(batch())
    assert where.input_ids.tolist() == [11, 12, 13, 14, 15, 31, 32]
    assert where.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert (where.num_rows, where.width, where.shape) == (2, 5, (3, 3))
    assert where.pad(where.input_ids).tolist() == [[11, 12, 13, 14, 15], [31, 32, 0, 0, 0]]


def test_a_sampled_token_belongs_to_the_state_one_token_earlier() -> None:
    where = layout(batch())
    # 13 was chosen after 12 (flat token 1), 15 after the tool's 14 (token 3), 32 after 31 (token 5)
    assert where.targets.tolist() == [13, 15, 32]
    assert where.states.tolist() == [1, 3, 5]
    assert where.to_columns(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 2], [0, 0, 0], [3, 0, 0]]


def test_tokens_whose_states_nothing_reads_are_left_out() -> None:
    """The last sampled token of a row and its later tokens are left out, if the row has other tokens of its own."""
    where = layout({**batch(), "response_mask": torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0]])}, ends=False)
    assert where.input_ids.tolist() == [11, 12, 21, 22, 31]  # no tool text 14, and no 15 after it
    assert where.targets.tolist() == [13, 23, 32] and where.states.tolist() == [1, 3, 4]
    shared = layout(answers_to_one_prompt(), share_prompts=True, ends=False)
    assert shared.input_ids.tolist() == [11, 12, 21, 4, 6, 7, 9] and shared.before.tolist() == [-1, 0, -1, 2, 1, 4, 1]
    assert shared.targets.tolist() == [1, 4, 5, 6, 7, 8, 9, 10] and shared.states.tolist() == [1, 2, 3, 1, 4, 5, 1, 6]
    ones = {**answers_to_one_prompt(), "response_mask": torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])}
    one = layout(ones, share_prompts=True, ends=False)  # row 2 has 6 alone, after a prompt of row 0
    assert one.input_ids.tolist() == [6, 7, 8, 11, 12] and one.states.tolist() == [4, 4]


def test_pad_and_unpad_are_inverse_and_so_are_their_gradients() -> None:
    where = layout(batch())
    flat = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(where.unpad(where.pad(flat)), flat)
    assert torch.autograd.gradcheck(lambda x: where.pad(x).square(), flat)
    assert torch.autograd.gradcheck(lambda x: where.unpad(where.pad(x) * 2).square(), flat)


def test_a_response_without_a_prompt_is_refused() -> None:
    bad = batch()
    bad["attention_mask"][2, 1] = 0
    with raises(DataError, key="sampled token"):
        layout(bad)


def test_nothing_sampled_at_all() -> None:
    empty = batch()
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    where = layout(empty)
    assert where.num_rows == 0 and len(where.targets) == 0


def test_rows_of_similar_length_are_bunched_the_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 10, 8, 7, 9, 10]
    width = max(lengths)
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    rows = {
        "input_ids": torch.arange(len(lengths) * width).view(len(lengths), width),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": mask[:, 1:],
    }

    monkeypatch.setattr("whet.models.packing.FEW_PAIRS", 0)

    def bunches() -> list[tuple[int, int, int, int]]:
        where = layout(rows)
        assert where.input_ids[:10].tolist() == list(range(10, 20)) and where.input_ids[-3:].tolist() == [0, 1, 2]
        grids = [bunch.pad(where.input_ids) for bunch in where.bunches]
        back = [bunch.unpad(grid) for bunch, grid in zip(where.bunches, grids, strict=True)]
        assert torch.equal(torch.cat(back), where.input_ids)
        return [(each.tokens.start, each.tokens.stop, each.num_rows, each.width) for each in where.bunches]

    # 10, 10, 9 and 8 tokens, then 7, which is less than eight tenths of 10, then 3
    assert bunches() == [(0, 37, 4, 10), (37, 44, 1, 7), (44, 47, 1, 3)]
    monkeypatch.setattr("whet.models.packing.BUNCH_PAIRS", 200)
    assert bunches() == [(0, 20, 2, 10), (20, 37, 2, 9), (37, 44, 1, 7), (44, 47, 1, 3)]
    monkeypatch.setattr("whet.models.packing.BUNCH_PAIRS", 1)
    assert [each[2] for each in bunches()] == [1] * 6


def answers_to_one_prompt() -> dict[str, torch.Tensor]:
    # rows 0, 2 and 3 have prompt 11 12 and answers of 1, 3 and 2 tokens; row 1 has prompt 21 and 2 tokens
    return {
        "input_ids": torch.tensor([[11, 12, 1, 0, 0], [0, 21, 4, 5, 0], [11, 12, 6, 7, 8], [11, 12, 9, 10, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 2, 2], [0, 0, 1, 2, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 3]]),
        "response_mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    }


def test_a_shared_prompt_is_read_once_by_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.models.packing.FEW_PAIRS", 0)
    rows = answers_to_one_prompt()
    assert same_prompt(rows).tolist() == [0, 1, 0, 0]
    where = layout(rows, share_prompts=True)
    # by their own tokens: row 0 (3, with the prompt), row 1 (3), row 2 (3), row 3 (2)
    assert where.input_ids.tolist() == [11, 12, 1, 21, 4, 5, 6, 7, 8, 9, 10]
    assert where.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 4, 2, 3]
    assert where.targets.tolist() == [1, 4, 5, 6, 7, 8, 9, 10]
    assert where.states.tolist() == [1, 3, 4, 1, 6, 7, 1, 9]  # the first of each answer comes after token 12
    assert where.places.tolist() == [0, 3, 4, 6, 7, 8, 9, 10]
    assert [(bunch.num_rows, bunch.prefix_width, bunch.width) for bunch in where.bunches] == [(3, 2, 3), (1, 2, 2)]
    first, second = (grid.tolist() for grid in SpreadTokens.apply(where.input_ids, where.bunches, True))
    assert first == [[0, 0, 11, 12, 1], [0, 0, 21, 4, 5], [11, 12, 6, 7, 8]] and second == [[11, 12, 9, 10]]
    assert [grid.tolist() for grid in SpreadTokens.apply(where.input_ids, where.bunches, False)][1] == [[9, 10]]
    assert (~where.bunches[0].hidden[0]).int().tolist() == [[0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert (~where.bunches[0].hidden[2]).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (~where.bunches[1].hidden).int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]]]


def test_gradients_of_queries_and_keys() -> None:
    where = layout(answers_to_one_prompt(), share_prompts=True)
    flat = torch.randn(11, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: tuple(grid.square() for grid in SpreadTokens.apply(x, where.bunches, False)), flat
    )
    assert torch.autograd.gradcheck(
        lambda x: tuple(grid.square() for grid in SpreadTokens.apply(x, where.bunches, True)), flat
    )


@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "position_ids"])
def test_a_prompt_is_another_with_another_token_padding_or_position(name: str) -> None:
    rows = answers_to_one_prompt()
    rows[name][2, 0] += 1
    assert same_prompt(rows).tolist() == [0, 1, 2, 0]
    rows[name][2] = rows[name][0]
    rows[name][2, 2:] += 1  # an answer's does not matter
    assert same_prompt(rows).tolist() == [0, 1, 0, 0]


def test_a_prompt_with_other_media_is_another_prompt() -> None:
    """Rows 0, 2 and 3 have one prompt by their tokens; the image of row 2 is another one."""
    rows = answers_to_one_prompt()
    a, b, c = (Media("image", name, source=None) for name in "abc")
    seen = np.array([(a,), (), (b,), (a,)], dtype=object)
    assert same_prompt({**rows, MEDIA: seen}).tolist() == [0, 1, 2, 0]
    shared, apart = (layout({**rows, **more}, share_prompts=True) for more in ({}, {MEDIA: seen}))
    assert len(apart.input_ids) == len(shared.input_ids) + 2  # the prompt of row 2 is read once more
    assert sorted(each.digest for each in apart.media) == ["a", "b"]
    later = np.array([(), (c,), (), (c, b)], dtype=object)
    both = layout({**rows, MEDIA: seen, LATER_MEDIA: later}, share_prompts=True).media
    assert sorted(each.digest for each in both) == ["a", "b", "b", "c", "c"]
    left_out = {**rows, "response_mask": rows["response_mask"].clone()}
    left_out["response_mask"][0] = 0  # rows that are not read leave the others their own media
    assert len(layout({**left_out, MEDIA: seen}, share_prompts=True).input_ids) == len(apart.input_ids) - 1
