# SPDX-License-Identifier: Apache-2.0
"""`whet env play` and `whet env check`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from whet.cli.app import main

BROKEN = "tests/environments/broken_environments.py"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["env", *arguments])
    captured = capsys.readouterr()
    assert (exit_.value.code or 0) == status, captured.err
    return captured.err if status == 2 else captured.out


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_play_takes_tools(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call in the form of Hermes gets its result; 6 * 7 is 42, and the next line is the answer."""
    file = tmp_path / "mine.py"
    file.write_text('def times(a: int, b: int) -> int:\n    """Multiplies."""\n    return a * b\n')
    call = '<tool_call>{"name": "times", "arguments": {"a": 6, "b": 7}}</tool_call>'
    typed(monkeypatch, call, "42")
    shown = printed(capsys, "play", "single_turn", "--tool", f"{file}:times", "--prompt", "6 * 7?").splitlines()
    assert any('"name": "times"' in line for line in shown)
    assert "42" in shown[shown.index(f"> {call}") + 1]
    assert shown[-1].startswith("the episode is over: 2 turns") and "tools/calls 1" in shown[-1]


def test_play_shows_the_rewards_that_training_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A turn's `reward` and an entry of `rewards` for its player are added."""
    (tmp_path / "duel.py").write_text(
        "from whet.environments.protocol import Observation\n"
        "class Duel:\n"
        "    turns = 0\n"
        "    def reset(self, prompt, seed): return Observation(False, player='white')\n"
        "    def step(self, answer):\n"
        "        self.turns += 1\n"
        "        if self.turns == 1: return Observation(False, player='black', reward=0.25)\n"
        "        return Observation(True, reward=0.5, rewards={'white': -1.0, 'black': 1.0})\n"
    )
    typed(monkeypatch, "1", "2")
    out = printed(capsys, "play", f"{tmp_path / 'duel.py'}:Duel")
    assert re.findall("reward of .*", out) == ["reward of white 0.25", "reward of white -1", "reward of black 1.5"]
    assert "sum of rewards white -0.75, black 1.5" in out


def test_play_reads_lines_until_the_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "<calc>6*7</calc>", "42")
    out = printed(capsys, "play", "calculator", "--prompt", "What is 6*7?")
    assert out == (
        "What is 6*7?\n> <calc>6*7</calc>\n42\nreward 0\n> 42\nreward 0\n"
        "the episode is over: 2 turns, sum of rewards 0\n"
    )


def test_play_of_a_game_shows_rewards_and_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    game = ["play", "whet_environments.number_game:NumberGame", "--option", "rounds=2", "--option", "encoding=compact"]
    typed(monkeypatch, "x")
    out = printed(capsys, *game, "--seed", "3")
    assert "\nreward -0.25\n> \nthe input ended\nnot over: 1 turn, sum of rewards -0.25" in out
    typed(monkeypatch, "x", "x")
    assert "the episode is over: 2 turns, sum of rewards -0.5, success 0.0, right 0.0, score 80.0\n" in printed(
        capsys, *game
    )


LOOK = """
import io
from PIL import Image
from whet.data.media import image, video
from whet.environments.protocol import Observation
from whet.types import Message

def png(colour):
    file = io.BytesIO()
    Image.new("RGB", (3, 2), colour).save(file, "png")
    return file.getvalue()

class Look:
    def reset(self, prompt, seed):
        parts = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "text", "text": "and <image>."}]
        media = (image(png("red")), image(png("blue")))
        return Observation(False, (Message("user", parts), Message("user", "Well?")), media=media)

    def step(self, answer):
        films = (video([png("white")] * 2), video(b"film"))
        return Observation(True, (Message("user", [{"type": "video"}]),), media=films)
"""


