# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from tests.environments.broken_environments import FAULTS
from whet.environments.check import Finding, Plan, check
from whet.registry import ENVIRONMENTS
from whet.types import Message, Prompt

FILE = "tests/environments/broken_environments.py"
PROMPT = Prompt("0:0", 0, (Message("user", "Begin."),), (1,), "check", "1")
NAMES = (
    *("starts", "deadline", "observations", "rewards", "observation size", "same seed", "beside another"),
    *("another seed", "prompt", "after the end", "restores", "close", "answers", "speed"),
)
GAMES = (
    "countdown:Countdown",
    "frozen_lake:FrozenLake",
    "nim:Nim",
    "number_game:NumberGame",
    "sokoban:Sokoban",
    "tree_game:TreeGame",
)


def found(environment: str, seconds: float = 2.0, **options: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in check(environment, options, Plan(PROMPT, seconds=seconds))}


def failed(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.is_ok is False}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_environment_is_caught_by_name(name: str) -> None:
    assert FAULTS[name] in failed(found(f"{FILE}:{name}", seconds=0.7))


def test_there_are_faults_for_all_that_can_fail() -> None:
    assert len(FAULTS) >= 12 and {*NAMES} - {*FAULTS.values()} == {"another seed", "speed"}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["Right", pytest.param("RightAndAsync", marks=SLOW), "RightAndDelegates", "RightAndShort"]
)
def test_a_sound_environment_passes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    findings = found(f"{FILE}:{name}", seconds=10.0)
    assert tuple(findings) == NAMES and not failed(findings), findings
    assert "Task was destroyed" not in capfd.readouterr().err
    is_short = name == "RightAndShort"
    assert (findings["close"].is_ok, findings["another seed"].is_ok) == ((None, None) if is_short else (True, True))
    assert findings["after the end"].what == ("stays at the end" if is_short else "raises")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(f"whet_environments.{game}", marks=SLOW) for game in GAMES), "calculator", "single_turn"],
)
def test_all_that_ship_pass(name: str) -> None:
    assert not failed(found(name, seconds=10.0))


def test_all_shipped_ones_are_named_here() -> None:
    shipped = [entry.name for entry in ENVIRONMENTS if entry.target.startswith("whet.")]
    assert shipped == ["calculator", "gymnasium", "single_turn"]


@pytest.mark.slow
def test_reasons_name_the_difference() -> None:
    shared = found(f"{FILE}:SharedState")["beside another"].what
    shown = [f"['{number}'] 0.0 (False, False) None append {{}}" for number in (1, 2)]
    assert shared == f"turn 0 differs while another one runs: it shares state or a generator: {' and '.join(shown)}"
    assert found(f"{FILE}:ReadsTheFirstLetter")["answers"].what.startswith(
        "empty: answers: step raised IndexError: string index out of range"
    )
    assert found(f"{FILE}:DiesOfANullByte")["answers"].what == "a null byte: its process died: exit code 9"
    assert "no reply within 0.5 s for an episode" in found(f"{FILE}:HangsInStep", seconds=0.5)["deadline"].what


def test_what_cannot_begin_is_not_checked_further() -> None:
    without = found(f"{FILE}:HasNoStep")
    assert list(without) == ["starts"]
    assert "HasNoStep has no method step; expected step(answer)" in without["starts"].what
    texts = found(f"{FILE}:ResetsToText")
    assert {name: finding.is_ok for name, finding in texts.items()} == {"starts": True, "observations": False}
    assert "reset gave what cannot be used: TypeError: the environment returned 'Begin.'" in texts["observations"].what
