# SPDX-License-Identifier: Apache-2.0
"""Rollouts in parallel with training: the groups handed out, their age, and their checkpoint."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from scripted import Scripted, text_prompt
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from tests.rollout.playing import Playing
from whet.algorithms.filters import dynamic_sampling
from whet.data.loader import PromptLoader, PromptSource
from whet.errors import DeadlineError, EngineError
from whet.phases import phase
from whet.rewards.pool import RewardPool
from whet.rollout.driver import SWITCH_SECONDS
from whet.rollout.flow import Admitted, Command, Filter, Flow, HandOut, RunEpisodes, keep_all
from whet.rollout.protocol import Completion, Event, Finished, Partial, Request
from whet.rollout.rollouts import Rollouts
from whet.types import Failure, Prompt, RewardResult, Trajectory

# ---- the machine


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0:{index}", index, (), (1, 2), "test", None) for index in range(count)]


def scored(prompt: Prompt, accuracy: float = 1.0) -> Trajectory:
    return Trajectory(f"{prompt.uid}:0", prompt, (), 0, reward=1.0, accuracy=accuracy)


class Numbered(PromptSource):
    """Prompts from a row on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.taken = first

    def draw(self, n: int) -> list[Prompt]:
        self.taken += n
        return [Prompt(f"0:{index}", index, (), (1, 2), "test", None) for index in range(self.taken - n, self.taken)]

    def position(self) -> dict[str, Any]:
        return {"taken": self.taken}


def no_episodes(prompts: Sequence[Prompt], step: int) -> list[Any]:
    return [(prompt, step) for prompt in prompts]


class Bench:
    """A flow of groups of one trajectory each, and the prompts that it started."""

    def __init__(self, k: float, batch_size: int = 4, first: int = 0, **options: Any) -> None:
        self.flow = Flow(1, batch_size, Numbered(first), no_episodes, k, **options)
        self.running = list[Prompt]()
        self.handed_out = list[HandOut]()
        self.aborted = list[str]()
        self.admitted = dict[str, tuple[int, int]]()  # version, and step of the draws, by prompt

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, HandOut):
                self.handed_out.append(command)
                self.aborted += command.aborted
            elif isinstance(command, RunEpisodes):
                for prompt, step in command.episodes:  # type: ignore[attr-defined]
                    self.running.append(prompt)
                    self.admitted[prompt.uid] = (self.flow.version, step)

    def score(self, prompt: Prompt, accuracy: float = 1.0) -> None:
        self.running.remove(prompt)
        self.carry_out(self.flow.on_scored([scored(prompt, accuracy)]))


