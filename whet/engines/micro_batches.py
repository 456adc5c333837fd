# SPDX-License-Identifier: Apache-2.0
"""Packs rows into micro-batches that fit a token budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain


def micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    packing: bool,
    block: int | list[list[int]] = 1,
    prompts: Sequence[tuple[int, int]] | None = None,
    first_fit: bool = False,
) -> list[list[int]]:
    """Returns the row numbers of each micro-batch. Only a micro-batch of one block may exceed `max_tokens`.

    A packed micro-batch costs its tokens; a padded one, its rows times its longest row. Rows are sorted by length, so
    that padding stays small. Each `block` consecutive rows stay together; a list gives the rows of each block. A block
    without tokens is left out. If packed rows share prompts, `prompts` has the number and length of each row's prompt:
    rows of one prompt stay neighbours, and the prompt costs once. With `first_fit` a block goes into any micro-batch
    that it fits into, preferably one with its prompt; this needs fewer micro-batches."""
    shared, every = prompts if prompts is not None else [(row, 0) for row in range(len(lengths))], range(len(lengths))
    blocks = [[*every[at : at + block]] for at in every[::block]] if isinstance(block, int) else block
    blocks = [rows for rows in blocks if any(lengths[row] for row in rows)]
    if (whole := [*chain(*blocks)]) and packing and _tokens(whole, lengths, shared, set()) <= max_tokens:
        return [whole]
    return _by_length(blocks, lengths, max_tokens, shared, packing, first_fit)


def _by_length(
    blocks: list[list[int]],
    lengths: Sequence[int],
    max_tokens: int,
    shared: Sequence[tuple[int, int]],
    packing: bool,
    first_fit: bool,
) -> list[list[int]]:
    """Sorts blocks of rows, longest first, and adds each block to the last micro-batch if it fits, or to a new one."""
    longest_with: dict[int, int] = {}
    for (prompt, _), length in zip(shared, lengths, strict=True):
        longest_with[prompt] = max(length, longest_with.get(prompt, 0))

    def by_length(rows: list[int]) -> tuple[int, int, int]:
        prompt = shared[rows[0]][0]
        return -longest_with[prompt], prompt, -max(lengths[row] for row in rows)

    blocks = sorted(blocks, key=by_length)
    if packing and first_fit:
        return _filled(blocks, lengths, max_tokens, shared)
    batches: list[list[int]] = []
    tokens = longest = 0
    read: set[int] = set()  # prompts of the current micro-batch
    for rows in blocks:
        longest = max(longest, *(lengths[row] for row in rows))
        total = tokens + _tokens(rows, lengths, shared, read)
        if batches and (total if packing else longest * (len(batches[-1]) + len(rows))) <= max_tokens:
            batches[-1].extend(rows)
            tokens = total
        else:
            batches.append(rows)
            read, longest = set(), max(lengths[row] for row in rows)
            tokens = _tokens(rows, lengths, shared, read)
        read.update(shared[row][0] for row in rows)
    return batches


def _filled(
    blocks: Sequence[list[int]], lengths: Sequence[int], max_tokens: int, shared: Sequence[tuple[int, int]]
) -> list[list[int]]:
    """Puts each block of rows into the first micro-batch that it fits into. Micro-batches that already have the block's
    prompt are tried first."""
    batches, totals, read = list[list[int]](), list[int](), list[set[int]]()
    for rows in blocks:
        prompts = {shared[row][0] for row in rows}
        for at in sorted(range(len(batches)), key=lambda each: (not prompts <= read[each], each)):
            more = _tokens(rows, lengths, shared, read[at])
            if totals[at] + more <= max_tokens:
                batches[at].extend(rows)
                totals[at] += more
                read[at] |= prompts
                break
        else:
            batches.append(list(rows))
            totals.append(_tokens(rows, lengths, shared, set()))
            read.append(set(prompts))
    return batches


def _tokens(rows: list[int], lengths: Sequence[int], shared: Sequence[tuple[int, int]], read: set[int]) -> int:
    """Counts the tokens that `rows` add to a micro-batch that already has the prompts `read`."""
    prompts = dict(shared[row] for row in rows if lengths[row])
    responses = sum(lengths[row] - shared[row][1] for row in rows if lengths[row])
    return responses + sum(length for prompt, length in prompts.items() if prompt not in read)
