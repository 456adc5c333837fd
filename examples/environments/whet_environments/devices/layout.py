# SPDX-License-Identifier: Apache-2.0
"""Places and colours of the games on a screen of 720 x 1280; the pages in `pages/` have the same ones."""

from __future__ import annotations

WIDTH, HEIGHT = 720, 1280
BARS = 236  # the status bar and the address bar, above the page

Place = tuple[float, float]
Colour = tuple[int, int, int]

INK: Colour = (30, 30, 30)
PAPER: Colour = (245, 245, 240)
WHITE: Colour = (255, 255, 255)
OFF: Colour = (200, 200, 200)  # a lamp that is not lit, a button that does nothing

# The number game.
CARDS_X, CARDS_Y = (135, 360, 585), 905  # the centres of the cards
NEXT = (360, 1070)
CARD, NEXT_BUTTON = (90, 110), (200, 40)  # half of width and height
COLOURS: dict[str, Colour] = {
    "red": (220, 50, 47),
    "yellow": (240, 190, 0),
    "green": (40, 160, 70),
    "card": (102, 96, 200),
}
LAMPS = {"red": (210, 580), "yellow": (360, 580), "green": (510, 580)}
LAMP_RADIUS = 50
SCORE_BOX, SCORE_COLOUR = (60, 260, 660, 420), (214, 51, 108)
SCORE, SCORE_HEIGHT = (290, 295), 90  # the left upper corner and the height of the number
ROUND, ROUND_HEIGHT = (300, 450), 40
CARD_DIGIT_HEIGHT = 100
READY: Colour = (60, 110, 220)  # the button "next" when a card is taken

# The tree game.
POWER_BOX, POWER_BOX_COLOUR = (60, 256, 660, 356), (40, 50, 60)
POWER, POWER_HEIGHT = (260, 281), 50
COUNT, COUNT_HEIGHT = (300, 385), 30
AXE, AXE_BUTTON, AXE_COLOUR = (360, 1067), (80, 60), (150, 100, 50)  # 50 % of the width, 5/6 of the height
DIALOG, DIALOG_COLOUR = (90, 460, 630, 900), (250, 248, 235)
DECOMPOSE, REPLACE = (252, 832), (468, 832)  # 35 % and 65 % of the width, 65 % of the height
BUTTON = (90, 35)
CHANGES_X, CHANGES_Y, CHANGE_HEIGHT = 330, (500, 580, 660), 40
UP: Colour = (40, 160, 70)
DOWN: Colour = (220, 50, 47)


def is_inside(x: float, y: float, centre: Place, half: Place) -> bool:
    """Tells whether a point is in a rectangle that is given by its centre and half of its width and height."""
    return abs(x - centre[0]) <= half[0] and abs(y - centre[1]) <= half[1]


def box(centre: Place, half: Place) -> tuple[float, float, float, float]:
    """Returns the corners (left, top, right, bottom) of such a rectangle."""
    return centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1]
