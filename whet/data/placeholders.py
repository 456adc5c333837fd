# SPDX-License-Identifier: Apache-2.0
"""Images and videos in messages: finds them in fields, tags and content parts, and puts their tokens into the text."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from whet.data.media import KINDS, OWN_LIMITS, UNREAD, Kind, MediaReader
from whet.errors import DataError
from whet.types import Media, Message

FIELDS: dict[Kind, tuple[str, str]] = {kind: (f"{kind}s", kind) for kind in KINDS}
OBJECTS: dict[str, Kind] = {name: kind for kind in KINDS for name in (kind, f"{kind}_url", f"input_{kind}")}
THREADS = 4  # that read files side by side
Value = tuple[Kind, Any]  # a media in a form that MediaReader.read takes


def values_of(row: Mapping[str, Any], keys: Mapping[Kind, str]) -> list[Value]:
    """Collects the media in the fields of a row, by kind. `images` may also be `image` or `multi_modal_data.image`."""
    nested = row.get("multi_modal_data") or {}
    found: list[Value] = []
    for kind in keys:
        plural, single = FIELDS[kind]
        names = (plural, single) if keys[kind] == plural else (keys[kind],)
        value = next((each[name] for each in (row, nested) for name in names if has(each, name)), None)
        is_one = kind == "video" and single in names[1:] and not has(row, plural) and has(row, single)
        is_list = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
        each_value = [value] if is_one or not is_list else value
        found += [(kind, each) for each in each_value or () if each is not None]
    return found


def has(row: Mapping[str, Any], name: str) -> bool:
    """Tells whether a field is present and not empty."""
    value = row.get(name)
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def place(
    messages: Sequence[Message], given: Sequence[Value], kinds: Sequence[Kind], owner: str = "row"
) -> tuple[tuple[Message, ...], list[Value]]:
    """Replaces each tag (<image>) by a content part.  Returns the messages without media objects, and the objects in
    order.

    A tag, or a part without an object, stands for the next `given` value of its kind. Assistant texts have no tags.
    Raises: DataError naming the `owner` of the messages if the numbers differ, or for parts of other `kinds`."""
    left = {kind: deque(value for own, value in given if own == kind) for kind in kinds}
    num_given, num_tags = {kind: len(values) for kind, values in left.items()}, dict.fromkeys(kinds, 0)
    placed, found = [], list[Value]()
    for number, message in enumerate(messages):
        parts = list(_parts(message, number, kinds))
        for kind, value in ((each["type"], each["value"]) for each in parts if each["type"] in KINDS):
            if value is None:
                num_tags[kind] += 1
                value = left[kind].popleft() if left[kind] else None
            found.append((kind, value))
        if any(each["type"] in KINDS for each in parts):
            contents = [{"type": each["type"]} if each["type"] in KINDS else each for each in parts]
            message = Message(message.role, contents, message.fields)
        placed.append(message)
    for kind in kinds:
        if num_tags[kind] != num_given[kind]:
            places = f"(the tag <{kind}>, or a part of type {kind!r} without an object)"
            expected = f"{num_tags[kind]}, the places for them in its text {places}"
            raise DataError(f"number of {FIELDS[kind][0]}", num_given[kind], expected, f"correct the {owner}")
    return tuple(placed), found


def has_parts(messages: Sequence[Message]) -> bool:
    """Tells whether messages have images or videos as content parts."""
    return any(part.get("type") in OBJECTS for message in messages for part in message.parts)


def has_tag(messages: Sequence[Message], kinds: Sequence[Kind]) -> bool:
    """Tells whether the text of a message has a tag such as <image>."""
    return any(each.is_text and re.search(_tag(kinds), str(each.content)) for each in messages)


def _tag(kinds: Sequence[Kind]) -> str:
    return f"<({'|'.join(kinds)})>"


def _parts(message: Message, number: int, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    """Yields the content parts of a message. The `value` of a media part is its object, or None if it has none."""
    has_objects = has_parts([message])
    for part in message.parts:
        form = str(part.get("type"))
        if OBJECTS.get(form) in kinds:
            names = (form, OBJECTS[form], "url", "path", "bytes")
            value = next((part[name] for name in names if has(part, name)), None)
            limits = {name: part[name] for name in (*OWN_LIMITS, *UNREAD) if has(part, name)}
            is_limited = value is not None and limits
            yield {"type": OBJECTS[form], "value": {OBJECTS[form]: value, **limits} if is_limited else value}
        elif "audio" in form:
            raise DataError(f"message {number}", f"has a part of type {form!r}", "only text, images and videos")
        elif form == "text" and not has_objects and message.role != "assistant":
            yield from _split(part, kinds)
        else:
            yield {name: each for name, each in part.items() if each is not None}  # tables add nulls


def _split(part: Mapping[str, Any], kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    for place, piece in enumerate(re.split(_tag(kinds), str(part.get("text") or ""))):
        if place % 2:
            yield {"type": piece, "value": None}
        elif piece:
            yield {"type": "text", "text": piece}


def read_all(reader: MediaReader, values: Sequence[Value]) -> list[Media | DataError]:
    """Reads the media of these values, in parallel. An unreadable value gives its error instead."""

    def read(value: Value) -> Media | DataError:
        try:
            return reader.read(*value)
        except DataError as error:
            return error

    if len(values) < 2:
        return [read(value) for value in values]
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(read, values))


def expanded(text: str, media: Sequence[Media], *, is_prefix: bool = False) -> str:
    """Replaces the placeholder of each media in a rendered text by its tokens. A prefix may lack the last placeholders.

    Raises: DataError unless the chat template writes one placeholder for each media."""
    if not media:
        return text
    expected = [media_tokens(each).placeholder for each in media]
    pattern = re.compile("|".join(map(re.escape, sorted({*expected}, key=len, reverse=True))))
    found = pattern.findall(text)
    if found != (expected[: len(found)] if is_prefix else expected):
        told = f"writes {len(found)} placeholders ({', '.join(found[:4]) or 'none'}) for {len(media)} images and videos"
        raise DataError("chat template", told, ", ".join(expected[:4]), "use the template that belongs to the model")
    texts = ("".join(piece * times for piece, times in media_tokens(each).text) for each in media)
    return pattern.sub(lambda _: next(texts), text)


def check_ids(ids: Sequence[int], media: Sequence[Media], forbidden: Sequence[int]) -> None:
    """Checks that the special media tokens in `ids` come only from `media`, not from text.  Raises: DataError."""
    own = {media_tokens(each).token_id for each in media} | {*forbidden}
    found, expected = sum(token_id in own for token_id in ids), sum(media_tokens(each).count for each in media)
    if found != expected:
        change = "write <image> or <video> instead of the model's own token, or exclude such rows (data.filter)"
        wanted = f"{expected}, those of its {len(media)} images and videos"
        raise DataError("media tokens", found, wanted, change)


def media_tokens(media: Media) -> Any:
    """Returns the tokens of a measured media."""
    assert media.tokens is not None, "a media that no encoder has measured"
    return media.tokens


def num_whole(ids: Sequence[int], media: Sequence[Media]) -> int | None:
    """Counts the media whose tokens are all in `ids`, the beginning of a text; None if `ids` end inside a media."""
    own = {media_tokens(each).token_id for each in media}
    left = sum(token_id in own for token_id in ids)
    for number, each in enumerate(media):
        if left <= 0:
            return number if left == 0 else None
        left -= media_tokens(each).count
    return len(media) if left == 0 else None
