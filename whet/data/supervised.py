# SPDX-License-Identifier: Apache-2.0
"""Makes SFT examples from rows: token ids, and a loss mask that is 1 on the tokens that a policy would sample."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.config.schema import SupervisedDataConfig
from whet.data.chat import as_text, encode_marked_chat, encode_rendered, render_chat, roles
from whet.data.placeholders import expanded, num_whole
from whet.data.prompts import PromptFormat, at_row, find_field, from_row, read_messages
from whet.errors import DataError
from whet.limits import bounded
from whet.types import Media, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedExample:
    """A training sequence: `loss_mask` is 1 on trained tokens, 0 on context."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    media: tuple[Media, ...] = ()  # in the order of their tokens

    @property
    def num_tokens(self) -> int:
        """The length."""
        return len(self.input_ids)


def build_examples(
    rows: Sequence[Mapping[str, Any]],
    prompt_format: PromptFormat,
    data: SupervisedDataConfig,
    *,
    numbers: Sequence[int] | None = None,
) -> tuple[SupervisedExample, ...]:
    """Makes examples from rows, in order: a whole conversation if a row has `messages_key`, else prompt and response.
    `numbers` are the row numbers for errors, where a filter dropped rows.

    data.overlong=truncate cuts from the right; an example without a trained token left is dropped, and one that would
    be cut inside an image or video.
    Raises: DataError for a missing field, a template that rewrites earlier turns, or a row over data.max_length if
    data.overlong=error.
    """
    max_length, overlong = data.max_length, data.overlong
    examples: list[SupervisedExample] = []
    num_truncated = 0
    for index, row in zip(range(len(rows)) if numbers is None else numbers, rows, strict=True):
        with at_row(index):
            example = _example(row, prompt_format, data)
            example = replace(example, media=from_row(index, example.media))
        length = len(example.input_ids)
        if length <= max_length:
            examples.append(example)
        elif overlong == "error":
            raise DataError(
                f"row {index} has {length} tokens, over data.max_length={max_length}; raise it, or set data.overlong "
                "to truncate or drop"
            )
        elif overlong == "truncate" and (shorter := _truncated(example, max_length)) is not None:
            examples.append(shorter)
            num_truncated += 1
    num_dropped = len(rows) - len(examples)
    if not examples:
        limits = f"data.max_length={max_length}, data.overlong={overlong}"
        raise DataError(f"no example is left of {len(rows)} rows ({limits}); raise data.max_length")
    if num_truncated or num_dropped:
        logger.warning(
            "truncated %d and dropped %d of %d examples over data.max_length=%s tokens",
            *(num_truncated, num_dropped, len(rows), max_length),
        )
    return tuple(examples)


def _example(row: Mapping[str, Any], prompt_format: PromptFormat, data: SupervisedDataConfig) -> SupervisedExample:
    if row.get(data.messages_key) is not None:
        conversation = prompt_format.with_media(row, read_messages(row, data.messages_key))
        return encode_conversation(conversation[0], prompt_format, conversation[1])
    if prompt_format.reader is None:
        prompt_format.refuse_media(row)
    field = find_field(row, data.prompt_key, "data.prompt_key or data.messages_key")
    response = row[find_field(row, data.response_key, "data.response_key")]
    messages, media = prompt_format.with_media(row, prompt_format.messages(row, field))
    return encode_response(messages, response, prompt_format, media)


def _truncated(example: SupervisedExample, length: int) -> SupervisedExample | None:
    """The beginning of an example; None where no trained token is left, or where it ends inside a media."""
    ids, mask = example.input_ids[:length], example.loss_mask[:length]
    kept = num_whole(ids, example.media)
    return SupervisedExample(ids, mask, example.media[:kept]) if any(mask) and kept is not None else None


