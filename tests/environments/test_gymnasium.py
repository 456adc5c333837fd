# SPDX-License-Identifier: Apache-2.0
"""Environments of other people in gymnasium's form: its own, and MiniGrid's, played through the adapter."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.raising import check_fields, raises
from whet.environments.host import open_host
from whet.environments.protocol import Answer, Observation
from whet.environments.running import EnvironmentSpec, Running, at_once
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.plugins.agents.shipped import Gymnasium
from whet.types import Failure, Message, Prompt

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")

PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
TAXI = {"env_id": "Taxi-v4", "actions": ["south", "north", "east", "west", "pickup", "dropoff"]}
CLIFF = {"env_id": "CliffWalking-v1", "actions": ["up", "right", "down", "left"]}
CARDS = {"env_id": "Blackjack-v1", "actions": ["stick", "hit"]}
TURNS = ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
ROOM = {"env_id": "minigrid:MiniGrid-Empty-5x5-v0", "actions": TURNS, "render": "whet_environments.minigrid_text:whole"}
NEEDS_MINIGRID = "minigrid is not installed: pip install minigrid"

Call = Callable[..., Observation]


@pytest.fixture
def begun() -> Iterator[Callable[..., Call]]:
    """Begins an episode.  Returns a function that plays a turn; without a text it returns the first observation."""
    running = []

    def begin(options: dict[str, Any], seed: int = 3) -> Call:
        episode = Running(EnvironmentSpec("gymnasium", options).load())
        running.append(episode)
        first = at_once(episode.call("reset", PROMPT, seed))

        def call(text: str | None = None) -> Any:
            return first if text is None else at_once(episode.call("step", Answer(text)))

        return call

    yield begin
    for episode in running:
        at_once(episode.call("close"))


def test_taxi_is_played_to_its_end(begun: Callable[..., Call]) -> None:
    """The way is computed from gymnasium's own table of transitions: 20 for the passenger, -1 a step before."""
    turn = begun({**TAXI, "kwargs": {"max_episode_steps": 60}})
    table = gymnasium.make("Taxi-v4").unwrapped.P
    paths, queue = {int(turn().messages[0].content): list[int]()}, [int(turn().messages[0].content)]
    found = None
    while found is None:
        state = queue.pop(0)
        for action, [(_, after, reward, ends)] in table[state].items():
            if ends and reward == 20:
                found = [*paths[state], action]
                break
            if after not in paths:
                paths[after] = [*paths[state], action]
                queue.append(after)
    played = [turn(f"I go {TAXI['actions'][action]}.") for action in found]
    assert [each.reward for each in played] == [-1.0] * (len(found) - 1) + [20.0]
    assert played[-1].done and not played[-1].truncated and played[-1].fields == {"success": 1.0}
    assert [int(each.state_key or -1) for each in played[:-1]] == [
        int(each.messages[0].content) for each in played[:-1]
    ]
    after = turn("south")
    assert isinstance(after, Failure) and "after the end" in after.message


def test_cliff_walking(begun: Callable[..., Call]) -> None:
    """From 36, the lower left of 4 x 12 cells: up, eleven to the right, down is the goal; right is the cliff, -100."""
    turn = begun(CLIFF)
    assert turn().messages == (Message("user", "36"),)
    fallen = turn("right")
    assert (fallen.reward, fallen.messages[0].content, fallen.done) == (-100.0, "36", False)
    walked = [turn(word) for word in ["up", *["right"] * 11, "down"]]
    assert [each.done for each in walked] == [False] * 12 + [True]
    assert [each.messages[0].content for each in walked][:2] == ["24", "25"]
    assert [each.fields for each in walked] == [{"success": 0.0}] * 13  # the goal pays -1, as every step


def test_success_of_an_environment_whose_goal_pays_less_than_nothing(begun: Callable[..., Call]) -> None:
    turn = begun({**CLIFF, "success_reward": -1.0})
    played = [turn(word) for word in ["right", "up", *["right"] * 11, "down"]]
    assert [each.fields["success"] for each in played] == [0.0] * 13 + [1.0]
    cut = begun({**CLIFF, "success_reward": -1.0, "kwargs": {"max_episode_steps": 2}})
    last = [cut("up"), cut("right")][-1]
    assert last.truncated and last.fields == {"success": 0.0}


def test_no_success_where_every_step_pays(begun: Callable[..., Call]) -> None:
    """CartPole pays 1 a step, also for the one with which it falls."""
    turn = begun({"env_id": "CartPole-v1", "actions": ["left", "right"]})
    played = [turn("left")]
    while not played[-1].done:
        played.append(turn("left"))
    assert {each.reward for each in played} == {1.0} and [each.fields for each in played] == [{}] * len(played)


