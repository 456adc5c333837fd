# SPDX-License-Identifier: Apache-2.0
import itertools
import re

import pytest
from hypothesis import given, settings, strategies as st

from tests.raising import raises
from whet.controller.dispatch import balanced_partition, inverse_order, sequence_workload
from whet.errors import DataError


def test_differencing_by_hand() -> None:
    # Greedy: 7 | 6, 7 | 6 5, 7 4 | 6 5, 7 4 3 | 6 5: 14 against 11. Differencing: 7 - 6 = 1 and 5 - 4 = 1 are the two
    # largest differences in turn; 3 - 1 = 2 joins 3 with one of them, 2 - 1 = 1 all: 13 against 12, the best there is.
    shards = balanced_partition([3, 4, 5, 6, 7], 2)
    assert sorted(sum([3, 4, 5, 6, 7][row] for row in shard) for shard in shards) == [12, 13]
    assert shards == [sorted(shard) for shard in shards]
    assert balanced_partition([3, 4, 5, 6, 7], 2) == shards


def test_the_more_even_partition_is_taken() -> None:
    # Of 3 3 2 2 2 over two, greedy has 7 against 5 and differencing 6 against 6. Of equal ones over four both are even,
    # and greedy, which deals them in turn, is kept.
    assert sorted(map(len, balanced_partition([3, 3, 2, 2, 2], 2))) == [2, 3]
    assert balanced_partition([1.0] * 8, 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_blocks_stay_together() -> None:
    # blocks (0, 1) = 2, (2, 3) = 9, (4, 5) = 8, (6, 7) = 2: 9 | 8, then 2 -> 10 on the right, then 2 -> 11 on the left
    assert balanced_partition([1, 1, 8, 1, 1, 7, 1, 1], 2, block=2) == [[2, 3, 6, 7], [0, 1, 4, 5]]
    # blocks of other sizes, whose rows are apart: 2 + 8 | 9, then 3
    assert balanced_partition([1, 9, 8, 1, 2, 1], 2, block=[[0, 3], [1], [2, 4], [5]]) == [[2, 4, 5], [0, 1, 3]]


def test_equal_work_is_dealt_evenly() -> None:
    assert balanced_partition([5.0] * 7, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert balanced_partition([0.0] * 4, 2) == [[0, 2], [1, 3]]


def test_fewer_rows_than_parts() -> None:
    assert balanced_partition([4], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 500), max_size=7), st.integers(1, 3), st.integers(1, 2)
)  # at most 3^7 assignments to try
def test_close_to_the_best_of_all_partitions(tokens: list[int], parts: int, block: int) -> None:
    blocks = [sequence_workload(length) for length in tokens]
    workloads = [work / block for work in blocks for _ in range(block)]
    shards = balanced_partition(workloads, parts, block)

    def largest(loads: list[float]) -> float:
        return max(loads, default=0.0)

    best = min(
        largest([sum(w for w, p in zip(blocks, choice, strict=True) if p == part) for part in range(parts)])
        for choice in itertools.product(range(parts), repeat=len(blocks))
    )
    assert sorted(row for shard in shards for row in shard) == list(range(len(workloads)))
    assert all(shard == sorted(shard) for shard in shards)
    assert all(row + 1 in shard for shard in shards for row in shard if block == 2 and row % 2 == 0)
    assert (
        largest([sum(workloads[row] for row in shard) for shard in shards]) <= best * (4 / 3 - 1 / (3 * parts)) + 1e-9
    )
    assert len(blocks) < parts or all(shards)


def test_a_batch_of_usual_lengths_is_within_one_percent_of_even() -> None:
    lengths = [16 + (row * 7919) % 497 for row in range(64)]
    workloads = [sequence_workload(length) for length in lengths]
    loads = [sum(workloads[row] for row in shard) for shard in balanced_partition(workloads, 4)]
    assert max(loads) <= 1.01 * sum(workloads) / 4


def test_workload_is_linear_plus_quadratic() -> None:
    assert sequence_workload(0) == 0
    assert sequence_workload(9216) == 2 * 9216  # attention costs as much as the rest
    assert sequence_workload(2 * 9216) == 6 * 9216


def test_inverse_order_finds_each_row() -> None:
    assert inverse_order([[1, 3], [], [0, 2]]) == [2, 0, 3, 1]


@pytest.mark.parametrize(("rows", "parts", "block"), [(5, 2, 2), (4, 0, 1), (4, 2, 0)])
def test_refuses_what_cannot_be_split(rows: int, parts: int, block: int) -> None:
    with raises(DataError, "rows", found=re.compile(rf"^{rows} rows .*\b{parts} .*\b{block} rows$")):
        balanced_partition([1.0] * rows, parts, block)
