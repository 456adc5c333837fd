# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from whet_environments.devices.chromium import NAMES as NAMES_OF_CHROMIUM

from tests.environments.broken_environments import FAULTS
from whet.environments.protocol import Observation
from whet.plugins.agents.check import EnvironmentFinding, Plan, _difference, _parts, check
from whet.registry import ENVIRONMENTS
from whet.types import Media, Message, Prompt

FILE = "tests/environments/broken_environments.py"
PROMPT = Prompt("0:0", 0, (Message("user", "Begin."),), (1,), "check", "1")
NAMES = (
    *("starts", "deadline", "observations", "rewards", "observation size", "same seed", "beside another"),
    *("another seed", "prompt", "after the end", "restores", "close", "answers", "speed"),
)
ROLES = ("user", "tool")
GAMES = (
    "countdown:Countdown",
    "frozen_lake:FrozenLake",
    "nim:Nim",
    "number_game:NumberGame",
    "sokoban:Sokoban",
    "tree_game:TreeGame",
)
SCREENS = ("screen_games:NumberGameScreen", "screen_games:TreeGameScreen")
ELSEWHERE = {  # checked in files of their own
    "browser.environment:Browser": "browser",
    "openenv_client:OpenEnv": "openenv",
    "python_repair:PythonRepair": "python_repair",
    "textworld_games:TextWorldGames": "textworld",
    "verifiers_tasks:Verifiers": "verifiers",
    "webshop.client:WebShopServer": "webshop_server",
    "webshop.environment:WebShop": "webshop",
    "gymnasium": "gymnasium",
}
ROOT = Path(__file__).resolve().parents[3]


def found(environment: str, seconds: float = 2.0, **options: Any) -> dict[str, EnvironmentFinding]:
    return {finding.name: finding for finding in check(environment, options, Plan(PROMPT, seconds=seconds))}


def failed(findings: dict[str, EnvironmentFinding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.is_ok is False}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_environment_is_caught_by_name(name: str) -> None:
    seconds = 0.7 if FAULTS[name] == "deadline" else 5.0  # others must not end late on a busy machine
    assert FAULTS[name] in failed(found(f"{FILE}:{name}", seconds=seconds))


def test_there_are_faults_for_all_that_can_fail() -> None:
    assert len(FAULTS) >= 12 and {*NAMES} - {*FAULTS.values()} == {"another seed", "speed"}


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Right", pytest.param("RightAndAsync", marks=SLOW), "RightAndDelegates", "RightAndShort"]
)
def test_a_sound_environment_passes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    findings = found(f"{FILE}:{name}", seconds=10.0)
    assert tuple(findings) == NAMES and not failed(findings), findings
    assert "Task was destroyed" not in capfd.readouterr().err
    is_short = name == "RightAndShort"
    assert (findings["close"].is_ok, findings["another seed"].is_ok) == ((None, None) if is_short else (True, True))
    assert findings["after the end"].what == "raises"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(f"whet_environments.{game}", marks=SLOW) for game in GAMES), "calculator", "single_turn"],
)
def test_all_that_ship_pass(name: str) -> None:
    assert not failed(found(name, seconds=10.0))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["drawn", "chromium"])
@pytest.mark.parametrize("game", SCREENS)
def test_screens_pass(game: str, device: str) -> None:
    if device == "chromium" and not any(map(shutil.which, NAMES_OF_CHROMIUM)):
        pytest.skip("needs Chromium: apt-get install chromium")
    options = {"device": device, "chops" if "Tree" in game else "rounds": 2}
    assert not failed(found(f"whet_environments.{game}", seconds=60.0, **options))


