# SPDX-License-Identifier: Apache-2.0
"""Score functions in processes of their own: `with RewardPool("gsm8k", ...) as pool: outcomes = pool.score(items)`;
and several of them as one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from whet.errors import describe
from whet.processes.user_code import pickle_code
from whet.registry import REWARDS
from whet.rewards.in_process import InlineScorer, ThreadScorer
from whet.rewards.processes import ProcessScorer
from whet.rewards.worker import WorkerSpec
from whet.types import Failure, Outcome, RewardItem, RewardResult

logger = logging.getLogger(__name__)


class RewardPool:
    """Scores answers with one function: a name, `package.module:function`, `path/file.py:function`, or the function.

    The processes import the function and are ready when the constructor returns; make the pool before a model is
    loaded. They are forks of a small process that has loaded none of the user's code, and no torch. A process that
    replaces another runs the same source files, as they were when the pool was made.

    An answer has `timeout_seconds`, by the wall's clock: leave room for a busy machine. A process that is late is
    killed with all that it started, and replaced, as is one that dies, or that writes into its own connection. Its
    answer is a Failure with source "reward", as for an exception, and no other answer is touched. A function that takes
    all answers at once judges one `score` call in one process, with `timeout_seconds` times their number, and fails as
    a whole. What a function prints goes to stderr. What it started ends with its process, and all of them with this
    process, however that ends.

    `num_workers=0` scores in the calling thread, without any deadline. A function that cannot be pickled (it holds a
    lock, a client, a model) scores in one thread of this process, where a late call is a Failure in time but cannot be
    stopped; a warning says so.

    Raises: RegistryError for an unknown name, RewardError where the function cannot be loaded, with the traceback.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        correct_threshold: float,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._scorer = _make_scorer(_make_spec(function, kwargs or {}, correct_threshold), num_workers, timeout_seconds)
        self._finalizer = weakref.finalize(self, self._scorer.close)  # at the latest when the interpreter ends

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Returns an outcome for each item, in order.  Raises: RewardError when the pool is closed or cannot go on."""
        return self.submit_batch(items).result()

    def submit_batch(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """The result of `score`, to come."""
        return self._scorer.submit(items)

    def close(self) -> None:
        """Ends the processes. What is still awaited raises RewardError."""
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Combined:
    """Judgements of several functions, to come."""

    pending: Sequence[Future[list[Outcome]]]  # by function
    combine: Callable[[Sequence[Outcome]], Outcome]

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order; waits for the functions."""
        by_function = [future.result() for future in self.pending]
        return [self.combine(outcomes) for outcomes in zip(*by_function, strict=True)]


class WeightedRewards:
    """reward = sum of weight * reward; accuracy and answer are those of the first function; parts are named
    `<function>/<part>`.

    An answer that one function failed on has failed. The functions judge at the same time, each in its own processes.
    """

    def __init__(self, pools: Sequence[tuple[str, RewardPool, float]]) -> None:
        self._pools = pools

    def submit_batch(self, items: Sequence[RewardItem]) -> Combined:
        """Returns the outcomes to come, in order."""
        return Combined([pool.submit_batch(items) for _, pool, _ in self._pools], self._combine)

    def close(self) -> None:
        """Ends all processes."""
        for _, pool, _ in self._pools:
            pool.close()

    def _combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        reward, parts, results = 0.0, dict[str, float](), list[RewardResult]()
        for (name, _, weight), outcome in zip(self._pools, outcomes, strict=True):
            if isinstance(outcome, Failure):
                return replace(outcome, message=f"{name}: {outcome.message}")
            results.append(outcome)
            reward += weight * outcome.reward
            parts[name] = outcome.reward
            parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
        return RewardResult(reward, results[0].accuracy, parts, extracted=results[0].extracted)


def _make_scorer(
    spec: WorkerSpec, num_workers: int, timeout_seconds: float
) -> InlineScorer | ThreadScorer | ProcessScorer:
    if num_workers == 0:
        return InlineScorer(spec.load)
    shown_as = spec.function if isinstance(spec.function, str) else f"{spec.function!r}"
    try:
        pickled = pickle_code(spec, spec.function)
    except Exception as error:  # whatever an object that the function holds raises when it is pickled
        logger.warning(
            "the reward function %s cannot be sent to a process (%s); it is called in a thread of this one, where a "
            "late call cannot be stopped. Name it as package.module:function to have it in processes",
            shown_as,
            describe(error),
        )
        return ThreadScorer(spec.load, timeout_seconds)
    return ProcessScorer(pickled, shown_as=shown_as, num_workers=num_workers, timeout_seconds=timeout_seconds)


def _make_spec(function: str | Callable[..., Any], kwargs: Mapping[str, Any], correct_threshold: float) -> WorkerSpec:
    """Names the function where a process finds it under that name, else holds it. An alias brings its options."""
    if isinstance(function, str) and ":" not in function:
        entry = REWARDS[function]
        if entry.alias_of is not None:
            defaults = REWARDS[entry.alias_of].options
            presets = {name: value for name, value in entry.options.items() if value != defaults.get(name)}
            kwargs = {**presets, **kwargs}
        function = entry.function or function
    return WorkerSpec(function, dict(kwargs), correct_threshold)
