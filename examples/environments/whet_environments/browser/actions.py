# SPDX-License-Identifier: Apache-2.0
"""The actions of the browser, written in a text; the last one counts.

click[3]  click[buy now]   an element by its number, or by its name in any case (the first one that has it)
type[3, words]             fills field 3, or chooses `words` in a list of choices
search[words]              fills the first field of the page and presses Enter
back                       on a line of its own, or back[]
stop[answer]               ends the episode
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

MOST_TYPED = 2000  # characters
_ACTION = re.compile(
    rf"\b(?P<verb>click|type|search|stop|back)\[(?P<argument>[^\[\]]{{0,{MOST_TYPED}}})\]|^[ \t]*(?P<back>back)[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True)
class Action:
    """An action. `number` is that of its element, if it has one; `text` is a name, or words to type or to answer."""

    verb: Literal["click", "type", "search", "back", "stop"]
    text: str = ""
    number: int | None = None


def read_action(text: str) -> Action | None:
    """The last action in a text; None where there is none, or the last one lacks its element or its words."""
    last = deque(_ACTION.finditer(text), maxlen=1)
    if not last:
        return None
    if last[0]["back"]:
        return Action("back")
    verb, argument = last[0]["verb"].lower(), last[0]["argument"].strip()
    if verb == "click" and argument:
        return Action("click", argument, int(argument) if _NUMBER.fullmatch(argument) else None)
    if verb == "type":
        number, comma, words = argument.partition(",")
        is_whole = comma and _NUMBER.fullmatch(number.strip())
        return Action("type", words.strip(), int(number)) if is_whole else None
    if verb == "search" and argument:
        return Action("search", argument)
    if verb == "back" and not argument:
        return Action("back")
    return Action("stop", argument) if verb == "stop" else None
