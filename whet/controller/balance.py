# SPDX-License-Identifier: Apache-2.0
"""Partition of rows among data-parallel ranks with balanced work."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from whet.errors import DataError

# The length at which causal attention costs as much as all other work of a token: six times the hidden size, here of a
# 1.5 B model. One number is good enough for all models, because the partition depends little on it.
EVEN_LENGTH = 9216
MAX_DIFFERENCED = 16  # blocks per part; with more of them the greedy partition is within 0.2 % of even
MAX_STEPS = 2**16  # of differencing, approximately: with many parts it runs on fewer blocks per part

Part = tuple[float, list[int]]  # work, blocks


def sequence_workload(num_tokens: int) -> float:
    """Relative cost of one sequence: linear in its tokens for the matrix products, quadratic for attention."""
    return num_tokens + num_tokens**2 / EVEN_LENGTH


def balanced_partition(workloads: Sequence[float], parts: int, block: int = 1) -> list[list[int]]:
    """Row numbers of each part, ascending; the largest total workload of a part is kept small.

    Each `block` consecutive rows stay together. Greedy (Graham 1969): the largest remaining block goes to the part with
    the least work; the largest part is then at most 4/3 - 1/(3 parts) of the optimum. With few blocks the largest
    differencing method (Karmarkar and Karp 1982) is tried too, and the more even partition is returned. A part is empty
    only where there are fewer blocks than parts. The same workloads give the same parts.

    Raises: DataError if the rows are not a whole number of blocks.
    """
    if parts < 1 or block < 1 or len(workloads) % block:
        raise DataError(
            f"{len(workloads)} rows do not split over {parts} data-parallel ranks in blocks of {block} rows: "
            "the rows must be a whole number of blocks, and both numbers at least 1"
        )
    blocks = [sum(workloads[start : start + block]) for start in range(0, len(workloads), block)]
    order = sorted(range(len(blocks)), key=lambda index: -blocks[index])
    chosen = _greedy(blocks, order, parts)
    if len(blocks) <= max(2 * parts, min(MAX_DIFFERENCED * parts, MAX_STEPS // parts)):
        chosen = min(chosen, _differenced(blocks, order, parts), key=lambda found: max(work for work, _ in found))
    return [[index * block + row for index in sorted(part) for row in range(block)] for _, part in chosen]


def inverse_order(shards: Iterable[Sequence[int]]) -> list[int]:
    """Returns the position of each of the caller's rows in the concatenated shards."""
    order = [row for shard in shards for row in shard]
    positions = [0] * len(order)
    for position, row in enumerate(order):
        positions[row] = position
    return positions


def _greedy(blocks: Sequence[float], order: Sequence[int], parts: int) -> list[Part]:
    """Assigns the blocks in `order` (largest first) to the part with the least work, then with the fewest blocks."""
    found: list[list[int]] = [[] for _ in range(parts)]
    least_loaded = [(0.0, 0, part) for part in range(parts)]
    for index in order:
        work, count, part = least_loaded[0]
        found[part].append(index)
        heapq.heapreplace(least_loaded, (work + blocks[index], count + 1, part))
    works = {part: work for work, _, part in least_loaded}
    return [(works[part], chosen) for part, chosen in enumerate(found)]


def _differenced(blocks: Sequence[float], order: Sequence[int], parts: int) -> list[Part]:
    """Partition of the blocks in `order` (largest first); its parts are sorted by their first block.

    Each block starts as a partition of its own. The two least even partitions are joined, the fullest part of one with
    the emptiest of the other, until one is left. A partition lists its non-empty parts, fullest first."""
    heap: list[tuple[float, int, list[Part]]] = [  # (emptiest minus fullest, age to order equal ones, parts)
        (-blocks[index] if parts > 1 else 0.0, age, [(blocks[index], [index])]) for age, index in enumerate(order)
    ]
    heapq.heapify(heap)
    for age in range(len(order), 2 * len(order) - 1):
        _, _, one = heapq.heappop(heap)
        joined = sorted(_joined(one, heap[0][2], parts), key=lambda part: (-part[0], -len(part[1])))
        emptiest = joined[-1][0] if len(joined) == parts else 0.0
        heapq.heapreplace(heap, (emptiest - joined[0][0], age, joined))
    found = sorted(heap[0][2], key=lambda part: min(part[1])) if heap else []
    return [*found, *((0.0, []) for _ in range(parts - len(found)))]


def _joined(one: list[Part], other: list[Part], parts: int) -> list[Part]:
    """Joins part i of `one` with part `parts - 1 - i` of `other`, where both exist."""
    both = len(one) + len(other) - parts  # number of joined parts: the last ones of each
    if both <= 0:
        return [*one, *other]
    start = len(one) - both
    meeting = [
        (work + more, [*chosen, *others])
        for (work, chosen), (more, others) in zip(one[start:], reversed(other[len(other) - both :]), strict=True)
    ]
    return [*one[:start], *meeting, *other[: len(other) - both]]
