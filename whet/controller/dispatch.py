# SPDX-License-Identifier: Apache-2.0
"""Dispatch: splits the arguments of a group's call over its ranks, with balanced work, and gathers their results."""

from __future__ import annotations

import enum
import heapq
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from whet.batch import Batch, blocks_of
from whet.controller.worker import RankLayout, Worker
from whet.errors import DataError, RegistryError, WorkerError
from whet.metrics import Metrics

F = TypeVar("F", bound=Callable[..., Any])
RESERVED = "block"  # keyword of a call that the dispatcher itself reads
# The length at which causal attention costs as much as all other work of a token: six times the hidden size, here of a
# 1.5 B model. One number is good enough for all models, because the partition depends little on it.
EVEN_LENGTH = 9216
MAX_DIFFERENCED = 16  # blocks per part; with more of them the greedy partition is within 0.2 % of even
MAX_STEPS = 2**16  # approximate limit of the steps of differencing: with many parts, fewer blocks per part are allowed
WorkPart = tuple[float, list[int]]  # work, blocks


class Dispatch(enum.Enum):
    """The modes of a group's call: how arguments are split over the ranks, and how results are gathered."""

    ONE_TO_ALL = "one to all"  # every rank gets the same arguments; returns a list of results by rank
    ALL_TO_ALL = "all to all"  # every argument is a list with one item per rank; returns a list of results by rank
    DP_COMPUTE = "data-parallel compute"  # rows are split over data-parallel ranks; returns the caller's row order
    GATHER = DP_COMPUTE
    MEGATRON_COMPUTE = DP_COMPUTE  # noqa: PIE796


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call on one rank."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CallPlan:
    """A call on many ranks: the arguments of each called rank, and the function that gathers the results."""

    arguments: Mapping[int, Arguments]  # by rank
    collect: Callable[[Mapping[int, Any]], Any]


_MODES: WeakKeyDictionary[Callable[..., Any], Dispatch] = WeakKeyDictionary()
_CONCURRENT = WeakSet[Callable[..., Any]]()


def register(dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, *, concurrent: bool = False) -> Callable[[F], F]:
    """Marks a worker's method as callable through its group (a decorator). Overriding methods inherit the mark.

    A process serves calls one after the other, in order. A call of a `concurrent` method runs at the same time, in its
    own thread. If the worker is in the caller's process, every call is a plain call.

    Raises: RegistryError for a parameter named `block`, a keyword that the dispatcher itself reads."""

    def decorate(method: F) -> F:
        if RESERVED in inspect.signature(method).parameters:
            found = f"a parameter {RESERVED!r}, which the dispatcher reads"
            raise RegistryError(method.__qualname__, found, change="rename the parameter")
        _MODES[method] = dispatch_mode
        if concurrent:
            _CONCURRENT.add(method)
        return method

    return decorate


def is_concurrent(cls: type[Worker], method: str) -> bool:
    """Tells whether a method is marked `concurrent`: its calls run at the same time as other calls."""
    return any(vars(base).get(method) in _CONCURRENT for base in cls.__mro__ if method in vars(base))


def registered_methods(cls: type[Worker]) -> dict[str, Dispatch]:
    """Returns the dispatch modes of a class's registered methods, by name. A subclass overrides its base's mode."""
    found: dict[str, Dispatch] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if inspect.isfunction(member) and member in _MODES:
                found[name] = _MODES[member]
    return found


def plan_call(
    mode: Dispatch, layouts: Sequence[RankLayout], arguments: Arguments, caller: str, block: int | str = 1
) -> CallPlan:
    """Plans one call on ranks with these layouts. `caller` is the name of the call in errors ("actor.update").

    Raises: DataError for arguments that do not fit the mode."""
    if mode is Dispatch.DP_COMPUTE:
        return _data_parallel(layouts, arguments, caller, block)
    if block != 1:
        raise DataError(f"{caller}: block", block, f"1, as the mode `{mode.value}` splits no rows", "remove `block`")
    ranks = range(len(layouts))
    by_rank = dict.fromkeys(ranks, arguments)
    if mode is Dispatch.ALL_TO_ALL:
        _check_one_per_rank(arguments, len(layouts), caller)
        by_rank = {rank: _map(arguments, operator.itemgetter(rank)) for rank in ranks}
    return CallPlan(by_rank, lambda results: [results[rank] for rank in ranks])


def whole_call(mode: Dispatch, arguments: Arguments, caller: str) -> CallPlan | None:
    """Plans a call on a single rank, without splitting or gathering. Returns None if `plan_call` must plan it."""
    sizes = {len(each) for each in (*arguments.args, *arguments.kwargs.values()) if isinstance(each, (Batch, list))}
    if mode is not Dispatch.DP_COMPUTE or len(sizes) != 1:
        return None
    return CallPlan({0: arguments}, lambda results: _one_result_per_row(results[0], range(*sizes), caller))


