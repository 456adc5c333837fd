# SPDX-License-Identifier: Apache-2.0
"""A second driver of episodes and of the stream: it tries orders of events, each replayed from its seed.

Requests are cut and go on, environments answer late, scores come in any order: the trajectories and groups are those of
the synchronous driver, which takes every event as it comes.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.rollout.test_continuous import Numbered, no_episodes
from whet.environments.protocol import Observation
from whet.rollout.episode import Command, End, Episode, EpisodeLimits, Reset, Rules, Sample, Stage, Step
from whet.rollout.flow import Filter, Flow, HandOut, RunEpisodes
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams
from whet.types import Failure, Group, Media, Message, Prompt, Trajectory, Turn

END = 0


class Letters:
    """A codec without a tokenizer: token 1 is a, 2 is b, ..."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(96 + token) for token in token_ids if token != END)

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[()]:
        return ()

    def read(self, observation: Observation) -> Observation:
        return observation

    def opening(self, messages: Sequence[Message], media: Sequence[Media]) -> list[int]:
        return [ord(letter) - 96 for message in messages for letter in str(message.content)]

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media]
    ) -> list[int]:
        return [ord(letter) - 96 for message in new for letter in str(message.content)]


RULES = Rules({"": Stage(Letters(), EpisodeLimits(max_turns=4))}, SamplingParams(max_new_tokens=24), seed=5, step=1)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"0:{index}", index, (Message("user", "?"),), (1, 2, 3), "test", None) for index in range(count)]


def respond(request: Request, already: int = 0) -> Completion:
    """The rest of a response whose tokens follow from the request's key and their position alone."""
    draws = random.Random(request.key)
    tokens = [draws.randint(1, 9) for _ in range(draws.randint(1, 8))] + [END]
    tokens = tokens[: request.params.max_new_tokens]
    rest = tuple(tokens[len(request.sampled_ids) :])
    reason = "stop" if tokens[-1] == END else "length"
    return Completion(rest, tuple(-token / 10 for token in rest), reason, ((3, len(rest)),) if rest else ())


def step(text: str, uid: str) -> Observation | Failure:
    """An environment that goes on after responses of an even length, and breaks on some."""
    if text.endswith("ab") or uid == "0:1:2":
        return Failure("environment", f"broke on {text}")
    if len(text) == 4:  # which lets go of all that was said
        return Observation(done=False, messages=(Message("user", f"uvw{text[0]}"),), context="replace", max_tokens=3)
    if len(text) % 2:
        return Observation(done=True, reward=len(text) / 8, fields={"length": len(text)})
    return Observation(done=False, messages=(Message("tool", "xyz"),), reward=0.5)


def in_order(episodes: Sequence[Episode]) -> dict[str, Trajectory]:
    """The synchronous order: every command is carried out when it comes."""
    done: dict[str, Trajectory] = {}
    for episode in episodes:
        commands = episode.start()
        while commands:
            command = commands.pop(0)
            commands = after(episode, command, done) + commands
    return done


def after(episode: Episode, command: Command, done: dict[str, Trajectory]) -> list[Command]:
    match command:
        case Reset():
            return episode.on_observation(Observation(done=False))
        case Sample(request=request):
            return episode.on_completion(respond(request))
        case Step(answer=answer):
            found = step(answer.text, episode.uid)
            return episode.on_failure(found) if isinstance(found, Failure) else episode.on_observation(found)
        case End(trajectory):
            assert trajectory.uid not in done, "an episode ends once"
            done[trajectory.uid] = trajectory
    return []


