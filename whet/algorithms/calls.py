# SPDX-License-Identifier: Apache-2.0
"""Calls registered functions on columns. Binds their options once, and converts their results to one form.

A trajectory has several rows if its context was rewritten. An estimator gets these rows joined to one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from whet.algorithms.statistics import reward_to_go, spread, zero_outside
from whet.columns import ROW_COLUMNS
from whet.errors import DataError, RegistryError
from whet.registry import FOREIGN_COLUMNS, REQUIRED, SUPPLIED, Entry, Registry, Resolved, entry_of, load_target

Values = Mapping[str, object]  # by the name of an option
BATCH = frozenset({"batch", "non_tensor_batch"})


@dataclass(frozen=True, eq=False)
class Bound:
    """A registered function with its options, to be called on columns [B, ...] by name.

    Float columns [B, R, ...] are set to 0 where `response_mask` is 0; the function must not write into columns. The
    value of an option comes from `options`, else from the `supplied` of a call, else from its default.
    Raises: ConfigError for an option that does not fit. A call raises RegistryError for a missing column or value."""

    entry: Entry
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.options and not isinstance(self.options, Resolved):
            self.entry.check(self.options, f"{_named(self.entry)}: ")

    @classmethod
    def of(cls, registry: Registry, name: str, options: Values, where: str) -> Bound:
        """Binds a function by name. `where` is the config key of its options.  Raises: ConfigError, RegistryError."""
        return cls(registry[name], registry[name].resolve_options(options, where))

    def __reduce__(self) -> tuple[type[Bound], tuple[Entry, Values]]:
        return Bound, (self.entry, self.options)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function itself, imported at the first call."""
        return self.entry.load()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that the function reads."""
        return self.entry.columns

    @cached_property
    def is_supplied(self) -> bool:
        """Tells whether the function has a parameter or option in `SUPPLIED`, whose value the caller supplies."""
        return not SUPPLIED.isdisjoint({*self.entry.parameters, *self.entry.options})

    @cached_property
    def sources(self) -> list[tuple[str, str | None]]:
        """Pairs each parameter with the column that it reads; with None if the caller supplies the value."""
        names = self.entry.parameters
        return [(name, None if name in SUPPLIED else FOREIGN_COLUMNS.get(name, name)) for name in names]

    @cached_property
    def before(self) -> dict[str, Bound]:
        """The functions that compute extra columns of a loss from a mini-batch, by column, with the loss's options."""
        resolved, functions = {**self.entry.options, **self.options}, mini_batch_functions(self.entry)
        return {column: Bound(own, {name: resolved[name] for name in own.options}) for column, own in functions.items()}

    def __call__(self, columns: Mapping[str, Tensor], supplied: Values | None = None) -> Any:
        """Calls the function with its columns and options.  Returns its result."""
        given, mask = supplied or {}, columns.get("response_mask")
        named = {**self.entry.options, **{name: given[name] for name in self.entry.options if name in given}}
        named |= self.options
        try:
            arguments = [
                given[each] if name is None else _argument(each, name, columns[name], mask)
                for each, name in self.sources
            ]
        except KeyError as error:
            raise self._missing(error.args[0], columns, given) from None
        if REQUIRED in named.values():
            raise self._missing(next(name for name, value in named.items() if value is REQUIRED), columns, given)
        return self.function(*arguments, **named)

    def _missing(self, name: str, columns: Iterable[str], supplied: Iterable[str]) -> RegistryError:
        key = _named(self.entry)
        if name in self.entry.columns:
            found = f"reads column {name!r}, which the batch lacks"
            return RegistryError(key, found, f"one of {', '.join(columns)}", "rename the parameter")
        found = f"needs {name!r}, which the caller does not supply"
        expected = f"a name that the caller supplies ({', '.join(supplied) or 'none'})"
        return RegistryError(key, found, expected, "set an option with that name")


