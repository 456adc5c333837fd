# SPDX-License-Identifier: Apache-2.0
"""Controllers of a device behind one interface: a phone by ADB, a page in Chromium, a drawn screen."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from difflib import get_close_matches
from typing import Protocol

from whet.errors import ConfigError
from whet_environments.devices.adb_server import Screen
from whet_environments.devices.chromium import ChromiumScreen
from whet_environments.devices.drawn import DRAWN
from whet_environments.devices.errors import DeviceError

CONTROLLERS = ("adb", "chromium", "drawn")
CALL_SECONDS = 30.0
PNG = b"\x89PNG\r\n\x1a\n"
NO_ADB = "install it (apt-get install adb), or use --controller chromium or drawn"
STATES = {
    "unauthorized": "allow USB debugging on its screen",
    "offline": "connect it again, or run `adb reconnect offline`",
    "no permissions": "see https://developer.android.com/studio/run/device for the rules of udev",
}


class Controller(Protocol):
    """A device with a screen. Each call ends within a deadline, or raises DeviceError with the device's name."""

    name: str

    def screenshot(self) -> bytes:
        """The screen as a PNG file."""
        ...

    def tap(self, x: int, y: int) -> None:
        """Touches the pixel (x, y)."""
        ...

    def key(self, code: str) -> None:
        """Presses a key, named as in `input keyevent`: KEYCODE_BACK, 4."""
        ...

    def size(self) -> tuple[int, int]:
        """Width and height of the screen in pixels."""
        ...

    def start(self, target: str) -> None:
        """Opens a URL, starts an activity (`package/.Activity`), or starts an app by its package."""
        ...

    def close(self) -> None:
        """Frees the device; a second call does nothing."""
        ...


class ScreenController:
    """A `Controller` of a screen in this process."""

    def __init__(self, screen: Screen, name: str) -> None:
        self.screen, self.name = screen, name

    def screenshot(self) -> bytes:
        """The screen as a PNG file."""
        return self.screen.png()

    def tap(self, x: int, y: int) -> None:
        """Touches the pixel (x, y)."""
        self.screen.tap(x, y)

    def key(self, code: str) -> None:
        """Presses a key."""
        self.screen.key(code)

    def size(self) -> tuple[int, int]:
        """Width and height of the screen in pixels."""
        return self.screen.size

    def start(self, target: str) -> None:
        """Opens a URL."""
        if "://" not in target:
            raise DeviceError(self.name, target, "a URL, as it has no apps", "give a URL, or use --controller adb")
        self.screen.open(target)

    def close(self) -> None:
        """Closes the screen if it can be closed."""
        if isinstance(self.screen, ChromiumScreen):
            self.screen.close()