def in_any_order(episodes: Sequence[Episode], seed: int) -> tuple[dict[str, Trajectory], list[str]]:
    """Carries out any open command next, cuts requests off on the way, and writes the order down."""
    draw, done, log = random.Random(seed), dict[str, Trajectory](), list[str]()
    open_: list[tuple[str, Command]] = []
    by_uid = {episode.uid: episode for episode in episodes}
    for episode in episodes:
        open_ += [(episode.uid, command) for command in episode.start()]
    steps: dict[str, int] = {}
    while open_:
        uid, command = open_.pop(draw.randrange(len(open_)))
        if draw.random() < 0.2:  # as in a checkpoint
            by_uid[uid] = pickle.loads(pickle.dumps(by_uid[uid]))
        episode = by_uid[uid]
        log.append(f"{uid} {type(command).__name__}")
        if isinstance(command, Sample):
            request = command.request
            rest = respond(request)
            if draw.random() < 0.4 and request.attempt < 3:
                kept = draw.randrange(len(rest.token_ids))
                cut = replace(
                    rest,
                    token_ids=rest.token_ids[:kept],
                    log_probs=rest.log_probs[:kept],
                    finish_reason="abort",
                    versions=((3, kept),) if kept else (),
                )
                open_ += [(uid, each) for each in episode.on_completion(cut)]
                continue
            assert request.params.max_new_tokens <= 24
        if isinstance(command, Step):
            steps[uid] = steps.get(uid, 0) + 1
        open_ += [(uid, each) for each in after(episode, command, done)]
    for uid, trajectory in done.items():
        assert steps.get(uid, 0) == len(trajectory.turns), "an environment steps once a turn"
    return done, log


def episodes() -> list[Episode]:
    return [Episode(prompt, sample, RULES) for prompt in prompts(3) for sample in range(4)]


@pytest.mark.slow
def test_any_order_of_events_gives_the_same_trajectories() -> None:
    expected = in_order(episodes())
    assert len(expected) == 12
    turns = [len(each.turns) for each in expected.values()]
    failed = [uid for uid, each in expected.items() if each.failure is not None]
    assert max(turns) > 1 and "0:1:2" in failed and len(failed) < 6
    for trajectory in expected.values():
        length = len(trajectory.turns[-1].context_ids) + len(trajectory.turns[-1].token_ids) - 3
        assert length <= 24 and len(trajectory.turns) <= 4
    logs = set()
    for seed in range(200):
        found, log = in_any_order(episodes(), seed)
        assert {uid: found[uid] for uid in expected} == expected, f"seed {seed}"
        assert in_any_order(episodes(), seed)[1] == log
        logs.add(tuple(log))
    assert len(logs) == 200


def test_what_comes_after_the_end_changes_nothing() -> None:
    episode = Episode(prompts(1)[0], 0, RULES)
    episode.start()
    commands = episode.on_failure(Failure("environment", "its process died"))
    assert [type(command) for command in commands] == [End]
    late = respond(Request("r", (1,), RULES.params, key=1))
    assert episode.on_completion(late) == episode.on_observation(Observation(done=True)) == []
    assert episode.on_failure(Failure("engine", "again")) == []


@pytest.mark.parametrize(
    ("tokens", "params", "kept"),
    [
        ((1, 2), {}, (1, 2)),
        ((1, 2, 9), {"stop_token_ids": (9,)}, (1, 2)),
        ((1, 2, 3), {"stop": ("c",)}, (1, 2)),
        ((1, 2, 3, 4), {"max_new_tokens": 4}, (1, 2, 3)),
        ((1, 2, 3, 4), {"max_new_tokens": 2}, (1,)),
        ((9,), {"stop_token_ids": (9,)}, ()),
    ],
)
def test_a_token_that_may_have_ended_a_response_is_sampled_again(
    tokens: tuple[int, ...], params: dict[str, Any], kept: tuple[int, ...]
) -> None:
    """An engine had said them all, and its end was not heard before the checkpoint."""
    rules = replace(RULES, params=SamplingParams(**{"max_new_tokens": 8, **params}))
    before = Episode(prompts(1)[0], 0, rules)
    before.start()
    before.on_observation(Observation(done=False))
    versions = ((3, 1), (4, len(tokens) - 1)) if len(tokens) > 1 else ((3, 1),)
    before.on_partial(Partial(f"{before.id}:0", 0, 0, tokens, (-0.5,) * len(tokens), versions))
    assert before.sampled is not None
    after = Episode(prompts(1)[0], 0, rules)
    after.go_on_from(before.sampled)
    after.start()
    [sample] = after.on_observation(Observation(done=False))
    assert isinstance(sample, Sample) and sample.request.sampled_ids == kept
    [step_] = after.on_completion(Completion((5,), (-0.1,), "stop", ((7, 1),)))
    assert isinstance(step_, Step) and step_.answer.token_ids == (*kept, 5)
    assert sum(count for _, count in after.turns[0].versions) == len(kept) + 1 == len(after.turns[0].log_probs)


