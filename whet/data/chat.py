# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids, and what a chat template puts after a turn that the policy has already sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from whet.errors import DataError
from whet.types import Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWER, _THOUGHT = "whet-probe-answer", "whet-probe-thought"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the chat template makes of `messages`; `tools` may be among `chat_template_kwargs`.

    Raises: DataError if there is no template, or the template refuses the messages.
    """
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
    return cast(str, _apply_template(tokenizer, messages, options))


def encode_marked_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]] | None:
    """The ids of a conversation, and 1 for each that the template has between `{% generation %}` marks.

    None if the template has no such marks. Raises: as `render_chat`.
    """
    options = dict(chat_template_kwargs or {})
    if _GENERATION_MARK.search(_template_text(tokenizer, options)) is None:
        return None
    encoded = _apply_template(tokenizer, messages, {"return_assistant_tokens_mask": True, **options})
    return encoded["input_ids"], encoded["assistant_masks"]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation, by default up to where the next assistant turn begins."""
    text = render_chat(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, chat_template_kwargs=chat_template_kwargs
    )
    return encode_rendered(tokenizer, text)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of text that a chat template wrote: its control tokens are parsed, and none is added."""
    [ids] = encode_texts(tokenizer, [text], add_special_tokens=False)
    return ids


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """The ids of each text. Raises: DataError for text that the tokenizer refuses."""
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
    before, after = render(messages_before), render([*answered, *new_messages])
    if not after.startswith(before):
        raise _not_append_only("what came before the answer")
    opening, _, continuation = after.removeprefix(before).partition(_ANSWER)
    if thinks and _THOUGHT not in opening:
        raise _not_append_only("the answer: its thoughts are left out")
    if not continuation or (not thinks and opening.strip()):
        raise _not_append_only("the answer itself")
    if after == render(answered):
        raise DataError(
            f"the chat template renders nothing for the new messages (roles {roles(new_messages)}); "
            "use a template that knows these roles, or give their text to the model as a user message"
        )
    ids = encode_rendered(tokenizer, continuation)
    return ids[_num_sampled(tokenizer, turn, ids) :]


def roles(messages: Sequence[Message]) -> str:
    """The roles in order, for error messages."""
    return ", ".join(message.role for message in messages)


def _num_sampled(tokenizer: PreTrainedTokenizerBase, turn: Turn, ids: Sequence[int]) -> int:
    """How many leading ids of a continuation the turn's own stop token stands for.

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


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: dict[str, Any]) -> Any:
    _template_text(tokenizer, options)
    try:
        return tokenizer.apply_chat_template([message.to_dict() for message in messages], **options)
    except (TemplateError, TypeError, ValueError) as error:  # the template is other people's code
        raise DataError(f"the chat template cannot render messages of roles ({roles(messages)}): {error}") from error


def _template_text(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    try:
        return tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError as error:
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template that fits: {error} "
            "Set data.apply_chat_template=false to feed the text as it is, or data.chat_template_kwargs.chat_template"
        ) from error
