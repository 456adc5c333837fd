# SPDX-License-Identifier: Apache-2.0
"""Tasks of verifiers: one written like its scaffold, and the shipped ones, each led by its own `Env`."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from whet_environments.verifiers_tasks import Verifiers, choose

from tests.raising import raises
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.types import Message, Prompt

HERE = "tests.environments.verifiers_tasksets"
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
# To import verifiers takes many seconds.
needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install verifiers"
)


def played(texts: Sequence[str], *, seed: int = 0, row: Any = None, **options: Any) -> list[Observation]:
    """The observations of an episode, up to its end."""
    prompt = PROMPT if row is None else Prompt("0:7", 7, PROMPT.messages, (1, 2), "s", None, extra_info={"task": row})

    async def play() -> list[Observation]:
        task = Verifiers(**options)
        try:
            seen = [await task.reset(prompt, seed)]
            for text in texts:
                if not seen[-1].done:
                    seen.append(await task.step(Answer(text, token_ids=(1, 2))))
            return seen
        finally:
            await task.close()

    return asyncio.run(play())


def text_of(observation: Observation) -> str:
    return "\n".join(str(message.content) for message in observation.messages)


def test_choose() -> None:
    tasks = [SimpleNamespace(data=SimpleNamespace(id=f"id-{i}", name=f"name-{i}")) for i in range(3)]
    assert [choose(tasks, wanted, 4) for wanted in (None, 2, "id-0", "name-2")] == [tasks[i] for i in (1, 2, 0, 2)]
    for wanted in (3, -1, "id-3"):
        with raises(ConfigError, re.compile("task"), found=wanted, expected=re.compile("0 to 2")):
            choose(tasks, wanted, 4)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, "environment.options.taskset", found="a:B", expected=re.compile("env=user-sim")):
        Verifiers(taskset="a:B", env="user-sim")
    monkeypatch.setitem(sys.modules, "verifiers", None)
    expected, change = re.compile(r"\b0\.4\b"), re.compile(r"examples/environments\[verifiers\]")
    with raises(ConfigError, re.compile("verifiers"), expected=expected, change=change):
        played((), taskset="none-such")


@needs_verifiers
@pytest.mark.slow
def test_a_task_of_one_turn() -> None:
    """Weights 1 and 0.25; the seed chooses 3 of four tasks."""
    options = {"taskset": f"{HERE}:SumTaskset", "settings": {"num_tasks": 4}}
    first, last = played(["5"], seed=7, **options)
    assert first.messages == (Message("system", "Answer with a number."), Message("user", "3 + 2 = ?"))
    assert (first.context, first.player) == ("replace", "")
    assert last == Observation(True, reward=1.25, fields={"exact": 1.0, "is_number": 1.0, "num_characters": 1.0})
    first, last = played(["44"], row="sum-1", **options)
    assert text_of(first).endswith("1 + 2 = ?") and last.reward == 0.25
    assert last.fields == {"exact": 0.0, "is_number": 1.0, "num_characters": 2.0}


@needs_verifiers
@pytest.mark.slow
def test_the_trace_and_the_end() -> None:
    async def play() -> tuple[Any, ...]:
        task = Verifiers(taskset=f"{HERE}:SumTaskset")
        await task.reset(PROMPT, 0)
        await task.step(Answer("2", token_ids=(7, 8), finish_reason="length"))
        assert task.table is not None
        with pytest.raises(RuntimeError, match="after the end"):
            await task.step(Answer("2"))
        table = task.table
        await task.close()
        return tuple(table.traces)

    [trace] = asyncio.run(play())
    assert [message.role for message in trace.messages] == ["system", "user", "assistant"]
    assert (trace.num_turns, trace.is_truncated, trace.ok, trace.reward) == (1, True, True, 1.25)
    [branch] = trace.branches
    assert (branch.token_ids, branch.sampled_mask) == ([7, 8], [True, True])


@needs_verifiers
@pytest.mark.slow
def test_a_task_with_a_runtime_is_refused() -> None:
    with raises(ConfigError, re.compile("BoxTask"), found=re.compile("file")):
        played((), taskset=f"{HERE}:BoxTaskset")


@needs_verifiers
@pytest.mark.slow
def test_several_agents_are_players(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' `user-sim`: the user, who is not trained, opens; the assistant's task scores it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    options = {"taskset": "verifiers_tasksets", "env": "user-sim", "settings": {"num_tasks": 1}}
    texts = ["How much is 0 and 2?", "2", "###DONE###"]
    seen = played(texts, **options)
    assert [each.player for each in seen] == ["user", "assistant", "user", ""]
    assert [each.is_trained for each in seen[:3]] == [False, True, False]
    assert [each.context for each in seen[:3]] == ["replace", "replace", "append"]
    assert "0 + 2 = ?" in text_of(seen[0])
    assert text_of(seen[1]) == "Answer with a number.\nHow much is 0 and 2?" and text_of(seen[2]) == "2"
    assert seen[3].rewards == {"user": 0.0, "assistant": 1.25}
    assert seen[3].fields["assistant/exact"] == 1.0 and seen[3].fields["assistant/user_turns"] == 2.0


@pytest.fixture(scope="module")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nltk") / "corpora" / "words"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def write_words(monkeypatch: pytest.MonkeyPatch, words_folder: Path) -> Callable[[Sequence[str]], None]:
    """Puts words in place of nltk's list, which has to be downloaded; TextArena's games read it."""
    pytest.importorskip("textarena", reason="TextArena is not installed: pip install textarena")
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(words_folder.parents[1])])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)

    def write(words: Sequence[str]) -> None:
        for name in ("README", "en", "en-basic"):
            (words_folder / name).write_text("".join(f"{word}\n" for word in words))

    return write


def game(name: str, texts: Sequence[str], **more: Any) -> list[Observation]:
    return played(texts, taskset="textarena", settings={"game": name}, num_tasks=2, **more)


@needs_verifiers
@pytest.mark.slow
def test_hangman(write_words: Callable[[Sequence[str]], None]) -> None:
    """The taskset `textarena`, which has several games, each an environment of TextArena's led by its own `Env`."""
    write_words(["stone"])
    letters = [f"[{letter}]" for letter in "stxone"]
    seen = game("Hangman-v0", letters)
    assert "You are playing Hangman" in text_of(seen[0]) and seen[0].messages[0].role == "system"
    assert [each.done for each in seen] == [False] * 6 + [True]
    assert "S   T   _   _   _" in text_of(seen[2])
    assert (seen[-1].reward, seen[-1].fields) == (1.0, {"game_reward": 1.0})
    seen = game("Hangman-v0", letters, max_turns=2)
    assert len(seen) == 3 and seen[-1].done and seen[-1].reward == 0.0


