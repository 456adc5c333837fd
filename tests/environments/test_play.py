# SPDX-License-Identifier: Apache-2.0
"""`whet play` on drawn screens: both agents with all back ends, the files that they leave, and errors."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from whet_environments import rewards
from whet_environments.devices import backends, number_agent, play, reading, tree_agent
from whet_environments.devices.backends import OllamaBackend, OpenAIBackend, Question, ScriptedBackend
from whet_environments.devices.drawn import DrawnNumberGame, DrawnTreeGame
from whet_environments.devices.errors import BackendDeadlineError, BackendError, DeviceError
from whet_environments.devices.layout import AXE

from tests.first import first
from tests.raising import raises
from whet.cli.app import main as whet_main
from whet.errors import ConfigError, StorageError

sys.path.insert(0, str(Path(__file__).parent))
from model_server import rule, serving

pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")

DEFAULTS: dict[str, Any] = {
    "controller": "drawn",
    "serial": None,
    "backend": "scripted",
    "url": None,
    "model": None,
    "observe": "image",
    "check": None,
    "page": None,
    "browser": None,
    "rounds": 10,
    "seed": 0,
    "lang": "en",
    "temperature": 0.7,
    "call_seconds": 60.0,
    "settle": None,
    "collect": None,
    "debug": False,
}


def game(name: str, tmp_path: Path, **options: Any) -> dict[str, Any]:
    chosen = {**DEFAULTS, "output": tmp_path / "out", **options}
    if chosen["backend"] != "scripted" and "model" not in options:
        chosen["model"] = "m"
    return play.play_game(name, **chosen)


def result_in(folder: Path) -> Any:
    [file] = folder.glob("result_*.json")
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scripted", "openai", "ollama"])
def test_ten_rounds_of_the_number_game(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving() as server:
        url = None if backend == "scripted" else server.url
        result = game("number-game", tmp_path, backend=backend, url=url, seed=3)
    kept = {key: result[key] for key in ("completed_rounds", "tries", "final_score", "score_on_screen", "right_cards")}
    assert kept == {
        "completed_rounds": 10,
        "tries": 10,
        "final_score": 200,
        "score_on_screen": 200,
        "right_cards": 10,
    }
    assert result["model_calls"] == 21  # a decision and a check a round, and the score
    assert [turn["reward"] for turn in result["turns"]] == [1.0] * 9 + [3.0]
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"final.png", *(f"round_{n:02d}{part}.png" for n in range(1, 11) for part in ("", "_tap_1"))}
    assert result_in(tmp_path / "out") == result
    if backend == "scripted":
        return
    path, body, headers = server.requests[0]
    if backend == "openai":
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.7, 512)
        assert "secret" not in repr(OpenAIBackend("u", "m", api_key="secret"))
    else:
        assert path == "/api/generate" and body["options"] == {"temperature": 0.7, "num_predict": 512}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["scripted", "openai", "ollama"])
def test_ten_rounds_of_the_tree_game(backend: str, tmp_path: Path) -> None:
    with serving() as server:
        url = None if backend == "scripted" else server.url
        result = game("tree-game", tmp_path, backend=backend, url=url, seed=3, lang="zh", debug=True)
    assert (result["completed_rounds"], result["steps"], result["right_decisions"]) == (10, 20, 10)
    decided = [turn for turn in result["turns"] if turn["action"] in ("replace()", "decompose()")]
    rises = [max(0, sum(turn["state"]["changes"])) for turn in decided]
    assert result["gain"] == sum(rises) == result["final_power"] - result["first_power"] > 0
    assert {turn["power_from"] for turn in result["turns"]} == {"pixels"}
    folder = tmp_path / "out" / "debug_screenshots"
    history = json.loads((folder / "action_history.json").read_text())
    assert len(history) == 20 and {path.name for path in folder.glob("*.png")} == {
        f"step_{n:03d}.png" for n in range(1, 22)
    }
    assert history[0]["action"] == "click(360, 1067)" and history[0]["screen"] == "tree_cutting"
    for entry, turn in zip(history, result["turns"], strict=True):
        change = entry["power_after"] - entry["power"]
        step = entry["step"]
        expected = rewards.change_reward(change) + (2.0 if step >= 10 else 0.0) + (0.2 if step <= 15 else 0.0)
        assert turn["reward"] == pytest.approx(expected)


@pytest.mark.parametrize("observe", first(1, ["words", "compact"], others=pytest.mark.slow))
@pytest.mark.parametrize("backend", first(1, ["openai", "ollama"], others=pytest.mark.slow))
def test_the_state_as_text(observe: str, backend: str, tmp_path: Path) -> None:
    def answer(text: str, png: bytes | None) -> str:
        assert png is None
        if observe == "compact":
            cards, lamp = [int(card) for card in text[:3]], text[3]
            return str(sorted(cards)["ryg".index(lamp)])
        found = re.search(r"Cards: (\d), (\d), (\d)\. Lamp: (\w+)\.$", text)
        assert found
        cards = [int(found[n]) for n in (1, 2, 3)]
        return f"select({cards.index(sorted(cards)[('red', 'yellow', 'green').index(found[4])])})"

    with serving(answer) as server:
        result = game("number-game", tmp_path, backend=backend, url=server.url, observe=observe, rounds=4)
    assert (result["final_score"], result["right_cards"], result["model_calls"]) == (140, 4, 4)
    path, body, _ = server.requests[0]
    if backend == "ollama":
        assert body.get("raw", False) is (observe == "compact") and "images" not in body
    else:
        assert path == ("/v1/completions" if observe == "compact" else "/v1/chat/completions")


def test_the_tree_as_text(tmp_path: Path) -> None:
    def answer(text: str, png: bytes | None) -> str:
        change = sum(int(sign) if sign.isdigit() else ord("a") - ord(sign) - 1 for sign in text[:-1] if sign != "T")
        return "c" if "T" in text else "r" if change > 0 else "d"

    with serving(answer) as server:
        result = game("tree-game", tmp_path, backend="openai", url=server.url, observe="compact", rounds=3, seed=1)
    assert (result["completed_rounds"], result["right_decisions"], result["steps"]) == (3, 3, 6)


def test_a_wrong_card_and_an_answer_without_a_card(tmp_path: Path) -> None:
    answers = iter(["no idea", "<action>select(0)</action>", "select(7)", "index: 1"])
    with serving(lambda text, png: next(answers)) as server:
        result = game(
            "number-game", tmp_path, backend="openai", url=server.url, check="pixels", observe="words", rounds=2
        )
    assert (result["tries"], result["completed_rounds"]) == (4, 2)
    assert [turn["place"] for turn in result["turns"]] == [None, 0, None, 1]
    assert [turn["reward"] for turn in result["turns"]][::2] == [-0.5, -0.5]
    assert result["final_score"] == 100 + 20 * result["right_cards"] - 20


def test_three_taps_a_try_and_two_tries_a_round(tmp_path: Path) -> None:
    def stubborn(text: str, png: bytes | None) -> str:
        return "No, none." if "yes or no" in text else rule(text, png)

    with serving(stubborn) as server:
        result = game("number-game", tmp_path, backend="openai", url=server.url, rounds=2)
    assert (result["completed_rounds"], result["tries"], result["final_score"]) == (0, 4, 110)
    assert result["model_calls"] == 4 * (1 + 3) + 1
    assert {path.name for path in (tmp_path / "out").glob("*tap*")} == {f"round_01_tap_{n}.png" for n in (1, 2, 3)}


def test_a_late_answer_costs_a_try(tmp_path: Path) -> None:
    with serving(pause_seconds=0.4) as server:
        result = game("number-game", tmp_path, backend="openai", url=server.url, rounds=1, call_seconds=0.15)
    assert (result["completed_rounds"], result["tries"], result["late_answers"]) == (0, 2, 3)
    assert (result["final_score"], result["score_on_screen"]) == (None, 100)


@pytest.mark.parametrize(
    ("how", "fields"),
    [
        (
            {"status": 500, "raw": b"out of memory"},
            {"found": re.compile("500.*'out of memory'"), "change": re.compile("--model")},
        ),
        ({"raw": b"<html>"}, {"found": "'<html>'", "change": re.compile("--url")}),
        ({"raw": b'{"choices": []}'}, {"expected": re.compile(r"choices\.0\.message\.content")}),
        ({"raw": b"9" * 5_000_000}, {"found": re.compile("4194304")}),
    ],
)
def test_a_server_that_answers_something_else(how: Any, fields: Any, tmp_path: Path) -> None:
    with serving(**how) as server, raises(BackendError, re.compile(re.escape(server.url)), **fields) as error:
        game("number-game", tmp_path, backend="openai", url=server.url)
    result = result_in(tmp_path / "out")
    assert str(error.value) in result["error"] and result["turns"] == [] and result["model_calls"] == 1


def test_a_server_that_is_not_there_or_drips(tmp_path: Path) -> None:
    with raises(BackendError, "http://127.0.0.1:9/api/generate", change=re.compile("--url")):
        game("tree-game", tmp_path, backend="ollama", url="http://127.0.0.1:9")
    with serving(piece=1, pause_seconds=0.05) as server:
        start = time.monotonic()
        with raises(BackendDeadlineError, found=re.compile(r"\b0\.3 s"), change=re.compile("--call-seconds")):
            OllamaBackend(server.url, "m", seconds=0.3).ask(Question("score", "x"))
        assert time.monotonic() - start < 4.0
    with raises(BackendError, re.compile("^nowhere")):
        OllamaBackend("nowhere", "m").ask(Question("score", "x"))


@pytest.mark.slow
def test_rows_have_the_right_answer_and_feed_the_reward_functions(tmp_path: Path) -> None:
    file = tmp_path / "data" / "rows.jsonl"
    for name in play.AGENTS:
        result = game(name, tmp_path, collect=file, seed=5, output=tmp_path / name)
        assert (result["collected_rows"], result["rows_without_label"]) == (10 if name == "number-game" else 20, 0)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 30 and all((file.parent / row["screenshot"]).is_file() for row in rows)
    first = rows[0]
    assert first["data_source"] == "number_game" and first["prompt"].startswith("Each round shows three cards")
    for row in rows:
        score = getattr(rewards, row["data_source"])(row["answer"], row)
        assert score["acc"] == 1.0 and score["format"] == 1.0
    assert sum(rewards.number_game_binary(row["answer"], row) for row in rows[:10]) == 10.0
    assert sum(rewards.number_game_binary("<action>select(1)</action>", row) for row in rows[:10]) < 8


def test_a_foreign_page_is_read_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels say nothing of another page: the model reads the power, and rows have no label."""
    monkeypatch.setattr(tree_agent, "read_tree_game", lambda image: None)
    monkeypatch.setattr(tree_agent, "ocr", lambda image: None)

    def answer(text: str, png: bytes | None) -> str:
        assert png is not None
        state = reading.read_tree_game(reading.open_image(png))
        if text == tree_agent.PROMPTS["en"]["state"]:
            return f"power: {state.power}, dialog: {'yes' if state.changes else 'no'}"
        return str(state.right_action) if state.right_action else "over"

    monkeypatch.setattr(tree_agent.TreeAgent, "wait_until_begun", lambda *_: None)
    with serving(answer) as server:
        rows = tmp_path / "rows.jsonl"
        result = game("tree-game", tmp_path, backend="openai", url=server.url, rounds=2, collect=rows)
    assert (result["completed_rounds"], result["steps"], result["collected_rows"]) == (2, 4, 2)
    assert {turn["power_from"] for turn in result["turns"]} == {"model"} and result["gain"] >= 0
    assert result["rows_without_label"] == 2 and rows.is_file()


