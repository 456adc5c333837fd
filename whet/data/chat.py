# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages to token ids, and the tokens between a sampled turn and the next one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from whet.errors import DataError
from whet.limits import bounded, cause
from whet.types import Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESPONSE, _THOUGHT = "whet-probe-response", "whet-probe-thought"
MAX_CHARACTERS = 4_000_000  # of one text: about a million tokens, for which a tokenizer needs seconds and a gigabyte
SANITIZE = "sanitize_control_tokens"  # the option's name in transformers
_MARK = "\U0010ffff"  # a noncharacter that marks control tokens in messages; those of the template have none


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Renders `messages` with the chat template, for `encode_rendered`.

    `chat_template_kwargs` may have `tools`, and `sanitize_control_tokens`: by default a control token such as
    `<|im_end|>` inside a message stays text, and only those that the template writes are control tokens.
    Raises: DataError if there is no template, or the template rejects the messages.
    """
    options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {}), "tokenize": False}
    _template_text(tokenizer, options)
    try:
        with bounded():
            dicts = as_text(tokenizer, [message.to_dict() for message in messages], options)
            return cast(str, tokenizer.apply_chat_template(dicts, **_of_template(options)))
    except Exception as error:  # the template is other people's code
        raise DataError(
            f"the chat template cannot render messages of roles ({roles(messages)}): {cause(error)}"
        ) from error


def encode_marked_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]] | None:
    """Encodes a conversation: its ids, and a mask that is 1 between the template's `{% generation %}` marks.

    None if the template has no such marks, or if control tokens in the messages have to stay text, which
    transformers does not support here. Raises: as `render_chat`.
    """
    options, dicts = chat_template_kwargs or {}, [message.to_dict() for message in messages]
    has_marks = _GENERATION_MARK.search(_template_text(tokenizer, options)) is not None
    if not has_marks or as_text(tokenizer, dicts, options) != dicts:
        return None
    # Render within limits first, without encoding: the tokenizer's process dies if it runs into the memory limit.
    _check_text(render_chat(tokenizer, messages, add_generation_prompt=False, chat_template_kwargs=options))
    encoded: Any = tokenizer.apply_chat_template(dicts, return_assistant_tokens_mask=True, **_of_template(options))
    return encoded["input_ids"], encoded["assistant_masks"]


def as_text(tokenizer: PreTrainedTokenizerBase, value: Any, options: Mapping[str, Any]) -> Any:
    """Marks control tokens in all strings of `value`, so that `encode_rendered` keeps them as text, unless `options`
    turn that off."""
    if isinstance(value, str) and options.get(SANITIZE, True):
        control = _control_tokens(tokenizer)
        return control.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", value.replace(_MARK, ""))
    if isinstance(value, Mapping):
        return {key: as_text(tokenizer, each, options) for key, each in value.items()}
    return [as_text(tokenizer, each, options) for each in value] if isinstance(value, list | tuple) else value


def encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encodes rendered texts. Control tokens of the template are parsed, those that `as_text` marked stay text, and
    none is added. A marked one is encoded in two parts, neither of which is a control token."""
    parts = [text.split(_MARK) for text in texts]
    found = encode_texts(tokenizer, [first for first, *_ in parts], add_special_tokens=False)
    for ids, (_, *rest) in zip(found, parts, strict=True):
        for part in rest:
            # After a line break, since some tokenizers add a space before a text.
            line_break, after, alone = encode_texts(tokenizer, ["\n", f"\n{part}", part], add_special_tokens=False)
            ids += after[len(line_break) :] if after[: len(line_break)] == line_break else alone
    return found


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Encodes each text.  Raises: DataError for a text that is too long, or that the tokenizer rejects."""
    for text in texts:
        _check_text(text)
    try:
        return cast(list[list[int]], tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise DataError(
            f"the tokenizer rejects one of {len(texts)} texts, the first of which is {texts[0][:80]!r}: {error}; "
            "use only characters that are in its vocabulary"
        ) from error


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    turn: Turn,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids between a sampled turn and the next one: the end of the turn, the new messages, the generation prompt.

    `messages_before` are the messages before `turn`; `new_messages` (tool results, user messages) follow it. The ids of
    the whole are `turn.context_ids + turn.token_ids + encode_continuation(...)`: no sampled id is ever tokenised again.
    A sampled stop token is not repeated; a turn that was truncated at its length limit is closed.

    The template renders the conversation with a probe in place of the turn's text; the text after the probe is the
    continuation. This needs a template that only appends. Raises: DataError for one that rewrites earlier turns.
    """

    def render(messages: Sequence[Message]) -> str:
        return render_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs)

    thinks = "</think>" in tokenizer.decode(list(turn.token_ids))  # templates treat such turns differently
    probe = Message("assistant", f"<think>\n{_THOUGHT}\n</think>\n\n{_RESPONSE}" if thinks else _RESPONSE)
    with_probe = [*messages_before, probe]
    with bounded():
        before, after = render(messages_before), render([*with_probe, *new_messages])
        without_new = render(with_probe)
    if not after.startswith(before):
        raise _not_append_only("the messages before the response")
    opening, _, continuation = after.removeprefix(before).partition(_RESPONSE)
    if thinks and _THOUGHT not in opening:
        raise _not_append_only("the response: it removes the thoughts")
    if not continuation or (not thinks and opening.strip()):
        raise _not_append_only("the response itself")
    if after == without_new:
        raise DataError(
            f"the chat template renders nothing for the new messages (roles {roles(new_messages)}); "
            "use a template that supports these roles, or send their text as a user message"
        )
    [ids] = encode_rendered(tokenizer, [continuation])
    return ids[_num_sampled(tokenizer, turn, ids) :]


def roles(messages: Sequence[Message]) -> str:
    """The roles in order, for error messages."""
    return ", ".join(message.role for message in messages)


def _num_sampled(tokenizer: PreTrainedTokenizerBase, turn: Turn, ids: Sequence[int]) -> int:
    """Counts the leading ids of a continuation up to the stop token that the turn already sampled.

    Usually the stop token is the first id. Some templates close with " </s>": then it is the first control token.
    """
    if turn.finish_reason != "stop":
        return 0
    stop = turn.token_ids[-1]
    if ids[0] == stop:
        return 1
    control_ids = tokenizer.added_tokens_decoder.keys()
    first = next((position for position, token_id in enumerate(ids) if token_id in control_ids), None)
    return 0 if first is None or ids[first] != stop else first + 1


def _not_append_only(what: str) -> DataError:
    return DataError(
        f"the chat template is not append-only: with the new messages it rewrites {what}, so the sampled ids cannot be "
        "continued as one row. Use a template that renders earlier turns as they were generated "
        "(data.chat_template_kwargs.chat_template), or let the environment start a new row for each turn"
    )


def check_message(message: Message) -> None:
    """Checks all text of a message.  Raises: DataError for text that is too long or that no encoding can hold."""
    _check_text(json.dumps(message.to_dict(), ensure_ascii=False, default=str))


def _check_text(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise DataError(f"the text has {len(text):,} characters, over the limit of {MAX_CHARACTERS:,}; shorten it")
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text, after {text[max(0, error.start - 20) : error.start]!r}, is half of "
            "a surrogate pair, which no encoding can hold; fix the program that wrote it, or remove the character"
        ) from error


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _of_template(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != SANITIZE}


def _template_text(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    try:
        return tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template to use: {error} "
            "Set data.apply_chat_template=false to use the text without a template, or set "
            "data.chat_template_kwargs.chat_template"
        ) from error
