# SPDX-License-Identifier: Apache-2.0
"""Loads the prompts or examples of the `data` section: reads each entry, filters its rows, applies the entry's keys."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from whet.config.schema import DataConfig, ExamplesDataConfig
from whet.config.sources import Source, files_of, read_sources, read_weights
from whet.data.prompts import PromptFormat, build_prompts, fit_prompts
from whet.data.sources import DataRow, read_hub, read_rows
from whet.errors import ConfigError, DataError, did_you_mean
from whet.options import is_number
from whet.phases import phase
from whet.registry import entry_of, load_target
from whet.types import Example, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
TRAIN, VAL = "data.train_files", "data.val_files"
MAX_ITEMS = 20_000_000  # an iterable with more rows is taken for an endless one
T = TypeVar("T")


@dataclass(frozen=True)
class EntryCounts:
    """Counts of an entry: all rows, rows after the filter, items made from them; and its sampling weight."""

    name: str
    num_rows: int
    num_matching: int
    num_items: int
    weight: float | None = None


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The items (prompts or examples) of all entries, in order, and the counts of each entry."""

    items: tuple[T, ...]
    parts: tuple[EntryCounts, ...]


@dataclass(frozen=True)
class _Read:
    """The rows of one entry after the filter, with row numbers; or the prompts that a function returned."""

    rows: list[DataRow]
    numbers: list[int]
    num_rows: int  # before the filter
    prompts: tuple[Prompt, ...] = ()


@phase("reading data")
def load_items(
    data: DataConfig | ExamplesDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str = TRAIN,
    *,
    rows: Iterable[Any] | None = None,
    argument: str = "data",
    where: Mapping[str, Any] | None = None,
    seed: int = 0,
    with_answers: bool = True,
    media_folder: Path | None = None,
) -> Loaded[Any]:
    """Loads the prompts of a data section, or the examples that its `builder` makes, from `data.train_files` or
    `data.val_files`, or from `rows` instead. `where` is the filter. `with_answers=False` reads no ground truths.
    `media_folder` stores images and videos that are not files.

    Raises: DataError naming the entry, or the `argument` with the rows, and the row; ConfigError."""
    named = data.train_files if key == TRAIN else data.val_files
    sources = [None] if rows is not None else read_sources(key, named, data)
    weights = read_weights(list(filter(None, sources)), data.weights) if key == TRAIN and rows is None else None
    supplied = {"split": "train" if key == TRAIN else "val", "tokenizer": tokenizer, "seed": seed}
    items, parts, first = list[Any](), list[EntryCounts](), 0
    for number, source in enumerate(sources):
        name, conditions, own = "data", {**(where or {})}, data
        if source is not None:
            name, conditions = source.name, {**conditions, **source.where}
            own = data.model_copy(update=dict(source.fields))
        with _named(source, argument):
            given = listed(rows) if source is None else _open(source, data, supplied)
            read = _filtered(name, given, conditions, are_rows=source is not None and source.kind != "function")
            folder = str(Path(source.path).parent) if source is not None and source.kind == "file" else None
            prompt_format = PromptFormat.of(tokenizer, own, beside=folder, media_folder=media_folder)
            if isinstance(own, DataConfig):
                built: Sequence[Any] = _prompts(own, prompt_format, read, first, key == TRAIN, with_answers)
            else:
                built = _examples(own, prompt_format, read)
        items += built
        weight = None if weights is None else weights[number]
        parts.append(EntryCounts(name, read.num_rows, len(read.rows) or len(read.prompts), len(built), weight))
        first += read.num_rows
    return Loaded(tuple(items), tuple(parts))


def numbered_rows(data: DataConfig, key: str) -> Iterator[tuple[int, DataRow]]:
    """Yields (number, row) for the rows of all entries of `key`. The number is the `index` of the row's prompt.

    Raises: DataError for an entry that is a function; the errors of `load_items`."""
    first = 0
    for source in read_sources(key, getattr(data, key.removeprefix("data.")), data):
        if source.kind == "function":
            raise DataError(
                source.name, "a function", "files and data sets, which have rows", "write its rows into a file"
            )
        rows = _open(source, data, {"split": "train" if key == TRAIN else "val"})
        yield from enumerate(rows, start=first)
        first += len(rows)


