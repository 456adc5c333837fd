# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids, and what a chat template puts after a turn that the policy has already sampled."""

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
_ANSWER, _THOUGHT = "whet-probe-answer", "whet-probe-thought"
MAX_CHARACTERS = 4_000_000  # of one text: about a million tokens, which take a tokenizer seconds and a gigabyte
SANITIZE = "sanitize_control_tokens"  # transformers' name for the option
_MARK = "\U0010ffff"  # a noncharacter that keeps a control token in a message apart from those of the template


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Returns the text that the chat template makes of `messages`, for `encode_rendered`.

    `chat_template_kwargs` may hold `tools`, and `sanitize_control_tokens`: by default a control token such as
    `<|im_end|>` that a message holds stays text, and only those that the template writes are control tokens.
    Raises: DataError if there is no template, or the template refuses the messages.
    """
    options = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {}), "tokenize": False}
    _template_text(tokenizer, options)
    try:
        with bounded():
            dicts = as_text(tokenizer, [message.to_dict() for message in messages], options)
            return cast(str, tokenizer.apply_chat_template(dicts, **_of_template(options)))
    except Exception as error:  # the template is other people's code
        said = f"the chat template cannot render messages of roles ({roles(messages)})"
        raise DataError(f"{said}: {cause(error)}") from error


def encode_marked_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]] | None:
    """The ids of a conversation, and 1 for each that the template has between `{% generation %}` marks.

    None if the template has no such marks, or if control tokens in the messages have to stay text, which
    transformers cannot do here. Raises: as `render_chat`.
    """
    options, dicts = chat_template_kwargs or {}, [message.to_dict() for message in messages]
    has_marks = _GENERATION_MARK.search(_template_text(tokenizer, options)) is not None
    if not has_marks or as_text(tokenizer, dicts, options) != dicts:
        return None
    # Rendered alone first, within limits, which a tokenizer that runs out of memory would not survive.
    _check_text(render_chat(tokenizer, messages, add_generation_prompt=False, chat_template_kwargs=options))
    encoded: Any = tokenizer.apply_chat_template(dicts, return_assistant_tokens_mask=True, **_of_template(options))
    return encoded["input_ids"], encoded["assistant_masks"]


def as_text(tokenizer: PreTrainedTokenizerBase, value: Any, options: Mapping[str, Any]) -> Any:
    """Marks the control tokens in all strings of `value` for `encode_rendered`, unless an option has them parsed."""
    if isinstance(value, str) and options.get(SANITIZE, True):
        control = _control_tokens(tokenizer)
        return control.sub(lambda found: f"{found[0][0]}{_MARK}{found[0][1:]}", value.replace(_MARK, ""))
    if isinstance(value, Mapping):
        return {key: as_text(tokenizer, each, options) for key, each in value.items()}
    return [as_text(tokenizer, each, options) for each in value] if isinstance(value, list | tuple) else value


def encode_rendered(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of texts that a chat template wrote: its control tokens are parsed, those that `as_text` marked
    are text, and none is added. A marked one is encoded in two parts, neither of which is a control token."""
    parts = [text.split(_MARK) for text in texts]
    found = encode_texts(tokenizer, [first for first, *_ in parts], add_special_tokens=False)
    for ids, (_, *rest) in zip(found, parts, strict=True):
        for part in rest:
            # Behind a line break, so that a tokenizer that puts a space before a text puts none here.
            line_break, after, alone = encode_texts(tokenizer, ["\n", f"\n{part}", part], add_special_tokens=False)
            ids += after[len(line_break) :] if after[: len(line_break)] == line_break else alone
    return found


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Returns the ids of each text.  Raises: DataError for one that is too long, or that the tokenizer refuses."""
    for text in texts:
        _check_text(text)
    try:
        return cast(list[list[int]], tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"])
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise DataError(
            f"the tokenizer refuses one of {len(texts)} texts, the first of which is {texts[0][:80]!r}: {error}; "
            "a tokenizer made from an alphabet knows no other characters"
        ) from error


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages_before: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    turn: Turn,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids between a sampled turn and the next one: what closes the turn, the new messages, the generation prompt.

    `messages_before` is the conversation that `turn` answered; `new_messages` (tool results, a user's words) follow it.
    The ids of the whole are then `turn.context_ids + turn.token_ids + encode_continuation(...)`, and no sampled id is
    ever tokenised again. A stop token that was sampled is not repeated; a turn that was cut at its length is closed.

    The template is asked for the conversation with a probe in place of the answer, and what follows the probe is
    the continuation. That is right only if the template appends. Raises: DataError if it rewrites what came before.
    """

    def render(messages: Sequence[Message]) -> str:
        return render_chat(tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs)

    thinks = "</think>" in tokenizer.decode(list(turn.token_ids))  # templates treat such answers apart
    probe = Message("assistant", f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}" if thinks else _ANSWER)
    answered = [*messages_before, probe]
    with bounded():
        before, after = render(messages_before), render([*answered, *new_messages])
        unanswered = render(answered)
    if not after.startswith(before):
        raise _not_append_only("what came before the answer")
    opening, _, continuation = after.removeprefix(before).partition(_ANSWER)
    if thinks and _THOUGHT not in opening:
        raise _not_append_only("the answer: its thoughts are left out")
    if not continuation or (not thinks and opening.strip()):
        raise _not_append_only("the answer itself")
    if after == unanswered:
        raise DataError(
            f"the chat template renders nothing for the new messages (roles {roles(new_messages)}); "
            "use a template that knows these roles, or give their text to the model as a user message"
        )
    [ids] = encode_rendered(tokenizer, [continuation])
    return ids[_num_sampled(tokenizer, turn, ids) :]


def roles(messages: Sequence[Message]) -> str:
    """The roles in order, for error messages."""
    return ", ".join(message.role for message in messages)


def _num_sampled(tokenizer: PreTrainedTokenizerBase, turn: Turn, ids: Sequence[int]) -> int:
    """Counts the leading ids of a continuation that the turn's own stop token stands for.

    Usually the stop token is the first id. Some templates close with " </s>", so the first control token counts too.
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
    """Raises: DataError for text that no tokenizer takes, wherever it stands in the message."""
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
            "a surrogate pair, which no encoding holds; correct what wrote it, or take the character out"
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
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template that fits: {error} "
            "Set data.apply_chat_template=false to feed the text as it is, or data.chat_template_kwargs.chat_template"
        ) from error
