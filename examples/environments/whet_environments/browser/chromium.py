# SPDX-License-Identifier: Apache-2.0
"""Chromium processes that episodes share: each episode has a context of its own (cookies, storage, pages).

A process has a temporary folder with its profile, and ends with the last of its episodes; the folder goes with it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from whet.errors import ConfigError

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PREFIX = "whet-browser-"
WITH_HOST, NO_HOST = ("http", "https", "ws", "wss"), ("data", "blob", "about")
CLOSE_SECONDS = 1.5  # for the browser, and again for its driver; then they are killed
MAX_PARENT = 32  # bytes: the address of a socket has 107, of which the names below need 72
NOWHERE = "http://127.0.0.1:1"  # a proxy that does not exist: what is not allowed ends there, redirects and sockets too
ARGUMENTS = ("--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@dataclass(frozen=True)
class Launch:
    """How Chromium is started: its program, the hosts that it may reach, episodes of a process."""

    program: str
    hosts: tuple[str, ...]
    episodes: int


def find_chromium(given: str) -> str:
    """The program of Chromium.  Raises: ConfigError where there is none, or playwright is not installed."""
    try:
        import playwright.async_api  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "package playwright",
            "not installed",
            change="run pip install './examples/environments[browser]' (it uses the system's Chromium: no download)",
        ) from error
    found = shutil.which(given) if given else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise ConfigError(
            "environment.options.chromium",
            given or f"none of {', '.join(NAMES)} is on the PATH",
            "the program of Chromium",
            "install it (apt-get install chromium), or set the key to its path",
        )
    return found


@dataclass(eq=False)
class Chromium:
    """A process of Chromium with its driver and its folder."""

    folder: Path
    driver: Any  # playwright's
    browser: Any
    num_episodes: int = 0
    is_broken: bool = False  # a context could not be closed

    @property
    def is_alive(self) -> bool:
        """Whether it can open contexts."""
        return not self.is_broken and bool(self.browser.is_connected())

    @classmethod
    async def start(cls, launch: Launch) -> Chromium:
        """Starts a process. A folder that a killed process left behind is removed first."""
        from playwright.async_api import async_playwright

        _sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_parent()))
        driver = None
        try:
            with _temporary_folder(folder):
                driver = await async_playwright().start()
            browser = await driver.chromium.launch(
                executable_path=launch.program,
                args=list(ARGUMENTS),
                chromium_sandbox=os.geteuid() != 0,  # it does not start with one as root
                proxy={"server": NOWHERE, "bypass": ",".join(launch.hosts)},
                env={**os.environ, "TMPDIR": str(folder), "HOME": str(folder)},
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
            )
        except BaseException:
            await _end(folder, driver, None)
            raise
        return cls(folder, driver, browser)

    async def close(self) -> None:
        """Ends the process, and removes its folder."""
        await _end(self.folder, self.driver, self.browser)


@dataclass(eq=False)
class Chromiums:
    """The processes of an event loop. `open` gives a context in one of them, `release` gives it back."""

    launch: Launch
    running: list[Chromium] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def acquire(self) -> Chromium:
        """A process with room for an episode, started if there is none."""
        async with self.lock:
            for each in self.running:
                if each.is_alive and each.num_episodes < self.launch.episodes:
                    break
            else:
                each = await Chromium.start(self.launch)
                self.running.append(each)
            each.num_episodes += 1
            return each

    async def release(self, used: Chromium) -> None:
        """Ends the use of an episode; the last one ends the process."""
        used.num_episodes -= 1
        if used.num_episodes == 0:
            self.running.remove(used)
            await asyncio.shield(used.close())


_OF_LOOPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Launch, Chromiums]] = weakref.WeakKeyDictionary()


def chromiums(launch: Launch) -> Chromiums:
    """The processes of the running event loop with these settings."""
    own = _OF_LOOPS.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault(launch, Chromiums(launch))


def processes_of(folder: Path) -> list[int]:
    """The ids of the processes whose command names a folder: the processes of one Chromium."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


async def _end(folder: Path, driver: Any, browser: Any) -> None:
    """Closes the browser with deadlines, kills the processes that remain, and removes the folder."""
    for end in (browser.close if browser else None, driver.stop if driver else None):
        if end is not None:
            with suppress(Exception):  # one that crashed, or hangs
                async with asyncio.timeout(CLOSE_SECONDS):
                    await end()
    for process in processes_of(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _parent() -> Path:
    """The folder for temporary files; /tmp where its name is too long for the socket that Chromium makes there."""
    own = Path(tempfile.gettempdir())
    return own if len(os.fsencode(own)) <= MAX_PARENT or not Path("/tmp").is_dir() else Path("/tmp")


def _sweep() -> None:
    """Removes the folders of processes that have ended without it."""
    for folder in _parent().glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[None]:
    """Lets the driver, which makes the profile, put its files into a folder."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before


def is_allowed(url: str, hosts: Iterable[str]) -> bool:
    """Tells whether a page may load an address: of the hosts, or without a host (data:, blob:, about:). No files."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:  # not an address
        return False
    return parts.scheme in NO_HOST or (parts.scheme in WITH_HOST and host in hosts)
