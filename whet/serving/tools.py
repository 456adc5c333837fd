# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of a response, in the form of Hermes and Qwen: <tool_call>{"name": ..., "arguments": ...}."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.serving.texts import num_begun

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call of a function."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_dict(self) -> dict[str, Any]:
        """The call as the API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolText:
    """Splits text that comes in parts into calls and the text around them. A call is given when it is whole; what is
    no call stays text, white space around calls does not."""

    def __init__(self) -> None:
        self._held = ""
        self._is_after_call = False

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Text and calls that are known to be such."""
        rest, texts, calls = self._held + text, list[str](), list[ToolCall]()
        while (begin := rest.find(BEGIN)) >= 0:
            end = rest.find(END, begin)
            if end < 0 and not is_last:
                break
            body = rest[begin + len(BEGIN) : end if end >= 0 else len(rest)]
            after = rest[end + len(END) :] if end >= 0 else ""
            call = _call(body)
            texts.append(self._stripped(rest[:begin], before_call=call is not None))
            if call is None:
                texts.append(rest[begin : len(rest) - len(after)])
            else:
                calls.append(call)
                self._is_after_call = True
            rest = after
        if not is_last:
            known = begin if begin >= 0 else len(rest) - num_begun(rest, [BEGIN])
            known = len(rest[:known].rstrip())
        else:
            known = len(rest)
        texts.append(self._stripped(rest[:known], before_call=False))
        self._held = rest[known:]
        return "".join(texts), calls

    def _stripped(self, text: str, *, before_call: bool) -> str:
        text = text.rstrip() if before_call else text
        text = text.lstrip() if self._is_after_call else text
        self._is_after_call = self._is_after_call and not text
        return text


def _call(body: str) -> ToolCall | None:
    """The call that the model wrote; None where it is not one."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        return None
    arguments = raw.get("arguments", {})
    return ToolCall(raw["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
