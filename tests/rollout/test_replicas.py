# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rollout as one engine: the pure choice of ranks, and real engines behind it."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
import rollout_conformance as suite

from tests.raising import raises
from whet.controller.dispatch import CallPlan, Dispatch, register
from whet.controller.launch import launch
from whet.controller.worker import Placement, ResourcePool, Worker, WorkerSpec
from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import EngineError, LostReplicaError, WhetError
from whet.models.load import load_policy
from whet.roles.rollout_worker import RolloutWorker
from whet.rollout.fleet import Done, Fleet, FleetTask, assign, blocks_of
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Event, Finished, Request, RolloutEngine, SamplingParams, Status, generate, late
from whet.rollout.replicas import RankDriver as Driver, Replicas


def requests_of(*prompts: tuple[int, int, int]) -> list[Request]:
    """For each (tokens, samples, limit) as many equal requests; uids count from 0."""
    made = [
        ((number,) * tokens, SamplingParams(limit))
        for number, (tokens, samples, limit) in enumerate(prompts)
        for _ in range(samples)
    ]
    return [Request(str(uid), prompt, params, key=0) for uid, (prompt, params) in enumerate(made)]


def uids(requests: Sequence[Request]) -> list[int]:
    return [int(request.uid) for request in requests]


def test_blocks_keep_prompts_whole_unless_too_few_would_be_left() -> None:
    # 24 rows over 2 ranks: blocks of at most 24 // 8 = 3, the longest possible first, else as they came.
    made = requests_of((4, 3, 10), (5, 3, 10), (4, 3, 10), (2, 3, 50), (4, 12, 10))
    assert [uids(block) for block in blocks_of(made, 2)] == [
        *([9, 10, 11], [3, 4, 5]),
        *([0, 1, 2], [6, 7, 8]),
        *([12, 13, 14], [15, 16, 17], [18, 19, 20], [21, 22, 23]),
    ]
    assert blocks_of([], 2) == []
    assert [uids(block) for block in blocks_of(requests_of((1, 2, 1)), 4)] == [[0], [1]]


def test_all_start_at_once_where_they_fit() -> None:
    made = requests_of(*[(3, 8, 10)] * 5)  # 40 rows in blocks of 40 // 8 = 5 and the 3 that are left of 8
    given = assign(made, {0: 0, 1: 0}, 99)
    # 5 | 5, then 3 | 3 (prompts 0 and 1), ...: the rank with fewer is next, until each has its half
    assert {rank: len(requests) for rank, requests in given.items()} == {0: 21, 1: 19}
    assert sorted(uids(given[0]) + uids(given[1])) == list(range(40))
    assert assign([], {0: 0, 1: 0}, 99) == {}


def test_a_rank_takes_no_more_than_it_has_room_for() -> None:
    made = requests_of(*[(3, 4, 10)] * 20)  # 80 rows in 20 blocks of 4; a rank has room for 12
    given = assign(made, {0: 0, 1: 0}, 12)
    assert uids(given[0]) == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19] and len(given[1]) == 12
    assert {rank: len(requests) for rank, requests in assign(made, {0: 12, 1: 3}, 12).items()} == {1: 9}
    same = requests_of((3, 80, 10))  # many groups with one prompt, as of a game, are blocks of an eighth
    assert {rank: len(requests) for rank, requests in assign(same, {0: 0, 1: 5}, 6).items()} == {0: 6, 1: 1}
    assert assign(made, {0: 12, 1: 12}, 12) == {}


def test_one_rank_takes_everything_in_order() -> None:
    made = requests_of((1, 3, 10), (1, 2, 90))
    assert uids(assign(made, {0: 7}, 2)[0]) == [0, 1, 2, 3, 4]


class Sampler(Worker):
    """Serves requests with an engine of its own."""

    def __init__(self, placement: Placement, model: PreTrainedModel) -> None:
        super().__init__(placement)
        self.engine = NativeEngine()
        self.engine.attach(model, 0)

    @register(Dispatch.ONE_TO_ALL)
    def serve(
        self, requests: Sequence[Request], aborted: Sequence[str], timeout_seconds: float, gathers: bool
    ) -> list[Event]:
        for request in requests:
            self.engine.submit(request)
        self.engine.abort(aborted)
        return self.engine.poll(timeout_seconds)

    @register(Dispatch.ONE_TO_ALL)
    def status(self) -> Status:
        return self.engine.status()