def _prompts(
    data: DataConfig, prompt_format: PromptFormat, read: _Read, first: int, is_train: bool, with_answers: bool
) -> Sequence[Prompt]:
    """Makes the prompts of one entry from the rows in `read`. `first` is the number of the entry's first row."""
    if read.prompts:
        prompts = fit_prompts(read.prompts, prompt_format, data)
    else:
        prompts = build_prompts(read.rows, prompt_format, data, numbers=read.numbers, with_answers=with_answers)
    if is_train and data.difficulty_key is not None:
        prompts = within_window(prompts, data.difficulty_key, *data.difficulty_window)
    return [replace(p, index=first + p.index, uid=f"0:{first + p.index}") for p in prompts] if first else prompts


def _examples(data: ExamplesDataConfig, prompt_format: PromptFormat, read: _Read) -> Sequence[Example]:
    if read.prompts:
        raise DataError("item type", "Prompt", "mappings: examples and pairs are made from rows", "return rows")
    examples: Sequence[Example] = load_target(data.builder)(read.rows, prompt_format, data, numbers=read.numbers)
    return examples


def _filtered(name: str, given: list[Any], conditions: Mapping[str, Any], *, are_rows: bool) -> _Read:
    """Returns the given rows, or prompts, that meet the conditions.  Raises: DataError, ConfigError."""
    if not given:
        raise DataError("number of rows", 0, "at least one")
    if not any(isinstance(item, Prompt) for item in given):
        rows = given if are_rows else read_rows(given)
        numbers = matching(rows, conditions)
        if conditions:
            log.info("%s: data.filter leaves %d of %d rows", name, len(numbers), len(rows))
        return _Read([rows[number] for number in numbers], numbers, len(rows))
    for number, item in enumerate(given):
        if not isinstance(item, Prompt):
            found = f"is a {type(item).__name__} among prompts"
            raise DataError(f"item {number}", found, "", "return only prompts or only rows")
    if conditions:
        found = f"it reads only rows ({', '.join(conditions)}), and the items are prompts"
        raise DataError("data.filter", found, "", "return rows, or remove the conditions")
    return _Read([], [], len(given), tuple(replace(prompt, index=i, uid=f"0:{i}") for i, prompt in enumerate(given)))


def _open(source: Source, data: DataConfig | ExamplesDataConfig, supplied: Mapping[str, Any]) -> list[Any]:
    if source.kind == "file":
        files = files_of(source.path)
        return [*read_rows(files if "*" in source.path else source.path)]
    if source.kind == "function":
        return listed(_call(source, supplied))
    default = "train" if supplied["split"] == "train" else None
    seconds = data.hub_deadline_seconds
    return [*read_hub(source.path, source.config, source.split, default_split=default, deadline_seconds=seconds)]


def _call(source: Source, supplied: Mapping[str, Any]) -> Any:
    """Calls a user's function or class. Parameters named in `supplied` get these values; all others are options."""
    function = load_target(source.path, is_called=False)
    if not callable(function):
        return function
    entry = entry_of(function, "data set", source.path, {})
    names = set(inspect.signature(function).parameters) & supplied.keys()
    options = {**entry.options, **source.options}
    if unknown := [name for name in entry.parameters if name not in names and name not in source.options]:
        expected, option = ", ".join(supplied), f"{{path: {source.path}, options: {{{unknown[0]}: ...}}}}"
        raise DataError(f"parameter {unknown[0]!r}", None, f"one of {expected}, or an option", f"set it: {option}")
    if not entry.accepts_any_option:
        for name in source.options:
            if name not in entry.options and name not in entry.parameters:
                known = ", ".join([*entry.parameters, *entry.options]) or "none"
                raise DataError(f"option {name!r}", "is not one of its options", known, "correct or remove it")
    with users_code("", "rows or prompts"):
        return function(**{**options, **{name: supplied[name] for name in names if name not in source.options}})


