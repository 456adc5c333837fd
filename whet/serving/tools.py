# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the text of a response that comes in parts, read by the registered parsers of environments."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from whet.environments.tools.parsers import CONTROL, Call, parts_of
from whet.errors import describe
from whet.registry import TOOL_PARSERS
from whet.serving.bodies import ApiError, ToolsAsked
from whet.serving.texts import num_begun


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. An id has nine letters and digits, as Mistral's template wants it."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])

    def to_dict(self) -> dict[str, Any]:
        """The call as the API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolText:
    """Splits text that comes in parts into calls and the text around them, as the parser splits the whole text.

    Text is given up to where a call may begin, a call with the end of its format, all else with the last part. What is
    no valid call stays text, with its marks but those of ends of turns; other text has none. White space around calls
    is left out."""

    def __init__(self, asked: ToolsAsked, *, is_thinking: bool = False) -> None:
        """`is_thinking`: the prompt ends with the opening tag of a thought."""
        entry = TOOL_PARSERS[asked.parser]
        self._asked = asked
        self._begins, self._ends = entry.marks.get("begin", ()), entry.marks.get("end", ())
        # Without marks the pattern is empty, and fits everywhere: all text waits for the end.
        self._begin = re.compile("|".join([*map(re.escape, self._begins), *entry.marks.get("begin_patterns", ())]))
        self._text = "<think>" if is_thinking else ""  # all text with its marks
        self._is_shown = bytearray(len(self._text))  # 0 for characters of marks
        self._num_given = self._num_parsed = len(self._text)  # characters
        self._num_calls = 0  # given, or left out as too many
        self._space, self._is_after_call = "", False

    def add(self, parts: Sequence[tuple[str, bool]], *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Text and calls that are known to be such; a part is text, or (True) a mark.  Raises: ApiError."""
        for text, is_mark in parts:
            self._text += text
            self._is_shown += bytes([not is_mark]) * len(text)
        found, new = list[str | ToolCall](), self._text[self._num_given :]
        ends = [self._num_given + new.rfind(end) + len(end) for end in self._ends if end in new]
        end = len(self._text) if is_last else max(ends, default=0)
        if (is_last or end > self._num_parsed) and self._begin.search(self._text, self._num_given, end):
            self._num_parsed = end
            found += self._parsed(end, is_last=is_last)
        known = len(self._text) if is_last else self._known()
        found.append(self._shown(self._num_given, known))
        self._num_given = max(self._num_given, known)
        return self._split(found, is_last=is_last)

    def _known(self) -> int:
        """The end of the text that no call can begin in."""
        begin, start = self._begin.search(self._text, self._num_given), self._num_given
        end = begin.start() if begin else len(self._text) - num_begun(self._text[start:], self._begins)
        return start + len(self._text[start:end].rstrip())  # a call may begin with the white space before it

    def _parsed(self, end: int, *, is_last: bool) -> Iterator[str | ToolCall]:
        """The new text and calls before `end`, without a call at the end that has an error yet."""
        groups, num_calls = self._groups(end), 0
        if not is_last and groups and groups[-1][2] and None in map(_written, groups[-1][2]):
            end = max(self._num_given, groups.pop()[0])
        for start, stop, parts in groups:
            calls = [_written(part) for part in parts]
            begin = self._begin.search(self._text, max(start, self._num_given), stop) if calls else None
            middle = begin.start() if begin else stop
            yield self._shown(max(start, self._num_given), middle)
            valid = [call for call in calls if call is not None]
            if len(valid) < len(calls):
                yield CONTROL.sub("", self._text[max(middle, self._num_given) : stop])
                continue
            num_calls += len(valid)
            yield from valid[len(valid) - max(0, num_calls - self._num_calls) :]
            self._num_calls = max(self._num_calls, num_calls)
        self._num_given = end

    def _groups(self, end: int) -> list[tuple[int, int, list[Call]]]:
        """The parts before `end`: where each begins and ends, and its calls, of which several may have one text."""
        groups, position = list[tuple[int, int, list[Call]]](), 0
        try:
            for part in parts_of(self._asked.parser, self._text[:end], self._asked.schemas, is_whole=False):
                text, calls = (part, []) if isinstance(part, str) else (part.text, [part])
                if calls and not text and groups and groups[-1][2] and groups[-1][0] < position:
                    groups[-1][2].extend(calls)
                    continue
                start = self._text.index(text, position, end)  # a user's parser may leave out text
                position = start + len(text)
                groups.append((start, position, calls))
        except Exception as error:  # the code of a user
            message = f"the tool parser {self._asked.parser} failed: {describe(error)}"
            raise ApiError(500, message, code="tool_parser_failed") from error
        return groups

    def _shown(self, start: int, stop: int) -> str:
        """Text without its marks."""
        return "".join(compress(self._text[start:stop], self._is_shown[start:stop]))

    def _split(self, found: Sequence[str | ToolCall], *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Text and calls, without white space around calls, and without calls that are too many."""
        texts, calls = list[str](), list[ToolCall]()
        for each in found:
            if isinstance(each, ToolCall):
                calls.append(each)
                self._space, self._is_after_call = "", True
                continue
            text = self._space + (each.lstrip() if self._is_after_call else each)
            shown = text.rstrip()
            self._space = text[len(shown) :]
            self._is_after_call = self._is_after_call and not shown
            texts.append(shown)
        before, most = self._num_calls - len(calls), self._asked.most_calls
        kept = calls if most is None else calls[: max(0, most - before)]
        return "".join(texts) + (self._space if is_last else ""), kept


def _written(call: Call) -> ToolCall | None:
    """The call as the API has it; None for one with an error, or with arguments that are no JSON."""
    try:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
        (call.name + arguments).encode()  # half of a surrogate pair has no encoding
    except (TypeError, ValueError, RecursionError):
        return None
    return ToolCall(call.name, arguments) if call.error is None else None
