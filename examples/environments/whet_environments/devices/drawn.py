# SPDX-License-Identifier: Apache-2.0
"""The games drawn with Pillow as the screen of a phone; taps change their state."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from whet_environments.actions import Action
from whet_environments.devices import layout as at
from whet_environments.devices.digits import centred, draw_number
from whet_environments.devices.errors import check_pillow
from whet_environments.devices.layout import CARDS_X, CARDS_Y, COLOURS, NEXT, box, is_inside
from whet_environments.number_game import NumberGame
from whet_environments.tree_game import ATTRIBUTES, TreeGame

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

T = TypeVar("T")
__all__ = ["CARDS_X", "CARDS_Y", "COLOURS", "NEXT", "Drawn", "DrawnNumberGame", "DrawnTreeGame"]


class PageRandom(random.Random):
    """The generator of the pages (mulberry32, `screen.js`): a seed begins the same game on a drawn screen and there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._state = seed % 2**32

    def __reduce__(self) -> tuple[type[PageRandom], tuple[int]]:
        """For copies of a game: the state is a seed."""
        return PageRandom, (self._state,)

    def random(self) -> float:
        """A number in [0, 1)."""
        self._state = (self._state + 0x6D2B79F5) % 2**32
        mixed = (self._state ^ self._state >> 15) * (self._state | 1) % 2**32
        mixed ^= (mixed + (mixed ^ mixed >> 7) * (mixed | 61)) % 2**32
        return (mixed ^ mixed >> 14) / 2**32

    def randint(self, a: int, b: int) -> int:
        """A whole number from `a` to `b`."""
        return a + int(self.random() * (b - a + 1))

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        """One of a sequence."""
        return seq[self.randint(0, len(seq) - 1)]

    def sample(self, population: Sequence[T], k: int) -> list[T]:  # type: ignore[override]
        """`k` of a sequence, each at most once."""
        left = list(population)
        return [left.pop(self.randint(0, len(left) - 1)) for _ in range(k)]


class Drawn:
    """A `Screen` that Pillow draws. A subclass has `begin`, `draw` and `tap`."""

    size = (at.WIDTH, at.HEIGHT)

    def begin(self, seed: int, rounds: int) -> None:
        """Begins the game of a seed."""
        raise NotImplementedError

    def draw(self, draw: ImageDraw) -> None:
        """Draws the page."""
        raise NotImplementedError

    def open(self, url: str) -> None:
        """Begins the game again, with `seed` and `rounds` of the URL."""
        asked = parse_qs(urlsplit(url).query)
        self.begin(int(asked.get("seed", ["0"])[0]), int(asked.get("rounds", ["10"])[0]))

    def key(self, code: str) -> None:
        """Ignores keys: the games have none."""

    def close(self) -> None:
        """Has nothing to free."""

    def png(self) -> bytes:
        """The screen as a PNG file."""
        check_pillow()
        from PIL import Image, ImageDraw

        image = Image.new("RGB", self.size, at.PAPER)
        draw = ImageDraw.Draw(image)
        draw.rectangle((0, 0, at.WIDTH, at.BARS - 1), at.WHITE)
        self.draw(draw)
        return to_png(image)


