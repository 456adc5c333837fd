# SPDX-License-Identifier: Apache-2.0
"""The state of the games, read from the pixels of a screenshot of any size; and power in the text of an OCR program."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from whet_environments.actions import Action
from whet_environments.devices import layout as at
from whet_environments.devices.digits import is_near, pixel, read_digit, read_number
from whet_environments.devices.errors import check_pillow
from whet_environments.devices.layout import CARDS_X, CARDS_Y, COLOURS
from whet_environments.number_game import LAMPS

if TYPE_CHECKING:
    from PIL.Image import Image

TreeScreen = Literal["tree_cutting", "equipment_selection", "over"]
POWER_WORDS = ("妖力", "战力", "战斗力", "power")


@dataclass(frozen=True)
class NumberState:
    """The screen of the number game."""

    score: int
    round: int
    rounds: int
    cards: tuple[int, int, int]
    lamp: str | None  # None: the game is over
    taken: int | None = None  # the place of the taken card
    is_right: bool | None = None  # whether that is right

    @property
    def is_over(self) -> bool:
        """Whether all rounds are played."""
        return self.lamp is None

    @property
    def is_new(self) -> bool:
        """Whether the game has just begun."""
        return (self.score, self.round, self.taken, self.is_over) == (100, 1, None, False)

    @property
    def right_place(self) -> int:
        """The place of the card that the lamp asks for."""
        assert self.lamp is not None
        return self.cards.index(sorted(self.cards)[LAMPS[self.lamp]])

    def fields(self) -> dict[str, Any]:
        """The state in a row of a data set."""
        return {"cards": list(self.cards), "lamp": self.lamp, "round": self.round, "score": self.score}

    def words(self) -> str:
        """The state as the text game writes it in words."""
        cards = ", ".join(map(str, self.cards))
        return f"Round {self.round} of {self.rounds}. Cards: {cards}. Lamp: {self.lamp}."

    def compact(self) -> str:
        """The state as the text game writes it in one character a cell."""
        return f"{''.join(map(str, self.cards))}{(self.lamp or '-')[0]}>"


@dataclass(frozen=True)
class TreeState:
    """The screen of the tree game."""

    screen: TreeScreen
    power: int | None
    number: int | None = None  # of the blow, from 1
    rounds: int | None = None
    changes: tuple[int, ...] = ()  # of attack, health and defence; empty: none, or not read

    @property
    def is_new(self) -> bool:
        """Whether the game has just begun."""
        return (self.screen, self.number) == ("tree_cutting", 1)

    @property
    def change(self) -> int:
        """The sum of the changes of all equipment."""
        return sum(self.changes)

    @property
    def right_action(self) -> Action | None:
        """The action of the rule `replace if the power rises`; None where the changes are unknown."""
        if self.screen == "tree_cutting":
            return Action("click", at.AXE)
        if self.screen == "over" or not self.changes:
            return None
        return Action("replace" if self.change > 0 else "decompose")

    def fields(self, step: int) -> dict[str, Any]:
        """The state in a row of a data set; `after` has the power after each action, by its name."""
        right = self.right_action
        after = None
        if self.power is not None:
            change = self.change if self.screen == "equipment_selection" else 0
            after = {"click": self.power, "replace": self.power + change, "decompose": self.power}
        found = {"screen": self.screen, "power": self.power, "changes": list(self.changes), "step": step}
        return {**found, "after": after, "right": right.name if right else None}

    def words(self) -> str:
        """The state as the text game writes it in words."""
        number = f"Blow {self.number} of {self.rounds}. Power: {self.power}. Screen: {self.screen}."
        if self.screen != "equipment_selection":
            return number
        names = ("attack", "health", "defence")
        return (
            f"{number} Equipment: {', '.join(f'{name} {x:+d}' for name, x in zip(names, self.changes, strict=False))}."
        )

    def compact(self) -> str:
        """The state as the text game writes it in one character a cell."""
        if self.screen == "tree_cutting":
            return "T>"
        steps = ((abs(x) // 100, x > 0) for x in self.changes)
        return f"{''.join(str(n) if up else 'abcdefghi'[n - 1] for n, up in steps)}>"


def open_image(png: bytes) -> Image:
    """Opens a screenshot.  Raises: OSError if it is no image, DeviceError without Pillow."""
    check_pillow()
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


def read_number_game(image: Image) -> NumberState | None:
    """Reads the screen of the number game; None if it is another screen, or not yet drawn."""
    cards = [read_digit(image, x, CARDS_Y, at.CARD_DIGIT_HEIGHT, at.WHITE) for x in CARDS_X]
    score = read_number(image, at.SCORE, at.SCORE_HEIGHT, at.WHITE)
    number, rounds = _counted(read_number(image, at.ROUND, at.ROUND_HEIGHT, at.INK))
    lamps = {lamp: pixel(image, *place) for lamp, place in at.LAMPS.items()}
    lit = [lamp for lamp, colour in lamps.items() if is_near(colour, COLOURS[lamp])]
    num_off = sum(is_near(colour, at.OFF) for colour in lamps.values())
    if None in cards or number is None or rounds is None or not score or len(lit) > 1 or len(lit) + num_off != 3:
        return None
    try:
        points = int(score)
    except ValueError:
        return None
    faces = [_face(image, x) for x in CARDS_X]
    if None in faces:
        return None
    taken = next((i for i, face in enumerate(faces) if face != "card"), None)
    is_right = None if taken is None else faces[taken] == "green"
    first, second, third = (int(card) for card in cards if card is not None)
    return NumberState(points, number, rounds, (first, second, third), lit[0] if lit else None, taken, is_right)


def _face(image: Image, x: float) -> str | None:
    colour = pixel(image, x - 80, CARDS_Y)
    return next((name for name in ("card", "green", "red") if is_near(colour, COLOURS[name])), None)


def read_tree_game(image: Image) -> TreeState | None:
    """Reads the screen of the tree game; None if it is another screen, or not yet drawn."""
    power = read_number(image, at.POWER, at.POWER_HEIGHT, COLOURS["yellow"])
    number, rounds = _counted(read_number(image, at.COUNT, at.COUNT_HEIGHT, at.INK))
    if power is None or not power.isdigit() or number is None:
        return None
    axe = pixel(image, at.AXE[0] - 70, at.AXE[1])
    if is_near(pixel(image, at.REPLACE[0] - 80, at.REPLACE[1]), at.UP):
        read = [read_number(image, (at.CHANGES_X, y), at.CHANGE_HEIGHT, _is_change) for y in at.CHANGES_Y]
        if not all(each and re.fullmatch(r"[+-]\d+", each) for each in read):
            return None
        return TreeState("equipment_selection", int(power), number, rounds, tuple(int(each) for each in read if each))
    if is_near(axe, at.AXE_COLOUR):
        return TreeState("tree_cutting", int(power), number, rounds)
    return TreeState("over", int(power), number, rounds) if is_near(axe, at.OFF) else None


def _is_change(colour: at.Colour) -> bool:
    return is_near(colour, at.UP) or is_near(colour, at.DOWN)


def _counted(text: str | None) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d+)/(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else (None, None)


def read_power(lines: Sequence[str]) -> int | None:
    """Returns the power in lines of text on the screen: the largest number in lines with 妖力, 战力 or "power", else
    the largest of all; None without a number."""
    named = [line for line in lines if any(word in line.lower() for word in POWER_WORDS)]
    for chosen in (named, lines):
        numbers = [int(number.replace(",", "")) for line in chosen for number in re.findall(r"\d[\d,]*", line)]
        if numbers:
            return max(numbers)
    return None