def test_blackjack_pays_as_gymnasium_does(begun: Callable[..., Call]) -> None:
    env = gymnasium.make("Blackjack-v1")
    for seed in range(5):
        turn, (hand, _) = begun(CARDS, seed), env.reset(seed=seed)
        assert turn().messages[0].content == str(hand)
        hit, (hand, reward, ends, _, _) = turn("hit"), env.step(1)
        assert (hit.messages[0].content, hit.reward, hit.done) == (str(hand), reward, ends)
        if not ends:
            stuck, (_, reward, ends, _, _) = turn("I stick"), env.step(0)
            assert stuck.done and (stuck.reward, stuck.fields) == (reward, {"success": float(reward > 0)})


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("0", 24),
        ("1.", 36),
        ("Not 3, but 0.", 24),
        ("3-0", 36),
        *[(text, None) for text in ("-1", "2.5", ".0", "1.0", "0 or 7", "10", "0x", "--0", "2.5x", "up", "")],
    ],
)
def test_without_words_an_action_is_a_whole_number(begun: Callable[..., Call], text: str, state: int | None) -> None:
    """From 36: 0 is up, 1 is right, the cliff, back to 36, and 3 is left, against the wall."""
    turn = begun({"env_id": "CliffWalking-v1"})
    found = turn(text)
    if state is None:
        assert found.messages[0].content == "There is no such action. Answer with one of: 0, 1, 2, 3"
        assert found.fields == {"invalid": 1.0} and turn("0").messages[0].content == "24"
    else:
        assert (found.messages[0].content, "invalid" in found.fields) == (str(state), False)


def test_a_negative_number_may_be_an_action(begun: Callable[..., Call]) -> None:
    class Signed(gymnasium.Env):  # type: ignore[misc]
        """Its actions are -1, 0 and 1, and its observation is their sum."""

        action_space = gymnasium.spaces.Discrete(3, start=-1)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.sum = 0
            return self.sum, {}

        def step(self, action: int) -> Any:
            self.sum += action
            return self.sum, 0.0, False, False, {}

    gymnasium.register("Signed-v0", lambda: Signed(), disable_env_checker=True)
    turn = begun({"env_id": "Signed-v0"})
    assert [turn(text).messages[0].content for text in ("-1", "I say -1", "1", "0")] == ["-1", "-2", "-1", "-1"]


@pytest.mark.parametrize(
    ("env_id", "kwargs", "said"),
    [("FrozenLake-v1", {"map_siz": 4}, "TypeError: "), ("FrozenLake-v1", {"map_name": "9x9"}, "")],
)
def test_arguments_that_the_environment_refuses(env_id: str, kwargs: dict[str, Any], said: str) -> None:
    key, found = "environment.options.kwargs", re.compile(f"^{re.escape(str(kwargs))} .*{said}")
    with raises(ConfigError, key, found=found, expected=re.compile(env_id)):
        Gymnasium(env_id=env_id, kwargs=kwargs)
    host = open_host("gymnasium", {"env_id": env_id, "kwargs": kwargs})
    try:
        refusal = host.refusal()
        assert refusal is not None
        check_fields(refusal, key, found=found, expected=re.compile(env_id))
    finally:
        host.shutdown()


def test_a_package_that_is_absent() -> None:
    found, change = re.compile(r"^no_such_grid:Room \(No module "), re.compile("pip install no_such_grid,")
    with raises(ConfigError, "environment.options.env_id", found=found, change=change):
        Gymnasium(env_id="no_such_grid:Room")


def test_minigrid_as_text(begun: Callable[..., Call]) -> None:
    pytest.importorskip("minigrid", reason=NEEDS_MINIGRID)
    turn = begun(ROOM)
    wall = "WG" * 5
    begin = f"Mission: get to the green goal square.\n\n{wall}\nWG>>    WG\nWG      WG\nWG    GGWG\n{wall}"
    assert turn().messages == (Message("user", begin),)
    assert turn("turn right").messages[0].content == begin.replace(">>", "VV")
    moved = [turn(word) for word in ("forward", "forward", "left", "forward", "forward")]
    assert [each.done for each in moved] == [False] * 4 + [True]
    assert moved[-1].reward == pytest.approx(1 - 0.9 * 6 / 100)  # MiniGrid's: 0.9 less for its limit of 100 steps


def test_minigrid_from_the_player(begun: Callable[..., Call]) -> None:
    """The player sees seven cells to the front: the walls of a room of 5 x 5, and nothing behind them."""
    pytest.importorskip("minigrid", reason=NEEDS_MINIGRID)
    options = {"env_id": "minigrid:MiniGrid-DoorKey-5x5-v0", "render": "whet_environments.minigrid_text:view"}
    turn = begun({**ROOM, **options})
    rows = str(turn().messages[0].content).split("\n\n", 1)[1].splitlines()
    assert len(rows) == 7 and rows[-1][6:8] == "^^" and "??" in rows[0]
    peer = gymnasium.make("minigrid:MiniGrid-DoorKey-5x5-v0").unwrapped
    peer.reset(seed=3)
    picture = "\n".join(rows)
    seen = peer.gen_obs()["image"][:, :, 0]  # 5 is a key, 4 a door
    assert ("KY" in picture) == bool((seen == 5).any()) and ("LY" in picture) == bool((seen == 4).any())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{**CLIFF, "answers": ("up", "right")}, {**CARDS, "answers": ("hit", "stick")}])
def test_they_pass_the_check(options: dict[str, Any]) -> None:
    plan = Plan(PROMPT, options.pop("answers"))
    failed = [finding for finding in check("gymnasium", options, plan) if finding.is_ok is False]
    assert not failed
