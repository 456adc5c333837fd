# SPDX-License-Identifier: Apache-2.0
"""The whole way: clients of ADB, the device server, the games' pages in Chromium, and models that are served."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from whet_environments.devices import layout as at, play
from whet_environments.devices.adb_server import AdbServer
from whet_environments.devices.chromium import NAMES, ChromiumScreen
from whet_environments.devices.controllers import AdbController
from whet_environments.devices.drawn import DrawnNumberGame, DrawnTreeGame
from whet_environments.devices.errors import DeviceError
from whet_environments.devices.page_server import PageServer
from whet_environments.devices.reading import open_image, read_number_game, read_tree_game

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "serving"))
sys.path.insert(0, str(Path(__file__).parent))
from model_server import serving
from server_processes import started

HERE = Path(__file__).parent
Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="needs Chromium: apt-get install chromium"),
]
NEEDS_ADB = pytest.mark.skipif(shutil.which("adb") is None, reason="needs adb: apt-get install adb")
OPTIONS: dict[str, Any] = {
    "controller": "adb",
    "serial": None,
    "backend": "openai",
    "url": None,
    "model": "m",
    "observe": "image",
    "check": None,
    "page": None,
    "browser": None,
    "rounds": 10,
    "seed": 0,
    "lang": "en",
    "temperature": 0.7,
    "call_seconds": 60.0,
    "settle": 0.05,
    "collect": None,
    "debug": False,
}


@pytest.fixture(scope="module")
def pages() -> Iterator[PageServer]:
    with PageServer() as server:
        yield server


@pytest.fixture(scope="module")
def screen(pages: PageServer) -> Iterator[ChromiumScreen]:
    with closing(ChromiumScreen(pages.url("number-game", 0))) as shown:
        yield shown


@pytest.fixture
def phone(screen: ChromiumScreen, pages: PageServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdbServer]:
    """A device that shows the number game of seed 1; adb has a server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(free.getsockname()[1]))
    screen.open(pages.url("number-game", 1))
    with AdbServer(screen) as device:
        yield device
    if shutil.which("adb"):
        subprocess.run(["adb", "kill-server"], timeout=20, capture_output=True)


@NEEDS_ADB
@pytest.mark.parametrize("backend", ["openai", "ollama"])
def test_ten_rounds_by_adb_in_chromium(phone: AdbServer, screen: ChromiumScreen, backend: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "serial": phone.serial, "backend": backend, "output": tmp_path, "debug": True, "seed": 7}
    with serving() as server:
        result = play.play_game("number-game", **{**options, "url": server.url, "collect": tmp_path / "rows.jsonl"})
    assert (result["completed_rounds"], result["tries"], result["error"]) == (10, 10, None)
    assert result["final_score"] == result["score_on_screen"] == 200 and result["model_calls"] == 21
    truth = screen.evaluate("state()")
    assert (truth["score"], truth["isOver"]) == (200, True)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 10
    assert {Image.open(path).size for path in tmp_path.glob("*.png")} == {(720, 1280)}


@NEEDS_ADB
def test_the_tree_game_by_adb_in_chromium(phone: AdbServer, screen: ChromiumScreen, tmp_path: Path) -> None:
    with serving() as server:
        options = {
            **OPTIONS,
            "serial": phone.serial,
            "url": server.url,
            "output": tmp_path,
            "debug": True,
            "lang": "zh",
        }
        result = play.play_game("tree-game", **options)
    assert (result["completed_rounds"], result["right_decisions"], result["steps"]) == (10, 10, 20)
    truth = screen.evaluate("state()")
    assert (truth["power"], truth["isOver"]) == (result["final_power"], True) and result["gain"] > 0
    history = json.loads((tmp_path / "debug_screenshots" / "action_history.json").read_text())
    assert [entry["step"] for entry in history] == list(range(1, 21))


@pytest.mark.parametrize("game", ["number-game", "tree-game"])
def test_both_games_in_chromium_by_their_pixels(game: str, tmp_path: Path) -> None:
    options = {
        **OPTIONS,
        "controller": "chromium",
        "backend": "scripted",
        "model": None,
        "output": tmp_path,
        "settle": None,
    }
    result = play.play_game(game, **options)
    assert result["completed_rounds"] == 10 and result["error"] is None
    assert result["right_cards" if game == "number-game" else "right_decisions"] == 10


