# SPDX-License-Identifier: Apache-2.0
"""Which rows go to which data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from whet.errors import DataError

# The length at which causal attention costs as much as all other work of a token: six times the hidden size, here that
# of a 1.5 B model. Only the order of lengths below it matters much, so one number serves all models.
EVEN_LENGTH = 9216


def sequence_workload(num_tokens: int) -> float:
    """The relative cost of one sequence: linear in its tokens for the matrix products, quadratic for attention."""
    return num_tokens + num_tokens**2 / EVEN_LENGTH


def balanced_partition(workloads: Sequence[float], parts: int, block: int = 1) -> list[list[int]]:
    """Row numbers of each part: every row in one part, ascending within it, the largest total workload kept small.

    Rows come in blocks of `block` consecutive ones that stay together. Blocks are dealt largest first to the part with
    the least work (Graham 1969): the largest part is at most 4/3 - 1/(3 parts) of the best possible, and within 1 % of
    the mean from eight sequences a part on. A part stays empty only where there are fewer blocks than parts.

    Raises: DataError if the rows are no whole number of blocks.
    """
    if parts < 1 or block < 1 or len(workloads) % block:
        raise DataError(
            f"{len(workloads)} rows do not split over {parts} data-parallel ranks in blocks of {block} rows: "
            "the rows must be a whole number of blocks, and both numbers at least 1"
        )
    blocks = [sum(workloads[start : start + block]) for start in range(0, len(workloads), block)]
    shards: list[list[int]] = [[] for _ in range(parts)]
    least_loaded = [(0.0, 0, part) for part in range(parts)]  # work, blocks, part: ties go to fewer blocks
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index]):
        work, count, part = heapq.heappop(least_loaded)
        shards[part].extend(range(index * block, (index + 1) * block))
        heapq.heappush(least_loaded, (work + blocks[index], count + 1, part))
    return [sorted(shard) for shard in shards]


def inverse_order(shards: Iterable[Sequence[int]]) -> list[int]:
    """Where each row of the caller lies in the shards put end to end."""
    order = [row for shard in shards for row in shard]
    positions = [0] * len(order)
    for position, row in enumerate(order):
        positions[row] = position
    return positions
