# SPDX-License-Identifier: Apache-2.0
"""The tree game: each blow of the axe drops equipment, which raises or lowers the power of the player."""

from __future__ import annotations

import random

from whet.options import Count, NonNegative
from whet.registry import register_environment
from whet_environments.actions import Action, parse_action, write_action
from whet_environments.devices.layout import AXE, AXE_BUTTON, is_inside
from whet_environments.game import Context, Encoding, Game, Outcome
from whet_environments.rewards import change_reward

ATTRIBUTES = ("attack", "health", "defence")
STEP = 100  # a change is 1 to 9 of them, up or down
LETTERS = {Action("click", AXE): "c", Action("replace"): "r", Action("decompose"): "d"}
ACTIONS = {letter: action for action, letter in LETTERS.items()}

Changes = tuple[int, ...]


def draw_equipment(draws: random.Random, number: int) -> list[Changes]:
    """Draws `number` pieces of equipment, each with the changes of all attributes; at least one raises the power."""
    while True:
        found = [tuple(STEP * draws.randint(1, 9) * draws.choice((1, -1)) for _ in ATTRIBUTES) for _ in range(number)]
        if any(sum(changes) > 0 for changes in found):
            return found


@register_environment("tree_game", pure=True)
class TreeGame(Game):
    """The tree game: cut the tree, then put on the equipment that drops if it raises the power, or decompose it.

    A game has `chops` blows of the axe. On the screen tree_cutting the answer is `click(360, 1067)`, the axe; on the
    screen equipment_selection it is `replace()` (or `equip()`), which adds the changes of all attributes to the power,
    or `decompose()` (`skip()`), which leaves it as it is. The compact encoding has the answers `c`, `r` and `d`, and
    shows `T` or the three changes: a digit (hundreds up) or a letter from `a` (-100); no decision needs the power.

    A change of power d pays 1 + min(d / 1000, 1) above 0 and -1 + max(d / 1000, -1) below, as a share of what perfect
    play gets in the game: the reward of an episode is at most 1. An answer that the screen does not have changes
    nothing, and costs `format_penalty` / chops. After 3 * chops turns the game is cut off.
    """

    rules = (
        "You cut a tree, and each blow of the axe drops equipment. On the screen tree_cutting, hit the axe with "
        f"<action>click({AXE[0]}, {AXE[1]})</action>. On the screen equipment_selection, answer "
        "<action>replace()</action> to put the equipment on, which adds its changes to your power, or "
        "<action>decompose()</action> to leave it. Make your power as large as possible."
    )

    def __init__(
        self,
        *,
        chops: Count = 10,
        format_penalty: NonNegative = 0.5,
        encoding: Encoding = "words",
        context: Context = "replace",
        max_tokens: Count | None = None,
    ) -> None:
        super().__init__(max_steps=3 * chops, encoding=encoding, context=context, max_tokens=max_tokens)
        self.chops, self.format_penalty = chops, format_penalty

    def begin(self, draws: random.Random) -> None:
        """Draws the power and all equipment."""
        self.start = self.power = draws.randint(10_000, 99_999)
        self.equipment = draw_equipment(draws, self.chops)
        self.attainable = sum(change_reward(sum(changes)) for changes in self.equipment if sum(changes) > 0)
        self.num_decided, self.num_right, self.is_won, self.is_choosing = 0, 0, False, False

    @property
    def changes(self) -> Changes:
        """The changes that the equipment of the present turn makes."""
        return self.equipment[self.num_decided]

    @property
    def right_action(self) -> Action:
        """The action of perfect play."""
        if not self.is_choosing:
            return Action("click", AXE)
        return Action("replace" if sum(self.changes) > 0 else "decompose")

    def play(self, text: str) -> Outcome:
        """Cuts the tree, or decides on equipment."""
        action = ACTIONS.get(text.strip()) if self.encoding == "compact" else parse_action(text)
        return self.act(action)

    def act(self, action: Action | None) -> Outcome:
        """Plays an action; one that the screen does not have changes nothing."""
        if action is not None and not self.is_choosing and action.name == "click":
            x, y = action.arguments
            if is_inside(x, y, AXE, AXE_BUTTON):
                self.is_choosing = True
                return 0.0, False, "Equipment drops."
        if action is None or not self.is_choosing or action.name not in ("replace", "decompose"):
            said = f"That is no action of this screen. Answer with {' or '.join(self.choices())}."
            return -self.format_penalty / self.chops, False, said
        return self._decide(action)

    def _decide(self, action: Action) -> Outcome:
        change = sum(self.changes) if action.name == "replace" else 0
        self.num_right += action == self.right_action
        self.power += change
        self.num_decided, self.is_choosing = self.num_decided + 1, False
        is_done = self.num_decided == self.chops
        self.is_won = is_done and self.num_right == self.chops
        return change_reward(change) / self.attainable, is_done, f"Your power changes by {change:+d}."

    def numbers(self) -> dict[str, float]:
        """Success (all decisions right), the share of right decisions, and the gain of power."""
        return {**super().numbers(), "right": self.num_right / self.chops, "gain": float(self.power - self.start)}

    def board(self) -> str:
        """The power, and the screen with the equipment on it."""
        if self.encoding == "compact":
            return "".join(map(_write_change, self.changes)) if self.is_choosing else "T"
        number = f"Blow {min(self.num_decided + 1, self.chops)} of {self.chops}. Power: {self.power}."
        if not self.is_choosing:
            return f"{number} Screen: tree_cutting."
        changes = ", ".join(f"{name} {change:+d}" for name, change in zip(ATTRIBUTES, self.changes, strict=True))
        return f"{number} Screen: equipment_selection. Equipment: {changes}."

    def state_key(self) -> str:
        """The game, the blow and the screen: the power, which earlier decisions change, is of no matter to the next."""
        return f"{self.start} {self.num_decided} {'equipment_selection' if self.is_choosing else 'tree_cutting'}"

    def best(self) -> str:
        """The right action."""
        return self._write(self.right_action)

    def choices(self) -> list[str]:
        """The actions of both screens."""
        return [self._write(action) for action in LETTERS]

    def _write(self, action: Action) -> str:
        return LETTERS[action] if self.encoding == "compact" else write_action(action)


def _write_change(change: int) -> str:
    """A digit for a change up, a letter from a (-100) for one down."""
    steps = abs(change) // STEP
    return str(steps) if change > 0 else "abcdefghi"[steps - 1]