def play_round(screenshot: Any, tap: Any) -> None:
    """Plays a round by the rule, with a client's functions."""
    state = read_number_game(screenshot())
    assert state is not None and state.taken is None
    tap(at.CARDS_X[state.right_place], at.CARDS_Y)
    after = read_number_game(screenshot())
    assert after is not None and after.is_right and after.score == state.score + 10
    tap(*at.NEXT)


def test_a_round_by_adb_shell(phone: AdbServer, screen: ChromiumScreen) -> None:
    module = pytest.importorskip("adb_shell.adb_device", reason="needs adb-shell: pip install adb-shell")
    client = module.AdbDeviceTcp("127.0.0.1", phone.port, default_transport_timeout_s=20)
    assert client.connect()
    try:
        play_round(
            lambda: open_image(client.exec_out("screencap -p", decode=False)),
            lambda x, y: client.shell(f"input tap {x} {y}"),
        )
    finally:
        client.close()
    assert screen.evaluate("state()")["round"] == 2


@NEEDS_ADB
def test_a_round_by_adbutils(phone: AdbServer, screen: ChromiumScreen, pages: PageServer) -> None:
    adbutils = pytest.importorskip("adbutils", reason="needs adbutils: pip install adbutils")
    server = AdbController(phone.serial)  # starts adb's server, and connects
    try:
        client = adbutils.AdbClient(port=int(os.environ["ANDROID_ADB_SERVER_PORT"])).device(phone.serial)
        assert tuple(client.window_size()) == (720, 1280) and client.prop.model == "whet"
        play_round(lambda: client.screenshot().convert("RGB"), client.click)
        client.open_browser(pages.url("tree-game", 2))
        state = read_tree_game(client.screenshot().convert("RGB"))
        assert state is not None and state.power == screen.evaluate("state()")["power"]
        assert client.shell2("none").returncode == 127
    finally:
        server.close()


def test_the_pages_follow_their_address(screen: ChromiumScreen, pages: PageServer) -> None:
    def state(url: str) -> Any:
        screen.open(url)
        return screen.evaluate("state()")

    deals = [tuple(state(pages.url("number-game", seed))["cards"]) for seed in (*range(12), 0)]
    assert deals[0] == deals[12] and len(set(deals)) > 8
    assert all(len(set(cards)) == 3 and all(1 <= card <= 9 for card in cards) for cards in deals)
    screen.open(pages.url("tree-game", 3, rounds=2, lang="zh"))
    for number in (1, 2):
        screen.tap(*at.AXE)
        found = read_tree_game(open_image(screen.png()))
        assert found is not None and list(found.changes) == screen.evaluate("state()")["changes"]
        assert (found.number, found.rounds) == (number, 2)
        screen.tap(*at.DECOMPOSE)
    assert (
        screen.evaluate("state()")["isOver"] and screen.evaluate("document.querySelector('text').textContent") == "妖力"
    )
    screen.tap(*at.AXE)
    screen.tap(-5, 99999)  # beside the screen
    assert screen.evaluate("state()")["isOver"]


def test_a_seed_is_the_same_game_in_chromium_and_drawn(screen: ChromiumScreen, pages: PageServer) -> None:
    for seed in (0, 5, 2**31 + 7, 2**32 + 5):
        screen.open(pages.url("number-game", seed))
        drawn = DrawnNumberGame(seed)
        for _ in range(3):
            state = screen.evaluate("state()")
            assert (state["cards"], state["lamp"]) == (drawn.game.cards, drawn.game.lamp)
            for each in (screen, drawn):
                each.tap(at.CARDS_X[0], at.CARDS_Y)
                each.tap(*at.NEXT)
        screen.open(pages.url("tree-game", seed))
        tree = DrawnTreeGame(seed)
        for each in (screen, tree):
            each.tap(*at.AXE)
        state = screen.evaluate("state()")
        assert (state["power"], tuple(state["changes"])) == (tree.game.power, tuple(tree.game.changes))


