# SPDX-License-Identifier: Apache-2.0
"""Episodes with several players, sub-agents and limits, with a scripted engine."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, text_prompt
from transformers import PreTrainedTokenizerBase

from tests.algorithms.calling import estimate
from tests.rollout.playing import Playing, World
from whet.environments.host import Deadlines
from whet.environments.protocol import Observation, unpaid
from whet.metrics import Metrics
from whet.registry import ADV_ESTIMATORS
from whet.rollout.batch import rows_of, to_batch
from whet.rollout.episode import EpisodeLimits
from whet.rollout.flow import Filter, by_player
from whet.rollout.protocol import SamplingParams
from whet.trainers.batch_metrics import measure_groups
from whet.types import Group, Trajectory

PARAMS = SamplingParams(max_new_tokens=64)
WORLDS = '''
import asyncio, time
from whet.environments.protocol import Observation
from whet.types import Message

def say(text, **more):
    return Observation(False, (Message("user", text),), **more)

class Duel:
    """Two players say a number each, twice; the larger sum wins."""
    def __init__(self, *, learners="white black", wrong=""): self.learners, self.wrong = learners.split(), wrong
    def reset(self, prompt, seed):
        self.said = []
        return self.turn("white", "1+")
    def turn(self, player, text):
        return say(text, player=player, is_trained=player in self.learners, state_key=str(len(self.said)))
    def step(self, answer):
        self.said.append(int(answer.text))
        if len(self.said) < 4:
            return self.turn(("white", "black")[len(self.said) % 2], f"{self.said[-1]}+")
        won = 1.0 if self.said[0] + self.said[2] > self.said[1] + self.said[3] else -1.0
        if self.wrong: return Observation(True, rewards={self.wrong: won, "black": -won})
        return Observation(True, rewards={"white": won, "black": -won}, fields={"success": float(won > 0)})

class Manager:
    def reset(self, prompt, seed): return Observation(False)
    async def step(self, answer, context):
        if answer.text == "9":
            return Observation(True, reward=2.0)
        found = await asyncio.gather(context.run("1+1=", "worker"), context.run("2+2=", "worker"))
        if any(each.failure for each in found): return Observation(True, fields={"lost": 1})
        return say("+".join(f"{each.text}{each.reward:g}{each.num_turns}" for each in found))

class Worker:
    def __init__(self, prompt): self.turns = 0
    def step(self, answer):
        self.turns += 1
        if answer == "5": raise RuntimeError("five")
        return Observation(self.turns == 2, (Message("user", "+"),), reward=0.5)

class Lost:
    def reset(self, prompt, seed): return Observation(False)
    async def step(self, answer, context):
        await context.run("1", "nobody")

class Slow:
    def reset(self, prompt, seed): return Observation(False)
    def step(self, answer):
        if answer.text == "2": time.sleep(100)
        return say("+")

class Spells:
    def __init__(self, *, text): self.text = text
    def reset(self, prompt, seed): return Observation(False)
    def step(self, answer): return Observation(True) if answer.text == "1" else say(self.text)

class Opens:
    """Its first message has `length` characters, that of its second player 20."""
    def __init__(self, *, length, replaces=False): self.length, self.replaces = length, replaces
    def reset(self, prompt, seed):
        return say("1" * self.length, player="white", context="replace" if self.replaces else "append")
    def step(self, answer):
        return say("2" * 20, player="black")

class Asks:
    def __init__(self, *, length): self.length = length
    def reset(self, prompt, seed): return Observation(False)
    async def step(self, answer, context):
        result = await context.run("1" * self.length, "worker")
        return Observation(True, fields={"failure": str(result.failure)})

class Talks:
    def __init__(self, *, replaces=False): self.replaces = replaces
    def reset(self, prompt, seed): return Observation(False)
    def step(self, answer): return say("1" * 30, context="replace" if self.replaces else "append")
'''


@pytest.fixture
def play(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Collects the trajectories of one prompt in an environment of the file, with an engine that says `answers`."""
    (tmp_path / "worlds.py").write_text(WORLDS)

    def stage(name: str, **settings: Any) -> World:
        return World(f"{tmp_path / 'worlds.py'}:{name}", **settings)

    def played(name: str, *answers: str, n: int = 1, agents: tuple[str, ...] = (), **settings: Any) -> list[Trajectory]:
        collector = Playing(
            Scripted(tokenizer, *answers, by_sample=n > 1),
            tokenizer,
            world=stage(name, **settings),
            agents={each.lower(): stage(each) for each in agents},
            apply_chat_template=False,
        )
        try:
            [trajectories] = collector.collect([text_prompt(tokenizer)], n, PARAMS, step=1)
        finally:
            collector.close()
        return trajectories

    return played


