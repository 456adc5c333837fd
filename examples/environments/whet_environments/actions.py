# SPDX-License-Identifier: Apache-2.0
"""Actions in the answers of a model: `<action>select(1)</action>`, `<action>click(360, 1067)</action>`, ..."""

from __future__ import annotations

import re
from typing import NamedTuple

TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
CALL = re.compile(
    r"\b(select|click|replace|equip|decompose|skip)\(\s*(\d{1,4}(?:\s*,\s*\d{1,4})*)?\s*\)", re.IGNORECASE
)
NUM_ARGUMENTS = {"select": 1, "click": 2, "replace": 0, "decompose": 0}
SAME = {"equip": "replace", "skip": "decompose"}
MOST_READ = 20_000  # characters of an answer; the beginning of a longer one is not read


class Action(NamedTuple):
    """An action with its arguments."""

    name: str  # select, click, replace or decompose
    arguments: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.arguments))})"


def parse_action(text: str, *, needs_tag: bool = False) -> Action | None:
    """Reads the last action in <action>...</action>; without a tag the last action in the text, unless `needs_tag`.
    None if there is none, or if it has a wrong number of arguments. `equip` is `replace`, `skip` is `decompose`."""
    text = text[-MOST_READ:]
    tagged = TAGGED.findall(text)
    if not tagged and needs_tag:
        return None
    found = CALL.findall(tagged[-1] if tagged else text)
    if not found:
        return None
    name, arguments = found[-1]
    name = SAME.get(name.lower(), name.lower())
    numbers = tuple(int(each) for each in arguments.split(",")) if arguments else ()
    return Action(name, numbers) if len(numbers) == NUM_ARGUMENTS[name] else None


def write_action(action: Action) -> str:
    """Returns the answer that `parse_action` reads as the action."""
    return f"<action>{action}</action>"
