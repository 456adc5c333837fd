# SPDX-License-Identifier: Apache-2.0
"""A format of tool calls: whet train ... environment.tool_parser=examples/extending/tool_parser.py:lines

It yields the parts of a turn's text: calls, and the text around them. A malformed call is a Call with an error, which
the model reads."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from whet.environments.calls import Call


def lines(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str | Call]:
    """A line `!name {"argument": value}` is a call."""
    for line in text.splitlines(keepends=True):
        if not line.startswith("!"):
            yield line
            continue
        name, _, written = line[1:].strip().partition(" ")
        try:
            arguments = dict(json.loads(written or "{}"))
        except (TypeError, ValueError) as error:
            yield Call(name, error=f"expected a JSON object after !{name}: {error}", text=line)
        else:
            yield Call(name, arguments, text=line)
