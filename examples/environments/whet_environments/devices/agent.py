# SPDX-License-Identifier: Apache-2.0
"""The parts that both agents share: the tools of a game, the files that it leaves, questions, waiting."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from whet.errors import StorageError
from whet_environments.devices.backends import Backend, Question
from whet_environments.devices.controllers import Controller
from whet_environments.devices.errors import BackendDeadlineError, DeviceError
from whet_environments.devices.layout import HEIGHT, WIDTH, Place
from whet_environments.devices.reading import NumberState, TreeState, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

Observe = Literal["image", "words", "compact"]
APPEAR_SECONDS = 15.0  # until the own page has begun
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Setup:
    """A game on a device, and the model that plays it."""

    controller: Controller
    backend: Backend
    output: Path
    rounds: int = 10
    observe: Observe = "image"  # or the text of the text game, read from the pixels
    checks_by_model: bool = True  # the model tells whether a tap changed a colour; otherwise the pixels do
    settle_seconds: float = 0.0  # from a tap to the next screenshot
    is_own_page: bool = True  # one of `pages/`, which the pixels tell everything about
    lang: str = "en"
    debug: bool = False
    collect: Path | None = None
    say: Callable[[str], None] = print
    notes: Mapping[str, Any] = field(default_factory=dict)  # stored in the result, such as the seed


class Agent(ABC):
    """Plays a game once. A subclass has `game`, `_play` and `_finish`."""

    game: str

    def __init__(self, setup: Setup) -> None:
        self.setup, self.controller = setup, setup.controller
        self.turns = list[dict[str, Any]]()
        self.num_calls = self.num_late = self.num_collected = self.num_unlabelled = 0
        self.result_file: Path | None = None  # once it is written
        self._make_folder(setup.output)

    @abstractmethod
    def _play(self) -> None:
        """Plays all rounds."""

    @abstractmethod
    def _finish(self) -> dict[str, Any]:
        """Reads the end of the game.  Returns its numbers."""

    def play(self) -> dict[str, Any]:
        """Plays the game and writes `result_*.json`, which also names an error that ended it.  Returns the result.

        Raises: DeviceError, BackendError."""
        start, setup = time.monotonic(), self.setup
        result: dict[str, Any] = {
            "game": self.game,
            "device": self.controller.name,
            "backend": setup.backend.name,
            "model": setup.backend.model,
            "observe": setup.observe,
            "rounds": setup.rounds,
            **setup.notes,
            "error": None,
        }
        try:
            self.size = self.controller.size()
            self._play()
            result |= self._finish()
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            result |= {"model_calls": self.num_calls, "late_answers": self.num_late, "turns": self.turns}
            if setup.collect:
                result |= {"collected_rows": self.num_collected, "rows_without_label": self.num_unlabelled}
            result["seconds"] = round(time.monotonic() - start, 2)
            now = datetime.now().astimezone()
            result["time"] = now.isoformat(timespec="seconds")
            self.result_file = self._write(f"result_{now:%Y%m%d_%H%M%S}.json", json.dumps(result, indent=1).encode())
        return result

    def ask(self, question: Question) -> str | None:
        """Returns the answer of the model; None if it is late, which costs a try.  Raises: BackendError."""
        self.num_calls += 1
        try:
            answer = self.setup.backend.ask(question)
        except BackendDeadlineError as error:
            self.num_late += 1
            self.setup.say(f"no answer: {error}")
            return None
        if self.setup.debug:
            self.setup.say(f"--- {question.kind}: the model answers ---\n{answer}\n---")
        return answer

    def screenshot(self, name: str) -> bytes:
        """Takes a screenshot and writes it to a file."""
        png = self.controller.screenshot()
        path = self._write(name, png)
        if self.setup.debug:
            self.setup.say(f"screenshot: {path}")
        return png

    def tap(self, place: Place) -> None:
        """Touches a place of the layout of 720 x 1280, on a screen of any size, and waits."""
        width, height = self.size
        self.tap_pixel(round(place[0] * width / WIDTH), round(place[1] * height / HEIGHT))

    def tap_pixel(self, x: int, y: int) -> None:
        """Touches a pixel, at the edge if it is outside, and waits."""
        width, height = self.size
        self.controller.tap(min(max(x, 0), width - 1), min(max(y, 0), height - 1))
        time.sleep(self.setup.settle_seconds)

    def wait_until_begun(self, read: Callable[[Image], NumberState | TreeState | None]) -> None:
        """Waits until the screen shows the begin of a game of the own page, and not an earlier page.

        Raises: DeviceError after 15 seconds."""
        if not self.setup.is_own_page:
            return
        end = time.monotonic() + APPEAR_SECONDS
        while True:
            png = self.controller.screenshot()
            state = read(open_image(png))
            if state is not None and state.is_new:
                return
            if time.monotonic() > end:
                path = self._write("not_begun.png", png)
                raise DeviceError(
                    self.controller.name,
                    f"no new game of the {self.game} after {APPEAR_SECONDS:g} s, see {path}",
                    change="unlock the phone, see that its browser opens the page, or play what it shows with "
                    "--page none",
                )
            time.sleep(POLL_SECONDS)

    def collect(self, row: Mapping[str, Any], screenshot: str) -> None:
        """Appends a row to the data set; one without an answer is counted and left out."""
        path = self.setup.collect
        if path is None:
            return
        if row["answer"] is None:
            self.num_unlabelled += 1
            return
        shown = os.path.relpath(self.setup.output / screenshot, path.parent)
        line = json.dumps({**row, "screenshot": shown}, ensure_ascii=False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            raise StorageError(
                str(path), f"cannot be written: {error}", change="choose another file with --collect"
            ) from error
        self.num_collected += 1

    def _write(self, name: str, data: bytes) -> Path:
        path = self.setup.output / name
        try:
            path.write_bytes(data)
        except OSError as error:
            raise StorageError(
                str(path), f"cannot be written: {error}", change="choose another folder with --output"
            ) from error
        return path

    @staticmethod
    def _make_folder(folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                str(folder), f"cannot be made: {error}", change="choose another folder with --output"
            ) from error
