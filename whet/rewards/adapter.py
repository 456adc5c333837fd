# SPDX-License-Identifier: Apache-2.0
"""The forms of a score function, recognised by signature, behind one method: `score(items)`.

The annotation of the first parameter decides first (DataProto, list of dicts, dict), then the names of the parameters.
A signature of no known form is an error that lists the forms; an option that the function does not take is an error.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import RewardError, SandboxError, describe, last_line
from whet.registry import PARTS
from whet.rewards.result import NOT_SCORED, as_number, failure, finite, read_result, split_rows
from whet.types import Failure, Outcome, RewardItem

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

FORMS = Path(__file__).with_name("forms.txt").read_text(encoding="utf-8")  # for errors
ONE_OF_THESE = f"one of these forms:\n{FORMS}"


class RewardFunction:
    """A score function of any form, with one interface: `score`. `adapt` makes it."""

    def __init__(
        self,
        function: Callable[..., Any],
        form: _Form,
        kwargs: Mapping[str, Any],
        correct_threshold: float,
        runner: asyncio.Runner | None = None,
    ) -> None:
        self._function, self._form, self._kwargs = function, form, dict(kwargs)
        self._correct_threshold, self._runner = correct_threshold, runner
        self._logged: set[tuple[str, int]] = set()

    @property
    def takes_batch(self) -> bool:
        """Tells whether one call of the function scores all items. If it fails, all items fail."""
        return self._form.takes_batch

    @property
    def is_concurrent(self) -> bool:
        """Tells whether this is an async function of one response: several `score_one` calls may then run at a time."""
        call = self._function if inspect.isroutine(self._function) else type(self._function).__call__
        return not self.takes_batch and any(map(inspect.iscoroutinefunction, (self._function, call)))

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Returns an outcome for each item, in order. Calls are awaited one after the other. An exception of the
        function becomes a Failure; its traceback is logged once per raising line."""
        score = self._score_logged if self._form.logs else self._score
        calls = split_calls(items, takes_batch=self.takes_batch)
        return [outcome for call in calls for outcome in score(call)]

    def _score_logged(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Calls a function that takes TRL's logging functions.  Returns outcomes with the logged values."""
        logged, numbers = [dict[str, Any]() for _ in items], defaultdict[str, list[float]](list)
        logs = {
            "log_extra": partial(_log_extra, logged),
            "log_metric": lambda name, value: numbers[name].append(finite(f"log_metric({name!r})", value)),
        }
        outcomes = self._score(items, {name: logs[name] for name in self._form.logs})
        means = {name: sum(values) / len(values) for name, values in numbers.items() if values}
        both = [(each, {**means, **new}) for each, new in zip(outcomes, logged, strict=True)]
        return [each if isinstance(each, Failure) or not new else replace(each, logged=new) for each, new in both]

    def _score(self, items: Sequence[RewardItem], logs: Mapping[str, Any] | None = None) -> list[Outcome]:
        try:
            raw = self._function(**{**self._form.arguments(items), **(logs or {}), **self._kwargs})
            if inspect.isawaitable(raw):
                raw = self.run(raw)
            rows = self._form.split_rows(raw, len(items)) if self.takes_batch else [raw]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # user code may raise anything, also SystemExit
            return [self._failure(error)] * len(items)
        return [self._read(row, item) for row, item in zip(rows, items, strict=True)]

    async def score_one(self, item: RewardItem) -> Outcome:
        """Scores one item with an `is_concurrent` function.  Raises: CancelledError."""
        import asyncio

        try:
            raw = await self._function(**self._form.arguments([item]), **self._kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # as in _score; signals of the run do not reach this process
            return self._failure(error)
        return self._read(raw, item)

    def _read(self, row: object, item: RewardItem) -> Outcome:
        num_response_tokens = len(item.response_ids)
        if row is NOT_SCORED:
            return NOT_SCORED
        return read_result(row, correct_threshold=self._correct_threshold, num_response_tokens=num_response_tokens)

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, RewardError):
            return replace(failure(str(error)), parts=dict(error.parts))
        if isinstance(error, SandboxError):
            return Failure("sandbox", str(error))
        line = last_line(error)
        if line not in self._logged:
            self._logged.add(line)
            logger.warning("the reward function raised (shown once for each line that raises)", exc_info=error)
        return failure(describe(error))

    def run(self, awaitable: Any) -> Any:
        """Runs `awaitable` and returns its result. The event loop lives until `close`: an HTTP client may need it."""
        import asyncio

        async def wait() -> Any:
            return await awaitable

        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(wait())

    def close(self) -> None:
        """Closes the event loop, if there is one."""
        if self._runner is not None:
            self._runner.close()


def adapt(
    function: Callable[..., Any],
    *,
    kwargs: Mapping[str, Any],
    correct_threshold: float,
    manager: str | None = None,
    runner: asyncio.Runner | None = None,
) -> RewardFunction:
    """Returns a RewardFunction that calls `function`, of any form, with `kwargs` on every call. With `manager='batch'`
    the function must take all responses at once; with any other manager, one response. `runner` is the event loop of an
    async method that takes a batch of one row, as in verl's newer managers.

    Raises: RewardError for a signature of no known form, a parameter without a value, an option not in the signature.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"{function!r}", "no signature", ONE_OF_THESE) from error
    annotation = _EASYR1.get(getattr(function, "__globals__", {}).get("REWARD_TYPE"))
    form = _recognise(parameters, takes_batch=manager == "batch", options=kwargs, annotation=annotation)
    if form is None:
        raise RewardError(show(function), "parameters whose names and annotations have no known form", ONE_OF_THESE)
    if runner is not None:
        form = replace(form, takes_batch=False)
    if manager is not None and form.takes_batch != (manager == "batch"):
        found, wanted = ("all responses", "one response") if form.takes_batch else ("one response", "all responses")
        change = f"unset reward.manager, then the signature decides, or use {ONE_OF_THESE}"
        raise RewardError(show(function), f"takes {found}", f"{wanted} by reward.manager={manager}", change)
    check_options(function, parameters, {*form.values, *form.whole, *form.columns, *form.logs}, kwargs)
    return RewardFunction(function, form, kwargs, correct_threshold, runner)


def stand_ins() -> AbstractContextManager[None]:
    """Lets reward files in the block import modules of other systems (verl, ...), if a plugin has `foreign_imports`."""
    return PARTS["foreign_imports"].load()() if "foreign_imports" in PARTS else nullcontext()


def split_calls(items: Sequence[RewardItem], *, takes_batch: bool) -> list[Sequence[RewardItem]]:
    """Splits the items into calls of a function: one call with all items, or one call per item."""
    return [items] if takes_batch and items else [[item] for item in items]


@dataclass(frozen=True)
class _Form:
    """The form of a function: the parameters of a call, and the functions that compute their values from the items."""

    values: Mapping[str, Callable[[RewardItem], Any]]  # by parameter, from one item; with `takes_batch` as a list
    takes_batch: bool
    whole: Mapping[str, Callable[[Sequence[RewardItem]], Any]] = field(default_factory=dict)  # from all items together
    split_rows: Callable[[object, int], list[object]] = split_rows
    columns: Collection[str] = ()  # required parameters that are fields of the rows
    more_columns: Collection[str] | None = ()  # optional fields, passed if a row has them; None: all fields
    logs: Collection[str] = ()  # the names in _LOGS that the function has as parameters

    def arguments(self, items: Sequence[RewardItem]) -> dict[str, Any]:
        """Returns the keyword arguments of a call for these items. Unless `takes_batch`, there is one item."""
        found = dict.fromkeys(name for item in items for name in _row(item))
        more = found if self.more_columns is None else [name for name in self.more_columns if name in found]
        if missing := [name for name in self.columns if name not in found]:
            change = f"rename the parameter, or set reward.kwargs.{missing[0]}"
            raise RewardError("rows", f"no field {missing}, which the function reads", f"one of {[*found]}", change)
        columns = {name: [_row(item).get(name) for item in items] for name in [*self.columns, *more]}
        own = {name: [get(item) for item in items] for name, get in self.values.items()}
        own = own if self.takes_batch else {name: value for name, (value,) in own.items()}
        return {**columns, **own, **{name: get(items) for name, get in self.whole.items()}}


def _log_extra(logged: Sequence[dict[str, Any]], column: str, values: Any) -> None:
    """Adds a column to TRL's table of completions. `values` has a value for each completion."""
    for row, found in zip(logged, split_rows({column: values}, len(logged)), strict=True):
        value = found.get(column, values)  # the same value for all rows, if `values` is no list
        number = as_number(value)
        is_number = number is not None and isfinite(number)
        row[column] = number if is_number else value if isinstance(value, str | None) else str(value)


def _trajectory(item: RewardItem) -> dict[str, Any]:
    messages = [{"role": "assistant", "content": item.solution_str}]
    return dict(item.trajectory) or {"messages": messages, "turn_rewards": [0.0], "fields": {}, "limit": None}


def _conversation(item: RewardItem) -> list[Any]:
    """Returns the messages of the prompt, and the messages that follow it."""
    prompt = [message.to_dict() for message in item.messages] or [{"role": "user", "content": item.prompt_str}]
    return [*prompt, *_trajectory(item)["messages"]]


_FIELDS: dict[str, Callable[[RewardItem], Any]] = {
    **{name: attrgetter(name) for name in ("data_source", "solution_str", "ground_truth", "extra_info", "prompt_str")},
    **dict.fromkeys(("predict", "predict_str"), attrgetter("solution_str")),
    "trajectory": _trajectory,
    "conversation": _conversation,
}
_ANSWERS = ("ground_truth", "answer", "solution")  # TRL's names of the ground truth, unless the row has the field
_LOGS = ("log_extra", "log_metric")  # TRL's functions that report values beside the scores
_OF_TRAINER = {"trainer_state", "environments", *_LOGS}  # from TRL's trainer; whet passes none of the first two
_RESPONSE_FIELDS = {"solution_str", "predict", "predict_str", "trajectory", "conversation"}  # a function takes one
_COMMON_FIELDS = {"data_source", "solution_str", "ground_truth", "extra_info"}  # passed as **kwargs

# The forms whose first parameter has all values, by its usual name; they are recognised by its annotation. Annotations
# are read as text: they may name classes that are imported for type checkers only.
_DICT = r"([\w.]+\.)?(dict|Dict|Mapping|MutableMapping)\b"
_WHOLE = {
    "data": re.compile(r".*\bDataProto\b", re.DOTALL),
    "reward_inputs": re.compile(r"([\w.]+\.)?(list|List|Sequence|Iterable)\[" + _DICT),
    "reward_input": re.compile(_DICT),
}

# The annotation that corresponds to each REWARD_TYPE of an EasyR1 module.
_EASYR1: Mapping[Any, str] = {"batch": "list[dict]", "sequential": "dict"}


def _recognise(
    parameters: Sequence[inspect.Parameter], *, takes_batch: bool, options: Collection[str], annotation: str | None
) -> _Form | None:
    """Finds the form of a signature. If it fits one response and a batch, as with `**kwargs`, `takes_batch` decides.
    `annotation` replaces the annotation of the first parameter, unless that is DataProto."""
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    common = _COMMON_FIELDS if any(p.kind is p.VAR_KEYWORD for p in parameters) else set()
    names = {p.name for p in named}
    columns = {_plural(name): get for name, get in _FIELDS.items()}
    if names & {"completions", "completion_ids"}:
        return _recognise_trl(named, has_keywords=bool(common), options=options)
    if named and named[0].name not in _FIELDS and named[0].name not in columns:
        own = _annotation_text(named[0])
        chosen = own if _WHOLE["data"].match(own) else annotation or own  # EasyR1 has no DataProto
        whole = _recognise_whole(named[0].name, chosen, names)
        if whole is not None:
            return whole
    of_batch = {_plural(name) for name in _RESPONSE_FIELDS}
    if names & of_batch or (takes_batch and common and not names & _RESPONSE_FIELDS):
        passed = names & columns.keys() | {_plural(name) for name in common}
        return _Form({name: columns[name] for name in passed}, takes_batch=True)
    if names & _RESPONSE_FIELDS or common:
        passed = names & _FIELDS.keys() | common
        return _Form({name: _FIELDS[name] for name in passed}, takes_batch=False)
    return None


def _recognise_whole(name: str, annotation: str, names: Collection[str]) -> _Form | None:
    """Finds the form of a function whose first parameter has all values: a dict, a list of dicts, or a DataProto."""
    form = next((usual for usual, pattern in _WHOLE.items() if pattern.match(annotation)), name)
    if form == "data":
        make_batch, split_batch_rows = PARTS["data_proto"].load()()
        asks = {"return_dict": lambda items: True} if "return_dict" in names else {}  # of verl's managers
        return _Form({}, True, {name: make_batch, **asks}, split_batch_rows)
    return _Form({name: _as_dict}, form == "reward_inputs") if form in ("reward_input", "reward_inputs") else None


def _recognise_trl(named: Sequence[inspect.Parameter], *, has_keywords: bool, options: Collection[str]) -> _Form:
    """Finds TRL's form. Completions and prompts are lists of messages if annotated as dicts, texts if annotated as str;
    without annotation they have the form of the data's prompts. Parameters not in `options` are fields of the rows."""
    annotation = next((_annotation_text(p) for p in named if p.name == "completions"), "")
    as_chat = True if re.search("dict", annotation, re.IGNORECASE) else False if "str" in annotation else None

    def completion(item: RewardItem) -> Any:
        is_chat = bool(item.messages) if as_chat is None else as_chat
        found = _trajectory(item)
        messages = list(found["messages"])
        while found.get("limit", "") in (None, "environment") and messages and messages[-1]["role"] != "assistant":
            messages.pop()  # messages of the environment after the last turn
        return messages if is_chat else item.solution_str

    def prompt(item: RewardItem) -> Any:
        is_chat = bool(item.messages) if as_chat is None else as_chat
        return _conversation(item)[: max(1, len(item.messages))] if is_chat else item.prompt_str

    fields = {"completions": completion, "prompts": prompt, "completion_ids": lambda item: list(item.response_ids)}
    names = {p.name for p in named}
    others = [p for p in named if p.name not in {*fields, *options, *_OF_TRAINER}]
    required = [p.name for p in others if p.default is p.empty]
    optional = [p.name for p in others if p.default is not p.empty]
    values = {name: get for name, get in fields.items() if has_keywords or name in names}
    return _Form(values, True, {}, _split_scored, required, None if has_keywords else optional, names & {*_LOGS})


def _split_scored(raw: object, count: int) -> list[object]:
    """Splits like `split_rows`, and replaces None by NOT_SCORED: TRL's functions return None for rows they skip."""
    return [NOT_SCORED if row is None else row for row in split_rows(raw, count)]


def _row(item: RewardItem) -> dict[str, Any]:
    """Returns the fields of the row under their names in TRL, and the ground truth under each of its usual names."""
    answers = {} if item.ground_truth is None else dict.fromkeys(_ANSWERS, item.ground_truth)
    return {**answers, "data_source": item.data_source, **item.extra_info}


def _plural(name: str) -> str:
    """Turns the parameter name for one response into the name for all responses."""
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def _as_dict(item: RewardItem) -> dict[str, Any]:
    return {
        "response": item.solution_str,
        "response_length": len(item.response_ids),
        "ground_truth": item.ground_truth,
        "prompt": item.prompt_str,
        "data_source": item.data_source,
        "extra_info": item.extra_info,
        "trajectory": _trajectory(item),
    }


def check_options(
    function: Callable[..., Any],
    parameters: Sequence[inspect.Parameter],
    supplied: Collection[str],
    kwargs: Mapping[str, Any],
) -> None:
    """Checks that each of `kwargs` is an option, and that each parameter gets a value.  Raises: RewardError."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = {p.name: p for p in parameters if p.kind not in variadic}
    options = [name for name in own if name not in supplied]
    for name in kwargs:
        if name in supplied:
            found = f"the run itself passes it to {show(function)}"
            raise RewardError(f"reward.kwargs.{name}", found, change="remove it from reward.kwargs")
        if name not in own and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            found = f"{show(function)} has no such parameter"
            raise RewardError(f"reward.kwargs.{name}", found, f"one of the options {', '.join(options) or '(none)'}")
    for name in options:
        if own[name].default is inspect.Parameter.empty and name not in kwargs:
            change = f"give it a default, set reward.kwargs.{name}, or use the names of {ONE_OF_THESE}"
            raise RewardError(f"{show(function)}: {name}", None, "a value for each parameter", change)


def _annotation_text(parameter: inspect.Parameter) -> str:
    annotation = "" if parameter.annotation is parameter.empty else parameter.annotation
    return (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)).strip("'\" ")


def show(function: Callable[..., Any]) -> str:
    """Formats the name and the signature of a function, for errors."""
    return f"{getattr(function, '__qualname__', type(function).__qualname__)}{inspect.signature(function)}"
