# SPDX-License-Identifier: Apache-2.0
"""Makes SFT examples from rows: token ids, and a loss mask that is 1 on the tokens that a policy would sample."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from whet.config.schema import SupervisedDataConfig
from whet.data.chat import as_text, encode_marked_chat, encode_rendered, render_chat, roles
from whet.data.media import KINDS
from whet.data.placeholders import expanded, num_whole
from whet.data.prompts import PromptFormat, Row, at_row, find_field, from_row, read_messages
from whet.data.written import NO_END, end_of_turn, mark_ends, warn_once
from whet.errors import DataError
from whet.limits import bounded
from whet.options import is_number
from whet.types import Example, Media, Message

logger = logging.getLogger(__name__)
WEIGHT = "example_weight"  # field of a row


@dataclass(frozen=True)
class SupervisedExample(Example):
    """A training sequence: `loss_mask` is 1 on trained tokens, 0 on context."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    media: tuple[Media, ...] = ()  # in the order of their tokens
    weight: float = 1.0  # of its tokens: 2 has the effect of two copies
    source: str | None = None  # data source, for trainers that read it

    @property
    def num_tokens(self) -> int:
        """The length in tokens."""
        return len(self.input_ids)

    @property
    def content(self) -> tuple[object, ...]:
        told = self.weight, self.source
        return self.input_ids, self.loss_mask, *(told if told != (1.0, None) else ())

    def texts(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        return {"": (self.input_ids, self.loss_mask)}


def build_examples(
    rows: Sequence[Row],
    prompt_format: PromptFormat,
    data: SupervisedDataConfig,
    *,
    numbers: Sequence[int] | None = None,
) -> tuple[SupervisedExample, ...]:
    """Makes examples from rows, in order: a whole conversation if a row has `messages_key`, else prompt and response.
    `numbers` are the row numbers for errors, where a filter dropped rows.

    data.overlong=truncate cuts from the right. It drops examples that then have no trained token, or that would be cut
    inside an image or video.  Raises: DataError for a missing field, a template that rewrites earlier turns, or a row
    over data.max_length if data.overlong=error."""
    max_length, overlong = data.max_length, data.overlong
    examples: list[SupervisedExample] = []
    made: list[tuple[int, SupervisedExample]] = []
    for index, row in zip(range(len(rows)) if numbers is None else numbers, rows, strict=True):
        with at_row(index):
            own, weight, source = _examples(row, prompt_format, data), _weight(row), data.get("data_source")
            source = source if source is None else str(row.get("data_source") or source)
            made += [
                (index, replace(each, media=from_row(index, each.media), weight=weight, source=source)) for each in own
            ]
    num_truncated = 0
    for index, example in made:
        length = len(example.input_ids)
        if length <= max_length:
            examples.append(example)
        elif overlong == "error":
            key, expected = f"row {index}: number of tokens", f"at most data.max_length={max_length}"
            raise DataError(key, length, expected, "raise it, or set data.overlong to truncate or drop")
        elif overlong == "truncate" and (shorter := _truncated(example, max_length)) is not None:
            examples.append(shorter)
            num_truncated += 1
    num_dropped = len(made) - len(examples)
    if not examples:
        expected = f"at least one example left of {len(rows)} rows (data.overlong={overlong})"
        raise DataError("data.max_length", max_length, expected, "raise it")
    if num_truncated or num_dropped:
        logger.warning(
            "truncated %d and dropped %d of %d examples over data.max_length=%s tokens",
            *(num_truncated, num_dropped, len(made), max_length),
        )
    if len(made) > len(rows):
        logger.info("data.unwritten=split made %d examples of %d rows", len(made), len(rows))
    prompt_format.warn_lost(len(rows), "; data.unwritten=split makes an example of each turn, error refuses such rows")
    return tuple(examples)


def _examples(row: Row, prompt_format: PromptFormat, data: SupervisedDataConfig) -> list[SupervisedExample]:
    """Makes one example of a row; or one of each turn, if the template leaves text out and data.unwritten=split."""
    if row.get(data.messages_key) is None:
        if prompt_format.reader is None:
            prompt_format.refuse_media(row)
        field = find_field(row, data.prompt_key, "data.prompt_key or data.messages_key")
        response = row[find_field(row, data.response_key, "data.response_key")]
        messages, media = prompt_format.with_media(row, prompt_format.messages(row, field))
        return [encode_response(messages, response, prompt_format, media)]
    before = len(prompt_format.lost)
    messages, media = prompt_format.with_media(row, read_messages(row, data.messages_key))
    whole = encode_conversation(messages, prompt_format, media)
    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if len(prompt_format.lost) == before or data.unwritten == "as_is" or (data.unwritten == "split" and len(turns) < 2):
        return [whole]
    if data.unwritten == "error":
        change = "use another template, exclude the row (data.filter), or set data.unwritten to split or as_is"
        found = f"leaves out {prompt_format.lost[-1]}"
        raise DataError("chat template", found, "all text (data.unwritten=error)", change)
    del prompt_format.lost[before:]  # text that is left out of an earlier turn is in the example of that turn
    made = list[SupervisedExample]()
    for number in turns:
        parts = [part for each in messages[: number + 1] for part in each.parts]
        own = media[: sum(part.get("type") in KINDS for part in parts)]
        made.append(encode_conversation(messages[: number + 1], prompt_format, own, only_last=True))
    del prompt_format.lost[before + 1 :]  # keeps one of each row
    return made


def _truncated(example: SupervisedExample, length: int) -> SupervisedExample | None:
    """Cuts an example to `length`; None if no trained token is left, or if the cut is inside a media."""
    ids, mask = example.input_ids[:length], example.loss_mask[:length]
    kept = num_whole(ids, example.media)
    if not any(mask) or kept is None:
        return None
    return replace(example, input_ids=ids, loss_mask=mask, media=example.media[:kept])


def encode_response(
    messages: Sequence[Message], response: object, prompt_format: PromptFormat, media: tuple[Media, ...] = ()
) -> SupervisedExample:
    """Makes an example of a prompt, as the policy reads it, and a response. Response and end token are trained on.
    `media` belong to the prompt."""
    tokenizer = prompt_format.tokenizer
    if not isinstance(response, str):
        raise DataError("response type", type(response).__name__, "text", "correct the row")
    end = end_of_turn(tokenizer, prompt_format.chat_template_kwargs if prompt_format.apply_chat_template else None)
    if end is None:
        raise DataError("tokenizer.eos_token", None, "the token that ends a response", "set it and save the tokenizer")
    if prompt_format.apply_chat_template:
        text = as_text(tokenizer, response, prompt_format.chat_template_kwargs)
        prompt_ids, response_ids = encode_rendered(tokenizer, [prompt_format.text(messages, media), text])
    else:
        [prompt_ids] = prompt_format.encode([messages], media=[media])
        [response_ids] = encode_rendered(tokenizer, [response])
    response_ids = [*response_ids, end]
    prompt_format.check([*prompt_ids, *response_ids], media)
    return SupervisedExample((*prompt_ids, *response_ids), (0,) * len(prompt_ids) + (1,) * len(response_ids), media)


def encode_conversation(
    messages: Sequence[Message], prompt_format: PromptFormat, media: tuple[Media, ...] = (), *, only_last: bool = False
) -> SupervisedExample:
    """Makes an example of a conversation. Each assistant turn and its end token are trained on; with `only_last`, only
    the last message.

    The mask comes from the template's `{% generation %}` marks, if it has any and there are no media. Otherwise a turn
    begins at the end of the earlier messages rendered with the generation prompt, and ends with the next end token.
    Raises: DataError if the template rewrites earlier turns, or if there is no assistant text."""
    if not prompt_format.apply_chat_template:
        expected = "true: a list of messages needs a chat template"
        raise DataError("data.apply_chat_template", False, expected, "set it to true")
    messages, tokenizer = prompt_format.with_system_prompt(messages), prompt_format.tokenizer
    kwargs = prompt_format.chat_template_kwargs
    text = render_chat(tokenizer, messages, add_generation_prompt=False, chat_template_kwargs=kwargs)
    earlier = {number for number, message in enumerate(messages[:-1]) if message.role == "assistant"}
    prompt_format.note_lost(text, messages, but=earlier if only_last else ())
    # The marks cannot be used with media: transformers encodes without expanding placeholders.
    marked = None if media else encode_marked_chat(tokenizer, messages, chat_template_kwargs=kwargs)
    if marked is not None:
        ends = {tokenizer.eos_token_id, end_of_turn(tokenizer, kwargs)}
        input_ids, loss_mask = marked[0], mark_ends(tokenizer, *marked, ends)
    else:
        input_ids, loss_mask = _encode_by_prefix(messages, prompt_format, media, expanded(text, media))
    if only_last:
        head = render_chat(tokenizer, messages[:-1], add_generation_prompt=True, chat_template_kwargs=kwargs)
        before = common_prefix(encode_rendered(tokenizer, [expanded(head, media)])[0], input_ids)
        loss_mask = [0] * before + loss_mask[before:]
    prompt_format.check(input_ids, media)
    if not any(loss_mask):
        found = f"they have no assistant text to train on (roles {roles(messages)})"
        raise DataError("messages", found, "", "correct the row, or exclude it (data.filter)")
    return SupervisedExample(tuple(input_ids), tuple(loss_mask), media)


def _encode_by_prefix(
    messages: Sequence[Message], prompt_format: PromptFormat, media: Sequence[Media], text: str
) -> tuple[list[int], list[int]]:
    tokenizer, kwargs = prompt_format.tokenizer, prompt_format.chat_template_kwargs

    def render(part: Sequence[Message], add_generation_prompt: bool) -> str:
        text = render_chat(tokenizer, part, add_generation_prompt=add_generation_prompt, chat_template_kwargs=kwargs)
        return expanded(text, media, is_prefix=len(part) < len(messages))

    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    with bounded():
        heads = [render(messages[:number], True) for number in turns]
    [input_ids] = encode_rendered(tokenizer, [text])

    def position_after(prefix: str) -> int:
        if not text.startswith(prefix):
            found = "rewrites earlier turns, so the tokens of assistant turns cannot be found"
            change = "use one with {% generation %} marks, or rows with one assistant turn, at the end"
            raise DataError("chat template", found, "", change)
        return common_prefix(encode_rendered(tokenizer, [prefix])[0], input_ids)

    starts = [position_after(head) for head in heads]
    loss_mask = [0] * len(input_ids)
    ends = {tokenizer.eos_token_id, end_of_turn(tokenizer, kwargs)}
    for number, start, limit in zip(turns, starts, [*starts, len(input_ids)][1:], strict=True):
        end = next((at + 1 for at in range(start, limit) if input_ids[at] in ends), None)
        if end is None:  # the template closes a turn with text
            warn_once(NO_END)
            end = position_after(render(messages[: number + 1], False))
        loss_mask[start:end] = [1] * (end - start)
    return input_ids, loss_mask


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the leading ids that are equal. They end early if the tokenizer merges tokens across a prefix's end."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((position for position, (one, other) in pairs if one != other), min(len(left), len(right)))


def _weight(row: Row) -> float:
    """Reads the weight of a row's tokens; 1 if the row has none."""
    value = row.get(WEIGHT, 1.0)
    if not is_number(value) or not 0 < value < math.inf:
        raise DataError(f"field {WEIGHT!r}", f"is {value!r}", "a number above 0", "correct it, or leave the row out")
    return float(value)
