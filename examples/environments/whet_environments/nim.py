# SPDX-License-Identifier: Apache-2.0
"""Nim with one heap, a game of two players: both learn by playing each other, or one of them does."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Literal

from whet.environments.protocol import Observation
from whet.errors import ConfigError
from whet.options import Count
from whet.registry import register_environment
from whet_environments.game import Context, Encoding, Game, Outcome

PLAYERS = ("first", "second")
TAKE = re.compile(r"take\(\s*([1-9])\s*\)")
SIZES = "0123456789abcdefghijklmnopqrstuvwxyz"  # of a heap, as one character


@register_environment("nim", pure=True)
class Nim(Game):
    """Nim: the players take 1 to `most` stones from a heap in turns, and who takes the last stone wins.

    The policy plays both sides, each with a conversation of its own. The winner gets 1, the other player -1; a move
    that is not in the game loses it. `learners=first` samples the second player's turns and does not train on them.
    `opponent=random` or `perfect` lets a script play the second side. A heap has 1 to `highest` stones, at most 35.

    The answer is `take(STONES)`, in the compact encoding a digit. The field `right` is the share of right moves in the
    positions that can be won, `first_wins` is 1 where the first player won.
    """

    @property
    def rules(self) -> str:  # type: ignore[override]
        """The rules in words."""
        return (
            f"A heap of stones. The players take turns; each takes 1 to {self.most} stones. Who takes the last stone "
            "wins. Answer with take(STONES), such as take(1)."
        )

    def __init__(
        self,
        *,
        highest: Count = 20,
        most: Count = 3,
        learners: Literal["both", "first"] = "both",
        opponent: Literal["policy", "random", "perfect"] = "policy",
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
    ) -> None:
        if highest > 35 or most > 9:
            found = f"highest={highest}, most={most}"
            raise ConfigError("environment.options", found, "at most 35 and 9, for one character each", "lower them")
        super().__init__(max_steps=highest, encoding=encoding, context=context, max_tokens=max_tokens)
        self.highest, self.most, self.learners, self.opponent = highest, most, learners, opponent

    def begin(self, draws: random.Random) -> None:
        """Draws the heap."""
        self.heap = draws.randint(1, self.highest)
        self._draws, self._number, self.is_won = draws, 0, False
        self._num_to_win = self._num_right = 0

    @property
    def player(self) -> str:
        """The player whose turn it is."""
        return PLAYERS[self._number]

    def play(self, text: str) -> Outcome:
        """Takes stones for the player, and then for a scripted opponent."""
        count, mover = self._read(text), self._number
        if self.heap % (self.most + 1):  # else the position is lost for the player who moves
            self._num_to_win += 1
            self._num_right += count == self._perfect()
        if count is None or not 1 <= count <= min(self.most, self.heap):
            return self._end(winner=1 - mover, said="That is not in the game: it loses the game.")
        self._take(count)
        if self.heap and self.opponent != "policy":
            self._take(self._perfect() if self.opponent == "perfect" else self._draws.choice(self._counts()))
        if not self.heap:
            return self._end(winner=1 - self._number, said="The last stone was taken.")
        return 0.0, False, ""

    def _take(self, count: int) -> None:
        self.heap -= count
        self._number = 1 - self._number

    def _end(self, winner: int, said: str) -> Outcome:
        self.is_won, self._winner = winner == 0, winner
        return 0.0, True, said

    def _observe(self, reward: float, said: str, *, is_first: bool) -> Observation:
        observation = super()._observe(reward, said, is_first=is_first)
        if self.opponent == "policy":
            is_trained = self.learners == "both" or self.player == self.learners
            observation = replace(observation, player=self.player, is_trained=is_trained)
        return observation

    def step(self, answer: object) -> Observation:
        """Plays a turn.  Raises: RuntimeError after the end."""
        observation = super().step(answer)  # type: ignore[arg-type]
        if not observation.done:
            return observation
        if self.opponent != "policy":
            return replace(observation, reward=1.0 if self.is_won else -1.0)
        rewards = {player: 1.0 if number == self._winner else -1.0 for number, player in enumerate(PLAYERS)}
        return replace(observation, rewards=rewards)

    def numbers(self) -> dict[str, float]:
        """`first_wins`, and `right` where a position could be won."""
        right = {"right": self._num_right / self._num_to_win} if self._num_to_win else {}
        return {"first_wins": float(self.is_won), **right}

    def board(self) -> str:
        """The heap."""
        return SIZES[self.heap] if self.encoding == "compact" else f"Stones: {self.heap}."

    def best(self) -> str:
        """The winning move; one stone in a lost position."""
        return self._write(self._perfect())

    def choices(self) -> list[str]:
        """All moves of the position."""
        return [self._write(count) for count in self._counts()]

    def _counts(self) -> range:
        return range(1, min(self.most, self.heap) + 1)

    def _perfect(self) -> int:
        """The stones that leave a multiple of `most` + 1."""
        return self.heap % (self.most + 1) or 1

    def _read(self, text: str) -> int | None:
        if self.encoding == "words":
            found = TAKE.findall(text)
            return int(found[-1]) if found else None
        return int(text) if len(text) == 1 and text in "123456789" else None

    def _write(self, count: int) -> str:
        return str(count) if self.encoding == "compact" else f"take({count})"