def encode_response(
    messages: Sequence[Message], response: object, prompt_format: PromptFormat, media: tuple[Media, ...] = ()
) -> SupervisedExample:
    """Makes an example of a prompt, as the policy reads it, and a response; response and end token are trained on.
    `media` are those of the prompt."""
    tokenizer = prompt_format.tokenizer
    if not isinstance(response, str):
        raise DataError(f"expected text as the response, found {type(response).__name__}; correct the row")
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos token, so no response can end; set tokenizer.eos_token and save it")
    if prompt_format.apply_chat_template:
        text = as_text(tokenizer, response, prompt_format.chat_template_kwargs)
        prompt_ids, response_ids = encode_rendered(tokenizer, [prompt_format.text(messages, media=media), text])
    else:
        [prompt_ids] = prompt_format.encode([messages], media=[media])
        [response_ids] = encode_rendered(tokenizer, [response])
    response_ids = [*response_ids, tokenizer.eos_token_id]
    prompt_format.check([*prompt_ids, *response_ids], media)
    return SupervisedExample((*prompt_ids, *response_ids), (0,) * len(prompt_ids) + (1,) * len(response_ids), media)


def encode_conversation(
    messages: Sequence[Message], prompt_format: PromptFormat, media: tuple[Media, ...] = ()
) -> SupervisedExample:
    """Makes an example of a conversation; every assistant turn, with its end token, is trained on.

    The mask comes from the template's `{% generation %}` marks, if it has any and there are no media. Otherwise a turn
    begins at the end of the earlier messages rendered with the generation prompt, and ends with the next eos token.
    Raises: DataError if the template rewrites earlier turns, or if there is no assistant text.
    """
    if not prompt_format.apply_chat_template:
        raise DataError("a list of messages needs a chat template; set data.apply_chat_template=true")
    messages = prompt_format.with_system_prompt(messages)
    kwargs = prompt_format.chat_template_kwargs
    marked = None
    if not media:  # transformers encodes without expanding placeholders
        marked = encode_marked_chat(prompt_format.tokenizer, messages, chat_template_kwargs=kwargs)
    input_ids, loss_mask = marked or _encode_by_prefix(messages, prompt_format, media)
    prompt_format.check(input_ids, media)
    if not any(loss_mask):
        raise DataError(
            f"the messages (roles {roles(messages)}) have no assistant text to train on; correct the row, or exclude "
            "it (data.filter)"
        )
    return SupervisedExample(tuple(input_ids), tuple(loss_mask), media)


def _encode_by_prefix(
    messages: Sequence[Message], prompt_format: PromptFormat, media: Sequence[Media]
) -> tuple[list[int], list[int]]:
    tokenizer = prompt_format.tokenizer

    def render(part: Sequence[Message], add_generation_prompt: bool) -> str:
        kwargs = prompt_format.chat_template_kwargs
        text = render_chat(tokenizer, part, add_generation_prompt=add_generation_prompt, chat_template_kwargs=kwargs)
        return expanded(text, media, is_prefix=len(part) < len(messages))

    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    with bounded():
        text, heads = render(messages, False), [render(messages[:number], True) for number in turns]
    [input_ids] = encode_rendered(tokenizer, [text])

    def position_after(prefix: str) -> int:
        if not text.startswith(prefix):
            raise DataError(
                "the chat template rewrites earlier turns, so the tokens of assistant turns cannot be found; use a "
                "template with {% generation %} marks, or rows with one assistant turn, at the end"
            )
        return _common_prefix(encode_rendered(tokenizer, [prefix])[0], input_ids)

    starts = [position_after(head) for head in heads]
    loss_mask = [0] * len(input_ids)
    for number, start, limit in zip(turns, starts, [*starts, len(input_ids)][1:], strict=True):
        if tokenizer.eos_token_id in input_ids[start:limit]:
            end = input_ids.index(tokenizer.eos_token_id, start) + 1
        else:  # the template closes a turn with another token
            end = position_after(render(messages[: number + 1], False))
        loss_mask[start:end] = [1] * (end - start)
    return input_ids, loss_mask


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the leading ids that agree; fewer than the prefix has if the tokenizer merges tokens across its end."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((position for position, (one, other) in pairs if one != other), min(len(left), len(right)))
