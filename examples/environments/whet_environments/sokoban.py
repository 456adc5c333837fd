# SPDX-License-Identifier: Apache-2.0
"""Sokoban: push all boxes onto the targets.

A room is made backwards, so that it can be solved: it begins with all boxes on targets, and the player pulls boxes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whet.errors import ConfigError
from whet.options import Count, NonNegative, Share
from whet.registry import register_environment
from whet_environments.game import DIRECTIONS, HOW_TO_MOVE, NO_MOVE, Context, Encoding, Game, Outcome, Render
from whet_environments.tiles import TILE, Tile, draw_tiles

if TYPE_CHECKING:
    from PIL.Image import Image

Cell = tuple[int, int]
MOST_DRAWS = 2_000  # of a room, until one is as asked for
MOST_STATES = 300_000  # that `solve` visits
TILES: dict[str, Tile] = {
    "#": (("square", "grey", 1.0),),
    "_": (),
    "O": (("ring", "red", 0.5),),
    "X": (("square", "brown", 0.75),),
    "√": (("square", "green", 0.75),),
    "P": (("circle", "blue", 0.75),),
    "S": (("circle", "blue", 0.75), ("ring", "red", 0.5)),
}
SYMBOLS = "P is you, X is a box, O is a target, √ is a box on a target, S is you on a target, # is a wall, _ is floor."
COLOURS = (
    "The blue circle is you, brown squares are boxes, red rings are targets, a green square is a box on a target, and "
    "grey is wall."
)


@dataclass(frozen=True)
class State:
    """The player and the boxes."""

    player: Cell
    boxes: frozenset[Cell]


@register_environment("sokoban", pure=True)
class Sokoban(Game):
    """Sokoban in a random room: -0.1 a move, +1 for a box pushed onto a target, -1 for one pushed off, +10 at the end.

    # wall, _ floor, O target, X box, √ box on a target, P player, S player on a target. `rows` and `columns` count the
    floor inside of the outer wall, which `border` draws; `walls` is the share of inner walls. A room is made with up to
    `pulls` backward moves of boxes. An answer that is no move changes nothing and costs `format_penalty`. With
    `render=picture` the room is an image, each cell of `tile` pixels.
    """

    def __init__(
        self,
        *,
        rows: Count = 4,
        columns: Count = 4,
        boxes: Count = 1,
        walls: Share = 0.1,
        pulls: Count = 6,
        border: bool = True,
        format_penalty: NonNegative = 0.15,
        max_steps: Count = 20,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
        render: Render = "text",
        tile: Count = TILE,
    ) -> None:
        super().__init__(max_steps=max_steps, encoding=encoding, context=context, max_tokens=max_tokens, render=render)
        if 2 * boxes + 1 > rows * columns:
            raise ConfigError(
                "environment.options.boxes",
                boxes,
                f"a cell for each box, each target and the player in rows={rows} x columns={columns}",
                "lower it, or raise rows or columns",
            )
        self.rows, self.columns, self.num_boxes, self.walls, self.pulls = rows, columns, boxes, walls, pulls
        self.border, self.format_penalty, self.tile = border, format_penalty, tile
        self.rules = (
            f"You push boxes onto targets in a room. {COLOURS if render == 'picture' else SYMBOLS} A box can be "
            f"pushed, one at a time, and not pulled. {HOW_TO_MOVE}"
        )

    def begin(self, draws: random.Random) -> None:
        """Draws a room that can be solved, with at least one box off its target."""
        for _ in range(MOST_DRAWS):
            if (state := self._draw(draws)) is not None:
                break
        else:
            raise ConfigError(
                "environment.options.walls",
                self.walls,
                f"a room with boxes={self.num_boxes} to push in {MOST_DRAWS} draws with rows={self.rows}, "
                f"columns={self.columns}, pulls={self.pulls}",
                "lower walls or boxes, or raise rows",
            )
        self.state, self.is_won = state, False

    def _draw(self, draws: random.Random) -> State | None:
        cells = [(row, column) for row in range(self.rows) for column in range(self.columns)]
        self.floor = {cell for cell in cells if draws.random() >= self.walls}
        if len(self.floor) < 2 * self.num_boxes + 1:
            return None
        places = draws.sample(sorted(self.floor), self.num_boxes + 1)
        self.targets = frozenset(places[1:])
        state = State(places[0], self.targets)
        for _ in range(draws.randint(1, self.pulls)):
            pulled = self._pulls(state)
            if not pulled:
                break
            state = draws.choice(pulled)
        if state.boxes == self.targets:
            return None
        return State(draws.choice(sorted(self._reach(state))), state.boxes)

    def _pulls(self, state: State) -> list[State]:
        """The states before a push that ends in `state`, in a fixed order."""
        reach, found = self._reach(state), []
        for box in sorted(state.boxes):
            for down, right in DIRECTIONS.values():
                beside, after = (box[0] + down, box[1] + right), (box[0] + 2 * down, box[1] + 2 * right)
                if beside in reach and after in self.floor - state.boxes:
                    found.append(State(after, state.boxes - {box} | {beside}))
        return found

    def _reach(self, state: State) -> set[Cell]:
        """The cells that the player can walk to."""
        free, seen, queue = self.floor - state.boxes, {state.player}, deque([state.player])
        while queue:
            row, column = queue.popleft()
            for down, right in DIRECTIONS.values():
                cell = (row + down, column + right)
                if cell in free and cell not in seen:
                    seen.add(cell)
                    queue.append(cell)
        return seen

    def after(self, state: State, move: str) -> State:
        """The state after a move; the same one where a wall or a second box is in the way."""
        down, right = DIRECTIONS[move]
        to = (state.player[0] + down, state.player[1] + right)
        beyond = (to[0] + down, to[1] + right)
        if to not in self.floor:
            return state
        if to not in state.boxes:
            return State(to, state.boxes)
        if beyond in self.floor and beyond not in state.boxes:
            return State(to, state.boxes - {to} | {beyond})
        return state

    def play(self, text: str) -> Outcome:
        """Moves, and pushes a box that is in the way."""
        move = self.read_move(text)
        if move is None:
            return -self.format_penalty, False, NO_MOVE
        before, self.state = self.state, self.after(self.state, move)
        self.is_won = self.state.boxes == self.targets
        gained = len(self.state.boxes & self.targets) - len(before.boxes & self.targets)
        said = f"You went {move}." if before != self.state else "You did not move."
        return -0.1 + gained + 10.0 * self.is_won, self.is_won, said

    def board(self) -> str:
        """The room."""
        return self.show_cells(self._cells())

    def picture(self) -> Image:
        """The room as an image."""
        return draw_tiles(self._cells(), TILES, self.tile)

    def _cells(self) -> list[list[str]]:
        edge = int(self.border)
        return [
            [self._symbol((row, column)) for column in range(-edge, self.columns + edge)]
            for row in range(-edge, self.rows + edge)
        ]

    def _symbol(self, cell: Cell) -> str:
        if cell not in self.floor:
            return "#"
        is_target = cell in self.targets
        if cell == self.state.player:
            return "S" if is_target else "P"
        if cell in self.state.boxes:
            return "√" if is_target else "X"
        return "O" if is_target else "_"

    def solve(self) -> list[str] | None:
        """The moves of a shortest solution; None where there is none, or the search is too long."""
        seen, queue = {self.state}, deque([(self.state, list[str]())])
        while queue and len(seen) < MOST_STATES:
            state, moves = queue.popleft()
            for move in DIRECTIONS:
                after = self.after(state, move)
                if after.boxes == self.targets:
                    return [*moves, move]
                if after not in seen:
                    seen.add(after)
                    queue.append((after, [*moves, move]))
        return None

    def best(self) -> str:
        """The first move of a shortest solution; any move in a state without one."""
        return self.write_move((self.solve() or ["Up"])[0])

    def choices(self) -> list[str]:
        """All four moves."""
        return self.moves()