class AdbController:
    """A `Controller` of a phone, an emulator or an `AdbServer`, by the program adb.

    `serial` names it as `adb devices` does; unset, the only device that is connected. An address such as
    192.168.0.7:5555 is connected first."""

    def __init__(self, serial: str | None = None, call_seconds: float = CALL_SECONDS) -> None:
        self._seconds, self._ports = call_seconds, list[int]()
        program = shutil.which("adb")
        if program is None:
            raise DeviceError("adb", "not on the PATH", change=NO_ADB)
        self._program, self.name = program, serial or "adb"
        self._is_connected_here, self._serial = False, ""
        if serial and re.fullmatch(r"[^\s]+:\d+", serial):
            self._connect(serial)
        self.name = self._serial = self._find(serial)

    def _connect(self, serial: str) -> None:
        said = self._adb("connect", serial, to_device=False).decode(errors="replace").strip()
        if "connected to" not in said:
            raise DeviceError(
                serial,
                f"adb cannot connect: {said or 'no answer'}",
                change="check the address, and that the phone allows debugging over the network (adb tcpip 5555)",
            )
        self._is_connected_here = not said.startswith("already")

    def _find(self, serial: str | None) -> str:
        """Returns the serial of a device that is ready."""
        lines = self._adb("devices", to_device=False).decode(errors="replace").splitlines()[1:]
        states = {name: state for name, _, state in (line.partition("\t") for line in lines if "\t" in line)}
        ready = [name for name, state in states.items() if state == "device"]
        if serial is None and len(ready) == 1:
            return ready[0]
        if serial in ready:
            return serial
        if serial in states:
            what = next(
                (hint for state, hint in STATES.items() if states[serial].startswith(state)), "connect it again"
            )
            raise DeviceError(f"device {serial}", states[serial], change=what)
        shown = ", ".join(f"{name} ({state})" for name, state in states.items()) or "none"
        if serial is None and ready:
            raise DeviceError("adb", f"{len(ready)} devices: {shown}", "one device", "choose one of them with --serial")
        near = get_close_matches(serial or "", ready, n=1)
        hint = f"did you mean --serial {near[0]}? " if near else ""
        raise DeviceError(
            "adb",
            f"devices: {shown}",
            f"{serial or 'a device'} that is ready",
            f"{hint}connect a phone with USB debugging, start one with `whet play device`, or use --controller "
            "chromium or drawn",
        )

    def screenshot(self) -> bytes:
        """The screen as a PNG file."""
        png = self._adb("exec-out", "screencap", "-p")
        if not png.startswith(PNG):
            raise DeviceError(
                f"screencap on {self.name}",
                f"{len(png)} bytes: {png[:80]!r}",
                "a PNG file",
                "unlock the phone, and leave screens that forbid screenshots",
            )
        return png

    def tap(self, x: int, y: int) -> None:
        """Touches the pixel (x, y)."""
        self._adb("shell", "input", "tap", str(x), str(y))

    def key(self, code: str) -> None:
        """Presses a key."""
        self._adb("shell", "input", "keyevent", shlex.quote(code))

    def size(self) -> tuple[int, int]:
        """Width and height of the screen in pixels."""
        said = self._adb("shell", "wm", "size").decode(errors="replace")
        found = re.search(r"Override size: (\d+)x(\d+)", said) or re.search(r"Physical size: (\d+)x(\d+)", said)
        if found is None:
            raise DeviceError(f"`wm size` on {self.name}", f"{said.strip()!r}", "Physical size: WIDTHxHEIGHT")
        return int(found[1]), int(found[2])

    def start(self, target: str) -> None:
        """Opens a URL in the browser, starts an activity, or starts an app by its package."""
        quoted = shlex.quote(target)
        if "://" in target:
            said = self._adb("shell", "am", "start", "-a", "android.intent.action.VIEW", "-d", quoted)
        elif "/" in target:
            said = self._adb("shell", "am", "start", "-n", quoted)
        else:
            said = self._adb("shell", "monkey", "-p", quoted, "-c", "android.intent.category.LAUNCHER", "1")
        text = said.decode(errors="replace")
        if "Error" in text or "No activities found" in text:
            raise DeviceError(
                f"{self.name}: {target}", f"cannot start: {text.strip()[-300:]}", change="check the name and the app"
            )

    def reach(self, port: int) -> None:
        """Lets the device reach 127.0.0.1:`port` of this machine under the same address."""
        self._adb("reverse", f"tcp:{port}", f"tcp:{port}")
        self._ports.append(port)

    def close(self) -> None:
        """Frees ports, and ends a connection that was made here; a second call does nothing."""
        ports, self._ports = self._ports, []
        for port in ports:
            self._try("reverse", "--remove", f"tcp:{port}")
        if self._is_connected_here:
            self._is_connected_here = False
            self._try("disconnect", self._serial, to_device=False)

    def _try(self, *words: str, to_device: bool = True) -> None:
        with suppress(DeviceError):  # the device has gone
            self._adb(*words, to_device=to_device)

    def _adb(self, *words: str, to_device: bool = True) -> bytes:
        command = [self._program, *(("-s", self._serial) if to_device else ()), *words]
        # Files, not pipes: a server that adb starts may keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors) as process:
                try:
                    code = process.wait(self._seconds)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise DeviceError(
                        f"`adb {' '.join(words)}` on {self.name}",
                        f"no end within {self._seconds:g} s",
                        change="check the cable or the network, or run `adb kill-server`",
                    ) from None
            out.seek(0)
            errors.seek(0)
            if code:
                said = (errors.read() or out.read()).decode(errors="replace").strip()
                raise DeviceError(
                    f"`adb {' '.join(words)}` on {self.name}",
                    f"status {code}: {said[-300:] or 'no message'}",
                    change="see `adb devices`",
                )
            return out.read()


def check_controller(name: str) -> None:
    """Checks the name of a controller.  Raises: ConfigError."""
    if name not in CONTROLLERS:
        near = get_close_matches(name, CONTROLLERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError("--controller", name, f"one of {', '.join(CONTROLLERS)}", hint)


def make_screen(kind: str, game: str, url: str, seed: int, rounds: int, browser: str | None = None) -> Screen:
    """Returns the screen of a game: `chromium` shows the page at `url`, `drawn` needs no browser."""
    screen: Screen = ChromiumScreen(url, browser) if kind == "chromium" else DRAWN[game](seed, rounds)
    return screen
