# SPDX-License-Identifier: Apache-2.0
"""The way from a call of the loop to a call on each rank, and from the results of the ranks to one result."""

from __future__ import annotations

import enum
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from whet.controller.balance import balanced_partition, inverse_order, sequence_workload
from whet.controller.worker import Layout, Worker
from whet.errors import DataError, RegistryError, WorkerError
from whet.metrics import Metrics
from whet.protocol import DataProto

F = TypeVar("F", bound=Callable[..., Any])
RESERVED = "block"  # keyword of a call that the dispatcher reads itself


class Dispatch(enum.Enum):
    """The meaning of a method's arguments and results to the ranks of its group."""

    ONE_TO_ALL = "one to all"  # the same arguments to every rank; a list of results by rank
    ALL_TO_ALL = "all to all"  # every argument a list with one item a rank; a list of results by rank
    DP_COMPUTE = "data-parallel compute"  # rows split over data-parallel ranks, results in the caller's row order
    GATHER = DP_COMPUTE
    MEGATRON_COMPUTE = DP_COMPUTE  # noqa: PIE796


@dataclass(frozen=True)
class Arguments:
    """The arguments of one rank's method."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """A call: what each rank is given (a rank that is absent is not called), and how the results become one."""

    arguments: Mapping[int, Arguments]
    collect: Callable[[Mapping[int, Any]], Any]


_MODES: WeakKeyDictionary[Callable[..., Any], Dispatch] = WeakKeyDictionary()
_BESIDE = WeakSet[Callable[..., Any]]()


def register(dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, *, beside: bool = False) -> Callable[[F], F]:
    """Decorator that lets the loop call a worker's method through its group. Overriding methods need no mark of their
    own.

    A process serves calls one after the other, in order; methods marked `beside` run beside them, each in a thread of
    its own. In the caller's own process every call is a plain call.

    Raises: RegistryError for a parameter called `block`: this is the caller's word to the dispatcher.
    """

    def decorate(method: F) -> F:
        if RESERVED in inspect.signature(method).parameters:
            raise RegistryError(
                f"{method.__qualname__} has a parameter {RESERVED!r}, which the dispatcher reads; rename it"
            )
        _MODES[method] = dispatch_mode
        if beside:
            _BESIDE.add(method)
        return method

    return decorate


def runs_beside(cls: type[Worker], method: str) -> bool:
    """Tells whether calls of a method run beside others."""
    return any(vars(base).get(method) in _BESIDE for base in cls.__mro__ if method in vars(base))


def registered_methods(cls: type[Worker]) -> dict[str, Dispatch]:
    """The methods of a worker class that a group offers, by name, with their modes. The word nearest to `cls` holds."""
    found: dict[str, Dispatch] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            if inspect.isfunction(member) and member in _MODES:
                found[name] = _MODES[member]
    return found


def plan_call(mode: Dispatch, layouts: Sequence[Layout], arguments: Arguments, caller: str, block: int = 1) -> Plan:
    """The plan of one call on ranks with these layouts. `caller` names it in errors ("actor.update").

    Raises: DataError for arguments that cannot be given out in this mode.
    """
    if mode is Dispatch.DP_COMPUTE:
        return _data_parallel(layouts, arguments, caller, block)
    if block != 1:
        raise DataError(f"{caller} was given block, which says how rows are split; it is {mode.value}")
    ranks = range(len(layouts))
    given = dict.fromkeys(ranks, arguments)
    if mode is Dispatch.ALL_TO_ALL:
        _check_one_a_rank(arguments, len(layouts), caller)
        given = {rank: _map(arguments, operator.itemgetter(rank)) for rank in ranks}
    return Plan(given, lambda results: [results[rank] for rank in ranks])


def check_layouts(layouts: Sequence[Layout], role: str) -> None:
    """Checks that exactly one rank reports each data-parallel rank.  Raises: WorkerError."""
    reporting = sorted(layout.dp_rank for layout in layouts if layout.is_reporting)
    if any(reporting != list(range(layout.dp_size)) or layout.dp_rank not in reporting for layout in layouts):
        found = ", ".join(f"rank {rank}: {layout}" for rank, layout in enumerate(layouts))
        raise WorkerError(
            f"{role}: every dp_rank from 0 to dp_size - 1 needs exactly one rank with is_reporting, and dp_size must "
            f"be the same everywhere; found {found}"
        )


# -- rows out ----------------------------------------------------------------------------------------------------------


def _data_parallel(layouts: Sequence[Layout], arguments: Arguments, caller: str, block: int) -> Plan:
    split = [value for value in (*arguments.args, *arguments.kwargs.values()) if isinstance(value, (DataProto, list))]
    if not split:
        raise DataError(
            f"{caller} splits rows, and was given none: pass a DataProto or a list, or register it one to all"
        )
    if len({len(value) for value in split}) > 1:
        raise DataError(
            f"{caller} was given {', '.join(f'{type(v).__name__} of {len(v)} rows' for v in split)}: all must have the "
            "same rows (a list that is meant for every rank goes as a tuple)"
        )
    dp_size = layouts[0].dp_size
    shards = balanced_partition(_workloads(split[0]), dp_size, block)
    given = [_map(arguments, partial(_take, shard)) for shard in shards]
    reporters = {layout.dp_rank: rank for rank, layout in enumerate(layouts) if layout.is_reporting}
    return Plan(
        {rank: given[layout.dp_rank] for rank, layout in enumerate(layouts)},
        lambda results: _gather([results[reporters[dp_rank]] for dp_rank in range(dp_size)], shards, caller),
    )


def _workloads(rows: DataProto | list[Any]) -> list[float]:
    """Returns a number for each row, from its tokens; the same for all where they have none."""
    if isinstance(rows, DataProto):
        lengths = rows["attention_mask"].sum(-1).tolist() if "attention_mask" in rows else [1] * len(rows)
    else:
        lengths = [len(getattr(row, "token_ids", (row,))) for row in rows]
    return [sequence_workload(length) for length in lengths]


def _take(shard: Sequence[int], value: Any) -> Any:
    if not isinstance(value, (DataProto, list)) or len(shard) == len(value):
        return value
    return [value[row] for row in shard] if isinstance(value, list) else value[shard]


def _map(arguments: Arguments, function: Callable[[Any], Any]) -> Arguments:
    return Arguments(
        tuple(function(value) for value in arguments.args),
        {name: function(value) for name, value in arguments.kwargs.items()},
    )


def _check_one_a_rank(arguments: Arguments, world_size: int, caller: str) -> None:
    for value in (*arguments.args, *arguments.kwargs.values()):
        if not isinstance(value, list) or len(value) != world_size:
            found = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
            raise DataError(f"{caller} takes lists with one item for each of {world_size} ranks; it was given {found}")


# -- results back ------------------------------------------------------------------------------------------------------


def _gather(results: Sequence[Any], shards: Sequence[Sequence[int]], caller: str) -> Any:
    """Joins the results of the data-parallel ranks: rows in the caller's order, metrics merged, tuples by position.

    A rank that was given no rows may return anything of no rows, or None.
    """
    parts = [(result, shard) for result, shard in zip(results, shards, strict=True) if shard or result is not None]
    if all(result is None for result, _ in parts):
        return None
    kinds = {next((kind for kind in _KINDS if isinstance(result, kind)), type(result)) for result, _ in parts}
    kind = kinds.pop()
    if kinds or kind not in _KINDS:
        found = ", ".join(sorted(each.__name__ for each in {kind, *kinds}))
        raise WorkerError(
            f"{caller} returned {found}, which cannot be gathered; return the same of DataProto, list, dict of "
            "tensors, Metrics, None or a tuple of these on every rank"
        )
    if kind is tuple:
        columns = zip(*(result for result, _ in parts), strict=True)
        return tuple(_gather(column, [shard for _, shard in parts], caller) for column in columns)
    if kind is Metrics:
        merged = Metrics()
        for result, _ in parts:
            merged.merge(result)
        return merged
    return _join_rows([part for part in parts if part[1]] or parts[:1], caller)


_KINDS = (tuple, Metrics, DataProto, list, dict)


def _join_rows(parts: Sequence[tuple[Any, Sequence[int]]], caller: str) -> Any:
    for result, shard in parts:
        columns = result if isinstance(result, dict) else {"rows": result}
        sizes = {name: len(column) for name, column in columns.items()}
        if any(size != len(shard) for size in sizes.values()):
            raise WorkerError(
                f"{caller} returned {sizes} for a shard of {len(shard)} rows; it must return one result a row"
            )
    results = [result for result, _ in parts]
    if len(results) == 1:
        return results[0]
    shards = [shard for _, shard in parts]
    if isinstance(results[0], list):
        joined = [item for result in results for item in result]
        return [joined[position] for position in inverse_order(shards)]
    if isinstance(results[0], dict):
        return DataProto.concat([DataProto.from_dict(result) for result in results], shards).tensors() if sizes else {}
    return DataProto.concat(results, shards)
