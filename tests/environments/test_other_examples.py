# SPDX-License-Identifier: Apache-2.0
"""The examples of reasoning-gym and TextArena."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.registry import load_target
from whet.types import Message, Prompt

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)


@pytest.mark.parametrize(
    ("module", "package", "file"),
    [("textarena", "textarena", "textarena_games.py"), ("reasoning_gym", "reasoning-gym", "reasoning_gym_tasks.py")],
)
def test_an_absent_package_is_named(module: str, package: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith(f"whet_user_{Path(file).stem}")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=rf"this example needs .*: pip install {package}$"):
        load_target(f"{EXAMPLES / file}:main")


@pytest.fixture
def arena() -> Any:
    """The class of the example."""
    pytest.importorskip("textarena", reason="TextArena is not installed: pip install textarena")
    return load_target(f"{EXAMPLES / 'textarena_games.py'}:Arena")


@pytest.mark.slow  # the packages take seconds to import
def test_reasoning_gym_scores_its_tasks() -> None:
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: pip install reasoning-gym")
    score = load_target(f"{EXAMPLES / 'reasoning_gym_tasks.py'}:score")
    sums = score.__globals__["SUMS"]
    for index in range(5):
        answer = str(eval(sums[index]["metadata"]["expression"]))
        assert score(f" {answer}\n", {"index": index}) == 1.0
        assert score(f"{int(answer) + 1}", {"index": index}) < 1.0


@pytest.mark.slow  # the packages take seconds to import
def test_two_players_of_nim(arena: Any) -> None:
    """Piles of 3, 4 and 5: player 0 takes 3, player 1 takes 4, player 0 takes the last five."""
    game = arena()
    seen = [game.reset(PROMPT, 1), *(game.step(Answer(text)) for text in ("[0 3]", "[1 4]"))]
    assert [each.player for each in seen] == ["0", "1", "0"] and "pile 2: 5" in str(seen[0].messages[0].content)
    assert game.step(Answer("[2 5]")) == Observation(True, rewards={"0": 1.0, "1": -1.0})
    with pytest.raises(RuntimeError, match="after the end"):
        game.step(Answer("[2 5]"))


@pytest.mark.slow  # the packages take seconds to import
def test_the_seed_alone_decides(arena: Any) -> None:
    """Mastermind draws its code from the global generator, which other games use between the turns."""

    def played(seed: int, *, disturbed: bool) -> list[str]:
        game = arena(game="Mastermind-v0", players=1)
        texts = []
        observation = game.reset(PROMPT, seed)
        for guess in ("[1 2 3 4]", "[3 4 5 6]", "[2 1 5 6]"):
            if disturbed:
                random.seed(9)
                arena(game="Mastermind-v0", players=1).reset(PROMPT, 50)
            assert observation.player == ""
            observation = game.step(Answer(guess))
            texts.append(str(observation.messages))
        return texts

    assert played(3, disturbed=False) == played(3, disturbed=True)
    assert len({str(played(seed, disturbed=False)) for seed in range(6)}) > 1
    random.seed(5)
    expected = random.random()
    random.seed(5)
    played(3, disturbed=False)
    assert random.random() == expected
