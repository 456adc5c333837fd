# SPDX-License-Identifier: Apache-2.0
"""Preference pairs from rows in the forms of TRL, and rows that are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from whet.config.schema import PreferenceDataConfig
from whet.data.preferences import PreferencePair, build_pairs
from whet.data.prompts import PromptFormat
from whet.errors import DataError

PLAIN = {"apply_chat_template": False}


def pairs(tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], **keys: Any) -> tuple[PreferencePair, ...]:
    data = PreferenceDataConfig(**keys)
    return build_pairs(rows, PromptFormat.of(tokenizer, data), data)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_texts_and_messages_and_whole_conversations_are_the_same_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    asked, good, bad = turn("user", "1+1="), turn("assistant", "2"), turn("assistant", "33")
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
        {"prompt": [asked], "chosen": "2", "rejected": "33"},
        {"prompt": [asked], "chosen": [good], "rejected": [bad]},
        {"chosen": [asked, good], "rejected": [asked, bad]},
    ]
    first, *others = pairs(tokenizer, *rows)
    assert all(other == first for other in others)
    text = tokenizer.decode(list(first.chosen))
    assert text.endswith("assistant\n2<|im_end|>") and "1+1=" in text  # up to what a policy would sample last
    assert first.chosen[: first.num_shared] == first.rejected[: first.num_shared]
    assert first.chosen[first.num_shared] != first.rejected[first.num_shared]


def test_texts_without_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    with_prompt, whole = pairs(
        tokenizer,
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"chosen": "1+1=2", "rejected": "1+1=3"},
        **PLAIN,
    )
    assert tokenizer.decode(list(with_prompt.chosen)) == "1+1=2<|im_end|>" == tokenizer.decode(list(whole.chosen))
    assert with_prompt.num_tokens == max(len(with_prompt.chosen), len(with_prompt.rejected))


def test_the_shared_tokens_leave_one_to_each() -> None:
    assert PreferencePair((5, 6, 7), (5, 6, 8)).num_shared == 2
    assert PreferencePair((5, 6), (5, 6, 8)).num_shared == 1  # the shorter keeps its last token
    assert PreferencePair((4, 6), (5, 6)).num_shared == 1  # a token has to come before the first of a response


def test_margins_and_keys(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "a", "better": "b", "worse": "c", "gap": 2}
    [pair] = pairs(tokenizer, row, **PLAIN, chosen_key="better", rejected_key="worse", margin_key="gap")
    assert pair.margin == 2.0
    [pair] = pairs(tokenizer, {"prompt": "a", "chosen": "b", "rejected": "c"}, **PLAIN)
    assert pair.margin == 0.0


def test_equal_responses_and_long_ones_are_dropped(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c" * 90},
    ]
    assert len(pairs(tokenizer, *rows, **PLAIN, max_length=20)) == 1
    [record] = caplog.records
    assert record.levelname == "WARNING" and re.search(r"1 of 3 .*=20 .* 1 of two", str(record.args))


@pytest.mark.parametrize(
    ("row", "keys", "key", "fields"),
    [
        ({"prompt": "a", "rejected": "c"}, {}, "row 0: field 'chosen'",
         {"found": re.compile("prompt, rejected$"), "change": re.compile("data.chosen_key")}),
        ({"prompt": "a", "chosen": "b"}, {}, "row 0: field 'rejected'", {"found": re.compile("prompt, chosen$")}),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, {}, "row 0: field 'chosen'",
         {"found": re.compile("int$"), "expected": re.compile("^text, ")}),
        ({"chosen": "b", "rejected": "c"}, {}, "row 0: field 'prompt'", {"found": re.compile("'chosen'")}),
        ({"prompt": "a", "chosen": [turn("assistant", "b"), turn("user", "c")], "rejected": "d"}, {},
         "row 0: field 'chosen'", {"found": re.compile("'user'"), "expected": re.compile("'assistant'")}),
        ({"chosen": [turn("user", "b")], "rejected": "d"}, {}, "row 0: field 'chosen'",
         {"found": re.compile("'user'")}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, {}, "row 0: field 'margin'",
         {"found": re.compile("'big'")}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, {}, "row 0: field 'margin'",
         {"found": re.compile("nan")}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, {}, "row 0: field 'margin'",
         {"found": re.compile("True")}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, {}, "row 0: field 'images'", {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c" * 99}, {"max_length": 9, "overlong": "error", **PLAIN},
         "row 0: number of tokens", {"found": 101, "expected": re.compile("data.max_length=9 ")}),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, PLAIN, "data.max_length",
         {"expected": re.compile(" 0 of 1 .* 1 of two")}),
        ({"chosen": "", "rejected": "b"}, PLAIN, "row 0: field 'chosen'", {"expected": re.compile("token")}),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_is_no_pair(
    row: dict[str, Any],
    keys: dict[str, Any],
    key: str,
    fields: dict[str, object],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with raises(DataError, key, **fields):
        pairs(tokenizer, row, **keys)
