# SPDX-License-Identifier: Apache-2.0
"""Makes preference pairs from rows: the token ids of two responses to one prompt, of which the first is the better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whet.config.schema import PreferenceDataConfig
from whet.data.chat import encode_texts, roles
from whet.data.prompts import PromptFormat, Row, at_row, find_field, read_messages
from whet.data.supervised import encode_conversation, encode_response
from whet.errors import DataError
from whet.types import Example, Media

logger = logging.getLogger(__name__)
_TEXT = "only text in preference pairs"


@dataclass(frozen=True)
class PreferencePair(Example):
    """The token ids of the better and of the worse response, each with its prompt, and the margin of their scores."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float = 0.0
    media: tuple[Media, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The length of the longer one."""
        return max(len(self.chosen), len(self.rejected))

    @property
    def content(self) -> tuple[object, ...]:
        return self.chosen, self.rejected, self.margin

    def texts(self) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns both responses; the mask is 1 on tokens in which they may differ."""
        both, shared = {"chosen": self.chosen, "rejected": self.rejected}, self.num_shared
        return {f", {name}": (ids, (0,) * shared + (1,) * (len(ids) - shared)) for name, ids in both.items()}

    def facts(self) -> Mapping[str, object]:
        return {"margin": self.margin}

    @property
    def num_shared(self) -> int:
        """The number of tokens before the first that differs: at least 1, and fewer than either has."""
        shared = (at for at, (one, other) in enumerate(zip(self.chosen, self.rejected, strict=False)) if one != other)
        shorter = min(len(self.chosen), len(self.rejected))
        return max(1, min(next(shared, shorter), shorter - 1))


def build_pairs(
    rows: Sequence[Row],
    prompt_format: PromptFormat,
    data: PreferenceDataConfig,
    *,
    numbers: Sequence[int] | None = None,
) -> tuple[PreferencePair, ...]:
    """Makes pairs from rows, in order; `numbers` are the row numbers for errors. Pairs of two equal responses and, with
    data.overlong=drop, pairs over data.max_length are dropped.

    A row without a prompt has two whole conversations, or without a chat template two whole texts.
    Raises: DataError for a missing field, a margin that is no number, or a pair over data.max_length if
    data.overlong=error.
    """
    pairs: list[PreferencePair] = []
    num_equal = num_long = 0
    for index, row in zip(range(len(rows)) if numbers is None else numbers, rows, strict=True):
        noted = len(prompt_format.lost)
        with at_row(index):
            prompt_format.refuse_media(row, expected=_TEXT)
            fields = [find_field(row, data[name], f"data.{name}", common) for name, common in COMMON.items()]
            chosen, rejected = (_encode(row, field, prompt_format, data) for field in fields)
            pair = PreferencePair(chosen, rejected, _margin(row, data.margin_key))
        del prompt_format.lost[noted + 1 :]  # one of a row
        if pair.num_tokens > data.max_length and data.overlong == "error":
            expected = f"at most data.max_length={data.max_length} with its prompt"
            key, change = f"row {index}: number of tokens", "raise it, or set data.overlong=drop"
            raise DataError(key, pair.num_tokens, expected, change)
        is_equal, is_long = chosen == rejected, pair.num_tokens > data.max_length
        num_equal, num_long = num_equal + is_equal, num_long + (is_long and not is_equal)
        if not is_equal and not is_long:
            pairs.append(pair)
    found = f"{num_long} of {len(rows)} pairs over data.max_length={data.max_length} tokens, and {num_equal} of two"
    if not pairs:
        expected = f"at least one pair that is left: dropped {found} equal responses"
        raise DataError("data.max_length", data.max_length, expected, "raise it, or correct the rows")
    if num_equal or num_long:
        logger.warning("dropped %s equal responses", found)
    prompt_format.warn_lost(len(rows))
    return tuple(pairs)


COMMON = {
    "chosen_key": ("chosen", "response_w", "preferred"),
    "rejected_key": ("rejected", "response_l", "dispreferred"),
}


def _encode(row: Row, field: str, prompt_format: PromptFormat, data: PreferenceDataConfig) -> tuple[int, ...]:
    """The ids of a prompt and a response, up to the token that ends it: the last that a policy would sample."""
    response, has_prompt = row[field], row.get(data.prompt_key) is not None
    prompt = prompt_format.messages(row, data.prompt_key) if has_prompt else ()
    prompt_format.refuse_media({}, prompt, _TEXT)
    if not isinstance(response, str):
        messages = [*prompt, *read_messages(row, field, "text, or ")]
        prompt_format.refuse_media({}, messages, _TEXT)
        if messages[-1].role != "assistant":
            found = f"ends in a message of the role {messages[-1].role!r} (roles {roles(messages)})"
            expected = "the response last, of the role 'assistant'"
            raise DataError(f"field {field!r}", found, expected, "correct the row")
        example = encode_conversation(messages, prompt_format)
        end = max(at for at, is_sampled in enumerate(example.loss_mask) if is_sampled) + 1
        return example.input_ids[:end]
    if has_prompt:
        return encode_response(prompt, response, prompt_format).input_ids
    if prompt_format.apply_chat_template:
        change = "set data.prompt_key, or data.apply_chat_template=false for whole texts"
        found = f"is missing and {field!r} is a text"
        raise DataError(f"field {data.prompt_key!r}", found, "a prompt, or a list of messages", change)
    [ids] = encode_texts(prompt_format.tokenizer, [response], add_special_tokens=True)
    if not ids:
        raise DataError(f"field {field!r}", "is an empty text without a prompt", "at least one token", "correct it")
    return (*ids, int(prompt_format.tokenizer.eos_token_id))  # type: ignore[arg-type]


def _margin(row: Row, field: str) -> float:
    value = row.get(field)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"field {field!r}", f"is {value!r}", "a number", "correct it, or set data.margin_key")
    return float(value)
