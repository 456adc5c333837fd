# SPDX-License-Identifier: Apache-2.0
"""Pools of reward processes: `with RewardPool("gsm8k", ...) as pool: outcomes = pool.score(items)`. Also weighted sums
of several score functions, a pool for each domain of the data, and the pools of a run."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whet.config.schema import DomainConfig, EvalConfig, ModelConfig, RewardConfig, TrainConfig
from whet.domains import OTHERS, Domains
from whet.errors import ConfigError, DataError, WhetError, describe
from whet.options import as_list
from whet.processes.background import Background
from whet.processes.user_code import pickle_code
from whet.registry import REWARDS, Entry
from whet.rewards.adapter import RewardFunction, split_calls
from whet.rewards.processes import ProcessScorer
from whet.rewards.result import NOT_SCORED, closed_error, failure
from whet.rewards.worker import ScorerSpec
from whet.types import Failure, Outcome, Outcomes, Prompt, RewardItem, RewardResult, Scorer

if TYPE_CHECKING:
    from whet.data.load import Loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Domain:
    """The reward pool of a domain, and the weight by which its rewards are multiplied."""

    pool: Scorer
    weight: float


@dataclass(frozen=True)
class Combined:
    """Pending outcomes of several pools; when all are ready, `combine` makes one outcome for each item."""

    pending: Sequence[Outcomes]  # one for each pool
    combine: Callable[[Sequence[list[Outcome]]], list[Outcome]]

    def result(self) -> list[Outcome]:
        return self.combine([each.result() for each in self.pending])

    def done(self) -> bool:
        return all(each.done() for each in self.pending)


class DomainRewards:
    """Scores each item with the function of its domain.

    The parts of a result are named `<domain>/<part>`, with `<domain>/reward` and `<domain>/accuracy` beside them.
    """

    def __init__(self, of: Callable[[RewardItem], str], domains: Mapping[str, Domain]) -> None:
        self._of, self._domains = of, domains
        self.scores_alone = all(domain.pool.scores_alone for domain in domains.values())

    def submit_batch(self, items: Sequence[RewardItem]) -> Combined:
        """Sends each item to the pool of its domain.  Raises: DataError for an item without a domain."""
        own = [(self._of(item), item) for item in items]
        names = dict.fromkeys(name for name, _ in own)

        def combine(found: Sequence[list[Outcome]]) -> list[Outcome]:
            outcomes = {name: iter(each) for name, each in zip(names, found, strict=True)}
            return [self._weigh(name, next(outcomes[name])) for name, _ in own]

        asked = {name: [item for of, item in own if of == name] for name in names}
        return Combined([self._domains[name].pool.submit_batch(each) for name, each in asked.items()], combine)

    def close(self) -> None:
        for domain in self._domains.values():
            domain.pool.close()

    def _weigh(self, name: str, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Failure):
            return replace(outcome, message=f"{name}: {outcome.message}")
        weight = self._domains[name].weight
        parts = {f"{name}/{part}": value for part, value in outcome.parts.items()}
        parts |= {f"{name}/reward": outcome.reward, f"{name}/accuracy": outcome.accuracy}
        tokens = outcome.token_rewards and tuple(weight * each for each in outcome.token_rewards)
        return replace(outcome, reward=weight * outcome.reward, parts=parts, token_rewards=tokens)


class RewardPool:
    """Scores items with one function: a name, `package.module:function`, `path/file.py:function`, or the function.

    The processes import the function and are ready when the constructor returns; make the pool before a model is
    loaded. They are forks of a small process that has loaded neither the user's code nor torch. A replacement process
    runs the same source files, as they were when the pool was created.

    Each item has `timeout_seconds` of wall-clock time: allow for a busy machine. A process that is late, dies or
    corrupts its connection is killed with its descendants, and replaced. Its item becomes a Failure with source
    "reward", as after an exception; other items are not affected. An async function of one response scores
    `concurrency` items at a time in each process. A process is killed if it and its descendants use more than
    `memory_limit_mb`. A function that takes all items at once scores the items of a `score` call in one process, within
    `timeout_seconds` times their number; if it fails, all fail. Calls of all processes begin at least
    `seconds_between_calls` apart. `manager` and `tokenizer` are fields of ScorerSpec. Output that a function prints
    goes to stderr. Processes that the function started end with their reward process; all end with this process, even
    after kill -9.

    `num_workers=0` scores in the calling thread, without a deadline. A function that cannot be pickled (it holds a
    lock, a client, a model) scores in one thread of this process, with a warning: there a late call becomes a Failure
    at its deadline but cannot be stopped.

    Raises: RegistryError for an unknown name, RewardError if the function cannot be loaded, with the traceback."""

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        correct_threshold: float,
        kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        memory_limit_mb: float | None = None,
        seconds_between_calls: float = 0.0,
        manager: str | None = None,
        tokenizer: tuple[str, bool] | None = None,
    ) -> None:
        named, options = _named(function, kwargs or {})
        spec = ScorerSpec(named, options, correct_threshold, timeout_seconds, concurrency, manager, tokenizer)
        shown_as = function if isinstance(function, str) else f"{function!r}"
        self._scorer = _make_scorer(spec, shown_as, num_workers, memory_limit_mb, seconds_between_calls)
        self.scores_alone = self._scorer.scores_alone  # one item a call, not in the calling thread
        self._finalizer = weakref.finalize(self, self._scorer.close)  # closes at the latest when the interpreter ends

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Returns an outcome for each item, in order.  Raises: RewardError if the pool is closed, or failed itself."""
        return self.submit_batch(items).result()

    def submit_batch(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        return self._scorer.submit(items)

    def close(self) -> None:
        """Ends the processes. Pending results raise RewardError."""
        self._finalizer()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WeightedRewards:
    """Weighted sum of several score functions: reward = sum_i weight_i * reward_i.

    Accuracy and extracted answer come from the first function; parts are named `<function>/<part>`. An item fails if
    any function fails on it, or none scores it (TRL's functions return None for such an item). The functions score at
    the same time, each in its own processes."""

    def __init__(self, pools: Sequence[tuple[str, RewardPool, float]]) -> None:
        self._pools = pools
        self.scores_alone = all(pool.scores_alone for _, pool, _ in pools)

    def submit_batch(self, items: Sequence[RewardItem]) -> Combined:
        pending = [pool.submit_batch(items) for _, pool, _ in self._pools]
        return Combined(pending, lambda found: [self._combine(outcomes) for outcomes in zip(*found, strict=True)])

    def close(self) -> None:
        for _, pool, _ in self._pools:
            pool.close()

    def _combine(self, outcomes: Sequence[Outcome]) -> Outcome:
        reward, parts, logged, results = 0.0, dict[str, float](), dict[str, Any](), list[RewardResult]()
        for (name, _, weight), outcome in zip(self._pools, outcomes, strict=True):
            if outcome == NOT_SCORED:
                continue
            if isinstance(outcome, Failure):
                return replace(outcome, message=f"{name}: {outcome.message}")
            results.append(outcome)
            reward += weight * outcome.reward
            parts[name] = outcome.reward
            parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
            logged |= {f"{name}/{key}": value for key, value in outcome.logged.items()}
        if not results:
            return NOT_SCORED
        return RewardResult(reward, results[0].accuracy, parts, extracted=results[0].extracted, logged=logged)


def _make_scorer(
    spec: ScorerSpec, shown_as: str, num_workers: int, memory_limit_mb: float | None, seconds_between_calls: float
) -> InlineScorer | ThreadScorer | ProcessScorer:
    key = "reward.limits" if seconds_between_calls else "reward.memory_limit_mb"
    needs_processes = seconds_between_calls or memory_limit_mb is not None
    found = f"set, but {shown_as} scores in the trainer's process, where calls are not limited"
    change = "set reward.num_workers=1, and name the function as package.module:function"
    refused = ConfigError(key, found, "reward processes", change)
    if num_workers == 0:
        if needs_processes:
            raise refused
        return InlineScorer(spec.load)
    try:
        pickled = pickle_code(spec, spec.function)
    except Exception as error:  # pickling an object that the function holds may raise anything
        if needs_processes:
            raise refused from error
        logger.warning(
            "the reward function %s does not pickle (%s), so it is called in a thread of this process, where a "
            "late call cannot be stopped. Name it as package.module:function to run it in processes",
            shown_as,
            describe(error),
        )
        return ThreadScorer(spec.load, spec.timeout_seconds)
    return ProcessScorer(
        pickled,
        shown_as=shown_as,
        num_workers=num_workers,
        timeout_seconds=spec.timeout_seconds,
        memory_limit_mb=memory_limit_mb,
        seconds_between_calls=seconds_between_calls,
    )


def _named(
    function: str | Callable[..., Any], kwargs: Mapping[str, Any]
) -> tuple[str | Callable[..., Any], dict[str, Any]]:
    """Returns a function, by name if other processes can import it, and its options with the options of an alias."""
    if isinstance(function, str) and ":" not in function:
        entry = REWARDS[function]
        if entry.alias_of is not None:
            defaults = REWARDS[entry.alias_of].options
            kwargs = {name: value for name, value in entry.options.items() if value != defaults.get(name)} | {**kwargs}
        function = entry.function or function
    return function, dict(kwargs)


class InlineScorer:
    """Scores in the calling thread, without a deadline. `submit` returns when the scores are ready."""

    scores_alone = False

    def __init__(self, load: Callable[[], RewardFunction]) -> None:
        self._function = load()

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """Returns a finished future with the outcome of each item, in order."""
        future: Future[list[Outcome]] = Future()
        future.set_result(self._function.score(items))
        return future

    def close(self) -> None:
        """Does nothing, as there are no processes."""


class ThreadScorer:
    """Scores in one thread. A late call becomes a Failure at its deadline. The thread of a late call cannot be stopped,
    so a new thread replaces it: a function that always hangs fills the process with threads. A function that holds the
    interpreter lock blocks all threads."""

    def __init__(self, load: Callable[[], RewardFunction], timeout_seconds: float) -> None:
        self._load, self._timeout_seconds = load, timeout_seconds
        self._function, self._thread = load(), Background("whet-reward-function")
        self._requests = Background("whet-rewards")
        self._lock = threading.Lock()
        self._closed = False
        self.scores_alone = not self._function.takes_batch

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """Returns a future with the outcome of each item, in order.  Raises: RewardError once closed."""
        with self._lock:
            if self._closed:
                raise closed_error()
            return self._requests.submit(partial(self._score, items))

    def close(self) -> None:
        """Lets the running call finish. Waiting calls raise RewardError."""
        with self._lock:
            self._closed = True
            self._requests.submit(lambda: self._thread.close())
            self._requests.close()

    def _score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        calls = split_calls(items, takes_batch=self._function.takes_batch)
        return [outcome for call in calls for outcome in self._score_call(call)]

    def _score_call(self, items: Sequence[RewardItem]) -> list[Outcome]:
        if self._closed:
            raise closed_error()
        deadline = self._timeout_seconds * len(items)
        future = self._thread.submit(partial(self._function.score, items))
        if wait([future], deadline).done:
            return future.result()
        self._thread.close()
        self._function, self._thread = self._load(), Background("whet-reward-function")
        late = failure(f"timed out after {deadline:g} s (its thread cannot be stopped)", timed_out=True)
        return [late] * len(items)


def scorer_of(config: TrainConfig | EvalConfig, function: Callable[..., Any] | None = None) -> Scorer | None:
    """Returns the reward pool of a run; None if the run has no reward function, because an environment or a reward
    model gives the rewards."""
    return build_scorer(config.reward, function, config.model) if is_scored(config, function) else None


def val_scorer_of(config: TrainConfig) -> Scorer | None:
    """Returns the pool of `reward.val_function`; None if it is not set."""
    for name, options in config.reward.val_function.items():  # at most one function
        changes = {"function": name, "kwargs": options, "domains": {}, "manager": None}
        return build_scorer(config.reward.model_copy(update=changes), model=config.model)
    return None


def checked(
    loaded: Loaded[Prompt], config: RewardConfig, function: Callable[..., Any] | None = None
) -> tuple[Prompt, ...]:
    """Returns the loaded prompts with their domains. Unless `function` scores them, the registered reward functions of
    `config` check their ground truths; functions from files do not, because only reward processes load them.

    Raises: DataError naming file and row."""
    prompts = Domains.of_config(config, has_function=function is not None).assign(loaded.items)
    entries: dict[str, list[Entry]] = {}
    for prompt in prompts if function is None else ():
        if (domain := prompt.domain) not in entries:
            own = config.domains.get(domain)
            named = own.function if own is not None else config.function or []
            entries[domain] = [REWARDS[name] for name in as_list(named) if name and ":" not in name]
        for entry in entries[domain]:
            try:
                entry.check_row(prompt.ground_truth, prompt.extra_info, prompt.data_source)
            except (ValueError, WhetError, ImportError) as error:
                first, place = 0, iter(loaded.parts)
                while (part := next(place)).num_rows <= prompt.index - first:
                    first += part.num_rows
                where = f"{part.name}, row {prompt.index - first}: reward {entry.name}"
                if isinstance(error, WhetError):
                    raise DataError.joined([error]).at(where) from error
                raise DataError(where, describe(error), "a row that it can read") from error
    return prompts


def is_scored(config: TrainConfig | EvalConfig, function: Callable[..., Any] | None = None) -> bool:
    """Tells whether a reward function scores the responses of a run."""
    if function is not None or config.reward.names_function:
        return True
    has_model = isinstance(config, TrainConfig) and config.reward_model.source is not None
    return not has_model and config.environment.name == "single_turn"


def build_scorer(
    config: RewardConfig, function: Callable[..., Any] | None = None, model: ModelConfig | None = None
) -> Scorer:
    """Builds the pool of one score function, or the pools of several functions, weighted or by domain. A manager class
    (as in verl) gets the tokenizer of `model`.  Raises: RewardError, RegistryError."""
    names = as_list(config.function or [])
    if function is None and not names and not config.domains:
        known = ", ".join(REWARDS.names())
        raise ConfigError("reward.function", None, f"one of {known}, or file.py:function", "set it")
    functions: list[str | Callable[..., Any]] = [function] if function is not None else [*names]
    pools = [_pool(config, each, model) for each in functions]
    found: Scorer | None = pools[0] if len(pools) == 1 else None
    if len(pools) > 1:
        weights = config.weights or [1.0] * len(pools)
        short = [name.rpartition(":")[2] for name in names]
        labels = short if len(set(short)) == len(short) else names
        found = WeightedRewards(list(zip(labels, pools, weights, strict=True)))
    if config.domains:
        domains = {name: _domain(config, each, model) for name, each in config.domains.items()}
        if found is not None:
            domains[OTHERS] = Domain(found, 1.0)
        return DomainRewards(Domains.of_config(config, has_function=found is not None).of, domains)
    assert found is not None
    return found


def _pool(config: RewardConfig, function: str | Callable[..., Any], model: ModelConfig | None) -> RewardPool:
    path = None if model is None else model.tokenizer_path or model.path
    return RewardPool(
        function,
        num_workers=config.num_workers,
        timeout_seconds=config.timeout_seconds,
        correct_threshold=config.correct_threshold,
        kwargs=config.kwargs,
        concurrency=config.concurrency,
        memory_limit_mb=config.memory_limit_mb,
        seconds_between_calls=config.seconds_between_calls,
        manager=config.manager,
        tokenizer=None if model is None or path is None else (path, model.trust_remote_code),
    )


def _domain(config: RewardConfig, domain: DomainConfig, model: ModelConfig | None) -> Domain:
    own = {
        "kwargs": domain.kwargs,
        "num_workers": config.num_workers if domain.num_workers is None else domain.num_workers,
        "timeout_seconds": domain.timeout_seconds or config.timeout_seconds,
    }
    return Domain(_pool(config.model_copy(update=own), domain.function, model), domain.weight)
