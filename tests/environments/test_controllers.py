# SPDX-License-Identifier: Apache-2.0
"""Controllers: the program adb in all its moods (a script in its place), and real adb in front of a drawn screen."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from whet_environments.devices import play
from whet_environments.devices.adb_server import AdbServer
from whet_environments.devices.controllers import STATES, AdbController, ScreenController
from whet_environments.devices.drawn import DrawnNumberGame
from whet_environments.devices.errors import DeviceError
from whet_environments.devices.reading import open_image, read_number_game

from tests.raising import raises
from whet.errors import ConfigError

pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")

NEEDS_ADB = pytest.mark.skipif(shutil.which("adb") is None, reason="needs adb: apt-get install adb")


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts a script in place of adb; yields its file."""
    file = tmp_path / "bin" / "adb"
    file.parent.mkdir()
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    yield file


def write(file: Path, cases: str) -> None:
    file.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\n*) echo "unknown: $*" >&2; exit 1;;\nesac\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def devices(*lines: str) -> str:
    listed = "".join(f"{line}\n" for line in ("List of devices attached", *lines, ""))
    return f"devices) cat <<'END'\n{listed}END\n;;"


@pytest.mark.parametrize(
    ("serial", "lines", "key", "found", "expected", "change"),
    [
        (None, [], "adb", "none", "", "whet play device"),
        (None, ["A\tdevice", "B\tdevice"], "adb", r"2 .*A \(device\), B \(device\)", "", "--serial"),
        ("R58M1", ["R58M2\tdevice"], "adb", r"R58M2 \(device\)", "R58M1", "--serial R58M2"),
        ("A", ["A\tunauthorized"], "device A", "unauthorized", "", STATES["unauthorized"]),
        ("A", ["A\toffline"], "device A", "offline", "", "adb reconnect offline"),
    ],
)
def test_devices_that_are_not_ready(
    pretend: Path, serial: str | None, lines: list[str], key: str, found: str, expected: str, change: str
) -> None:
    write(pretend, devices(*lines))
    fields = {"found": found, "expected": expected, "change": change}
    with raises(DeviceError, key, **{name: re.compile(text) for name, text in fields.items()}):
        AdbController(serial)


def test_the_only_device_is_taken(pretend: Path) -> None:
    size = "'-s A shell wm size') echo 'Physical size: 1080x2400'; echo 'Override size: 720x1600';;"
    listed = devices("B\toffline", "A\tdevice")
    write(pretend, f"{listed}\n{size}")
    phone = AdbController()
    assert phone.name == "A" and phone.size() == (720, 1600)
    phone.close()


def test_answers_that_are_none(pretend: Path) -> None:
    cases = [
        devices("A\tdevice"),
        "'-s A exec-out screencap -p') echo 'screencap: not found';;",
        "'-s A shell wm size') echo 'cmd: no service';;",
        "'-s A shell am start'*) echo 'Error: Activity not started';;",
        "'-s A shell monkey -p com.none'*) echo '** No activities found to run, monkey aborted.';;",
        "'-s A shell input tap 1 2') echo 'error: closed' >&2; exit 1;;",
    ]
    write(pretend, "\n".join(cases))
    phone = AdbController("A")
    for call, key, found in (
        (phone.screenshot, r"screencap on A", "21 .*not found"),
        (phone.size, r"`wm size` on A", "'cmd: no service'"),
        (lambda: phone.start("http://x"), "A: http://x", "Error: Activity not started"),
        (lambda: phone.start("com.none"), "A: com.none", "No activities found"),
        (lambda: phone.tap(1, 2), "`adb shell input tap 1 2` on A", "1: error: closed"),
    ):
        with raises(DeviceError, key, found=re.compile(found)):
            call()


def test_a_device_that_hangs(pretend: Path) -> None:
    listed = devices("A\tdevice")
    write(pretend, f"{listed}\n'-s A exec-out screencap -p') exec sleep 30;;")
    phone = AdbController("A", call_seconds=0.5)
    start = time.monotonic()
    with raises(DeviceError, "`adb exec-out screencap -p` on A", found=re.compile(r"\b0\.5 s")):
        phone.screenshot()
    assert time.monotonic() - start < 25.0  # not the 30 that it sleeps


def test_an_address_without_a_device(pretend: Path) -> None:
    write(pretend, "'connect 10.0.0.9:5555') echo \"failed to connect to '10.0.0.9:5555': Connection refused\";;")
    with raises(DeviceError, "10.0.0.9:5555", found=re.compile("failed"), change=re.compile("adb tcpip 5555")):
        AdbController("10.0.0.9:5555")


def test_a_screen_in_this_process() -> None:
    screen = DrawnNumberGame(1)
    device = ScreenController(screen, "drawn")
    assert device.size() == (720, 1280)
    device.key("KEYCODE_BACK")
    device.start("http://127.0.0.1/number_game.html?seed=9&rounds=3")
    assert screen.game.cards == DrawnNumberGame(9).game.cards
    with raises(DeviceError, "drawn", found="com.tencent.mm", change=re.compile("--controller adb")):
        device.start("com.tencent.mm")
    device.close()


@pytest.fixture
def own_adb_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets adb have a server of its own for the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(port))
    yield
    subprocess.run(["adb", "kill-server"], timeout=20, capture_output=True)


@NEEDS_ADB
def test_real_adb_plays_on_a_drawn_screen(own_adb_server: None, tmp_path: Path) -> None:
    screen = DrawnNumberGame(1)
    with AdbServer(screen) as device:
        phone = AdbController(device.serial)
        try:
            state = read_number_game(open_image(phone.screenshot()))
            assert state is not None and list(state.cards) == screen.game.cards
            phone.reach(4321)
            phone.start("http://127.0.0.1:4321/number_game.html?seed=2&rounds=5")
            assert screen.game.rounds == 5
            phone.tap(135, 905)
            assert screen.taken == 0
            with raises(DeviceError, re.compile("adb reverse tcp:1 tcp:2"), found=re.compile("same port")):
                phone._adb("reverse", "tcp:1", "tcp:2")
        finally:
            phone.close()
        options = {"controller": "adb", "serial": device.serial, "backend": "scripted", "rounds": 2, "settle": 0.0}
        others = dict.fromkeys(("url", "model", "check", "page", "browser", "collect"))
        common = {"observe": "image", "lang": "en", "temperature": 0.7, "call_seconds": 5.0, "debug": False, "seed": 6}
        result = play.play_game("number-game", **options, **others, **common, output=tmp_path)
        assert (result["final_score"], result["device"], result["error"]) == (120, device.serial, None)
    listed = subprocess.run(["adb", "devices"], timeout=20, capture_output=True, text=True, check=True).stdout
    assert device.serial not in listed  # it was connected for the game, and disconnected after it


def test_a_device_for_other_clients(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        play.main(["device", "tree-game", "--screen", "drawn", "--port", "0", "--seconds", "0.1"])
    assert exit_.value.code == 0 and "serial 127.0.0.1:" in capsys.readouterr().out
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with raises(ConfigError, "--port", found=re.compile(f"^{port}: ")):
            play.main(["device", "--screen", "drawn", "--port", str(port)])
    known, near = re.compile("number-game, tree-game"), re.compile("'tree-game'")
    with raises(ConfigError, "GAME", found="tree", expected=known, change=near):
        play.main(["device", "tree"])