def test_keys_and_a_page_that_hangs(screen: ChromiumScreen, pages: PageServer) -> None:
    screen.open(pages.url("number-game", 1))
    screen.open(pages.url("number-game", 2))
    screen.key("KEYCODE_BACK")
    assert "seed=1" in screen.evaluate("location.href")
    screen.tap(at.CARDS_X[0], at.CARDS_Y)
    screen.key("KEYCODE_REFRESH")
    screen.key("KEYCODE_HOME")
    assert screen.evaluate("state()")["taken"] is None
    with raises(DeviceError, found="file:///etc/hosts", expected=re.compile("https")):
        screen.open("file:///etc/hosts")
    with raises(DeviceError, re.compile("Chromium"), found=re.compile("http://127.0.0.1:9/: .*ERR_")):
        screen.open("http://127.0.0.1:9/")


def test_a_browser_that_dies_or_hangs(pages: PageServer) -> None:
    shown = ChromiumScreen(pages.url("number-game", 1), call_seconds=2.0)
    try:
        start = time.monotonic()
        with raises(DeviceError, "Chromium", found=re.compile(r"evaluate .*\b2 s")):
            shown.evaluate("new Promise(() => 0)")
        assert time.monotonic() - start < 10
        with raises(DeviceError, re.compile("Chromium"), found=re.compile("screenshot: .*closed")):
            shown.png()
    finally:
        shown.close()
        shown.close()
    assert time.monotonic() - start < 10
    with raises(DeviceError, re.compile("Chromium .*false"), change=re.compile("--browser")):
        ChromiumScreen(pages.url("number-game", 1), browser=shutil.which("false"))


@NEEDS_ADB
def test_the_device_command_and_the_play_command(phone: AdbServer, tmp_path: Path) -> None:
    """Both programs as a user starts them: a device in one process, an agent in another."""
    folder = HERE.parents[1] / "examples" / "environments"
    code = f"import sys; sys.path.append({str(folder)!r})\nfrom whet_environments.devices import play\n"
    code += "play.main(sys.argv[1:])"
    words = [sys.executable, "-c", code]
    device = subprocess.Popen([*words, "device", "--port", "0", "--seconds", "90"], stdout=subprocess.PIPE, text=True)
    try:
        assert device.stdout is not None
        serial = device.stdout.readline().split()[1].rstrip(";")
        command = [*words, "number-game", "--controller", "adb", "--serial", serial, "--backend", "scripted"]
        command += ["--rounds", "2", "--settle", "0.05", "--output", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=80)
        assert done.returncode == 0 and "score 120 after 2 rounds" in done.stdout, done.stderr
    finally:
        device.kill()
        device.wait(10)
        device.stdout.close()


def test_a_served_model_plays_in_chromium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was shown perfect play reads the state as text, behind `whet serve`."""
    spec = importlib.util.spec_from_file_location("games_example", HERE.parents[1] / "examples" / "games.py")
    assert spec is not None and spec.loader is not None
    games = importlib.util.module_from_spec(spec)
    sys.modules["games_example"] = games
    spec.loader.exec_module(games)
    plan = replace(games.PLANS["number_game"], noise=0.0, warm_up_steps=150)
    monkeypatch.setitem(games.PLANS, "number_game", plan)
    monkeypatch.setattr(games, "NUM_TRAINED", 300)
    changes = [
        "trainer.total_steps=1",
        "data.train_batch_size=2",
        "rollout.n=2",
        "trainer.val_freq=0",
        "trainer.logger=[jsonl]",
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny
    games.learn("number_game", tmp_path / "run", 0, changes)
    torch.set_num_threads(threads)
    options = {**OPTIONS, "controller": "chromium", "observe": "compact", "temperature": 0.0, "settle": None}
    with started(tmp_path / "run" / "sft_model", "--name", "player") as server:
        options |= {"url": server.address, "model": "player", "output": tmp_path / "out"}
        result = play.play_game("number-game", **options)
    assert result["error"] is None and result["completed_rounds"] == 10 and result["model_calls"] == result["tries"]
    assert result["right_cards"] >= 7  # 3 by chance