def check_layouts(layouts: Sequence[RankLayout], role: str) -> None:
    """Checks that exactly one rank reports the results of each data-parallel rank.  Raises: WorkerError."""
    reporting = sorted(layout.dp_rank for layout in layouts if layout.is_reporting)
    if any(reporting != list(range(layout.dp_size)) or layout.dp_rank not in reporting for layout in layouts):
        found = ", ".join(f"rank {rank}: {layout}" for rank, layout in enumerate(layouts))
        expected = "one rank with is_reporting for every dp_rank from 0 to dp_size - 1, and one dp_size"
        raise WorkerError(role, found, expected)


# -- from the caller's rows to the ranks -------------------------------------------------------------------------------


def _data_parallel(layouts: Sequence[RankLayout], arguments: Arguments, caller: str, block: int | str) -> CallPlan:
    given = (*arguments.args, *arguments.kwargs.values())
    split: list[Any] = [value for value in given if isinstance(value, (Batch, list))]
    if not split:
        expected = "a Batch or a list, whose rows the call splits"
        raise DataError(caller, "no argument has rows", expected, "pass one, or register the method as ONE_TO_ALL")
    if len({len(value) for value in split}) > 1:
        found = ", ".join(f"{type(v).__name__} of {len(v)} rows" for v in split)
        change = "pass a list that every rank needs whole as a tuple"
        raise DataError(caller, found, "equal numbers of rows", change)
    dp_size = layouts[0].dp_size
    reporters = {layout.dp_rank: rank for rank, layout in enumerate(layouts) if layout.is_reporting}
    together = block if isinstance(block, int) else blocks_of(split[0][block])
    shards = balanced_partition(_workloads(split[0]), dp_size, together)
    by_dp_rank = [_map(arguments, partial(_take_rows, shard)) for shard in shards]
    return CallPlan(
        {rank: by_dp_rank[layout.dp_rank] for rank, layout in enumerate(layouts)},
        lambda results: _gather([results[reporters[dp_rank]] for dp_rank in range(dp_size)], shards, caller),
    )


def _workloads(rows: Batch | list[Any]) -> list[float]:
    """Estimates the workload of each row from its number of tokens; equal for rows without tokens."""
    if isinstance(rows, Batch):
        lengths = rows["attention_mask"].sum(-1).tolist() if "attention_mask" in rows else [1] * len(rows)
    else:
        lengths = [len(getattr(row, "token_ids", (row,))) for row in rows]
    return [sequence_workload(length) for length in lengths]


def _take_rows(shard: Sequence[int], value: Any) -> Any:
    if not isinstance(value, (Batch, list)) or len(shard) == len(value):
        return value
    return [value[row] for row in shard] if isinstance(value, list) else value[shard]