def test_a_screen_without_a_new_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whet_environments.devices import agent

    monkeypatch.setattr(agent, "APPEAR_SECONDS", 0.3)
    for kind in (number_agent.NumberAgent, tree_agent.TreeAgent):
        screen = DrawnTreeGame(0)
        screen.tap(*AXE)  # a game that has begun is no new one
        setup = play.Setup(
            play.ScreenController(screen, "drawn"), ScriptedBackend(str), tmp_path, say=lambda text: None
        )
        with raises(DeviceError, "drawn", found=re.compile(r"\b0\.3 s.*not_begun\.png")):
            kind(setup).play()
    assert (tmp_path / "not_begun.png").is_file()


def test_a_game_that_is_over_before_the_last_round(tmp_path: Path) -> None:
    screen = DrawnNumberGame(0, rounds=1)
    rule = ScriptedBackend(number_agent.rule)
    setup = play.Setup(play.ScreenController(screen, "drawn"), rule, tmp_path, rounds=2, say=lambda text: None)
    with raises(DeviceError, re.compile("drawn"), found=re.compile("1 of 1"), change=re.compile("rounds=2")):
        number_agent.NumberAgent(setup).play()
    assert result_in(tmp_path)["turns"][0]["right"]


def test_the_pages_say_the_same_in_both_languages() -> None:
    folder = Path(play.__file__).parents[2]
    for name in ("number-game", "tree-game"):
        english, chinese = ((folder / f"{name}{end}.md").read_text(encoding="utf-8") for end in ("", ".zh"))
        blocks = [re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) for text in (english, chinese)]
        commands = [[re.sub(r"  +#.*", "", block) for _, block in each] for each in blocks]
        assert [block for block in commands[0] if "import" not in block] == commands[1]
        rows = [[line.count("|") for line in text.splitlines() if line.startswith("|")] for text in (english, chinese)]
        assert rows[0] == rows[1]
        options = set(re.findall(r"--[a-z-]+", english))
        assert options >= set(re.findall(r"--[a-z-]+", chinese)) >= options - {"--page-none"}