def _argument(parameter: str, name: str, column: Tensor, mask: Tensor | None) -> object:
    """Returns a column as the parameter needs it: floats are 0 outside the mask, `index` is a NumPy array."""
    if mask is not None and column.shape[:2] == mask.shape and name not in ROW_COLUMNS and column.is_floating_point():
        column = zero_outside(column, mask)
    # verl's estimators use the elements of `index` as dict keys; elements of a tensor are never equal as keys.
    return column.cpu().numpy() if parameter == "index" else column


def call(entry: Entry, columns: Mapping[str, Tensor], options: Values, supplied: Values | None = None) -> Any:
    """Binds a function to `options` and calls it once. See `Bound`."""
    return Bound(entry, options)(columns, supplied)


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator: columns [B, R], finite, detached, 0 where the mask is 0; metrics are scalars."""

    advantages: Tensor
    returns: Tensor | None
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """Result of a loss: one value per token [B, R], or a scalar that the loss itself has aggregated (verl's form).

    `diagnostics` are numbers or flags per token, to be averaged over sampled tokens; `metrics` are scalars."""

    per_token: Tensor | None
    aggregated: Tensor | None
    diagnostics: dict[str, Tensor]
    metrics: dict[str, Tensor]


def estimate(
    estimator: Bound, columns: Mapping[str, Tensor], supplied: Values | None = None, *, with_returns: bool = False
) -> Estimate:
    """Estimates the advantages of all rows of a batch.

    Rows with the same `trajectory_uid` are concatenated first, so the estimator sees one row per trajectory: its reward
    counts once in the group, and all its rows get its advantage. If the estimator reads `returns` and the batch has
    none, it gets the undiscounted reward-to-go. With `with_returns` the result has these returns, for a critic, if the
    estimator gives none of its own.  Raises: RegistryError where a column is missing or the result is not finite
    advantages of the batch's shape; DataError where the rows of a trajectory disagree."""
    layout = _trajectory_layout(columns)
    seen = dict(columns) if layout is None else layout.joined(estimator, columns)
    if "returns" not in seen and ("returns" in estimator.columns or with_returns):
        seen["returns"] = reward_to_go(seen["token_level_rewards"], seen["response_mask"])

    entry, result = estimator.entry, estimator(seen, supplied)
    advantages, returns, metrics = (result, None, {}) if isinstance(result, Tensor) else _parts(entry, result)
    if returns is None and with_returns:
        returns = seen["returns"]
    found = {"advantages": advantages, **({} if returns is None else {"returns": returns})}
    shape, mask = seen["response_mask"].shape, columns["response_mask"]
    made = {name: _column(entry, name, value, shape, layout, mask) for name, value in found.items()}
    return Estimate(made["advantages"], made.get("returns"), _scalars(entry, metrics) if metrics else {})


def mini_batch_functions(entry: Entry) -> dict[str, Entry]:
    """Returns the functions that compute extra columns for a loss, by column; its decorator names them (`before=`).
    They are in the loss's file, and see the whole mini-batch before its update; the loss sees only a micro-batch."""
    location = entry.target.rpartition(":")[0]
    return {
        column: entry_of(load_target(f"{location}:{function}"), entry.kind, function, {})
        for column, function in entry.marks.get("before", {}).items()
    }


def with_mini_batch_columns(loss: Bound, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adds to a whole mini-batch the columns that `loss.before` computes."""
    return {**columns, **{column: own(columns) for column, own in loss.before.items()}}


def policy_loss(function: Bound, columns: Mapping[str, Tensor], supplied: Values | None = None) -> PolicyLoss:
    """Calls a policy or value loss; its further results become diagnostics (per token) or metrics (scalars).
    Raises: RegistryError if a column is missing, or the result is neither per token nor a scalar."""
    entry, shape = function.entry, columns["response_mask"].shape
    result = function(columns, supplied)
    loss, reported = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, Tensor) or loss.shape not in (shape, ()) or not isinstance(reported, Mapping):
        expected = f"a loss of shape {list(shape)} (per token) or a scalar (aggregated), alone or with a metrics dict"
        raise _unusable(entry, result, expected)
    diagnostics = {
        name: value.detach() for name, value in reported.items() if isinstance(value, Tensor) and value.shape == shape
    }
    others = {name: value for name, value in reported.items() if name not in diagnostics}
    metrics = _scalars(entry, others) if others else {}
    per_token, aggregated = (loss, None) if loss.shape == shape else (None, loss)
    return PolicyLoss(per_token, aggregated, diagnostics, metrics)


def whole_trajectories(columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Joins the rows of each trajectory to one; differentiable.  Raises: DataError if its rows disagree."""
    layout = _trajectory_layout(columns)
    return columns if layout is None else {name: layout.join(name, column) for name, column in columns.items()}


def _trajectory_layout(columns: Mapping[str, Tensor]) -> TrajectoryLayout | None:
    """Returns the layout of the trajectories; None if each row is a whole trajectory."""
    uid = columns.get("trajectory_uid")
    if uid is None or len(torch.unique(uid)) == len(uid):
        return None
    return TrajectoryLayout(uid, columns["response_mask"])


def _parts(entry: Entry, result: object) -> tuple[object, Tensor | None, Mapping[str, object]]:
    """Splits a result, the advantages alone or a tuple, into advantages, returns and metrics.  Returns all three."""
    advantages, *rest = result if isinstance(result, tuple) else (result,)
    match rest:
        case []:
            return advantages, None, {}
        case [Tensor() as returns]:
            return advantages, returns, {}
        case [Mapping() as metrics]:
            return advantages, None, metrics
        case [Tensor() as returns, Mapping() as metrics]:
            return advantages, returns, metrics
    raise _unusable(entry, result, "advantages, (advantages, returns) or (advantages, dict of metrics)")


def _column(
    entry: Entry, name: str, value: object, shape: torch.Size, layout: TrajectoryLayout | None, mask: Tensor
) -> Tensor:
    """Converts a result to [B, R], finite and 0 outside the mask. The result must have `shape`, or one number a row."""
    if not isinstance(value, Tensor) or value.shape not in (shape, shape[:1]):
        expected = f"a tensor of shape {list(shape)}, or {list(shape[:1])} for one number a row"
        raise _unusable(entry, value, expected, name)
    value = value.detach() if value.is_floating_point() else value.detach().float()
    value = value if layout is None else layout.cut(value)
    if value.ndim == 1 and bool(value.isfinite().all()):
        return spread(value, mask)
    column: Tensor = zero_outside(value[:, None].expand(mask.shape) if value.ndim == 1 else value, mask)
    if not bool(column.sum().isfinite()):  # a finite sum means that all numbers are finite
        _check_finite(entry, name, column)
    return column


def _check_finite(entry: Entry, name: str, column: Tensor) -> None:
    """Checks that all numbers of a column are finite; an infinite sum of them is accepted.  Raises: RegistryError."""
    if len(bad := (~column.isfinite()).nonzero()):
        row, position = bad[0].tolist()
        raise RegistryError(
            f"{_named(entry)}: {name}",
            f"not finite at {len(bad)} sampled tokens, the first in row {row}, position {position}",
            "finite numbers",
            f"look for nan or inf in the columns that it reads: {', '.join(entry.columns)}",
        )


def _scalars(entry: Entry, metrics: Mapping[str, object]) -> dict[str, Tensor]:
    scalars = {}
    for name, value in metrics.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise _unusable(entry, value, "one number", name)
        scalars[name] = value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value))
    return scalars