def _map(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    return Arguments(
        tuple(function(value) for value in arguments.args),
        {name: function(value) for name, value in arguments.kwargs.items()},
    )


def _check_one_per_rank(arguments: Arguments, world_size: int, caller: str) -> None:
    for value in (*arguments.args, *arguments.kwargs.values()):
        if not isinstance(value, list) or len(value) != world_size:
            found = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
            raise DataError(caller, found, f"lists with one item for each of {world_size} ranks")


# -- from the ranks' results to the caller -----------------------------------------------------------------------------


def _gather(results: Sequence[Any], shards: Sequence[Sequence[int]], caller: str) -> Any:
    """Joins the results of data-parallel ranks: rows in the caller's order, metrics merged, tuples item by item.

    A rank without rows may return an empty result, or None.
    """
    parts = [(result, shard) for result, shard in zip(results, shards, strict=True) if shard or result is not None]
    if all(result is None for result, _ in parts):
        return None
    kinds = {next((kind for kind in _KINDS if isinstance(result, kind)), type(result)) for result, _ in parts}
    kind = kinds.pop()
    if kinds or kind not in _KINDS:
        found = ", ".join(sorted(each.__name__ for each in {kind, *kinds}))
        kinds_known = "Batch, list, dict of tensors, Metrics, None or a tuple of these"
        raise WorkerError(caller, f"returned {found}", f"one type on every rank: {kinds_known}")
    if kind is tuple:
        columns = zip(*(result for result, _ in parts), strict=True)
        return tuple(_gather(column, [shard for _, shard in parts], caller) for column in columns)
    if kind is Metrics:
        merged = Metrics()
        for result, _ in parts:
            merged.merge(result)
        return merged
    return _join_rows([part for part in parts if part[1]] or parts[:1], caller)


_KINDS = (tuple, Metrics, Batch, list, dict)


def _join_rows(parts: Sequence[tuple[Any, Sequence[int]]], caller: str) -> Any:
    results = [_one_result_per_row(result, shard, caller) for result, shard in parts]
    if len(results) == 1:
        return results[0]
    shards = [shard for _, shard in parts]
    if isinstance(results[0], list):
        joined = [item for result in results for item in result]
        return [joined[position] for position in inverse_order(shards)]
    if isinstance(results[0], dict):
        tables = [Batch.of(result) for result in results]
        return Batch.concat(tables, shards).tensors() if results[0] else {}
    return Batch.concat(results, shards)


def _one_result_per_row(result: Any, shard: Sequence[int], caller: str) -> Any:
    """Returns the result.  Raises: WorkerError unless each of its columns has one row for each row of the shard."""
    for each in result if isinstance(result, tuple) else [result]:
        columns = each if isinstance(each, dict) else {"rows": each} if isinstance(each, (Batch, list)) else {}
        sizes = {name: len(column) for name, column in columns.items()}
        if any(size != len(shard) for size in sizes.values()):
            raise WorkerError(caller, f"returned {sizes} for a shard of {len(shard)} rows", "one result per row")
    return result


def sequence_workload(num_tokens: int) -> float:
    """Estimates the relative cost of a sequence: linear in its tokens for matrix products, quadratic for attention."""
    return num_tokens + num_tokens**2 / EVEN_LENGTH


def balanced_partition(workloads: Sequence[float], parts: int, block: int | list[list[int]] = 1) -> list[list[int]]:
    """Splits rows into `parts` of nearly equal total workload.  Returns the row numbers of each part, ascending.

    Each `block` consecutive rows stay together; a list gives the rows of each block. Greedy (Graham 1969): the largest
    remaining block goes to the part with the least work. The largest part is then at most 4/3 - 1/(3 parts) of the
    optimum. With few blocks the largest differencing method (Karmarkar and Karp 1982) is tried too, and the more even
    partition is returned. A part is empty only if there are fewer blocks than parts. The same workloads give the same
    parts.

    Raises: DataError if the rows are not a whole number of blocks."""
    size = block if isinstance(block, int) else 1
    if parts < 1 or size < 1 or len(workloads) % size:
        found = f"{len(workloads)} rows for {parts} data-parallel ranks in blocks of {size} rows"
        raise DataError("rows", found, "a whole number of blocks, and at least 1 rank and 1 row of a block")
    starts = range(0, len(workloads), size)
    rows = [list(range(start, start + size)) for start in starts] if isinstance(block, int) else block
    blocks = [sum(workloads[row] for row in each) for each in rows]
    order = sorted(range(len(blocks)), key=lambda index: -blocks[index])
    chosen = _greedy(blocks, order, parts)
    if len(blocks) <= max(2 * parts, min(MAX_DIFFERENCED * parts, MAX_STEPS // parts)):
        chosen = min(chosen, _differenced(blocks, order, parts), key=lambda found: max(work for work, _ in found))
    return [sorted(row for index in part for row in rows[index]) for _, part in chosen]


def inverse_order(shards: Iterable[Sequence[int]]) -> list[int]:
    """Returns the position of each of the caller's rows in the concatenated shards."""
    order = [row for shard in shards for row in shard]
    positions = [0] * len(order)
    for position, row in enumerate(order):
        positions[row] = position
    return positions


def _greedy(blocks: Sequence[float], order: Sequence[int], parts: int) -> list[WorkPart]:
    """Assigns the blocks in `order` (largest first) to the part with the least work, then with the fewest blocks."""
    found: list[list[int]] = [[] for _ in range(parts)]
    least_loaded = [(0.0, 0, part) for part in range(parts)]
    for index in order:
        work, count, part = least_loaded[0]
        found[part].append(index)
        heapq.heapreplace(least_loaded, (work + blocks[index], count + 1, part))
    works = {part: work for work, _, part in least_loaded}
    return [(works[part], chosen) for part, chosen in enumerate(found)]


def _differenced(blocks: Sequence[float], order: Sequence[int], parts: int) -> list[WorkPart]:
    """Partitions the blocks in `order` (largest first) by the largest differencing method; sorts parts by first block.

    Each block starts as a partition of its own. The two least even partitions are joined, the fullest part of one with
    the emptiest of the other, until one partition is left. A partition lists its non-empty parts, fullest first."""
    heap: list[tuple[float, int, list[WorkPart]]] = [  # (emptiest minus fullest, age to order equal ones, parts)
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


def _joined(one: list[WorkPart], other: list[WorkPart], parts: int) -> list[WorkPart]:
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
