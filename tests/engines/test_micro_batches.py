# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given, strategies as st

from whet.engines.micro_batches import micro_batches


def test_packed_by_hand() -> None:
    # longest first: 5 | 4+3 | 2+1, budget 7; the row of length 0 is left out
    assert micro_batches([3, 5, 0, 1, 4, 2], 7, packing=True) == [[1], [4, 0], [5, 3]]


def test_rows_that_fit_together_keep_their_order() -> None:
    assert micro_batches([1, 4, 0, 2], 7, packing=True) == [[0, 1, 3]]
    # a row without tokens stays with its block; a block of such rows is left out
    assert micro_batches([1, 0, 0, 0, 4, 2], 7, packing=True, block=2) == [[0, 1, 4, 5]]
    assert micro_batches([1, 0, 0, 2], 7, packing=True, block=[[0, 3], [1, 2]]) == [[0, 3]]


def test_padded_by_hand() -> None:
    # rows times longest: 5x1 | 4x1 (4x2 is 8) | 3x2 | 1x1
    assert micro_batches([3, 5, 1, 4, 2], 7, packing=False) == [[1], [3], [0, 4], [2]]


def test_pairs_stay_together_and_a_large_one_goes_alone() -> None:
    assert micro_batches([1, 1, 9, 9, 2, 2], 6, packing=True, block=2) == [[2, 3], [4, 5, 0, 1]]
    blocks = [[0, 2, 4], [1], [3, 5]]
    assert micro_batches([1, 4, 1, 0, 2, 2], 6, packing=True, block=blocks) == [[1], [0, 2, 4, 3, 5]]


def test_rows_of_one_prompt_follow_one_another_and_pay_for_it_once() -> None:
    # prompt 0 of 3 tokens has rows of 5, 4 and 6, prompt 1 of 1 token rows of 3 and 8; budget 10
    lengths, prompts = [5, 3, 4, 8, 6], [(0, 3), (1, 1), (0, 3), (1, 1), (0, 3)]
    # prompt 1: 8 + 2 = 10 | prompt 0: 6 + 2 + 1 = 9
    assert micro_batches(lengths, 10, packing=True, prompts=prompts) == [[3, 1], [4, 0, 2]]
    # 8 | 3, and nothing more: 3 + 6 is 9 | 6 + 2 | 4
    assert micro_batches(lengths, 8, packing=True, prompts=prompts) == [[3], [1], [4, 0], [2]]
    assert micro_batches(lengths, 9, packing=True, prompts=prompts) == [[3], [1, 4], [0, 2]]


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 100), st.booleans(), st.integers(1, 4))
def test_every_row_once_and_within_the_budget(lengths: list[int], budget: int, packing: bool, block: int) -> None:
    batches = micro_batches(lengths, budget, packing=packing, block=block)
    rows = [row for batch in batches for row in batch]
    blocks = [range(start, min(start + block, len(lengths))) for start in range(0, len(lengths), block)]
    assert sorted(rows) == [row for rows_ in blocks if any(lengths[r] for r in rows_) for row in rows_]
    for batch in batches:
        cost = sum(lengths[row] for row in batch) if packing else len(batch) * max(lengths[row] for row in batch)
        assert cost <= budget or len({row // block for row in batch}) == 1