def test_each_player_reads_a_conversation_of_its_own(play: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    [trajectory] = play("Duel", "5", "3", "4", "2")
    read = [str(tokenizer.decode(list(turn.context_ids))).replace("<|im_end|>", "|") for turn in trajectory.turns]
    assert read == ["2+2=1+", "2+2=5+", "2+2=1+5|3+", "2+2=5+3|4+"]
    assert [(turn.player, turn.reward) for turn in trajectory.turns] == [
        ("white", 0.0),
        ("black", 0.0),
        ("white", 1.0),  # 5 + 4 > 3 + 2
        ("black", -1.0),
    ]
    assert trajectory.score == 0.0 and trajectory.fields == {"success": 1.0}
    white, black = rows_of(trajectory)
    assert white.turn_ids == [0, 0, -1, -1, 2, 2] and black.turn_ids == [1, 1, -1, -1, 3, 3]
    scores = to_batch([Group(trajectory.prompt, (trajectory,))], pad_token_id=0)["token_level_scores"]
    assert scores[:, -1].tolist() == [-1.0, 1.0]  # black, white


@pytest.mark.slow
def test_players_are_groups_of_their_own(play: Any) -> None:
    """Two episodes: white wins the first, black the second; the mean of each player's returns is 0."""
    trajectories = [play("Duel", *said)[0] for said in (("5", "3", "4", "2"), ("1", "3", "4", "8"))]
    trajectories[1] = type(trajectories[1])(**{**vars(trajectories[1]), "uid": "0:0:1", "sample": 1})
    group = Group(trajectories[0].prompt, tuple(trajectories))
    batch = to_batch([group], pad_token_id=0)
    assert batch["trajectory_uid_name"].tolist() == ["0:0:0/black", "0:0:1/black", "0:0:0/white", "0:0:1/white"]
    assert batch["uid"].tolist() == [0, 0, 1, 1] and batch["trajectory_uid"].tolist() == [0, 1, 2, 3]
    assert batch["token_level_scores"].sum(1).tolist() == [-1.0, 1.0, 1.0, -1.0]
    columns = {name: batch[name] for name in ("response_mask", "uid", "trajectory_uid")}
    columns["token_level_rewards"] = batch["token_level_scores"]
    found = estimate(ADV_ESTIMATORS["grpo"], columns, {"std_norm": False}).advantages
    assert found.sum(1).tolist() == [-4.0, 4.0, 4.0, -4.0]  # +-1 on each of four sampled tokens
    different = Filter(lambda values: len(set(values)) > 1, {}, metric="reward")
    assert different.keep(group) and [each.score for each in group.trajectories] == [0.0, 0.0]
    metrics = Metrics()
    measure_groups(metrics, [group])
    assert metrics.value("reward/groups_all_equal") == 0.0


def test_a_reward_for_nobody_fails_the_episode(play: Any) -> None:
    [trajectory] = play("Duel", "5", "3", "4", "2", options={"wrong": "wite"})
    assert trajectory.failure is not None
    assert re.match("Observation.rewards: wite; .*'white', 'black'; ", trajectory.failure.message)


@pytest.mark.parametrize(
    ("moved", "reward", "rewards", "is_lost"),
    [
        (["white"], 0.0, {"black": 1.0}, False),  # an error in the first turn: the winner has not moved
        (["white"], 0.0, {"white": -1.0, "black": 1.0}, False),
        (["a", "b"], 0.0, {"a": 0.5, "b": -1.0, "c": 0.5}, False),
        (["a", "b"], -1.0, {"a": 0.5, "c": 0.5}, False),  # `reward` pays b
        (["a", "b"], 0.0, {"a": 0.5, "c": 0.5}, True),
        (["a", "b"], 0.0, {"a": 0.5, "c": 0.0}, False),
        (["a", "a"], 0.0, {"A": 1.0}, True),
        ([""], 0.0, {"agent": 1.0}, True),  # players have no names
        ([], 0.0, {"white": 1.0}, False),  # before the first turn nobody is paid
    ],
)
def test_which_rewards_are_for_nobody(
    moved: list[str], reward: float, rewards: dict[str, float], is_lost: bool
) -> None:
    assert bool(unpaid(Observation(True, reward=reward, rewards=rewards), moved)) == is_lost


def test_a_player_who_moves_next_may_be_paid() -> None:
    assert unpaid(Observation(False, player="b", rewards={"b": 1.0}), ["a", "a"]) is None


def test_a_player_that_does_not_learn(play: Any) -> None:
    [trajectory] = play("Duel", "5", "3", "4", "2", options={"learners": "black"})
    assert [turn.is_trained for turn in trajectory.turns] == [False, True, False, True]
    [row] = rows_of(trajectory)
    scores = to_batch([Group(trajectory.prompt, (trajectory,))], pad_token_id=0)["token_level_scores"]
    assert scores.shape == (1, len(row.response_ids)) and scores[0, -1] == -1.0
    [group] = by_player([Group(trajectory.prompt, (trajectory,))])
    assert group.prompt.uid == "0:0/black" and len(group.trajectories[0].turns) == 2


def test_where_nobody_learns_the_reward_gets_an_empty_response(play: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    [trajectory] = play("Duel", "5", "3", "4", "2", options={"learners": "nobody"})
    item = Playing(None, tokenizer)._item(trajectory)
    assert len(trajectory.turns) == 4 and trajectory.rows == ()
    assert (item.response_ids, item.solution_str, item.trajectory["turn_rewards"]) == ((), "", [0, 0, 1, -1])
    batch = to_batch([Group(trajectory.prompt, (trajectory,))], pad_token_id=0)
    assert batch["response_mask"].tolist() == [[0]] and batch["token_level_scores"].tolist() == [[0.0]]


def test_rows_of_sub_agents_belong_to_the_trajectory(play: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    [trajectory] = play("Manager", "1", "2", "3", "4", "6", "9", agents=("Worker",))
    assert trajectory.failure is None and len(trajectory.turns) == 6
    assert [turn.agent for turn in trajectory.turns] == ["", "worker", "worker", "worker", "worker", ""]
    assert any(re.fullmatch(r"[346]12\+[346]12", str(message.content)) for message in trajectory.messages)
    assert trajectory.score == 4 * 0.5 + 2.0
    batch = to_batch([Group(trajectory.prompt, (trajectory,))], pad_token_id=0)
    assert batch["agent"].tolist() == ["worker", "worker", ""] and batch["trajectory_uid"].tolist() == [0, 0, 0]
    assert batch["token_level_scores"].sum(1).tolist() == [1.0, 1.0, 2.0]
    orders = (["1+1=", "2+2="], ["2+2=", "1+1="])
    assert [str(tokenizer.decode(ids[ids != 0]))[-4:] for ids in batch["prompts"][:2]] in orders


def test_a_sub_agent_that_fails_is_a_result(play: Any) -> None:
    [trajectory] = play("Manager", "1", "5", agents=("Worker",))
    assert trajectory.failure is None and trajectory.fields == {"lost": 1}
    assert [turn.agent for turn in trajectory.turns] == [""]


def test_a_task_for_an_agent_that_is_not_configured(play: Any) -> None:
    [trajectory] = play("Lost", "1", agents=("Worker",))
    assert trajectory.failure is not None and trajectory.failure.source == "environment"
    assert re.search(r"'nobody'.*environment\.agents .*\bworker\b", trajectory.failure.message)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["step", "episode"])
def test_deadlines_truncate_by_option(play: Any, limit: str) -> None:
    seconds = Deadlines(step=1.0 if limit == "step" else 100.0, close=0.5)
    limits = EpisodeLimits(seconds=100.0 if limit == "step" else 3.0)
    [failed] = play("Slow", "1", "2", seconds=seconds, limits=limits)
    assert failed.failure is not None and failed.failure.timed_out and failed.limit is None
    [cut] = play("Slow", "1", "2", seconds=seconds, limits=replace(limits, fails_at=frozenset()))
    assert cut.failure is None and cut.limit == "time" and len(cut.turns) == 2


@pytest.mark.slow
@pytest.mark.parametrize("first", ["manager", "worker"])
def test_an_episode_and_its_tasks_that_are_late_together(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, first: str
) -> None:
    (tmp_path / "worlds.py").write_text(WORLDS)
    collector = Playing(
        Scripted(tokenizer, "1", "2", "2"),  # of the manager, and of its workers, which then hang
        tokenizer,
        world=World(f"{tmp_path / 'worlds.py'}:Manager"),
        agents={"worker": World(f"{tmp_path / 'worlds.py'}:Slow")},
        apply_chat_template=False,
    )
    driver, done, now = collector.driver, list[Trajectory](), 0.0
    driver._clock = lambda: now
    try:
        driver.add(collector.episodes([text_prompt(tokenizer)], 1, PARAMS, step=1), done.append)
        until = time.monotonic() + 60.0
        while sorted(driver._stepping.values()) != ["worker", "worker"] or len(driver.engine.requests) < 3:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            driver.turn(0.1)
        if first == "worker":
            driver._open = dict(reversed(driver._open.items()))
        now = 3601.0
        driver.turn(0.0)
    finally:
        collector.close()
    [late] = done
    assert late.failure is not None and late.failure.timed_out and "3600 s" in late.failure.message
    assert driver.is_idle and driver._stepping == {} and driver._first_late_at == math.inf


def test_tokens_of_turns_and_episodes(play: Any) -> None:
    """An answer of one digit has two tokens with its end: at most 1 a turn, then at most 5 in all."""
    [cut] = play("Slow", "1", limits=EpisodeLimits(max_turns=3, max_turn_tokens=1))
    assert [len(turn.token_ids) for turn in cut.turns] == [1, 1, 1] and cut.limit == "turns"
    [short] = play("Slow", "1", limits=EpisodeLimits(max_episode_tokens=5))
    assert [len(turn.token_ids) for turn in short.turns] == [2, 2, 1] and short.limit == "length"


@pytest.mark.slow
def test_observations_without_room(play: Any) -> None:
    """64 tokens of a response hold two answers and two observations, and not the third."""
    [cut] = play("Talks", "1")
    assert cut.limit == "overflow" and len(cut.turns) == 2
    fails = frozenset({"overflow"})
    [failed] = play("Talks", "1", limits=EpisodeLimits(fails_at=fails))
    assert failed.failure is not None
    assert failed.failure.source == "environment" and "environment.on_overflow=truncate" in failed.failure.message
    [replaced] = play(
        "Talks", "1", options={"replaces": True}, limits=EpisodeLimits(fails_at=fails, max_context_tokens=20)
    )
    assert replaced.failure is not None
    assert re.search(r"\b30 tokens\b.*data\.max_prompt_length=20\b", replaced.failure.message)


@pytest.mark.slow
def test_openings_without_room(play: Any) -> None:
    """A prompt of 4 tokens is held to its limit by the data; 12 is the limit of the others, a token a character."""
    fails = {"limits": EpisodeLimits(fails_at=frozenset({"overflow"}), max_context_tokens=12, max_turns=1)}
    for replaces, most in ((False, 8), (True, 12)):
        [fits] = play("Opens", "1", options={"length": most, "replaces": replaces}, **fails)
        assert fits.failure is None and fits.limit == "turns"
        for limits in (
            fails,
            {"limits": EpisodeLimits(max_context_tokens=12)},
        ):  # without a turn there is nothing to keep
            [failed] = play("Opens", "1", options={"length": most + 1, "replaces": replaces}, **limits)
            assert re.search(r"\b13 tokens\b.*data\.max_prompt_length=12\b", failed.failure.message)
            assert ("prompt and" in failed.failure.message) is not replaces
            assert "environment.on_overflow" not in failed.failure.message
    [given] = play("Slow", "1", limits=EpisodeLimits(max_context_tokens=3, max_turns=1))
    assert given.failure is None and given.limit == "turns"


def test_an_opening_of_another_player_without_room(play: Any) -> None:
    most = {"max_context_tokens": 12}
    [cut] = play("Opens", "1", options={"length": 8}, limits=EpisodeLimits(**most))
    assert cut.limit == "overflow" and [turn.player for turn in cut.turns] == ["white"]
    [failed] = play("Opens", "1", options={"length": 8}, limits=EpisodeLimits(fails_at=frozenset({"overflow"}), **most))
    assert failed.failure is not None and re.search(
        r"prompt and.*\b24 tokens\b.*data\.max_prompt_length=12\b.*environment\.on_overflow=truncate",
        failed.failure.message,
    )


@pytest.mark.slow
def test_a_task_without_room_is_a_result(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    play: Any,
) -> None:
    """The fixture `play` writes the file."""
    for length, said in ((12, "^None$"), (13, r"task and.*\b13 tokens\b.*data\.max_prompt_length=12\b")):
        collector = Playing(
            Scripted(tokenizer, "1"),
            tokenizer,
            world=World(f"{tmp_path / 'worlds.py'}:Asks", options={"length": length}),
            agents={"worker": World(f"{tmp_path / 'worlds.py'}:Worker", limits=EpisodeLimits(max_context_tokens=12))},
            apply_chat_template=False,
        )
        try:
            [[trajectory]] = collector.collect([text_prompt(tokenizer)], 1, PARAMS, step=1)
        finally:
            collector.close()
        assert trajectory.failure is None and re.search(said, str(trajectory.fields["failure"]))


@pytest.mark.parametrize("environment", ["calculator", "Slow"])  # in this process, and in its own
def test_the_deadline_of_an_episode_counts_from_its_reset(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, environment: str
) -> None:
    """Of two episodes one has a place. The first is late after 3600 s, the second 3600 s after it got the place."""
    (tmp_path / "worlds.py").write_text(WORLDS)
    name = environment if environment == "calculator" else f"{tmp_path / 'worlds.py'}:{environment}"
    collector = Playing(
        Scripted(tokenizer, "1"), tokenizer, world=World(name, max_episodes=1), apply_chat_template=False
    )
    driver, done, now = collector.driver, list[Trajectory](), 0.0
    driver._clock = lambda: now
    driver.engine.submit = lambda request: False  # type: ignore[method-assign] - full: nothing is sampled
    prompts = [text_prompt(tokenizer, index=index) for index in range(2)]

    def until_begun(count: int) -> None:
        end = time.monotonic() + 60.0
        while len(driver._unsent) < count:
            assert time.monotonic() < end
            driver.turn(0.1)

    try:
        driver.add(collector.episodes(prompts, 1, PARAMS, step=1), done.append)
        until_begun(1)
        now = 3601.0
        driver.turn(0.0)
        assert [each.uid for each in done] == ["0:0:0"]
        until_begun(1)
        begun_at, now = now, now + 3599.0
        driver.turn(0.0)
        assert len(done) == 1 and driver._open["rollout:1:0:1:0"].late_at == begun_at + 3600.0
        now += 2.0
        driver.turn(0.0)
    finally:
        collector.close()
    assert [each.failure.timed_out and "3600 s" in each.failure.message for each in done if each.failure] == [True] * 2
    assert driver.is_idle and driver._first_late_at == math.inf


def test_limits_and_fields_are_metrics(play: Any) -> None:
    trajectories = [play("Talks", "1")[0], play("Duel", "5", "3", "4", "2")[0]]
    metrics = Metrics()
    measure_groups(metrics, [Group(each.prompt, (each,)) for each in trajectories], "games")
    assert metrics.value("env/games/limit/overflow") == 0.5
    assert metrics.value("env/games/success") == 1.0


def test_text_that_the_tokenizer_rejects_fails_its_own_episode(play: Any) -> None:
    played = play("Spells", "1", "2", n=2, options={"text": "\N{SNOWMAN}"})
    assert [each.failure is None for each in played] == [True, False]
    assert played[1].failure is not None and "'\\u2603" in ascii(played[1].failure.message)
    [failed] = play("Spells", "2", options={"text": "\ud800"})
    assert failed.failure is not None and "surrogate" in failed.failure.message