def _named(entry: Entry) -> str:
    return f"{entry.kind} {entry.name!r}"


def _unusable(entry: Entry, result: object, expected: str, part: str = "result") -> RegistryError:
    return RegistryError(f"{_named(entry)}: {part}", _describe(result), expected, "correct the function")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return f"a {type(value).__name__}"


class TrajectoryLayout:
    """Concatenates the sampled tokens of rows with the same `trajectory_uid`, in row order, and splits results again.

    T trajectories become columns [T, L] without gaps, L the largest number of sampled tokens. The k-th sampled token of
    the batch moves from (row[k], position[k]) to (trajectory[k], place[k]).
    """

    def __init__(self, trajectory_uid: Tensor, response_mask: Tensor) -> None:
        sampled = response_mask != 0
        names, self.trajectory_of_row = torch.unique(trajectory_uid, return_inverse=True)  # [T], [B]
        rows = torch.arange(len(trajectory_uid), device=trajectory_uid.device)
        self.first_row = torch.full_like(names, len(rows)).scatter_reduce(0, self.trajectory_of_row, rows, "amin")
        before, lengths = _tokens_before(self.trajectory_of_row, sampled.sum(-1), len(names))
        self.shape = (len(names), max(1, int(lengths.max())))  # a batch of failures keeps one empty position
        self.row_shape = response_mask.shape
        self.row, self.position = sampled.nonzero(as_tuple=True)
        self.trajectory = self.trajectory_of_row[self.row]
        self.place = before[self.row] + sampled.cumsum(-1)[self.row, self.position] - 1

    def joined(self, estimator: Bound, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Joins the columns that an estimator reads, by trajectory.  Raises: RegistryError if it reads a `BATCH`."""
        entry = estimator.entry
        if asked := BATCH & {*entry.parameters, *entry.options}:
            found = f"takes {min(asked)!r}, and in this batch a trajectory has several rows"
            change = "name the columns that it reads as its parameters instead"
            raise RegistryError(_named(entry), found, "columns, of one row per trajectory", change)
        wanted = {*entry.columns, "response_mask", "token_level_rewards"}
        return {name: self.join(name, column) for name, column in columns.items() if name in wanted}

    def join(self, name: str, column: Tensor) -> Tensor:
        """Joins a column by trajectory: [B, R] -> [T, L]; one value per row [B] -> one value per trajectory [T].
        Raises: DataError if the rows of a trajectory have different values [B]."""
        if column.shape == self.row_shape and name not in ROW_COLUMNS:
            joined = column.new_zeros(self.shape)
            joined[self.trajectory, self.place] = column[self.row, self.position]
            return joined
        first = column[self.first_row]
        differs = (column != first[self.trajectory_of_row]).nonzero()
        if len(differs):
            row = int(differs[0, 0])
            other = int(self.first_row[self.trajectory_of_row[row]])
            found, change = f"differs in rows {other} and {row}", "give every row of a trajectory the same value"
            raise DataError(f"column {name!r}", found, "one value in the rows of one trajectory_uid", change)
        return first

    def cut(self, result: Tensor) -> Tensor:
        """Splits a result of trajectories into rows: [T, L] -> [B, R], 0 where no token was sampled; or [T] -> [B]."""
        if result.ndim == 1:
            return result[self.trajectory_of_row]
        rows = result.new_zeros(self.row_shape)
        rows[self.row, self.position] = result[self.trajectory, self.place]
        return rows


def _tokens_before(trajectory_of_row: Tensor, row_lengths: Tensor, num_trajectories: int) -> tuple[Tensor, Tensor]:
    """Returns the number of tokens in earlier rows of the same trajectory [B], and each trajectory's length [T]."""
    lengths = row_lengths.new_zeros(num_trajectories).index_add(0, trajectory_of_row, row_lengths)
    starts = lengths.cumsum(0) - lengths  # start of each trajectory, if all of them were concatenated
    order = trajectory_of_row.argsort(stable=True)
    ordered = row_lengths[order]
    before = torch.empty_like(row_lengths)
    before[order] = ordered.cumsum(0) - ordered - starts[trajectory_of_row[order]]
    return before, lengths
