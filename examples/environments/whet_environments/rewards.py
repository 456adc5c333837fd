# SPDX-License-Identifier: Apache-2.0
"""Reward functions of the games for rows that `whet play ... --collect` writes: one turn each.

    reward:
      function: whet_environments.rewards:number_game

A row has the state in the fields of its column `state`; the last action in <action>...</action> counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet_environments.actions import parse_action

FORMAT_PENALTY = -0.5
UNREADABLE = -0.2
COMPLETION = 2.0
LAST = 10  # rounds or steps of a game
PLACES = {"min": 0, "red": 0, "mid": 1, "yellow": 1, "max": 2, "green": 2}  # of the right card among the sorted ones


def number_game(solution_str: str, extra_info: Mapping[str, Any]) -> dict[str, float]:
    """Scores a card: 1 if it is right, -1 if it is wrong, -0.5 for an answer of another form; 2 more from round 10 on.

    `extra_info["state"]` has `cards` (three numbers), `lamp` (red, yellow, green, or min, mid, max) and `round`."""
    state = extra_info["state"]
    taken = _card(solution_str)
    selection = 0.0 if taken is None else 1.0 if is_right(state["cards"], state["lamp"], taken) else -1.0
    bonus = COMPLETION if state.get("round", 1) >= LAST else 0.0
    penalty = FORMAT_PENALTY if taken is None else 0.0
    return {"score": selection + penalty + bonus, "acc": float(selection > 0), "format": float(taken is not None)}


def number_game_binary(solution_str: str, extra_info: Mapping[str, Any]) -> float:
    """Scores a card: 1 if it is right, else 0."""
    state, taken = extra_info["state"], _card(solution_str)
    return float(taken is not None and is_right(state["cards"], state["lamp"], taken))


def is_right(cards: Sequence[int], lamp: str, place: int) -> bool:
    """Tells whether the card at `place` is the one that the lamp asks for.  Raises: ValueError on a bad row."""
    if len(cards) != 3 or lamp not in PLACES:
        raise ValueError(
            f"the row has cards={list(cards)!r} and lamp={lamp!r}; expected three cards and one of {', '.join(PLACES)}"
        )
    return cards[place] == sorted(cards)[PLACES[lamp]]


def _card(text: str) -> int | None:
    action = parse_action(text, needs_tag=True)
    return action.arguments[0] if action and action.name == "select" and action.arguments[0] <= 2 else None


def change_reward(d: float) -> float:
    """Returns 1 + min(d / 1000, 1) for a rise d of power, -1 + max(d / 1000, -1) for a fall, 0 without a change."""
    return 1.0 + min(d / 1000, 1.0) if d > 0 else -1.0 + max(d / 1000, -1.0) if d < 0 else 0.0


def power_reward(before: float | None, after: float | None) -> float:
    """Returns the `change_reward` from one power to another, or -0.2 if one of them could not be read: it is None or
    below 0."""
    if before is None or after is None or before < 0 or after < 0:
        return UNREADABLE
    return change_reward(after - before)


def efficiency(step: int) -> float:
    """Returns 0.2 up to step 15, 0 up to step 20, then 0.01 less with each step; 0 for step 0."""
    return 0.0 if step <= 0 else 0.2 if step <= 15 else 0.0 if step <= 20 else -0.01 * (step - 20)


def tree_game(solution_str: str, extra_info: Mapping[str, Any]) -> dict[str, float]:
    """Scores a turn of the tree game by the change of power after it; -0.5 for an answer of another form, 2 more from
    step 10 on, and the efficiency.

    `extra_info["state"]` has `power`, `step`, and `after`: the power after each action, by its name."""
    state, action = extra_info["state"], parse_action(solution_str, needs_tag=True)
    valid = action is not None and action.name != "select"
    name = action.name if action is not None and valid else "decompose"
    change = power_reward(state.get("power"), (state.get("after") or {}).get(name))
    step = state.get("step", 0)
    bonus = COMPLETION if step >= LAST else 0.0
    score = change + (0.0 if valid else FORMAT_PENALTY) + bonus + efficiency(step)
    right = state.get("right")
    return {"score": score, "acc": float(right is not None and valid and name == right), "format": float(valid)}