LADDER = ["head", "heal", "teal", "tell", "tall", "tail"]  # each differs in one letter from its neighbours alone


@needs_verifiers
@pytest.mark.slow
def test_word_ladder(write_words: Callable[[Sequence[str]], None]) -> None:
    write_words(LADDER)
    [first] = game("WordLadder-v0", ())
    [start, target] = re.findall(r"word:\s+\*\*(\w+)\*\*", text_of(first))
    way = LADDER if start == "head" else LADDER[::-1]
    assert (start, target) == (way[0], way[-1])
    seen = game("WordLadder-v0", [f"[{word}]" for word in way[1:]])
    assert [each.done for each in seen] == [False] * 5 + [True]
    assert f"{way[0]} -> {way[1]} -> {way[2]}" in text_of(seen[2])
    assert (seen[-1].reward, seen[-1].fields) == (1.0, {"game_reward": 1.0})
    seen = game("WordLadder-v0", [f"[{way[2]}]", f"[{way[3]}]"])  # two moves against the rules end the game
    assert "is not exactly one letter different" in text_of(seen[1]) and (seen[2].done, seen[2].reward) == (True, 0.0)


@needs_verifiers
@pytest.mark.slow
def test_word_search(write_words: Callable[[Sequence[str]], None]) -> None:
    """Five of eight words lie across or down; their places are read from the text."""
    write_words([*LADDER, "stone", "river"])
    [first] = game("WordSearch-v0", ())
    rows = re.findall(r"^R\d\d ((?: \w  )+)$", text_of(first), re.MULTILINE)
    board = [row.split() for row in rows]
    [listed] = re.findall(r"Placed Words: (.*)", text_of(first))
    found: dict[str, str] = {}
    for word in listed.split(", "):
        for y, x in product(range(len(board)), repeat=2):
            across = board[y][x : x + len(word)]
            down = [row[x] for row in board[y : y + len(word)]]
            end = (y, x + len(word) - 1) if "".join(across) == word else (y + len(word) - 1, x)
            if word in ("".join(across), "".join(down)):
                found[word] = f"[{y} {x} {end[0]} {end[1]}]"
    assert len(found) == 5
    seen = game("WordSearch-v0", [*found.values()])
    assert [each.done for each in seen] == [False] * 5 + [True]
    assert text_of(seen[1]).count("[") == len(next(iter(found)))  # its letters are marked
    assert (seen[-1].reward, seen[-1].fields) == (1.0, {"game_reward": 1.0})
    wrong = game("WordSearch-v0", ["[0 0 0 1]"])
    assert "Incorrect Attempts Remaining: 19" in text_of(wrong[1])


@needs_verifiers
@pytest.mark.slow
def test_the_openenv_taskset_that_ships() -> None:
    """The taskset `openenv` (which needs openenv 0.4), against a server of whet's frozen lake."""
    client = pytest.importorskip("openenv.core.env_client", reason="OpenEnv is not installed: pip install openenv")
    if "_base_url" not in Path(client.__file__).read_text():
        pytest.skip("the taskset needs openenv 0.4 or newer: pip install openenv")
    from tests.environments.test_openenv import LAKE, Started

    server = Started("-m", "whet_environments.openenv_server", LAKE, "--option", "size=3", "--port", "0")
    try:
        url = server.line().rpartition(" ")[2].strip()
        settings = {"base_url": url, "resets": [{"seed": 3}]}
        seen = played(["<answer>Up</answer>", "", "x"], taskset="openenv", settings=settings)
        assert "__G\\nP__\\n_O_" in text_of(seen[0]) and "P_G\\n___\\n_O_" in text_of(seen[1])
        assert seen[-1].done and seen[-1].fields == {"openenv_reward": 0.0}
    finally:
        server.stop()


@needs_verifiers
@pytest.mark.slow
def test_it_passes_the_check() -> None:
    plan = Plan(PROMPT, ("2", "5", "no"), seconds=100.0)
    found = check("whet_environments.verifiers_tasks:Verifiers", {"taskset": f"{HERE}:SumTaskset"}, plan)
    results = {finding.name: finding.is_ok for finding in found}
    assert results.pop("restores") is None  # an episode waits in an asyncio.Future, which cannot be copied
    names = "starts deadline observations rewards,observation size,same seed,beside another,another seed,prompt"
    expected = [*names.split(",")[0].split(), *names.split(",")[1:], "after the end", "close", "answers", "speed"]
    assert results == dict.fromkeys(expected, True)