def test_ocr_by_pytesseract(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("pytesseract")
    asked = []
    module.get_languages = lambda: ["eng", "osd", "chi_sim"]
    module.image_to_string = lambda image, lang, timeout: asked.append((lang, timeout)) or "妖力 5\n\nreplace\n"
    monkeypatch.setitem(sys.modules, "pytesseract", module)
    assert tree_agent.ocr(None) == ["妖力 5", "replace"] and asked == [("chi_sim+eng", 20)]

    def fail(*words: Any, **named: Any) -> str:
        raise RuntimeError("Tesseract process timeout")

    module.image_to_string = fail
    assert tree_agent.ocr(None) is None
    monkeypatch.setitem(sys.modules, "pytesseract", None)
    assert tree_agent.ocr(None) is None


def test_ocr_lines_tell_the_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setup = play.Setup(
        play.ScreenController(DrawnNumberGame(0), "drawn"),
        ScriptedBackend(lambda q: "?"),
        tmp_path,
        say=lambda text: None,
    )
    agent = tree_agent.TreeAgent(setup)
    monkeypatch.setattr(tree_agent, "ocr", lambda image: ["妖力 77925", "金币 99999", "替换 分解"])
    state = agent.read_state(DrawnNumberGame(0).png())
    assert (state.screen, state.power, agent.source) == ("equipment_selection", 77925, "ocr")
    assert state.right_action is None


@pytest.mark.parametrize(
    ("options", "key", "found", "expected", "change"),
    [
        ({"controller": "chrome"}, "--controller", "chrome", "adb, chromium, drawn", "'chromium'"),
        ({"backend": "olama"}, "--backend", "olama", "openai, ollama, scripted", "'ollama'"),
        ({"backend": "openai", "model": None}, "--model", None, "", "--backend openai"),
        ({"backend": "openai", "observe": "word"}, "--observe", "word", "image, words, compact", "'words'"),
        ({"check": "pixel"}, "--check", "pixel", "model, pixels", "'pixels'"),
        ({"call_seconds": -inf}, "--call-seconds", -inf, ">= 0", ""),
        ({"settle": inf}, "--settle", inf, ">= 0", ""),
        ({"lang": "fr"}, "--lang", "fr", "en, zh", ""),
        ({"serial": "x"}, "--serial", "x", "--controller drawn", "--controller adb"),
        ({"page": "http://x"}, "--page", "http://x", "--controller drawn", "--controller chromium or adb"),
        ({"controller": "chromium", "page": "com.game"}, "--page", "com.game", "--controller chromium", "adb$"),
        ({"controller": "chromium", "page": "none"}, "--page", "none", "--controller chromium", "adb$"),
        ({"observe": "nope"}, "--observe", "nope", "image, words, compact", ""),
        ({"observe": "words"}, "--observe", "words", "--backend scripted", "openai or ollama"),
        ({"model": "foo"}, "--model", "foo", "--backend scripted", "openai or ollama"),
        ({"url": "http://x"}, "--url", "http://x", "--backend scripted", "openai or ollama"),
        ({"browser": "/no"}, "--browser", "/no", "--controller drawn", "--controller chromium"),
    ],
)
def test_options_that_do_not_fit(
    options: Any, key: str, found: object, expected: str, change: str, tmp_path: Path
) -> None:
    with raises(ConfigError, key, found=found, expected=re.compile(expected), change=re.compile(change)):
        game("number-game", tmp_path, **options)


def test_seconds_that_are_no_number(tmp_path: Path) -> None:
    with raises(ConfigError, "--call-seconds", found=re.compile("nan"), expected=re.compile(">= 0")):
        game("number-game", tmp_path, call_seconds=nan)


def test_games_and_commands_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    known, near = re.compile("number-game, tree-game, device"), re.compile("'number-game'")
    with raises(ConfigError, "whet play", found="numbergame", expected=known, change=near):
        play.main(["numbergame"])
    with pytest.raises(SystemExit) as exit_:
        play.main(["number-game", "--help"])
    assert exit_.value.code == 0 and "--controller" in capsys.readouterr().out
    words = ["number-game", "--controller", "drawn", "--backend", "scripted", "--rounds", "1", "--games", "2"]
    words += ["--seed", "4", "--debug", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as exit_:
        play.main(words)
    out = capsys.readouterr().out
    assert exit_.value.code == 0 and out.count("--- decide: the model answers ---") == 2
    assert f"screenshot: {tmp_path}/seed_5/round_01.png" in out and result_in(tmp_path / "seed_4")["seed"] == 4
    assert f"result: {tmp_path}/seed_5/result_" in out


def test_whet_play_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whet import registry

    folder = tmp_path / "whet_environments-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: whet-environments\nVersion: 1\n")
    points = (Path(play.__file__).parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."whet.command"]\nplay = "whet_environments.devices.play:main"\n' in points
    (folder / "entry_points.txt").write_text("[whet.command]\nplay = whet_environments.devices.play:main\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.entry_points.cache_clear()
    try:
        words = ["play", "number-game", "--controller", "drawn", "--backend", "scripted", "--rounds", "1", "--debug"]
        with pytest.raises(SystemExit) as exit_:
            whet_main([*words, "--output", str(tmp_path / "out")])
        assert exit_.value.code == 0 and "takes card" in capsys.readouterr().out
        with pytest.raises(SystemExit) as exit_:
            whet_main(["play", "number-gam"])
        assert exit_.value.code == 2
        assert capsys.readouterr().err.startswith("ConfigError: whet play: number-gam;")
    finally:
        registry.entry_points.cache_clear()


def test_an_interrupted_game_leaves_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(question: Question) -> str:
        raise KeyboardInterrupt

    monkeypatch.setitem(play.AGENTS, "number-game", (number_agent.NumberAgent, interrupt))
    with pytest.raises(KeyboardInterrupt):
        game("number-game", tmp_path)
    assert result_in(tmp_path / "out")["error"] == "KeyboardInterrupt"
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"result: {tmp_path}/out/result_")


def test_each_game_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [play.new_folder("a", tmp_path / "runs").name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    (tmp_path / "file").write_text("")
    with raises(StorageError, str(tmp_path / "file" / "a"), change=re.compile("--output")):
        play.new_folder("a", tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        game("number-game", tmp_path, rounds=1, output=None)
    assert len([*(tmp_path / "runs/play").glob("*/result_*.json")]) == 2


def test_the_hint_of_a_refusal_fits_the_question() -> None:
    image, words, compact = (
        Question("decide", "x", b"png"),
        Question("decide", "x"),
        Question("decide", "x", None, False),
    )
    assert backends.refused_hint(image).endswith("or play with --observe words")
    assert "--observe words" not in backends.refused_hint(words) and "vocabulary" in backends.refused_hint(words)
    assert backends.refused_hint(compact) == ""


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(StorageError, str(tmp_path / "file" / "out"), change=re.compile("--output")):
        game("number-game", tmp_path, output=tmp_path / "file" / "out")
    with raises(StorageError, str(tmp_path / "file" / "rows.jsonl"), change=re.compile("--collect")):
        game("number-game", tmp_path, collect=tmp_path / "file" / "rows.jsonl")
    assert "StorageError" in result_in(tmp_path / "out")["error"]


def test_the_answers_of_a_model_are_read_leniently() -> None:
    for answer, place in (
        ("<action>select(2)</action>", 2),
        ("first <action>select(1)</action>, rather <action> select( 0 ) </action>", 0),
        ("I choose select(1).", 1),
        ("选择的索引: 2", 2),
        ("The index is 1", 1),
        ("<action>select(3)</action>", None),
        ("<action>click(1, 2)</action>", None),
        ("select()", None),
        ("", None),
        ("9" * 100_000, None),
    ):
        assert number_agent.read_place(answer, None) == place, answer
    assert [number_agent.is_yes(text) for text in ("Yes.", "是", "no", "不是", "No, yes", "", "yesterday")] == [
        True,
        True,
        False,
        False,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("controller", ["drawn", "chromium"])
def test_without_pillow(controller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    command = re.compile(r"examples/environments\[devices\]")
    with raises(DeviceError, re.compile("Pillow"), change=command):
        game("number-game", tmp_path, controller=controller)
    with raises(DeviceError, re.compile("Pillow"), change=command):
        DrawnNumberGame(0).png()
    assert not (tmp_path / "out").exists()


def test_no_browser_names_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(DeviceError, "Chromium", change=re.compile("apt-get install chromium.* --browser PATH")):
        game("number-game", tmp_path, controller="chromium")
    with raises(DeviceError, "--browser", found="/nowhere"):
        game("number-game", tmp_path, controller="chromium", browser="/nowhere")
    with raises(DeviceError, "adb", change=re.compile("install adb")):
        game("number-game", tmp_path, controller="adb")
    assert backends.BACKENDS == ("openai", "ollama", "scripted") and os.environ["PATH"] == str(tmp_path)
