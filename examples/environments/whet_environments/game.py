# SPDX-License-Identifier: Apache-2.0
"""The frame of a game: seeds, turns, the end, and how a state is written or drawn as an observation."""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from whet.environments.protocol import Answer, Observation
from whet.types import Message, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Encoding = Literal["compact", "words"]
Context = Literal["append", "replace"]
Render = Literal["text", "picture"]
DIRECTIONS = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
LETTERS = {"u": "Up", "d": "Down", "l": "Left", "r": "Right"}
MOVE = re.compile(r"<answer>\s*(up|down|left|right)\s*</answer>", re.IGNORECASE)
MOST_READ = 20_000  # characters of an answer; the beginning of a longer one is not read
HOW_TO_MOVE = "Answer with <answer>Up</answer>, <answer>Down</answer>, <answer>Left</answer> or <answer>Right</answer>."
NO_MOVE = f"That is no move. {HOW_TO_MOVE}"

Outcome = tuple[float, bool, str]  # reward, whether the game has ended, what happened in words


def row_seed(prompt: Prompt, seed: int) -> int:
    """The seed that a row fixes by its field `seed`; otherwise the one that whet gives.  Raises: ValueError."""
    own = prompt.extra_info.get("seed")
    if own is not None and not isinstance(own, int):
        raise ValueError(f"the row's field seed is {own!r}; expected a whole number that names the game")
    return seed if own is None else own


class Game(ABC):
    """A game of one player. A subclass has `begin`, `play`, `board` and `rules`; its constructor has the options.

    `encoding=compact` writes a state as one character a cell and ">"; `words` adds the rules and lines. With
    `context=replace` each observation has the whole state and replaces what came before. With `render=picture` an image
    takes the place of the written state. A row of the data set may fix its game by a field `seed`; otherwise whet gives
    the seed, the same one to all episodes of a group.
    """

    rules: str  # for encoding=words
    is_won: bool  # set by `begin` and `play`

    def __init__(
        self,
        *,
        max_steps: int,
        encoding: Encoding,
        context: Context,
        max_tokens: int | None,
        render: Render = "text",
    ) -> None:
        self.render = render
        self.max_steps, self.encoding, self.context, self.max_tokens = max_steps, encoding, context, max_tokens
        self._steps_left, self._is_over = 0, True

    @abstractmethod
    def begin(self, draws: random.Random) -> None:
        """Sets up a game; all draws of the episode come from `draws`."""

    @abstractmethod
    def play(self, text: str) -> Outcome:
        """Plays an answer; one that is not in the game changes nothing and pays the penalty."""

    @abstractmethod
    def board(self) -> str:
        """The state in one character a cell; lines for encoding=words."""

    @abstractmethod
    def best(self) -> str:
        """An answer of perfect play, in the encoding."""

    @abstractmethod
    def choices(self) -> list[str]:
        """The answers that the state allows, in the encoding."""

    def picture(self) -> Image | bytes:
        """The state as an image, for render=picture."""
        raise NotImplementedError

    def state_key(self) -> str:
        """Names the state for estimators that compare the turns of a group in the same state."""
        return self.board()

    def numbers(self) -> dict[str, float]:
        """The fields of the trajectory."""
        return {"success": float(self.is_won)}

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begins a game."""
        self._steps_left, self._is_over = self.max_steps, False
        self.begin(random.Random(row_seed(prompt, seed)))
        return self._observe(0.0, "", is_first=True)

    def step(self, answer: Answer) -> Observation:
        """Plays a turn.  Raises: RuntimeError after the end."""
        if self._is_over:
            raise RuntimeError("step was called after the end of the game, or before reset; call reset first")
        reward, is_done, said = self.play(answer.text[-MOST_READ:])
        self._steps_left -= 1
        is_truncated = not is_done and self._steps_left == 0
        self._is_over = is_done or is_truncated
        end = {"done": is_done, "truncated": is_truncated}
        return replace(self._observe(reward, said, is_first=False), **end)

    def _observe(self, reward: float, said: str, *, is_first: bool) -> Observation:
        is_whole = is_first or self.context == "replace"
        state, content, media = "" if self.render == "picture" else self.board(), list[dict[str, Any]](), ()
        if self.encoding == "compact":
            text = f"{state}>"
        else:
            text = "\n\n".join(part for part in (self.rules if is_whole else "", said, state) if part)
        if self.render == "picture":
            from whet.data.media import image

            media = (image(self.picture()),)
            content = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        return Observation(
            done=False,
            messages=(Message("user", content or text),),
            media=media,
            reward=reward,
            fields=self.numbers(),
            context=self.context,
            state_key=self.state_key(),
            max_tokens=self.max_tokens,
        )

    def show_cells(self, cells: list[list[str]]) -> str:
        """Writes a grid: rows without anything between them in the compact encoding."""
        return ("" if self.encoding == "compact" else "\n").join("".join(row) for row in cells)

    def read_move(self, text: str) -> str | None:
        """Up, Down, Left or Right: the last one in <answer>, or the letter of the compact encoding; None without."""
        if self.encoding == "compact":
            return LETTERS.get(text.strip())
        found = MOVE.findall(text)
        return found[-1].capitalize() if found else None

    def write_move(self, move: str) -> str:
        """The answer that `read_move` reads as a move."""
        return move[0].lower() if self.encoding == "compact" else f"<answer>{move}</answer>"

    def moves(self) -> list[str]:
        """The answers of all four moves."""
        return [self.write_move(move) for move in DIRECTIONS]
