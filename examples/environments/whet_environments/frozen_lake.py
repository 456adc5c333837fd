# SPDX-License-Identifier: Apache-2.0
"""FrozenLake: walk over the ice to the goal, around the holes."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from whet.errors import ConfigError
from whet.options import Count, NonNegative, Share
from whet.registry import register_environment
from whet_environments.game import DIRECTIONS, HOW_TO_MOVE, NO_MOVE, Context, Encoding, Game, Outcome, Render
from whet_environments.tiles import TILE, Tile, draw_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

SIDES = {"Up": ("Left", "Right"), "Down": ("Left", "Right"), "Left": ("Up", "Down"), "Right": ("Up", "Down")}
MOST_DRAWS = 10_000  # of a map, until one has a path
Cell = tuple[int, int]
TILES: dict[str, Tile] = {
    "_": (("square", "ice", 1.0),),
    "P": (("square", "ice", 1.0), ("circle", "blue", 0.75)),
    "O": (("square", "ice", 1.0), ("circle", "black", 0.75)),
    "G": (("square", "green", 1.0),),
    "X": (("square", "ice", 1.0), ("circle", "black", 0.75), ("circle", "blue", 0.4)),
    "√": (("square", "green", 1.0), ("circle", "blue", 0.75)),
}
SYMBOLS = "P is you, _ is ice, O is a hole, G is the goal."
COLOURS = "The blue circle is you, black circles are holes, and the green square is the goal."


@register_environment("frozen_lake", pure=True)
class FrozenLake(Game):
    """FrozenLake on a random map: 1 at the goal, 0 in a hole, and an invalid answer costs `format_penalty`.

    P player, _ ice, O hole, G goal, X player in a hole, √ player at the goal. Player and goal are drawn first, each
    other cell is ice with probability `ice`, and maps without a path from the player to the goal are drawn again. On
    `slippery` ice a move goes in its direction or to either side of it, each with probability 1/3. With
    `render=picture` the map is an image, each cell of `tile` pixels.
    """

    def __init__(
        self,
        *,
        size: Count = 4,
        ice: Share = 0.75,
        slippery: bool = False,
        format_penalty: NonNegative = 0.01,
        max_steps: Count = 10,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
        render: Render = "text",
        tile: Count = TILE,
    ) -> None:
        super().__init__(max_steps=max_steps, encoding=encoding, context=context, max_tokens=max_tokens, render=render)
        if size < 2:
            raise ConfigError("environment.options.size", size, "2 or more, for player and goal", "raise it")
        self.size, self.ice, self.slippery, self.format_penalty = size, ice, slippery, format_penalty
        self.tile = tile
        self.rules = (
            f"You walk on a frozen lake of {size} x {size} cells. {COLOURS if render == 'picture' else SYMBOLS} "
            f"Reach the goal and stay out of the holes{'; the ice is slippery' if slippery else ''}. {HOW_TO_MOVE}"
        )

    def begin(self, draws: random.Random) -> None:
        """Draws a map with a path."""
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(MOST_DRAWS):
            self.player, self.goal = draws.sample(cells, 2)
            others = [cell for cell in cells if cell not in (self.player, self.goal)]
            self.holes = {cell for cell in others if draws.random() >= self.ice}
            if self.path():
                break
        else:
            raise ConfigError(
                "environment.options.ice",
                self.ice,
                f"a map of size={self.size} with a path in {MOST_DRAWS} draws",
                "raise it",
            )
        self.is_won, self._draws = False, draws

    def play(self, text: str) -> Outcome:
        """Moves."""
        move = self.read_move(text)
        if move is None:
            return -self.format_penalty, False, NO_MOVE
        if self.slippery:
            move = self._draws.choice([move, *SIDES[move]])
        before, self.player = self.player, self.to(self.player, move)
        self.is_won = self.player == self.goal
        is_done = self.is_won or self.player in self.holes
        return float(self.is_won), is_done, f"You went {move}." if before != self.player else "You did not move."

    def to(self, cell: Cell, move: str) -> Cell:
        """The cell after a move: the same one at the edge."""
        row, column = cell[0] + DIRECTIONS[move][0], cell[1] + DIRECTIONS[move][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def board(self) -> str:
        """The map."""
        return self.show_cells(self._cells())

    def picture(self) -> Image:
        """The map as an image."""
        return draw_tiles(self._cells(), TILES, self.tile)

    def _cells(self) -> list[list[str]]:
        return [[self._symbol((row, column)) for column in range(self.size)] for row in range(self.size)]

    def _symbol(self, cell: Cell) -> str:
        if cell == self.player:
            return "X" if cell in self.holes else "√" if cell == self.goal else "P"
        return "G" if cell == self.goal else "O" if cell in self.holes else "_"

    def path(self) -> list[str]:
        """The moves of a shortest path to the goal; none if there is no path."""
        seen, queue = {self.player}, deque([(self.player, list[str]())])
        while queue:
            cell, moves = queue.popleft()
            for move in DIRECTIONS:
                after = self.to(cell, move)
                if after == self.goal:
                    return [*moves, move]
                if after not in seen and after not in self.holes:
                    seen.add(after)
                    queue.append((after, [*moves, move]))
        return []

    def best(self) -> str:
        """The first move of a shortest path."""
        return self.write_move(self.path()[0])

    def choices(self) -> list[str]:
        """All four moves."""
        return self.moves()
