# SPDX-License-Identifier: Apache-2.0
"""The number game: the colour of a lamp says which of three cards to take."""

from __future__ import annotations

import random
import re

from whet.options import Count, NonNegative
from whet.registry import register_environment
from whet_environments.game import Context, Encoding, Game, Outcome

LAMPS = {"red": 0, "yellow": 1, "green": 2}  # the place of the right card among the sorted ones
SELECT = re.compile(r"select\(\s*([0-2])\s*\)")


@register_environment("number_game", pure=True)
class NumberGame(Game):
    """The number game: green takes the largest of three cards, red the smallest, yellow the middle one.

    A game has `rounds` rounds, each with three different cards from 1 to 9; a right card pays 1 / rounds, so that the
    reward of an episode is the share of right cards. The answer is `select(N)` with the card's place from 0, in the
    compact encoding the card itself. Any other answer is a wrong card that also costs `format_penalty` / rounds. The
    score begins at 100, and goes up or down by 10 a round.
    """

    rules = (
        "Each round shows three cards and a lamp. A green lamp asks for the largest card, a red one for the smallest, "
        "a yellow one for the middle one. Answer with select(0), select(1) or select(2): the place of the card."
    )

    def __init__(
        self,
        *,
        rounds: Count = 10,
        format_penalty: NonNegative = 0.5,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
    ) -> None:
        super().__init__(max_steps=rounds, encoding=encoding, context=context, max_tokens=max_tokens)
        self.rounds, self.format_penalty = rounds, format_penalty

    def begin(self, draws: random.Random) -> None:
        """Draws the first round."""
        self._draws, self.num_played, self.num_right, self.is_won = draws, 0, 0, False
        self._draw()

    def _draw(self) -> None:
        self.cards, self.lamp = self._draws.sample(range(1, 10), 3), self._draws.choice([*LAMPS])

    @property
    def right_card(self) -> int:
        """The card that the lamp asks for."""
        return sorted(self.cards)[LAMPS[self.lamp]]

    def play(self, text: str) -> Outcome:
        """Takes a card."""
        taken = self._read(text)
        is_right = taken == self.right_card
        said = f"{'Right' if is_right else 'Wrong'}: the card was {self.right_card}."
        if taken is None:
            said = f"That is no card: answer with select(0), select(1) or select(2). The card was {self.right_card}."
        self.num_played, self.num_right = self.num_played + 1, self.num_right + is_right
        is_done = self.num_played == self.rounds
        self.is_won = self.num_right == self.rounds
        if not is_done:
            self._draw()
        penalty = self.format_penalty if taken is None else 0.0
        return (is_right - penalty) / self.rounds, is_done, said

    def _read(self, text: str) -> int | None:
        if self.encoding == "compact":
            return int(text) if text in map(str, self.cards) else None
        found = SELECT.findall(text)
        return self.cards[int(found[-1])] if found else None

    def numbers(self) -> dict[str, float]:
        """Success (all cards right), the share of right cards, and the score."""
        score = 100.0 + 10.0 * (2 * self.num_right - self.num_played)
        return {**super().numbers(), "right": self.num_right / self.rounds, "score": score}

    def board(self) -> str:
        """The cards and the lamp."""
        if self.encoding == "compact":
            return f"{''.join(map(str, self.cards))}{self.lamp[0]}"
        cards = ", ".join(map(str, self.cards))
        return f"Round {min(self.num_played + 1, self.rounds)} of {self.rounds}. Cards: {cards}. Lamp: {self.lamp}."

    def best(self) -> str:
        """The right card."""
        return self._write(self.right_card)

    def choices(self) -> list[str]:
        """All three cards."""
        return [self._write(card) for card in self.cards]

    def _write(self, card: int) -> str:
        return str(card) if self.encoding == "compact" else f"select({self.cards.index(card)})"
