# SPDX-License-Identifier: Apache-2.0
"""Parsers of tool calls, one registered function for each format; they split a turn's text into calls and other text.

A parser yields the text in parts: a `Call` with its text, or other text. It never raises. A part that was meant as a
call but is malformed becomes a `Call` with an `error`, which the model reads as its result: no text is dropped.

Keyword arguments of the decorator let a server stream text and calls during sampling. Each call begins with one of the
texts `begin` or a match of `begin_patterns`; all text before it is plain. After one of the texts `end`, earlier parts
no longer change, except a final call with an error. Without `begin`, all parts wait for the end of the response.
`opening` has the texts before and after the tool's name in a call: a server can force the model to begin with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.registry import TOOL_PARSERS

Schemas = Mapping[str, Mapping[str, Any]]  # the JSON schema of the arguments, by name of the tool
# Parsers by a text that shows the format of a chat template; the first of these texts in the template decides.
SIGNS: Mapping[str, str | None] = {
    "<arg_key>": None,  # GLM, which has the tags of Hermes
    "<function=": "qwen3_coder",
    "<|channel|>": "gpt-oss",
    "<|/tool|>": "phi",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    "ipython": "llama3_json",
}
CONTROL = re.compile(r"<\|(?:im_end|eot_id|eom_id|end|call|return|endoftext)\|>|</s>")
_THOUGHT = r"<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)"
_UNOPENED = r"\A(?:(?!<think>|\[THINK\]).)*?(?:</think>|\[/THINK\])"  # a prompt may end with the opening tag


@dataclass(frozen=True)
class Call:
    """A call of a tool, or a malformed call with its error."""

    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None  # for the model to read
    text: str = ""  # as the model wrote it


def parts_of(parser: str, text: str, schemas: Schemas, *, is_whole: bool = True) -> Iterator[str | Call]:
    """Yields the parts of a text by a registered parser. A thought is plain text, which the parser gets only if it is
    registered with `gets_thoughts`. A thought without closing tag lasts to the end. With `is_whole`, all text before
    the first closing tag is a thought, even without opening tag. Tags inside a valid call belong to the call."""
    entry = TOOL_PARSERS[parser]
    load = entry.load()

    def read(text: str) -> Iterator[str | Call]:
        return (_of_json(part) if isinstance(part, Call) else part for part in load(text, schemas))

    if entry.marks.get("gets_thoughts") or not ("think>" in text or "THINK]" in text):
        yield from read(text)
        return
    masked, position = text, 0
    calls = {part.text for part in read(text) if isinstance(part, Call) and part.error is None}
    for call in sorted(calls, key=len, reverse=True):
        masked = masked.replace(call, " " * len(call))
    for thought in re.finditer(f"{_UNOPENED}|{_THOUGHT}" if is_whole else _THOUGHT, masked, re.DOTALL):
        if position < thought.start():
            yield from read(text[position : thought.start()])
        yield text[thought.start() : thought.end()]
        position = thought.end()
    if position < len(text):
        yield from read(text[position:])


def _of_json(call: Call) -> Call:
    """Returns `call`, or a call with an error if an argument of `call` is not valid JSON, such as NaN."""
    try:
        json.dumps(dict(call.arguments), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        return Call(call.name, error=f"an argument is no value of JSON ({error}); expected JSON", text=call.text)
    return call


def parser_of(template: str) -> str | None:
    """Finds the name of the parser for tool calls of a chat template; None if the template shows no known format."""
    return next((name for sign, name in SIGNS.items() if sign in template), None)