@pytest.fixture(scope="module")
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder).eval()


def group(model: PreTrainedModel) -> WorkerGroup:
    return launch([WorkerSpec("rollout", Sampler, (model,))], ResourcePool(1), 60.0)["rollout"]


def test_the_completions_are_those_of_the_engine(model: PreTrainedModel) -> None:
    made = suite.requests(groups=5, n=4)
    alone = NativeEngine()
    alone.attach(model, 0)
    replicas = Replicas(group(model), 256, gathers=False)
    assert generate(replicas, made) == generate(alone, made)
    assert generate(replicas, made[::-1]) == generate(alone, made[::-1])
    assert replicas.status().running == replicas.status().waiting == 0
    with raises(EngineError, key=re.compile("^weights ")):
        replicas.load([], 1)


def test_a_rollout_without_a_rank_names_its_deadline(model: PreTrainedModel) -> None:
    replicas = Replicas(group(model), 256, gathers=False)
    replicas.submit(suite.requests(groups=1, n=1)[0])
    replicas._lose(0)  # its engine starts again
    assert (replicas.status().running, replicas.status().waiting) == (0, 1)
    assert "waited 2 s for 1 of 4 responses (0 running, 1 waiting" in str(late(replicas, 2.0, 1, 4))


def test_requests_end_wherever_they_are(model: PreTrainedModel) -> None:
    replicas = Replicas(group(model), 256, gathers=False)
    first, second, third = suite.requests(groups=3, n=1, stop_token_ids=(), max_new_tokens=20)
    replicas.submit(first)
    replicas.poll(0.0)
    replicas.submit(second)
    replicas.abort([second.uid])  # no rank has it yet
    [event] = replicas.poll(0.0)
    assert isinstance(event, Finished) and event.uid == second.uid and event.completion.token_ids == ()
    replicas.submit(third)
    replicas.poll(0.0)
    replicas.abort([first.uid])
    events: list[Event] = []
    while len(events) < 2:
        events += replicas.poll(1.0)
    reasons = {event.uid: event.completion.finish_reason for event in events if isinstance(event, Finished)}
    assert reasons == {first.uid: "abort", third.uid: "length"}


class Fragile(NativeEngine):
    """Is lost at some polls, counted over its life."""

    def __init__(self, model: PreTrainedModel, losses: Sequence[int]) -> None:
        super().__init__()
        self.attach(model, 0)
        self.losses, self.polls, self.is_lost, self.restarts = losses, 0, False, 0

    def poll(self, timeout_seconds: float) -> list[Event]:
        self.polls += 1
        self.is_lost |= self.polls in self.losses
        if self.is_lost:
            raise LostReplicaError("it is gone")
        return super().poll(min(timeout_seconds, 0.005))

    def check(self, request: Request) -> None: ...

    def restart(self) -> None:
        self.abort(list(self.unfinished))
        super().poll(0.0)

    def rejoin(self) -> None:
        self.is_lost, self.restarts = False, self.restarts + 1


