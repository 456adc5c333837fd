# SPDX-License-Identifier: Apache-2.0
"""A page in Chromium as the screen of a phone: 720 x 1280 pixels, two a CSS pixel, with a browser's bars on top."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from whet_environments.devices.drawn import to_png
from whet_environments.devices.errors import INSTALL, DeviceError, check_pillow
from whet_environments.devices.layout import BARS, HEIGHT, WIDTH

if TYPE_CHECKING:
    from playwright.sync_api import Page

T = TypeVar("T")
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCALE = 2  # pixels a CSS pixel
START_SECONDS, CALL_SECONDS, CLOSE_SECONDS = 60.0, 20.0, 15.0
NO_BROWSER = (
    "install it (apt-get install chromium), or name it with --browser PATH; --controller drawn needs no browser"
)
NO_START = "try it by itself ({program} --version), name another one with --browser PATH, or use --controller drawn"


def find_browser(path: str | None = None) -> str:
    """Returns the program of Chromium.  Raises: DeviceError if there is none."""
    found = shutil.which(path) if path else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and path:
        raise DeviceError("--browser", path, "the path of Chromium, such as /usr/bin/chromium", "correct it")
    if found is None:
        raise DeviceError("Chromium", f"none of {', '.join(NAMES)} is on the PATH", change=NO_BROWSER)
    return found


class ChromiumScreen:
    """A `Screen` that shows a page. All calls run in one thread of its own, each with a deadline."""

    size = (WIDTH, HEIGHT)

    def __init__(self, url: str, browser: str | None = None, call_seconds: float = CALL_SECONDS) -> None:
        check_pillow()
        self._program, self._seconds = find_browser(browser), call_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chromium")
        self._playwright: Any = None
        self._browser: Any = None
        self._pid: int | None = None  # of the browser
        try:
            self._run(self._start, "start", START_SECONDS)
            self.open(url)
        except BaseException:
            self.close()
            raise

    def _run(self, function: Callable[[], T], what: str, seconds: float | None = None) -> T:
        try:
            return self._thread.submit(function).result(seconds or self._seconds)
        except FutureTimeoutError:
            self._kill()  # which ends the call that hangs
            raise DeviceError(
                "Chromium",
                f"did not {what} within {seconds or self._seconds:g} s, and was ended",
                change="see that the page answers, and that the machine has a free core",
            ) from None
        except DeviceError:
            raise
        except Exception as error:  # playwright's, and those of its driver
            raise DeviceError(
                f"Chromium ({self._program})",
                f"cannot {what}: {_first_line(error)}",
                change="see that the page answers",
            ) from error

    def _start(self) -> None:
        try:
            from playwright.sync_api import sync_playwright
        except ImportError as error:
            raise DeviceError("package playwright", "not installed", change=f"run {INSTALL}") from error
        self._playwright = sync_playwright().start()
        with suppress(RuntimeError):  # calls raise their errors; Ctrl-C, which also ends the driver, leaves others
            asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        is_root = os.geteuid() == 0
        try:
            self._browser = self._playwright.chromium.launch(
                executable_path=self._program,
                chromium_sandbox=not is_root,
                args=["--disable-dev-shm-usage", "--disable-gpu"],
                timeout=START_SECONDS * 1000,
            )
        except Exception as error:  # playwright's
            raise DeviceError(
                f"Chromium ({self._program})",
                f"cannot start: {_first_line(error)}",
                "a program of Chromium that answers",
                NO_START.format(program=self._program),
            ) from error
        processes = self._browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self._pid = next(each["id"] for each in processes if each["type"] == "browser")
        context = self._browser.new_context(
            viewport={"width": WIDTH // SCALE, "height": (HEIGHT - BARS) // SCALE},
            screen={"width": WIDTH // SCALE, "height": HEIGHT // SCALE},
            device_scale_factor=SCALE,
            is_mobile=True,
            has_touch=True,
        )
        context.set_default_timeout(self._seconds * 900)
        self._page: Page = context.new_page()

    def open(self, url: str) -> None:
        """Shows a page.  Raises: DeviceError if it is no address of the web, such as a file."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise DeviceError("page", url[:200], "an address of http or https", "serve the page")
        self._run(lambda: self._page.goto(url, wait_until="load"), f"open {url}")

    def png(self) -> bytes:
        """The screen as a PNG file: the page below white bars."""
        page = self._run(lambda: self._page.screenshot(type="png"), "take a screenshot")
        from PIL import Image

        image = Image.new("RGB", self.size, "white")
        image.paste(Image.open(io.BytesIO(page)).convert("RGB"), (0, BARS))
        return to_png(image)

    def tap(self, x: int, y: int) -> None:
        """Touches a pixel of the page; the bars have no effect."""
        if 0 <= x < WIDTH and BARS <= y < HEIGHT:
            self._run(lambda: self._page.touchscreen.tap(x / SCALE, (y - BARS) / SCALE), f"tap ({x}, {y})")

    def key(self, code: str) -> None:
        """Presses a key of the phone: BACK goes back, REFRESH loads the page again; others do nothing."""
        if code in ("4", "KEYCODE_BACK"):
            self._run(lambda: self._page.go_back(), "go back")
        elif code in ("285", "KEYCODE_REFRESH"):
            self._run(lambda: self._page.reload(), "load the page again")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of an expression in the page, such as `state()`."""
        return self._run(lambda: self._page.evaluate(expression), f"evaluate {expression}")

    def close(self) -> None:
        """Ends the browser; a second call does nothing."""
        if self._thread is None:
            return
        with suppress(DeviceError):  # it has gone already
            self._run(self._stop, "close", CLOSE_SECONDS)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _kill(self) -> None:
        pid, self._pid = self._pid, None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stop(self) -> None:
        browser, playwright, self._browser, self._playwright = self._browser, self._playwright, None, None
        try:
            if browser is not None:
                browser.close()
        finally:
            if playwright is not None:
                playwright.stop()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
