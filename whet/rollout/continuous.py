# SPDX-License-Identifier: Apache-2.0
"""Rollouts that go on while models train: a thread samples ahead as far as `rollout.max_staleness` allows.

The loop is the same as with `Rollouts`: it asks for the groups of a step, and waits only until they are there.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from whet.errors import DataError, WorkerError
from whet.metrics import Metrics
from whet.phases import counted, watching
from whet.rollout.collect import Collector
from whet.rollout.conductor import Command, Conductor, Run, ScoreGroup
from whet.rollout.episode import Episode
from whet.rollout.groups import HandOut, Stream
from whet.rollout.protocol import late
from whet.rollout.stream import Rollouts, Sampled, Taken, count_failures, count_judges, with_outcomes
from whet.types import Outcomes, Prompt, Trajectory

log = logging.getLogger(__name__)
TURN_SECONDS = 0.05  # longest wait of the thread, after which it sees new calls
SWITCH_SECONDS = 1e-4  # after which the loop and the thread take turns: with Python's 5e-3 either's short calls wait
CLOSE_SECONDS = 10.0
HELP = {  # by the part that limits a run
    "sampling": "more rollout ranks, a higher rollout.max_batch_size, or rollout.max_staleness=1 where it is below",
    "environments": "a pool for environments (cluster.placement)",
    "rewards": "a higher reward.num_workers, or a faster reward function",
    "training": "more ranks of the actor, a higher actor.max_tokens_per_micro_batch, or fewer actor.epochs",
    "saving": "a higher trainer.save_freq, or a faster disk",
    "sync": "a higher data.train_batch_size, which brings new weights less often",
}
DOES = {"save": "saving", "time/sync": "sync"}  # by phase of the loop; in the others it trains
T = TypeVar("T")


class BackgroundCollector(Collector):
    """A collector whose episodes run in a thread of its own, also between two calls of `collect`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.idle_seconds = 0.0  # in which the engine had nothing to sample
        self.limit: Callable[[], str | None] = lambda: None  # part of the run that the others wait for now
        self.limit_seconds = defaultdict[str | None, float](float)  # by that part
        self.after_turn: Callable[[], None] = lambda: None
        self._calls = SimpleQueue[Callable[[], None]]()
        self._promises: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._go, name="rollouts", daemon=True)

    @property
    def has_started(self) -> bool:
        """Tells whether the thread runs, or has run."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Starts the thread."""
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()

    def promise(self) -> Future[Any]:
        """A future that the thread fulfils; it fails with the thread."""
        future = Future[Any]()
        self._promises.add(future)
        future.add_done_callback(self._promises.discard)
        if self._error is not None or self._is_closing:
            self._break(future)
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in the thread, between two turns.  Returns the future of its result."""
        future = self.promise()

        def called() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # it belongs to the caller
                future.set_exception(error)

        if not future.done():
            self._calls.put(called)
        return future

    def wait(
        self, future: Future[T], progress: Callable[[], tuple[int, int]], *, between: Callable[[], None] = lambda: None
    ) -> T:
        """The result of a future, at most `deadline_seconds` from now; `progress` gives what is there and all that is
        waited for, `between` is called now and then and may raise.

        Raises: DeadlineError; the error of the thread."""
        until, speed = time.monotonic() + self.deadline_seconds, self.driver.speed()
        while time.monotonic() < until:
            try:
                return future.result(timeout=TURN_SECONDS)
            except TimeoutError:
                if future.done():  # the error of the thread is one
                    raise
            between()
            counted(*progress(), speed())
        done, total = progress()
        raise late(self.engine, self.deadline_seconds, total - done, total)

    def close(self) -> None:
        """Ends the thread, and the environments' processes."""
        self._is_closing = True
        if self.has_started:
            sys.setswitchinterval(self._switch_seconds)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("the thread of the rollouts did not end within %g s", CLOSE_SECONDS)
        super().close()

    def _run(self, episodes: Sequence[Episode], note: Callable[[Trajectory], None], done: Sized) -> None:
        """Runs episodes beside the others; the thread notes their ends."""
        total, whole = len(episodes), self.promise()

        def noted(trajectory: Trajectory) -> None:
            note(trajectory)
            if len(done) == total:
                whole.set_result(None)

        if episodes:
            self.wait(self.call(lambda: self.driver.add(episodes, noted)), lambda: (0, total))
            self.wait(whole, lambda: (len(done), total))

    def _go(self) -> None:
        """The thread: calls and turns of the driver, until the collector is closed."""
        try:
            while not self._is_closing:
                self._timed(self._serve)
                self._timed(lambda: self.driver.turn(TURN_SECONDS))
                self.after_turn()
        except BaseException as error:
            self._error = error
        finally:
            for future in list(self._promises):
                self._break(future)

    def _timed(self, function: Callable[[], None]) -> None:
        """Calls a function, and counts its seconds for what limited the run when it began."""
        began, was_sampling, limit = time.monotonic(), self.driver.is_sampling, self.limit()
        function()
        seconds = time.monotonic() - began
        self.idle_seconds += 0.0 if was_sampling else seconds
        self.limit_seconds[limit] += seconds

    def _serve(self) -> None:
        """Carries out the calls that have come; waits for one where there is nothing else to do."""
        with suppress(Empty):
            self._calls.get(timeout=TURN_SECONDS if self.driver.is_idle else 0.0)()
            while True:
                self._calls.get_nowait()()

    def _break(self, future: Future[Any]) -> None:
        if not future.done():
            future.set_exception(self._error or WorkerError("the rollouts are closed; build the run again"))