def test_play_writes_pictures_to_files_while_it_plays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, int], object]] = []

    class Input(io.StringIO):
        def readline(self, size: int = -1) -> str:
            for path in sorted(tmp_path.glob("whet-play-*/*.png")):
                with Image.open(path) as picture:
                    seen.append((picture.size, picture.getpixel((0, 0))))
            return super().readline(size)

    monkeypatch.setattr(sys, "stdin", Input("red\n"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "look.py").write_text(LOOK)
    out = printed(capsys, "play", f"{tmp_path}/look.py:Look")
    assert re.sub(r"\S+/whet-play-\w+", "AT", out) == (
        "Look:\n[image AT/001.png]\nand <image>.\nWell?\n[image AT/002.png]\n> red\n"
        "[video AT/003.png]\n[video AT/004.png]\n[video]\nreward 0\nthe episode is over: 1 turn, sum of rewards 0\n"
    )
    assert seen == [((3, 2), (255, 0, 0)), ((3, 2), (0, 0, 255))]
    assert not [*tmp_path.glob("whet-play-*")]


@pytest.mark.parametrize(
    ("game", "size"),
    [
        ("sokoban:Sokoban", (96, 96)),
        ("frozen_lake:FrozenLake", (64, 64)),
        ("screen_games:NumberGameScreen", (360, 640)),
    ],
)
def test_play_of_a_game_in_pictures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, game: str, size: tuple[int, int]
) -> None:
    sizes = []

    class Input(io.StringIO):
        def readline(self, size: int = -1) -> str:
            with Image.open(capsys.readouterr().out.partition("[image ")[2].partition("]")[0]) as picture:
                sizes.append(picture.size)
            return ""

    monkeypatch.setattr(sys, "stdin", Input())
    option = [] if "Screen" in game else ["--option", "render=picture"]
    out = printed(capsys, "play", f"whet_environments.{game}", *option)
    assert "the input ended" in out and sizes == [size]


MANAGER = """
import asyncio
from whet.environments.protocol import Observation
from whet.types import Message

class Manager:
    def reset(self, prompt, seed):
        return Observation(False, (Message("user", "Plan."),))

    async def step(self, answer, context):
        asked = (context.run(f"Do {each}.", "worker", ground_truth="6") for each in answer.text.split())
        told = " ".join(f"{each.text}:{each.reward:g}:{each.num_turns}" for each in await asyncio.gather(*asked))
        return Observation(True, (Message("user", told),), reward=1.0)

class Two:
    def reset(self, prompt, seed):
        self.left = 2 if prompt.ground_truth == "6" else 0
        return Observation(False)

    def step(self, answer):
        self.left -= 1
        return Observation(self.left == 0, reward=0.5)
"""


def test_the_player_plays_sub_agents_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manager.py").write_text(MANAGER)
    at = f"{tmp_path}/manager.py"
    typed(monkeypatch, "a b", "first", "second")
    end = "\nreward 0\nworker: the episode is over: 1 turn, sum of rewards 0\n"
    last = "\nreward 1\nthe episode is over: 1 turn, sum of rewards 1\n"
    assert printed(capsys, "play", f"{at}:Manager") == (
        f"Plan.\n> a b\nto worker: Do a.\nworker> first{end}to worker: Do b.\nworker> second{end}"
        f"first:0:1 second:0:1{last}"
    )
    typed(monkeypatch, "a", "x", "y")
    out = printed(capsys, "play", f"{at}:Manager", "--agent", f"worker={at}:Two")
    assert out.endswith(f"worker: the episode is over: 2 turns, sum of rewards 1\ny:1:2{last}")


def test_play_tells_of_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "")
    out = printed(capsys, "play", f"{BROKEN}:ReadsTheFirstLetter", status=1)
    assert "the environment failed: IndexError: string index out of range" in out


@pytest.mark.slow
def test_check_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "check", f"{BROKEN}:ChangesThePrompt", status=1).splitlines()
    assert "failed  prompt            it changes its prompt; copy it" in lines
    assert [line.split()[0] for line in lines].count("failed") == 1
    out = printed(capsys, "check", f"{BROKEN}:RightAndShort", "--option", "rounds=3", "--answer", "7")
    assert "ok      starts            3 turns\n" in out
    error = printed(capsys, "check", f"{BROKEN}:RightAndShort", "--option", "round=3", status=2)
    assert re.search("--option.round=3; .*'rounds'", error)


def test_play_pays_players_by_name_and_reads_answers_of_several_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n9\n"))
    out = printed(capsys, "play", "whet_environments.nim:Nim", "--option", "encoding=compact", "--seed", "4")
    assert "first> 1\n" in out and "second> 9\n" in out  # 9 is not in the game
    assert "reward of first 1\nreward of second -1\n" in out and "sum of rewards first 1, second -1" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("```\n<calc>1+1</calc>\n```\nx\n"))
    out = printed(capsys, "play", "calculator")
    assert "> ```\n<calc>1+1</calc>\n```\n2\n" in out and "2 turns" in out