def listed(items: Any) -> list[Any]:
    """Lists the items of an iterable, or of a data set with `__len__` and `__getitem__`.  Raises: DataError."""
    with users_code("", "rows or prompts"):
        if not hasattr(items, "__iter__") and hasattr(items, "__len__") and hasattr(items, "__getitem__"):
            return [items[index] for index in range(len(items))]
        if isinstance(items, str | bytes | Mapping) or not hasattr(items, "__iter__"):
            change = "name a file in data.train_files or data.val_files" if isinstance(items, str) else ""
            raise DataError("type", type(items).__name__, "a sequence or an iterable of rows or prompts", change)
        items = list(islice(items, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise DataError("number of rows", f"more than {MAX_ITEMS:,}", "a data set that ends")
    return items


@contextmanager
def users_code(key: str, expected: str = "", change: str = "") -> Iterator[None]:
    """Converts an error of a user's code to a DataError. A DataError stays unchanged."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # other people's code
        raise DataError(key, f"raised {type(error).__name__}: {error}", expected, change) from error


@contextmanager
def _named(source: Source | None, argument: str) -> Iterator[None]:
    """Adds to a DataError the name of the entry, or of the argument that has the rows."""
    try:
        yield
    except DataError as error:
        if source is not None and error.key.startswith(source.path):
            raise
        raise error.at(argument if source is None else source.name) from error


# -- the filter: `data.filter` has a value, a list of values, `{min: , max: }` or `{not: }` for a field, and
# -- `data.difficulty_window` excludes prompts that are too easy or too hard

Test = Callable[[Any, int], bool]  # of a field's value and the row number
BOUNDS = ("min", "max")


def matching(rows: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of the rows that meet all conditions. A field may be nested: `extra_info.level`.

    A missing field is null: it equals only null, and lies within no bounds. Raises: ConfigError for an invalid
    condition; DataError for a field that no row has, and if no row is left."""
    left = list(range(len(rows)))
    for field, condition in where.items():
        test = _test(field, condition)
        if rows and not any(field in _names(row) for row in rows):
            names = sorted({name for row in rows for name in _names(row)})
            hint = did_you_mean(field, names, f"name one of {', '.join(names)}", quoted=False, most=3)
            raise DataError(f"data.filter.{field}", "no row has this field", "", hint)
        met = [number for number in left if test(_value(rows[number], field), number)]
        if left and not met:
            found = Counter(repr(_value(rows[number], field)) for number in left).most_common(5)
            shown = f"within {dict(condition)}" if isinstance(condition, Mapping) else f"= {condition!r}"
            problem = f"none of {len(left)} rows has {field} {shown}"
            values = ", ".join(value for value, _ in found)
            raise DataError(f"data.filter.{field}", problem, f"a value that some rows have, most often {values}")
        left = met
    return left


def _test(field: str, condition: object) -> Test:
    match condition:
        case {"not": unwanted, **more} if not more:
            denied = _test(field, unwanted)
            return lambda value, number: not denied(value, number)
        case Mapping() if condition and {*condition} <= {*BOUNDS} and all(map(is_number, condition.values())):
            low, high = condition.get("min", float("-inf")), condition.get("max", float("inf"))
            return lambda value, number: value is not None and low <= _number(field, value, number) <= high
        case Mapping():
            expected = "a value, a list of values, {min: number, max: number} (either may be left out) or {not: ...}"
            raise ConfigError(f"data.filter.{field}", dict(condition), expected)
        case [*conditions]:
            tests = [_test(field, each) for each in conditions]
            return lambda value, number: any(test(value, number) for test in tests)
    return lambda value, number: bool(value == condition and isinstance(value, bool) == isinstance(condition, bool))


def _value(row: Mapping[str, Any], field: str) -> Any:
    outer, dot, inner = field.partition(".")
    if field in row or not dot:
        return row.get(field)
    return _value(row[outer], inner) if isinstance(row.get(outer), Mapping) else None


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of a row's fields and of nested fields: `extra_info`, `extra_info.level`."""
    for outer, value in row.items():
        yield outer
        yield from (f"{outer}.{inner}" for inner in _names(value if isinstance(value, Mapping) else {}))


def _number(field: str, value: object, number: int) -> float:
    if not is_number(value):
        expected = f"a number, as data.filter.{field} has bounds"
        raise DataError(f"row {number}: field {field!r}", f"is {value!r}", expected)
    return float(value)


def within_window(prompts: Sequence[Prompt], key: str, low: float, high: float) -> tuple[Prompt, ...]:
    """Keeps prompts with low < `extra_info[key]` < high. The value may be the accuracy from an earlier `whet eval`.

    He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312.  Raises: DataError for a row without such a number,
    and if no prompt is left."""
    kept = tuple(prompt for prompt in prompts if low < difficulty(prompt, key, "data.difficulty_key") < high)
    if not kept:
        problem = f"none of {len(prompts)} prompts has {low} < {key} < {high}"
        raise DataError("data.difficulty_window", problem, "", "widen it, or unset data.difficulty_key")
    if len(kept) < len(prompts):
        log.info("%d of %d prompts are outside %g < %s < %g", len(prompts) - len(kept), len(prompts), low, key, high)
    return kept


def difficulty(prompt: Prompt, key: str, option: str) -> float:
    """Reads `extra_info[key]`. `option` is the config key that set `key`.  Raises: DataError if it is no number."""
    value = prompt.extra_info.get(key)
    if not is_number(value):
        found = f"is {value!r}; the row has {', '.join(prompt.extra_info) or 'no further fields'}"
        raise DataError(f"row {prompt.index}: {option}={key}", found, "a number")
    return float(value)