class DrawnNumberGame(Drawn):
    """A tap on a card takes it and colours it green or red; a tap on "next" begins the next round."""

    def __init__(self, seed: int, rounds: int = 10) -> None:
        self.begin(seed, rounds)

    def begin(self, seed: int, rounds: int) -> None:
        """Begins the game of a seed."""
        self.game = NumberGame(rounds=rounds)
        self.game.begin(PageRandom(seed))
        self.taken: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played."""
        return self.game.num_played == self.game.rounds

    @property
    def is_right(self) -> bool:
        """Whether the taken card is the one that the lamp asks for."""
        return self.taken is not None and self.game.cards[self.taken] == self.game.right_card

    @property
    def score(self) -> int:
        """The score on the screen, with the taken card."""
        now = 0 if self.taken is None else 10 if self.is_right else -10
        return int(self.game.numbers()["score"]) + now

    def tap(self, x: int, y: int) -> None:
        """Takes a card or goes on; a tap anywhere else changes nothing."""
        if self.is_over:
            return
        if self.taken is None:
            self.taken = next((i for i, x0 in enumerate(CARDS_X) if is_inside(x, y, (x0, CARDS_Y), at.CARD)), None)
        elif is_inside(x, y, NEXT, at.NEXT_BUTTON):
            self.game.play(f"select({self.taken})")
            self.taken = None

    def draw(self, draw: ImageDraw) -> None:
        """Draws score, round, lamps, cards and the button."""
        game = self.game
        draw.rectangle(at.SCORE_BOX, at.SCORE_COLOUR)
        draw_number(draw, str(self.score), at.SCORE, at.SCORE_HEIGHT, at.WHITE)
        number = min(game.num_played + 1, game.rounds)
        draw_number(draw, f"{number}/{game.rounds}", at.ROUND, at.ROUND_HEIGHT, at.INK)
        for lamp, (x, y) in at.LAMPS.items():
            is_lit = lamp == game.lamp and not self.is_over
            draw.ellipse(box((x, y), (at.LAMP_RADIUS, at.LAMP_RADIUS)), COLOURS[lamp] if is_lit else at.OFF)
        for i, (x, card) in enumerate(zip(CARDS_X, game.cards, strict=True)):
            colour = "card" if i != self.taken else "green" if self.is_right else "red"
            draw.rectangle(box((x, CARDS_Y), at.CARD), COLOURS[colour])
            digit = centred(x, CARDS_Y, at.CARD_DIGIT_HEIGHT)
            draw_number(draw, str(card), digit, at.CARD_DIGIT_HEIGHT, at.WHITE)
        draw.rectangle(box(NEXT, at.NEXT_BUTTON), at.OFF if self.taken is None else at.READY)
        write(draw, NEXT, "game over" if self.is_over else "next")


class DrawnTreeGame(Drawn):
    """A tap on the axe drops equipment; a tap on a button of the dialog decides on it."""

    def __init__(self, seed: int, rounds: int = 10) -> None:
        self.begin(seed, rounds)

    def begin(self, seed: int, rounds: int) -> None:
        """Begins the game of a seed."""
        self.game = TreeGame(chops=rounds)
        self.game.begin(PageRandom(seed))

    @property
    def is_over(self) -> bool:
        """Whether all equipment is decided on."""
        return self.game.num_decided == self.game.chops

    def tap(self, x: int, y: int) -> None:
        """Cuts the tree or decides; a tap anywhere else changes nothing."""
        if self.is_over:
            return
        if not self.game.is_choosing:
            self.game.act(Action("click", (x, y)))
        elif is_inside(x, y, at.REPLACE, at.BUTTON):
            self.game.act(Action("replace"))
        elif is_inside(x, y, at.DECOMPOSE, at.BUTTON):
            self.game.act(Action("decompose"))

    def draw(self, draw: ImageDraw) -> None:
        """Draws power, number, tree and axe, and the dialog of the equipment."""
        game = self.game
        draw.rectangle(at.POWER_BOX, at.POWER_BOX_COLOUR)
        write(draw, (160, 306), "Power")
        draw_number(draw, str(game.power), at.POWER, at.POWER_HEIGHT, COLOURS["yellow"])
        number = min(game.num_decided + 1, game.chops)
        draw_number(draw, f"{number}/{game.chops}", at.COUNT, at.COUNT_HEIGHT, at.INK)
        draw.rectangle((330, 700, 390, 960), (120, 80, 40))
        draw.ellipse((180, 440, 540, 760), (90, 150, 70))
        draw.rectangle(box(at.AXE, at.AXE_BUTTON), at.OFF if self.is_over else at.AXE_COLOUR)
        write(draw, at.AXE, "over" if self.is_over else "axe")
        if game.is_choosing:
            self._draw_dialog(draw)

    def _draw_dialog(self, draw: ImageDraw) -> None:
        draw.rectangle(at.DIALOG, at.DIALOG_COLOUR)
        for name, change, y in zip(ATTRIBUTES, self.game.changes, at.CHANGES_Y, strict=True):
            write(draw, (210, y + at.CHANGE_HEIGHT / 2), name, at.INK)
            colour = at.UP if change > 0 else at.DOWN
            draw_number(draw, f"{change:+d}", (at.CHANGES_X, y), at.CHANGE_HEIGHT, colour)
        for place, name, colour in ((at.DECOMPOSE, "decompose", at.DOWN), (at.REPLACE, "replace", at.UP)):
            draw.rectangle(box(place, at.BUTTON), colour)
            write(draw, place, name, size=30)


def write(draw: ImageDraw, centre: at.Place, text: str, colour: at.Colour = at.WHITE, size: int = 40) -> None:
    """Writes a word around its centre."""
    from PIL import ImageFont

    draw.text(centre, text, colour, ImageFont.load_default(size), anchor="mm")


def to_png(image: Image) -> bytes:
    """Returns an image as a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


DRAWN: dict[str, Any] = {"number-game": DrawnNumberGame, "tree-game": DrawnTreeGame}
