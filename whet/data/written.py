# SPDX-License-Identifier: Apache-2.0
"""Reads the tools of rows for a chat template, finds the token that ends a turn and text that a template leaves out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from whet.data.chat import TOOLS, read_arguments, render_chat, template_text
from whet.errors import DataError
from whet.options import as_list
from whet.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

logger = logging.getLogger(__name__)
_QUESTION, _ANSWER = "whet-probe-question", "whet-probe-answer"
_NO_TEXT = ("role", "name", "id", "tool_call_id")  # fields of a message that need not be written
_NOT_WRITTEN = ("type", "id", "description", "parameters")  # names in calls, parts and tools
NO_END = (
    "the chat template ends an answer with text and no token: conversations are trained without an end token, so that "
    "sampled responses may not end; use a template with one, or set rollout.stop"
)
_THINK = re.compile(r"</?think>|\[/?THINK\]")


def row_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Reads a row's field `tools`, a list or its JSON text, in the form of OpenAI's API; None if there are none."""
    found = row.get("tools")
    if isinstance(found, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(found or "[]")
    if not found:
        return None
    listed = as_list(found)
    named = [each.get("function") or each for each in listed if isinstance(each, Mapping)]
    if len(named) < len(listed) or not all(isinstance(each, Mapping) and each.get("name") for each in named):
        warn_once(
            'the field `tools` of some rows is no list of tools {"name": ..., "parameters": ...} or its JSON text: it '
            "is not shown to the model"
        )
        return None
    return [{"type": "function", "function": as_written(each)} for each in named]


def as_written(value: Any) -> Any:
    """Removes nulls from a message or a part of it. Tables (parquet) have a null for each key of other rows."""
    if isinstance(value, Mapping):
        return {name: as_written(each) for name, each in value.items() if each is not None}
    return [as_written(each) for each in value] if isinstance(value, list) else value


@cache
def warn_once(text: str) -> None:
    """Warns about `text`, once per process."""
    logger.warning("%s", text)


def end_of_turn(tokenizer: Tokenizer, options: Mapping[str, Any] | None) -> int | None:
    """Finds the token that the chat template with these `options` writes after an assistant turn. If there is no
    template, or it writes no token there, returns the tokenizer's end token."""
    try:
        end = None if options is None else _end(tokenizer, template_text(tokenizer, options))
    except DataError:
        end = None
    return tokenizer.eos_token_id if end is None else end  # type: ignore[return-value]


@lru_cache(maxsize=8)
def _end(tokenizer: Tokenizer, template: str) -> int | None:
    chat, options = [Message("user", _QUESTION), Message("assistant", _ANSWER)], {"chat_template": template}
    text = render_chat(tokenizer, chat, add_generation_prompt=False, chat_template_kwargs=options)
    after = text.rpartition(_ANSWER)[2].lstrip()
    added = tokenizer.added_tokens_decoder.items()
    tokens = {token.content: number for number, token in added if token.content.strip()}
    return tokens.get(max((token for token in tokens if after.startswith(token)), key=len, default=""))


def mark_ends(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int], ends: Collection[int | None]) -> list[int]:
    """Extends each run of trained tokens in the mask to its end token, and unmarks blank text after that token."""
    marked = [*mask]
    starts = [at for at, trained in enumerate(mask) if trained and not (at and mask[at - 1])]

    def is_blank(start: int, stop: int) -> bool:
        return not str(tokenizer.decode(list(ids[start:stop]))).strip()

    for start, limit in pairwise([*starts, len(ids)]):
        stop = next((at for at in range(start, limit) if not mask[at]), limit)
        found = (at for at in range(start, limit) if ids[at] in ends and is_blank(at + 1, stop) and is_blank(stop, at))
        if (end := next(found, None)) is not None:
            marked[start:limit] = [int(at <= end) for at in range(start, limit)]
        else:
            warn_once(NO_END)
    return marked


def unwritten(text: str, messages: Sequence[Message], *, tools: bool = True) -> dict[int, str]:
    """Finds fields of messages whose text is missing in `text`, the rendered conversation, apart from white space.
    Returns the first such field by message number. With `tools` the row's tools are checked too."""
    squeezed, lost = "".join(text.split()), set[tuple[int, str]]()
    fields = [(at, *field) for at, each in enumerate(messages) for field in each.to_dict().items()]
    found = [(at, name, piece) for at, name, value in fields if name not in _NO_TEXT for piece in _texts(value)]
    for at, name, piece in sorted(found, key=lambda each: -len("".join(each[2].split()))):  # the longest first
        forms = ["".join(form.split()) for form in (piece, json.dumps(piece, ensure_ascii=False)[1:-1])]
        own = next((form for form in forms if form in squeezed), None)
        if own is not None:
            squeezed = squeezed.replace(own, "\0", 1) if own else squeezed
        elif tools or name != TOOLS:
            lost.add((at, name))
    return {at: name for at, name, _ in reversed(fields) if (at, name) in lost}  # of several fields the first


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a nested value that a template writes, split at thinking tags such as <think>."""
    if isinstance(value, str):
        yield from _THINK.split(value)
    elif isinstance(value, list):
        yield from (text for each in value for text in _texts(each))
    elif isinstance(value, Mapping):
        shown = {name: read_arguments(each) for name, each in value.items() if name not in _NOT_WRITTEN}
        yield from (text for each in shown.values() for text in _texts(each))