@pytest.mark.parametrize(("k", "outstanding"), [(0.5, 6), (1, 8), (1.5, 10), (2, 12), (0.1, 4)])
def test_so_many_groups_are_outstanding_and_no_more(k: float, outstanding: int) -> None:
    bench = Bench(k)
    bench.carry_out(bench.flow.on_version(0))
    assert len(bench.running) == bench.flow.outstanding == outstanding
    assert [step for _, step in bench.admitted.values()] == [1 + place // 4 for place in range(outstanding)]
    for prompt in list(bench.running):
        bench.score(prompt)
    assert bench.flow.ready == outstanding and not bench.running
    bench.carry_out(bench.flow.ask(1))
    assert [group.prompt.index for group in bench.handed_out[0].kept] == [0, 1, 2, 3]
    assert not bench.running, "groups that are being trained on are outstanding"
    bench.carry_out(bench.flow.on_version(1))
    assert len(bench.running) == 4


def test_without_staleness_prompts_are_started_when_a_step_asks() -> None:
    bench = Bench(0)
    bench.carry_out(bench.flow.on_version(0))
    assert not bench.running
    bench.carry_out(bench.flow.ask(1))
    assert len(bench.running) == 4


def test_a_batch_is_the_first_to_end_of_more_groups_whatever_the_order_of_their_scores() -> None:
    """Six groups start for four; the last to end are aborted, and the next step takes other prompts."""
    bench = Bench(0, group_filter=Filter(keep_all, {}, extra=0.5))
    bench.carry_out(bench.flow.on_version(0))
    bench.carry_out(bench.flow.ask(1))
    begun = list(bench.running)
    assert [prompt.index for prompt in begun] == [0, 1, 2, 3, 4, 5]
    assert {step for _, step in bench.admitted.values()} == {1}
    for index in (5, 2, 0, 4, 3):
        bench.carry_out(bench.flow.on_sampled(scored(begun[index])))
    for index in (3, 4, 0, 2):
        bench.score(begun[index])
        assert not bench.handed_out
    bench.score(begun[5])
    [handed_out] = bench.handed_out
    assert [group.prompt.index for group in handed_out.kept] == [0, 2, 4, 5] and len(handed_out.aborted) == 2
    assert bench.aborted == ["0:1", "0:3"]
    bench.carry_out([*bench.flow.on_sampled(scored(begun[1])), *bench.flow.on_version(1), *bench.flow.ask(2)])
    assert [prompt.index for prompt in bench.running[1:]] == [6, 7, 8, 9, 10, 11]


def test_a_filter_takes_the_first_that_it_keeps_and_refills_behind_all() -> None:
    bench = Bench(0, batch_size=2, group_filter=Filter(lambda values: sum(values) > 0, {}, max_refills=1, extra=0.5))
    bench.carry_out(bench.flow.on_version(0))
    bench.carry_out(bench.flow.ask(1))
    for accuracy in (0.0, 1.0, 0.0):  # one of three is kept: one is missing, and two begin
        bench.carry_out(bench.flow.on_sampled(scored(bench.running[0])))
        bench.score(bench.running[0], accuracy)
    assert [prompt.index for prompt in bench.running] == [3, 4] and not bench.handed_out
    bench.carry_out(bench.flow.on_sampled(scored(bench.running[1])))
    bench.score(bench.running[1])
    [handed_out] = bench.handed_out
    assert [group.prompt.index for group in handed_out.kept] == [1, 4]
    assert [group.prompt.index for group in handed_out.dropped] == [0, 2] and bench.aborted == ["0:3"]


def test_a_slow_group_is_waited_for_and_keeps_its_place() -> None:
    bench = Bench(1)
    bench.carry_out(bench.flow.on_version(0))
    bench.carry_out(bench.flow.ask(1))
    slow, *others = list(bench.running)
    for prompt in others:
        bench.score(prompt)
    assert not bench.handed_out
    bench.score(slow)
    assert [group.prompt.index for group in bench.handed_out[0].kept] == [0, 1, 2, 3]


def test_nothing_is_started_for_steps_behind_the_last() -> None:
    bench = Bench(2, last_step=2)
    bench.carry_out(bench.flow.on_version(0))
    assert len(bench.running) == 8


def test_a_filter_that_drops_everything_ends_a_step_after_its_refills() -> None:
    bench = Bench(1, group_filter=Filter(lambda values: sum(values) > 0, {}, max_refills=2))
    bench.carry_out(bench.flow.on_version(0))
    bench.carry_out(bench.flow.ask(1))
    while bench.running:
        bench.score(bench.running[0], accuracy=0.0)
    [handed_out] = bench.handed_out
    assert not handed_out.kept and len(handed_out.dropped) == (1 + 2) * 4


@pytest.mark.parametrize("max_refills", [0, 1])
@pytest.mark.parametrize("k", [0, 0.5, 1, 2.25])
def test_a_step_takes_as_many_prompts_as_without_staleness_where_the_filter_drops_groups(
    k: float, max_refills: int
) -> None:
    """Every second group of four is dropped. Two of four are left where none is sampled in their place, and with
    twice as many prompts all four; no prompt is started for a step behind the last."""
    bench = Bench(k, group_filter=Filter(lambda values: sum(values) > 0, {}, max_refills=max_refills), last_step=3)
    bench.carry_out(bench.flow.on_version(0))
    for step in (1, 2, 3):
        bench.carry_out(bench.flow.ask(step))
        while bench.running:
            bench.score(bench.running[0], accuracy=float(bench.running[0].index % 2))
        handed_out = bench.handed_out[step - 1]
        taken = sorted(group.prompt.index for group in (*handed_out.kept, *handed_out.dropped))
        if k or not max_refills:
            # with refills the step ends with its fourth kept group, the seventh after it
            first, count = (4 * (step - 1), 4) if not max_refills else (8 * (step - 1), 8)
            assert taken == [*range(first, first + count)]
        assert len(handed_out.kept) == (2 if not max_refills else 4 if k else 3)
        bench.carry_out(bench.flow.on_version(step))
    assert bench.flow.source.taken == sum(len(each.kept) + len(each.dropped) for each in bench.handed_out)


@pytest.mark.parametrize("k", [0.5, 1, 1.5, 2.25, 4])
@pytest.mark.parametrize("has_filter", [False, True])
def test_no_group_is_older_than_allowed_whatever_the_order_of_events(k: float, has_filter: bool) -> None:
    """Of a batch at most the fraction of k is at the last version allowed, where nothing is dropped."""
    for seed in range(30):
        draw = random.Random(seed)
        group_filter = Filter(lambda values: sum(values) > 0, {}, max_refills=1) if has_filter else None
        bench = Bench(k, group_filter=group_filter)
        bench.carry_out(bench.flow.on_version(0))
        version, asked = 0, 0
        while version < 12:
            event = draw.choice(["score", "score", "score", "train"])
            if event == "score" and bench.running:
                bench.score(draw.choice(bench.running), float(draw.random() < 0.5))
            elif asked == version:
                asked = version + 1
                bench.carry_out(bench.flow.ask(asked))
            elif len(bench.handed_out) == asked:
                version = asked
                bench.carry_out(bench.flow.on_version(version))
            assert bench.flow.outstanding <= 4 + int(4 * k)
        trained = [group.prompt.index for each in bench.handed_out for group in each.kept]
        assert trained == sorted(trained)
        for each in bench.handed_out:
            lags = [each.step - 1 - bench.admitted[group.prompt.uid][0] for group in each.kept]
            assert max(lags, default=0) <= -(-k // 1), (seed, each.step, lags)
            if k % 1 and not has_filter:
                assert sum(lag > k for lag in lags) <= 4 * (k % 1)


def test_another_thread_may_ask_how_full_a_stream_is() -> None:
    of, done = Flow(2, 64, Numbered(), no_episodes, 4), threading.Event()

    def asks() -> Iterator[int]:
        while not done.is_set():
            yield of.ready + of.outstanding

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: max(asks()))
        until = time.monotonic() + 1.0
        for index in itertools.count():
            of.queue[f"0:{index}"] = Admitted(Prompt(f"0:{index}", index, (), (1, 2), "test", None), 1)
            if len(of.queue) > 300:
                of.queue.clear()
                if time.monotonic() > until:
                    break
        done.set()
        assert asked.result(10.0) >= 0


def test_a_stream_can_be_pickled() -> None:
    bench = Bench(1)
    bench.carry_out(bench.flow.on_version(0))
    bench.flow = pickle.loads(pickle.dumps(bench.flow))
    for prompt in list(bench.running):
        bench.score(prompt)
    assert bench.flow.ready == 8


def test_groups_of_a_checkpoint_come_first_and_in_their_order() -> None:
    bench = Bench(1, first=5)
    before = [Admitted(prompt, 3, {0: scored(prompt)}, True) for prompt in prompts(5)]
    before[1] = Admitted(before[1].prompt, 3)
    bench.flow.restart(2, before)
    bench.running.append(before[1].prompt)
    bench.carry_out(bench.flow.on_version(2))
    assert len(bench.running) == 1 + 3
    bench.carry_out(bench.flow.ask(3))
    assert not bench.handed_out
    bench.score(before[1].prompt)
    assert [group.prompt.index for group in bench.handed_out[0].kept] == [0, 1, 2, 3]


# ---- the thread


class Slow(Scripted):
    """Answers one request a poll, and has a token of every other request to show when it is paused."""

    version = 0

    def poll(self, timeout_seconds: float) -> list[Event]:
        time.sleep(0.001)
        noted, self._noted = getattr(self, "_noted", []), []
        events, self._events = self._events[:1], self._events[1:]
        return [*noted, *events]

    def pause(self) -> None:
        self._noted = [
            Partial(event.uid, event.attempt, 0, event.completion.token_ids[:1], (-0.5,), ((self.version, 1),))
            for event in self._events
            if isinstance(event, Finished)
        ]

    def abort(self, uids: Collection[str]) -> None:
        super().abort(uids)

    def say(self, answer: str, request: Request) -> Completion:
        whole = super().say(answer, request)
        rest = slice(len(request.sampled_ids), None)
        ids = whole.token_ids[rest]
        return Completion(ids, whole.log_probs[rest], whole.finish_reason, ((self.version, len(ids)),))


@contextmanager
def continuous(
    tokenizer: PreTrainedTokenizerBase,
    *answers: str,
    k: float = 1,
    n: int = 2,
    engine: Scripted | None = None,
    deadline_seconds: float = 30.0,
    state: dict[str, Any] | None = None,
    version: int = 0,
    scorer: Any = None,
    loader: Any = None,
    **options: Any,
) -> Iterator[Playing]:
    pool = scorer or RewardPool("exact_match", num_workers=0, timeout_seconds=5.0, correct_threshold=1.0)
    rows = [text_prompt(tokenizer, f"{index}+0=", index) for index in range(6)]
    loader = loader or PromptLoader(rows, seed=0, shuffle=False)
    made = Playing(
        engine or Slow(tokenizer, *answers),
        tokenizer,
        apply_chat_template=False,
        seed=1,
        deadline_seconds=deadline_seconds,
        in_thread=True,
        prompts=loader,
        scorer=pool,
        n=n,
        batch_size=2,
        max_staleness=k,
        last_step=9,
        **options,
    )
    with closing(made):
        if state is not None:
            made.load_state(json.loads(json.dumps(state)))
        made.on_weights(version)
        yield made


def wait_for_all(of: Rollouts) -> None:
    """Returns when every group that was begun is scored, however busy the machine is."""
    until = time.monotonic() + 60
    while any(each.is_kept is None for each in list(of.flow.queue.values())):
        assert time.monotonic() < until, "groups are not scored"
        time.sleep(0.01)


def uids(groups: Any) -> list[str]:
    return [group.prompt.uid for group in groups]


def test_the_next_step_is_sampled_while_one_trains(tokenizer: PreTrainedTokenizerBase) -> None:
    with continuous(tokenizer, "4") as of:
        taken = of.start(2, step=1).result()
        first = of.metrics.reduce()
        assert uids(taken.groups) == ["0:0", "0:1"]
        wait_for_all(of)
        assert of.flow.ready == 2 and of.flow.outstanding == 4
        assert isinstance(of.driver.engine, Slow)
        of.driver.engine.version = 1
        of.on_weights(1)
        second = of.start(2, step=2).result()
        assert uids(second.groups) == ["0:2", "0:3"]
        numbers = of.metrics.reduce()
        assert numbers["staleness/mean"] == numbers["staleness/max"] == numbers["staleness/stale_fraction"] == 1.0
        assert first["staleness/max"] == 0.0
        assert {"time/rollout", "time/rollout_idle"} <= of.metrics.timings().keys()


def test_without_staleness_the_groups_are_those_of_the_synchronous_rollouts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    answers = ["0", "4", "4", "4", "2", "4"]
    with continuous(tokenizer, *answers, k=0, group_filter=Filter(dynamic_sampling, {})) as of:
        got = []
        for step in (1, 2, 3):
            got.append(of.start(2, step=step).result().groups)
            of.on_weights(step)
        loader = PromptLoader([text_prompt(tokenizer, f"{i}+0=", i) for i in range(6)], seed=0, shuffle=False)
        given = {"prompts": loader, "scorer": of.scorer, "n": 2, "group_filter": Filter(dynamic_sampling, {})}
        synchronous = Playing(Slow(tokenizer, *answers), tokenizer, apply_chat_template=False, seed=1, **given)
        assert got == [synchronous.start(2, step=step).result().groups for step in (1, 2, 3)]


def test_long_responses_are_trained_on_as_often_as_in_a_synchronous_run(tokenizer: PreTrainedTokenizerBase) -> None:
    """With lengths of a heavy tail, each response takes as many polls as it has tokens: a stream that hands out ready
    groups first would train on short ones, and one that drops stale groups would lose the longest."""

    def length(uid: str) -> int:
        _, _, _, index, sample, _ = uid.split(":")
        return int(random.Random(f"{index} {sample}").paretovariate(0.8) // 1) % 60 + 1

    class Tailed(Slow):
        left: dict[str, int]

        def poll(self, timeout_seconds: float) -> list[Event]:
            for event in self._events:
                self.left[event.uid] = self.left.get(event.uid, length(event.uid)) - 1
            over = [event for event in self._events if self.left[event.uid] <= 0]
            self._events = [event for event in self._events if self.left[event.uid] > 0]
            return over

        def say(self, answer: str, request: Request) -> Completion:
            count = length(request.uid)
            return Completion((1,) * count, (-0.5,) * count, "stop", ((self.version, count),))

    def trained(k: float) -> list[list[int]]:
        engine = Tailed(tokenizer, "")
        engine.left = {}
        found = []
        with continuous(tokenizer, k=k, engine=engine) as of:
            for step in range(1, 9):
                groups = of.start(2, step=step).result().groups
                found.append([len(each.turns[0].token_ids) for group in groups for each in group.trajectories])
                engine.version = step
                of.on_weights(step)
        return found

    synchronous = trained(0)
    assert max(map(max, synchronous)) > 10 * min(map(min, synchronous))
    assert trained(1) == trained(2.5) == synchronous


class Late:
    """Outcomes that are there after a while."""

    def __init__(self, outcomes: Any, seconds: float) -> None:
        self.outcomes, self.until = outcomes, time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self.until and self.outcomes.done()

    def result(self) -> Any:
        return self.outcomes.result()


class LateScorer:
    scores_alone = False

    def __init__(self) -> None:
        self.pool = RewardPool("exact_match", num_workers=0, timeout_seconds=5.0, correct_threshold=1.0)

    def submit_batch(self, items: Any) -> Late:
        return Late(self.pool.submit_batch(items), 0.4)

    def close(self) -> None:
        self.pool.close()


class Held:
    """Scores each response alone, when `release` is called; the sizes of its batches."""

    scores_alone = True

    def __init__(self) -> None:
        self.sizes, self.pending = list[int](), list[Future[list[RewardResult]]]()

    def submit_batch(self, items: Sequence[Any]) -> Any:
        self.sizes.append(len(items))
        self.pending.append(Future())
        return self.pending[-1]

    def release(self, num: int) -> None:
        """Scores the first `num` responses, once they are here: a thread may sample them before it sends them on."""
        deadline = time.monotonic() + 30
        while len(self.pending) < num and time.monotonic() < deadline:
            time.sleep(0.001)
        for future in self.pending[:num]:
            future.set_result([RewardResult(0.25, 1.0)])

    def close(self) -> None: ...


@pytest.mark.parametrize("k", [0, 1])
def test_groups_are_there_before_their_scores_where_nothing_reads_these(
    k: float, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each response is scored alone, when it ends; without a filter the loop may read the groups at once."""
    held = Held()
    with continuous(tokenizer, "4", k=k, scorer=held) as of:
        sampled = of.start(2, step=1)
        assert uids(sampled.groups) == ["0:0", "0:1"] and not any(each.done() for each in held.pending[:4])
        assert [each.reward for group in sampled.groups for each in group.trajectories] == [None] * 4
        held.release(4)
        scored = sampled.result().groups
        assert [each.reward for group in scored for each in group.trajectories] == [0.25] * 4
        assert [each.turns for group in scored for each in group.trajectories] == [
            each.turns for group in sampled.groups for each in group.trajectories
        ]
    assert set(held.sizes) == {1}


class LateEngine(Slow):
    """Answers after a while."""

    until = 0.0

    def submit(self, request: Request) -> bool:
        self.until = time.monotonic() + 0.4
        return super().submit(request)

    def poll(self, timeout_seconds: float) -> list[Event]:
        if time.monotonic() < self.until:
            time.sleep(0.02)
            return []
        return super().poll(timeout_seconds)


@pytest.mark.parametrize("part", ["sampling", "rewards", "training", "saving", "sync"])
def test_a_run_says_which_part_the_others_waited_for(
    part: str, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="whet")
    engine = LateEngine(tokenizer, "4") if part == "sampling" else None
    with continuous(tokenizer, "4", engine=engine, scorer=LateScorer() if part == "rewards" else None) as of:
        for step in (1, 2, 3):
            of.start(2, step=step).result()
            with phase({"saving": "save", "sync": "time/sync"}.get(part, "time/update")):
                time.sleep(0.4 if part in ("training", "saving", "sync") else 0.0)
            of.on_weights(step)
    [line] = [record.getMessage() for record in caplog.records if "limited the run" in record.getMessage()]
    assert line.startswith(f"{part} limited the run")
    seconds = {name: float(number) for name, number in re.findall(r"(\w+) ([\d.]+) s", line)}
    assert seconds.keys() == {"sampling", "environments", "rewards", "training", "saving", "sync"}
    assert ("trainer.save_freq" in line) == (part == "saving")
    assert seconds[part] > 0.7 and seconds[part] == max(seconds.values())


def test_the_loop_and_the_thread_take_turns_often_until_the_run_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    before = sys.getswitchinterval()
    with continuous(tokenizer, "4"):
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == before == pytest.approx(0.005)


def test_a_validation_runs_beside_the_stream(tokenizer: PreTrainedTokenizerBase) -> None:
    with continuous(tokenizer, "4") as of:
        held_out = [text_prompt(tokenizer, "2+2=", 0)]  # the uid of a prompt that is being trained on
        groups = of.sample(held_out, 3, of.params, step=0, purpose="validation")
        assert [each.accuracy for each in groups[0].trajectories] == [1.0] * 3
        assert uids(of.start(2, step=1).result().groups) == ["0:0", "0:1"]


def test_a_checkpoint_has_every_group_that_was_not_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    with continuous(tokenizer, "4", "0", k=2) as of:
        first = of.start(2, step=1).result().groups
        state = dict(of.state())
    assert [entry["uid"] for entry in state["stream"]] == ["0:0", "0:1", "0:2", "0:3", "0:4", "0:5"]
    assert [entry["is_kept"] for entry in state["stream"][:2]] == [True, True]
    assert any(entry["partial"] for entry in state["stream"][2:]), "tokens of responses that are not over"

    class Other(Slow):
        version = 7

    engine = Other(tokenizer, "4", "0")
    with continuous(tokenizer, k=2, engine=engine, state=state) as resumed:
        again = resumed.start(2, step=1).result().groups
        assert again == first
        resumed.on_weights(1)
        second = resumed.start(2, step=2).result().groups
        assert uids(second) == ["0:2", "0:3"]
        resumed.on_weights(2)
        third = resumed.start(2, step=3).result().groups
        assert uids(third) == ["0:4", "0:5"]
        runs = [turn.versions for group in second + third for each in group.trajectories for turn in each.turns]
        assert ((0, 1), (7, 1)) in runs, f"a response that went on under other weights has runs of both: {runs}"
        assert not [each.uid for each in engine.requests if each.uid.startswith("rollout:1:0:0:")], "sampled twice"


def sampled_ahead(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The checkpoint of step 1 with two steps ahead: 0:2 to 0:5 of the first weights, 1:0 and 1:1 of the second."""
    engine = Slow(tokenizer, "4")
    with continuous(tokenizer, k=2, engine=engine) as of:
        of.start(2, step=1).result()
        wait_for_all(of)
        engine.version = 1
        of.on_weights(1)
        of.driver.submit(lambda: None).result(60.0)  # the thread has begun those of the new weights
        wait_for_all(of)
        state: dict[str, Any] = json.loads(json.dumps(of.state()))
    assert [entry["uid"] for entry in state["stream"]] == ["0:2", "0:3", "0:4", "0:5", "1:0", "1:1"]
    assert all(entry["is_kept"] for entry in state["stream"])
    return state


def resumed(
    tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], steps: int = 3, **options: Any
) -> list[tuple[str, list[int]]]:
    """The uid of each group that a resumed run trains on, and the version of each of its responses; the engine says
    the version of the step before."""
    found, engine = list[tuple[str, list[int]]](), Slow(tokenizer, "4")
    engine.version = 1
    with continuous(tokenizer, engine=engine, state=state, version=1, **options) as of:
        for step in range(2, 2 + steps):
            for group in of.start(2, step=step).result().groups:
                assert [each.turns[0].context_ids for each in group.trajectories] == [group.prompt.token_ids] * of.n
                found.append((group.prompt.uid, [each.turns[0].policy_version for each in group.trajectories]))
            wait_for_all(of)  # what is sampled ahead is of the old weights, also on a busy machine
            engine.version = step
            of.on_weights(step)
    return found


def test_groups_of_rows_that_changed_begin_again(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 3 has another prompt, row 4 another ground truth; the other groups are used as they are."""
    caplog.set_level("INFO", logger="whet")
    state = sampled_ahead(tokenizer)
    rows = [text_prompt(tokenizer, f"{index}+{int(index == 3)}=", index) for index in range(6)]
    rows[4] = replace(rows[4], ground_truth="other")
    found = resumed(tokenizer, state, k=2, loader=PromptLoader(rows, shuffle=False), steps=2)
    assert found == [("0:2", [0, 0]), ("0:3", [1, 1]), ("0:4", [1, 1]), ("0:5", [0, 0])]
    told = {record.levelname: record.args for record in caplog.records if record.name.endswith("snapshot")}
    assert told["INFO"][:2] == (4, 4) and told["WARNING"][0] == 2


def test_a_checkpoint_without_digests_is_read_as_before(tokenizer: PreTrainedTokenizerBase) -> None:
    state = sampled_ahead(tokenizer)
    for entry in state["stream"]:
        assert isinstance(entry.pop("prompt"), int)
    assert resumed(tokenizer, state, k=2, steps=2) == [(f"0:{index}", [0, 0]) for index in (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        # three may be outstanding: a batch trained on next, and half of the one behind it. 0:2 is one version old and
        # first in its batch, 0:3 would be the second old one in a batch that may have one.
        (0.5, [("0:2", [0, 0]), ("0:3", [1, 1]), ("0:4", [1, 1]), ("0:5", [2, 2])]),
        (1, [("0:2", [0, 0]), ("0:3", [0, 0]), ("0:4", [1, 1]), ("0:5", [1, 1]), ("1:0", [2, 2]), ("1:1", [2, 2])]),
        (2, [("0:2", [0, 0]), ("0:3", [0, 0]), ("0:4", [0, 0]), ("0:5", [0, 0]), ("1:0", [1, 1]), ("1:1", [1, 1])]),
    ],
)
def test_a_smaller_bound_holds_for_the_groups_of_a_checkpoint(
    k: float, expected: list[tuple[str, list[int]]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Groups that are too old start again, and groups without room become the next prompts."""
    assert resumed(tokenizer, sampled_ahead(tokenizer), k=k, steps=len(expected) // 2) == expected


def test_prompts_that_there_is_no_room_for_are_in_the_next_checkpoint(tokenizer: PreTrainedTokenizerBase) -> None:
    before = sampled_ahead(tokenizer)
    with continuous(tokenizer, "4", k=0.5, state=before, version=1) as of:
        state = dict(of.state())
    assert [entry["uid"] for entry in state["stream"]] == ["0:2", "0:3", "0:4"]
    assert state["first"] == ["0:5", "1:0", "1:1"]
    found = resumed(tokenizer, state, k=1, steps=4)
    assert [uid for uid, _ in found] == ["0:2", "0:3", "0:4", "0:5", "1:0", "1:1", "1:2", "1:3"]


@pytest.mark.parametrize("n", [1, 3])
def test_groups_of_a_checkpoint_get_as_many_responses_as_the_run_asks_for(
    n: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Existing samples are kept, and missing ones are sampled."""
    state = sampled_ahead(tokenizer)
    state["stream"][1] |= {"is_kept": False, "samples": state["stream"][1]["samples"][1:]}  # one of two was over
    versions = {1: ([0], [1]), 3: ([0, 0, 1], [1, 0, 1])}[n]
    assert resumed(tokenizer, state, k=2, n=n, steps=1) == [("0:2", versions[0]), ("0:3", versions[1])]


def test_a_run_without_staleness_begins_with_the_prompts_of_an_asynchronous_one(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    state = sampled_ahead(tokenizer)

    def synchronous() -> Rollouts:
        loader = PromptLoader([text_prompt(tokenizer, f"{i}+0=", i) for i in range(6)], seed=0, shuffle=False)
        pool = RewardPool("exact_match", num_workers=0, timeout_seconds=5.0, correct_threshold=1.0)
        given = {"prompts": loader, "scorer": pool, "n": 2}
        return Playing(Slow(tokenizer, "4"), tokenizer, apply_chat_template=False, seed=1, **given)

    with closing(synchronous()) as of:
        of.load_state(state)
        of.on_weights(1)
        assert uids(of.start(2, step=2).result().groups) == ["0:2", "0:3"]
        of.on_weights(2)
        state = json.loads(json.dumps(of.state()))
    assert state["first"] == ["0:4", "0:5", "1:0", "1:1"] and "stream" not in state
    with closing(synchronous()) as of:
        of.load_state(state)
        found = [uid for step in (3, 4, 5) for uid in uids(of.start(2, step=step).result().groups)]
        assert found == ["0:4", "0:5", "1:0", "1:1", "1:2", "1:3"]
        assert of.prompts is not None and "first" not in of.prompts.state()


def test_tokens_of_failed_responses_are_unused(tokenizer: PreTrainedTokenizerBase) -> None:
    """Each response has two tokens; the two of the first group fail in their reward."""

    class Failing(LateScorer):
        def submit_batch(self, items: Any) -> Any:
            done: Future[list[Any]] = Future()
            fails = [item.prompt_str == "0+0=" for item in items]
            done.set_result([Failure("reward", "no") if each else RewardResult(1.0, 1.0) for each in fails])
            return done

    with continuous(tokenizer, "4", scorer=Failing()) as of:
        of.start(2, step=1).result()
        numbers = [of.metrics.reduce()]
        of.on_weights(1)
        of.start(2, step=2).result()
        numbers.append(of.metrics.reduce())
    assert [each["rollout/unused_tokens"] for each in numbers] == [2 * 2, 0]


def test_an_error_of_the_engine_reaches_the_loop(tokenizer: PreTrainedTokenizerBase) -> None:
    class Broken(Slow):
        def poll(self, timeout_seconds: float) -> list[Event]:
            raise EngineError("its server", "is gone")

    with (
        continuous(tokenizer, engine=Broken(tokenizer, "4")) as of,
        raises(EngineError, "its server"),
    ):
        of.start(2, step=1).result()


def test_a_wait_ends_at_its_deadline(tokenizer: PreTrainedTokenizerBase) -> None:
    class Silent(Slow):
        def poll(self, timeout_seconds: float) -> list[Event]:
            time.sleep(timeout_seconds)
            return []

    with continuous(tokenizer, engine=Silent(tokenizer, "4"), deadline_seconds=0.3) as of:
        began = time.monotonic()
        with raises(DeadlineError, found=re.compile(r" 0\.3 s ")):
            of.start(2, step=1).result()
        assert time.monotonic() - began < 5
