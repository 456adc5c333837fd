# SPDX-License-Identifier: Apache-2.0
"""The number game drawn as the screen of a phone; taps change its state."""

from __future__ import annotations

import io
import random

from whet_environments.number_game import NumberGame

CARDS_X, CARDS_Y = (135, 360, 585), 905  # the centres of the cards
NEXT = (360, 1070)
CARD, BUTTON = (90, 110), (140, 35)  # half of width and height
COLOURS = {"red": (220, 50, 47), "yellow": (240, 190, 0), "green": (40, 160, 70), "card": (70, 90, 160)}


class DrawnNumberGame:
    """A `Screen`: a tap on a card takes it and colours it green or red; a tap on "next" begins the next round."""

    size = (720, 1280)

    def __init__(self, seed: int, rounds: int = 10) -> None:
        self.game = NumberGame(rounds=rounds)
        self.game.begin(random.Random(seed))
        self.taken: int | None = None

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
        if self.game.num_played == self.game.rounds:
            return
        if self.taken is None:
            self.taken = next((i for i, at in enumerate(CARDS_X) if _is_inside(x, y, (at, CARDS_Y), CARD)), None)
        elif _is_inside(x, y, NEXT, BUTTON):
            self.game.play(f"select({self.taken})")
            self.taken = None

    def key(self, code: str) -> None:
        """Ignores keys: the game has none."""

    def png(self) -> bytes:
        """The screen as a PNG file."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", self.size, (245, 245, 240))
        draw = ImageDraw.Draw(image)
        number = min(self.game.num_played + 1, self.game.rounds)
        text = f"Score {self.score}   Round {number} of {self.game.rounds}"
        draw.text((360, 300), text, (30, 30, 30), ImageFont.load_default(40), anchor="mm")
        draw.ellipse((290, 480, 430, 620), COLOURS[self.game.lamp])
        for i, (x, card) in enumerate(zip(CARDS_X, self.game.cards, strict=True)):
            colour = "card" if i != self.taken else "green" if self.is_right else "red"
            draw.rectangle(_box((x, CARDS_Y), CARD), COLOURS[colour])
            draw.text((x, CARDS_Y), str(card), (255, 255, 255), ImageFont.load_default(90), anchor="mm")
        draw.rectangle(_box(NEXT, BUTTON), (120, 120, 120))
        draw.text(NEXT, "next", (255, 255, 255), ImageFont.load_default(40), anchor="mm")
        out = io.BytesIO()
        image.save(out, "PNG")
        return out.getvalue()


def _box(centre: tuple[int, int], half: tuple[int, int]) -> tuple[int, int, int, int]:
    return centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1]


def _is_inside(x: int, y: int, centre: tuple[int, int], half: tuple[int, int]) -> bool:
    return abs(x - centre[0]) <= half[0] and abs(y - centre[1]) <= half[1]
