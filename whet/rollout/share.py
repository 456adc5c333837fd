# SPDX-License-Identifier: Apache-2.0
"""One list of requests for several ranks: each takes the next of it as it has room, and none waits for another.

A rank takes no more at once than its even part. Where all fit together, all start at once: a step costs little more for
more rows, and what started later would end later. Where they do not, a rank that long answers keep busy takes fewer.
Who answers what changes no answer: random draws are keyed by request and position, and a request gives the same tokens
in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from whet.rollout.protocol import Request

BLOCKS_A_RANK = 4  # at least, of equal requests: fewer are handed out as one, so that a rank prefills a prompt once


class Share:
    """What one rank takes of requests that all ranks were given: blocks in an order that all agree on, by a counter
    that they share. `next_number` raises it by 1 and returns what it was."""

    def __init__(self, requests: Sequence[Request], ranks: int, next_number: Callable[[], int]) -> None:
        self._blocks = blocks_of(requests, ranks)
        self._part, self._next_number = -(-len(requests) // ranks), next_number
        self._first_free = 0  # as last seen; others may be further

    def __call__(self, unfinished: int, most: int) -> list[int]:
        """The requests to take on beside the `unfinished` ones of this rank, up to about `most` in all: none where
        others should have them, or nothing is left."""
        taken: list[int] = []
        while self._first_free < len(self._blocks) and unfinished + len(taken) < min(most, self._part):
            number = self._next_number()
            self._first_free = number + 1
            if number < len(self._blocks):
                taken += self._blocks[number]
        return taken


def everything(count: int) -> Callable[[int, int], Sequence[int]]:
    """For a rank that answers alone: all requests at once."""
    left = list(range(count))

    def take(unfinished: int, most: int) -> list[int]:
        taken, left[:] = left[:], []
        return taken

    return take


def blocks_of(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Rows that one rank takes together: of one prompt, and no more than leaves every rank some blocks. What may take
    longest comes first."""
    most = max(1, len(requests) // (BLOCKS_A_RANK * ranks))
    blocks = []
    for _, rows in groupby(range(len(requests)), lambda row: requests[row].token_ids):
        same = list(rows)
        blocks += [same[start : start + most] for start in range(0, len(same), most)]

    def longest(block: list[int]) -> int:
        return max(len(requests[row].token_ids) + requests[row].params.max_new_tokens for row in block)

    return sorted(blocks, key=longest, reverse=True)