class ContinuousRollouts(Rollouts):
    """Groups that were sampled ahead, with up to `max_staleness` versions between sampling and training.

    Produces: `start(n)`, the next n groups in the order of their admission.
    Consumes: as `Rollouts`, with a background collector.  Waits: within `rollout.deadline_seconds`.
    Its checkpoint has every group that was admitted and not trained on, with its tokens and versions.
    """

    collector: BackgroundCollector

    def __init__(self, *args: Any, batch_size: int, max_staleness: float, last_step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.prompts is not None
        self.source = self.prompts
        observe = self.source.observe
        self.stream = Stream(self.n, batch_size, max_staleness, self.group_filter, observe, last_step=last_step)
        self.conductor = Conductor(self.stream, self.source, self._episodes)
        self.collector.after_turn, self.collector.limit = self._take_scores, self._limit
        self._restored: Sequence[Mapping[str, Any]] = ()
        self._scoring: list[tuple[list[Trajectory], Outcomes]] = []
        self._handed_out: Future[HandOut] | None = None  # what the loop waits for
        self._noted = Future[None]()  # the last version
        self._idle_seconds = 0.0  # of the engine, up to the last hand-out
        self._does, self._watched = "training", ExitStack()  # the loop's part now

    def start(self, n: int, *, step: int) -> Sampled[Taken]:
        """Waits for the groups of a step."""
        if n != self.stream.batch_size:
            raise DataError(
                f"step {step} asks for {n} groups, and {self.stream.batch_size} a step are sampled ahead; ask for "
                "data.train_batch_size groups"
            )
        metrics, handed_out = Metrics(), self.collector.promise()
        with metrics.time("time/rollout"):
            self._finish(lambda: self._ask(step, handed_out))
            self._noted.result()  # done, or failed, before the question
            found: HandOut = self.collector.wait(
                handed_out, lambda: (min(self.stream.ready, n), n), between=self.may_stop
            )
        self._measure(found, metrics)
        taken = self._taken(found, metrics)
        return Sampled(taken.groups, lambda: taken)

    def on_weights(self, version: int) -> None:
        """Lets sampling go as far ahead as these weights allow."""
        if not self.collector.has_started:
            self._watched.enter_context(watching(self._watch))
            self.collector.start()
            self._finish(lambda: self._begin(version))
        # Training need not wait for the thread: what it is called for next comes behind this.
        self._noted = self.collector.call(lambda: self._carry_out(self.conductor.on_version(version)))

    def state(self) -> Mapping[str, Any]:
        """Returns the place of the next prompt, and under `stream` every group that is not trained on."""
        if not self.collector.has_started:
            return {**self.source.state(), "stream": list(self._restored)}
        return self._finish(self._snapshot)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from there, before the first weights come."""
        self.source.load_state(state)
        self._restored = state.get("stream", ())

    def close(self) -> None:
        """Ends the thread, and the processes of environments and rewards; says which part the others waited for."""
        self._watched.close()
        super().close()
        seconds = {part: self.collector.limit_seconds[part] for part in HELP}
        slowest = max(seconds, key=lambda part: seconds[part])
        if seconds[slowest] > 0:
            shown = ", ".join(f"{part} {seconds[part]:.1f} s" for part in HELP)
            log.info("%s limited the run (others waited for %s); what would help: %s", slowest, shown, HELP[slowest])

    @contextmanager
    def _watch(self, phase: str) -> Iterator[None]:
        """Notes a phase of the loop."""
        before, self._does = self._does, DOES.get(phase, self._does)
        try:
            yield
        finally:
            self._does = before

    def _limit(self) -> str | None:
        """The part of the run that the others wait for: what the loop lacks, or the loop where nothing is sampled."""
        driver, is_asked = self.collector.driver, self._handed_out is not None and not self._handed_out.done()
        if not is_asked:
            return None if driver.is_sampling or self._handed_out is None else self._does
        if driver.is_sampling:
            return "sampling"
        return "rewards" if driver.is_idle else "environments"

    def _finish(self, function: Callable[[], T]) -> T:
        """Calls a function in the thread, and waits for its result."""
        return self.collector.wait(self.collector.call(function), lambda: (0, 1))

    def _ask(self, step: int, handed_out: Future[HandOut]) -> None:
        self._handed_out = handed_out
        self._carry_out(self.conductor.ask(step))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Run):
                self.collector.driver.add(command.episodes, self._on_sampled)
            elif isinstance(command, ScoreGroup):
                self._scoring.append((command.trajectories, self.submit(command.trajectories)))
            else:
                assert self._handed_out is not None
                self._handed_out.set_result(command)

    def _episodes(self, prompts: Sequence[Prompt], step: int) -> list[Episode]:
        return self.collector.episodes(prompts, self.n, self.params_at(step), step=step)

    def _on_sampled(self, trajectory: Trajectory) -> None:
        self._carry_out(self.conductor.on_sampled(trajectory))

    def _take_scores(self) -> None:
        """Hands the groups whose scores have come to the stream."""
        for entry in [entry for entry in self._scoring if entry[1].done()]:
            self._scoring.remove(entry)
            trajectories, outcomes = entry
            self._carry_out(self.conductor.on_scored(with_outcomes(trajectories, outcomes.result())))

    def _measure(self, found: HandOut, metrics: Metrics) -> None:
        """Measures how old the tokens are, how full the queue is, and which side waited."""
        sampled = [each for group in (*found.kept, *found.dropped) for each in group.trajectories]
        count_failures(sampled, metrics)
        count_judges(sampled, metrics, self.spent)
        lags = Counter[int]()  # tokens by the number of versions that they are behind
        for version, count in _versions(each for group in found.kept for each in group.trajectories):
            lags[found.step - 1 - version] += count
        if lags:
            total = lags.total()
            metrics.mean("staleness/mean", sum(lag * count for lag, count in lags.items()) / total, total)
            metrics.max("staleness/max", max(lags))
            metrics.mean("staleness/stale_fraction", 1 - lags[0] / total, total)
        metrics.mean("rollout/outstanding_groups", self.stream.outstanding)
        metrics.mean("rollout/ready_groups", self.stream.ready)
        unused = [each for group in found.dropped for each in group.trajectories]
        unused += [each for group in found.kept for each in group.trajectories if each.failure is not None]
        metrics.sum("rollout/unused_tokens", sum(count for _, count in _versions(unused)))
        idle = self.collector.idle_seconds
        metrics.seconds("time/rollout_idle", idle - self._idle_seconds)
        self._idle_seconds = idle

    def _snapshot(self) -> dict[str, Any]:
        driver = self.collector.driver
        driver.note_partials()
        return {**self.source.state(), "stream": self.conductor.snapshot(driver.episodes)}

    def _begin(self, version: int) -> None:
        """Puts the groups of a checkpoint back."""
        commands = self.conductor.restore(version, self._restored)
        self._restored = ()
        self._carry_out(commands)


def _versions(trajectories: Iterable[Trajectory]) -> Iterable[tuple[int, int]]:
    """The runs of (version, number of tokens) of all turns."""
    return (run for trajectory in trajectories for turn in trajectory.turns for run in turn.versions)