# ---- the stream of groups


def scored(prompt: Prompt, sample: int, seed: int) -> Trajectory:
    """Right one time in three, failed one time in ten."""
    draw = random.Random(f"{prompt.uid} {sample} {seed}").random()
    failure = Failure("reward", "late") if draw > 0.9 else None
    return Trajectory(
        f"{prompt.uid}:{sample}", prompt, (), sample, reward=1.0, accuracy=float(draw < 0.3), failure=failure
    )


def mixed(values: Sequence[float]) -> bool:
    return 0 < sum(values) < len(values)


class Watched(Numbered):
    """Prompts, and the uids of groups that were observed together."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = list[list[str]]()

    def observe(self, groups: Sequence[Group]) -> None:
        self.rounds.append([group.prompt.uid for group in groups])


def run_flow(seed: int, shuffled: bool, max_refills: int) -> tuple[HandOut, list[list[str]]]:
    draw, source = random.Random(seed), Watched()
    flow = Flow(3, 6, source, no_episodes, 0, Filter(mixed, {}, max_refills=max_refills))
    [command] = flow.ask(1)
    while isinstance(command, RunEpisodes):
        started: list[Any] = list(command.episodes)
        assert {step for _, step in started} == {1}
        coming = [scored(prompt, sample, seed) for prompt, _ in started for sample in range(3)]
        if shuffled:
            draw.shuffle(coming)
            coming += coming[:2]  # heard twice
            coming = coming[-2:] + coming[:-2]
        for trajectory in coming:
            if commands := flow.on_scored([trajectory]):
                [command] = commands
                break
    assert isinstance(command, HandOut)
    return command, source.rounds


@pytest.mark.parametrize("max_refills", [0, 3])
def test_groups_come_in_the_order_of_their_admission_whatever_the_order_of_scores(max_refills: int) -> None:
    sizes = set()
    for seed in range(60):
        expected, rounds = run_flow(seed, shuffled=False, max_refills=max_refills)
        assert run_flow(seed, shuffled=True, max_refills=max_refills) == (expected, rounds)
        kept = [group.prompt.index for group in expected.kept]
        everything = sorted(group.prompt.index for group in [*expected.kept, *expected.dropped])
        assert kept == sorted(kept) and everything == list(range(sum(map(len, rounds))))
        assert len(rounds) <= 1 + max_refills and (len(kept) == 6 or len(rounds) == 1 + max_refills)
        assert [len(each) for each in rounds[:1]] == [6] and len(kept) <= 6
        sizes.add(len(kept))
    assert len(sizes) > 2 if max_refills == 0 else 6 in sizes


def test_a_round_in_which_all_fail_is_not_refilled() -> None:
    flow = Flow(1, 1, Numbered(), no_episodes, 0, Filter(mixed, {}))
    [run] = flow.ask(1)
    assert isinstance(run, RunEpisodes)
    [(prompt, step)] = run.episodes  # type: ignore[misc]
    assert step == 1
    failed = replace(scored(prompt, 0, 0), failure=Failure("environment", "gone"))
    [handed_out] = flow.on_scored([failed])
    assert isinstance(handed_out, HandOut) and handed_out.kept == [] and len(handed_out.dropped) == 1