class Host(RolloutWorker):
    """A rank with an engine that is given."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self._queue, self._turn = engine, deque(), threading.Lock()
        self._is_half_filled = False


class Ranks:
    """A worker group whose ranks are in this process; a restart takes some polls of the others."""

    def __init__(self, *hosts: Host, restart_takes: int) -> None:
        self.hosts, self.restart_takes = hosts, restart_takes
        self.world_size, self.reporting = len(hosts), [*range(len(hosts))]
        self.calls: list[tuple[int, str]] = []

    def start_on(self, rank: int, method: str, *arguments: Any) -> Ranks.Call:
        self.calls.append((rank, method))
        call = Ranks.Call(method, self.restart_takes if method == "restart" else 0)
        call.replies[rank].set_result(getattr(self.hosts[rank], method)(*arguments))
        return call

    class Call:
        deadline_seconds = 60.0

        def __init__(self, method: str, takes: int) -> None:
            self.replies: dict[int, Future[Any]] = defaultdict(Future)
            self.method, self.takes = method, takes

        def done(self) -> bool:
            self.takes -= 1
            return self.takes < 0

        def expire(self) -> None:
            """Is never late."""

        def result(self) -> Any:
            [reply] = self.replies.values()
            return reply.result()


@pytest.mark.parametrize("losses", [([2], []), ([3, 5], [4]), ([2], [2])])
def test_the_requests_of_a_lost_engine_go_on_elsewhere(
    model: PreTrainedModel, losses: tuple[list[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """Two engines, of which one or both are lost in the middle: the same tokens, each response once."""
    made = suite.requests(groups=6, n=4)
    alone = NativeEngine()
    alone.attach(model, 0)
    engines = [Fragile(model, each) for each in losses]
    ranks = Ranks(*(Host(engine) for engine in engines), restart_takes=4)
    replicas = Replicas(ranks, 256, gathers=False)
    assert generate(replicas, made) == generate(alone, made)
    while len(replicas.fleet.ranks) < 2:
        replicas.poll(0.0)
    assert generate(replicas, made) == generate(alone, made)  # by all of them again
    assert [engine.restarts for engine in engines] == [len(each) for each in losses]
    lost = ranks.calls.index((0, "restart"))
    if not losses[1]:
        assert (1, "serve") in ranks.calls[lost : lost + 3]  # while the other starts
    assert re.search(r"rank 0\b.* again: it is gone", caplog.text)


def test_an_engine_that_starts_delays_no_checkpoint(model: PreTrainedModel) -> None:
    """A pause, the tokens so far and the state are asked of the other rank alone."""
    ranks = Ranks(Host(Fragile(model, [1])), Host(Fragile(model, [])), restart_takes=99)
    replicas = Replicas(ranks, 256, gathers=False)
    for each in suite.requests(groups=4, n=2, stop_token_ids=(), max_new_tokens=40):
        replicas.submit(each)
    while (0, "restart") not in ranks.calls:
        replicas.poll(0.0)
    ranks.calls.clear()
    replicas.pause()
    assert replicas.poll(0.0)
    replicas.resume()
    assert replicas.status().running > 0
    assert {rank for rank, _ in ranks.calls} == {1}
    assert [method for _, method in ranks.calls if method != "serve"] == ["pause", "resume", "status"]


def test_a_single_lost_engine_is_waited_for(model: PreTrainedModel) -> None:
    made = suite.requests(groups=2, n=2)
    engine = Fragile(model, [2])
    replicas = Replicas(Ranks(Host(engine), restart_takes=3), 256, gathers=False)
    assert len(generate(replicas, made)) == 4 and engine.restarts == 1


class Hanging:
    """A group of two ranks and its transport; the first rank never answers."""

    role, world_size = "reward", 2

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.open: list[Future[Any]] = []

    def start_on(self, rank: int, method: str, tasks: Sequence[FleetTask], *rest: object) -> PendingCall:
        reply: Future[Any] = Future()
        if rank == 1:
            reply.set_result([Done(each.uid, "scored", each.attempt) for each in tasks])
        else:
            self.open.append(reply)
        plan = CallPlan({}, lambda results: results[rank])
        return PendingCall(self.role, method, {rank: reply}, plan, self, 0.05)  # type: ignore[arg-type]

    def give_up(self, role: str, ranks: Sequence[int], error: WhetError) -> None:
        for reply in self.open:
            reply.set_exception(error)


def test_a_rank_that_hangs_is_given_up_and_another_does_its_tasks() -> None:
    ranks = Driver(Hanging(), Fleet(), concurrent=True)  # type: ignore[arg-type]
    ranks.join(range(2))
    for uid in "abcd":
        ranks.submit(FleetTask(uid, [uid]))
    told, until = list[Done](), time.monotonic() + 20
    while len(told) < 4 and time.monotonic() < until:
        told += ranks.turn(0.01)
    assert sorted(each.uid for each in told) == [*"abcd"] and {each.what for each in told} == {"scored"}
    assert [*ranks.fleet.ranks] == [1] and ranks.num_lost == 1 and not ranks.fleet.flights