def test_all_that_ship_are_checked() -> None:
    """Environments named by the entry points and the registry are checked here or in the file that `ELSEWHERE`
    names."""
    points: dict[str, str] = {}
    for folder in (ROOT, ROOT / "examples" / "environments"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        points |= project.get("entry-points", {}).get("whet.environment", {})
    own = {entry.name for entry in ENVIRONMENTS if entry.target.startswith("whet.")}
    there = {target.removeprefix("whet_environments.") for target in points.values()}
    assert own | there == {*GAMES, *SCREENS, *ELSEWHERE, "calculator", "single_turn"}
    for target, name in ELSEWHERE.items():
        text = (ROOT / "tests" / "environments" / f"test_{name}.py").read_text()
        assert f'{target}"' in text and re.search(r"\bcheck\(", text), target


@pytest.mark.slow
def test_reasons_name_the_difference() -> None:
    shared = found(f"{FILE}:SharedState")["beside another"].what
    shown = [f"[{{'content': '{number}', 'role': 'user'}}]" for number in (1, 2)]
    differs = "turn 0 differs while another one runs: it shares state or a generator: messages"
    assert shared == f"{differs} {' and '.join(shown)}"
    large = found(f"{FILE}:ShowsTooMuch", seconds=10.0)["observation size"].what
    both = "at most 100,000 characters, and 16,777,216 bytes of media"
    assert large == f"7 characters, and 17,825,792 bytes of media; expected {both}"
    assert found(f"{FILE}:ReadsTheFirstLetter")["answers"].what.startswith(
        "empty: answers: step raised IndexError: string index out of range"
    )
    assert found(f"{FILE}:DiesOfANullByte")["answers"].what == "a null byte: its process died: exit code 9"
    assert "no reply within 0.5 s for an episode" in found(f"{FILE}:HangsInStep", seconds=0.5)["deadline"].what


SEEN = Observation(
    False, (Message("user", "a"),), 0.5, {"board": [1.5], "seen": {2, 1}}, media=(Media("image", "ab", b"png"),)
)


@pytest.mark.parametrize(
    ("changes", "part", "one", "two"),
    [
        ({"messages": (Message("tool", "a"),)}, "messages", *(f"[{{'content': 'a', 'role': '{r}'}}]" for r in ROLES)),
        (
            {"messages": (Message("user", "a", {"name": "b"}),)},
            "messages",
            "[{'content': 'a', 'role': 'user'}]",
            "[{'content': 'a', 'name': 'b', 'role': 'user'}]",
        ),
        (
            {"fields": {"board": [2.5], "seen": {1, 2}}},
            "fields",
            *(f"{{'board': [{n}], 'seen': [1, 2]}}" for n in (1.5, 2.5)),
        ),
        ({"media": (Media("image", "cd", b"png"),)}, "media", "[['image', 'ab']]", "[['image', 'cd']]"),
        ({"player": "b"}, "player", "''", "'b'"),
        ({"is_trained": False}, "is_trained", "True", "False"),
        ({"max_tokens": 3}, "max_tokens", "None", "3"),
        ({"state_key": "s"}, "state_key", "None", "'s'"),
        ({"rewards": {"a": 1.0}}, "rewards", "{}", "{'a': 1.0}"),
    ],
)
def test_each_part_of_an_observation_counts(changes: dict[str, Any], part: str, one: str, two: str) -> None:
    parts = [_parts(each, ()) for each in (SEEN, replace(SEEN, **changes))]
    assert _difference([parts[0]], [parts[1]], "differs") == f"turn 0 differs: {part} {one} and {two}"
    assert _parts(replace(SEEN, fields={"seen": {1, 2}, "board": [1.5]}), ()) == parts[0]
    assert _parts(replace(SEEN, fields={"f": object()}), ())["fields"] == "{'f': '<object object>'}"


def test_an_observation_against_a_failure_or_none() -> None:
    seen, failed = _parts(SEEN, ()), {"failure": "ValueError: no", "tasks": "[]"}
    assert _difference([seen], [failed], "differs") == "turn 0 differs: an observation and ValueError: no"
    assert _difference([seen, seen], [seen], "differs") == "turn 1 differs: an observation and no observation"


@pytest.mark.slow
def test_what_cannot_begin_is_not_checked_further() -> None:
    without = found(f"{FILE}:HasNoStep")
    assert list(without) == ["starts"]
    assert "HasNoStep" in without["starts"].what and "step(answer)" in without["starts"].what
    texts = found(f"{FILE}:ResetsToText")
    assert {name: finding.is_ok for name, finding in texts.items()} == {"starts": True, "observations": False}
    assert texts["observations"].what.startswith("reset") and "'Begin.' (str)" in texts["observations"].what
