# SPDX-License-Identifier: Apache-2.0
"""The number game and the tree game as screenshots: of a drawn screen, or of the games' own pages in Chromium."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, ClassVar, Literal

from whet.options import Count, NonNegative
from whet.registry import register_environment
from whet_environments.actions import Action
from whet_environments.devices import layout as at
from whet_environments.devices.controllers import Controller, ScreenController, make_screen
from whet_environments.devices.drawn import PageRandom
from whet_environments.devices.errors import DeviceError
from whet_environments.devices.layout import is_inside
from whet_environments.devices.page_server import PageServer
from whet_environments.devices.reading import NumberState, TreeState, open_image, read_number_game, read_tree_game
from whet_environments.game import Context, Encoding, Game, Outcome
from whet_environments.number_game import NumberGame
from whet_environments.tree_game import TreeGame

if TYPE_CHECKING:
    from PIL.Image import Image

Device = Literal["drawn", "chromium"]
SETTLE_SECONDS, POLL_SECONDS = 5.0, 0.05  # until a page shows the new state


class OnScreen(Game):
    """A game on a screen. Taps follow the game in this process, whose state the screen must show, read from its pixels.

    A subclass has `page`, `read` and `rounds`, and taps before it plays."""

    page: ClassVar[str]  # of `PageServer`
    read: ClassVar[Callable[[Image], NumberState | TreeState | None]]

    def show(self, device: Device, browser: str | None, rounds: int, width: int) -> None:
        """Sets the device up."""
        self.render, self._device, self._browser, self._rounds, self._width = "picture", device, browser, rounds, width
        self._open, self._controller = ExitStack(), None

    def begin(self, draws: random.Random) -> None:
        """Begins the same game here and on the screen.  Raises: DeviceError."""
        seed = draws.getrandbits(31)
        super().begin(PageRandom(seed))
        self.close()
        url = ""
        if self._device == "chromium":
            url = self._open.enter_context(PageServer()).url(self.page, seed, self._rounds)
        screen = make_screen(self._device, self.page, url, seed, self._rounds, self._browser)
        self._controller: Controller = ScreenController(screen, self._device)
        self._open.enter_context(closing(self._controller))

    def tap(self, x: float, y: float) -> None:
        """Touches a place of the screen."""
        self._controller.tap(round(x), round(y))

    def picture(self) -> Image:
        """A screenshot, `width` pixels wide.  Raises: DeviceError where the screen shows another state for too long."""
        until = time.monotonic() + SETTLE_SECONDS
        while True:
            image = open_image(self._controller.screenshot())
            state = type(self).read(image)
            if self._is_shown(state):
                return image.resize((self._width, round(self._width * image.height / image.width)))
            if time.monotonic() > until:
                raise DeviceError(
                    f"screen ({self._device})",
                    f"{state and state.words()!r}",
                    f"{self.board()!r}, as in the game",
                    "see that the page is whet's own",
                )
            time.sleep(POLL_SECONDS)

    def _is_shown(self, state: NumberState | TreeState | None) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """Closes the screen."""
        self._open.close()


@register_environment("number_game_screen", shared=True)
class NumberGameScreen(OnScreen, NumberGame):
    """The number game as screenshots, `width` pixels wide: with the answers and rewards of `number_game`.

    `device=drawn` needs no browser, `chromium` shows the own page in the Chromium of the system, or in `browser`. An
    invalid answer takes a wrong card.
    """

    page, read = "number-game", staticmethod(read_number_game)

    def __init__(
        self,
        *,
        rounds: Count = 10,
        format_penalty: NonNegative = 0.5,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
        device: Device = "drawn",
        browser: str | None = None,
        width: Count = 360,
    ) -> None:
        given = {"encoding": encoding, "context": context, "max_tokens": max_tokens}
        super().__init__(rounds=rounds, format_penalty=format_penalty, **given)
        self.show(device, browser, rounds, width)

    def play(self, text: str) -> Outcome:
        """Taps a card, and goes on."""
        wrong = next(card for card in self.cards if card != self.right_card)
        self.tap(at.CARDS_X[self.cards.index(self._read(text) or wrong)], at.CARDS_Y)
        self.tap(*at.NEXT)
        return super().play(text)

    def _is_shown(self, state: NumberState | None) -> bool:
        if state is None or state.score != self.numbers()["score"]:
            return False
        is_over = self.num_played == self.rounds
        return state.is_over if is_over else (list(state.cards), state.lamp) == (self.cards, self.lamp)


@register_environment("tree_game_screen", shared=True)
class TreeGameScreen(OnScreen, TreeGame):
    """The tree game as screenshots, `width` pixels wide: with the answers and rewards of `tree_game`.

    A click on a button of the dialog counts as its action; places are in pixels of a screen of 720 x 1280. `device` and
    `browser` are those of `number_game_screen`.
    """

    page, read = "tree-game", staticmethod(read_tree_game)

    def __init__(
        self,
        *,
        chops: Count = 10,
        format_penalty: NonNegative = 0.5,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
        device: Device = "drawn",
        browser: str | None = None,
        width: Count = 360,
    ) -> None:
        given = {"encoding": encoding, "context": context, "max_tokens": max_tokens}
        super().__init__(chops=chops, format_penalty=format_penalty, **given)
        self.rules = f"{TreeGame.rules} Places are in pixels of a screen of {at.WIDTH} x {at.HEIGHT}."
        self.show(device, browser, chops, width)

    def act(self, action: Action | None) -> Outcome:
        """Taps the place of an action that the screen has."""
        if action is not None and self.is_choosing and action.name == "click":
            named = {"replace": at.REPLACE, "decompose": at.DECOMPOSE}
            action = next(
                (Action(each) for each in named if is_inside(*action.arguments, named[each], at.BUTTON)), None
            )
        if action is not None and self.is_choosing:
            self.tap(*(at.REPLACE if action.name == "replace" else at.DECOMPOSE))
        elif action is not None and action.name == "click":
            self.tap(*action.arguments)
        return super().act(action)

    def _is_shown(self, state: TreeState | None) -> bool:
        if state is None or state.power != self.power:
            return False
        is_over = self.num_decided == self.chops
        return state.screen == "over" if is_over else state.changes == (self.changes if self.is_choosing else ())
