# SPDX-License-Identifier: Apache-2.0
"""Preference pairs from rows in the forms of TRL, and rows that are none."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

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
    assert "dropped 1 of 3 pairs over data.max_length=20 tokens, and 1 of two equal responses" in caplog.text


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"prompt": "a", "rejected": "c"}, {}, r"row 0: field 'chosen' is missing; the row has .* set data.chosen_key"),
        ({"prompt": "a", "chosen": "b"}, {}, r"row 0: field 'rejected' is missing"),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, {}, r"field 'chosen': expected text, or a list of messages"),
        ({"chosen": "b", "rejected": "c"}, {}, r"field 'prompt' is missing and 'chosen' is a text; expected a prompt"),
        (
            {"prompt": "a", "chosen": [turn("assistant", "b"), turn("user", "c")], "rejected": "d"},
            {},
            r"'chosen' ends in a message of the role 'user'.*expected the response last",
        ),
        ({"chosen": [turn("user", "b")], "rejected": "d"}, {}, r"ends in a message of the role 'user'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, {}, r"'margin' is 'big'; expected a number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, {}, r"'margin' is nan"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": True}, {}, r"'margin' is True"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, {}, r"has a field 'images'"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c" * 99},
            {"max_length": 9, "overlong": "error", **PLAIN},
            r"row 0 has a response that makes \d+ tokens with its prompt, over data.max_length=9; raise it",
        ),
        (
            {"prompt": "a", "chosen": "b", "rejected": "b"},
            PLAIN,
            r"no pair is left: dropped 0 of 1 .* correct the rows",
        ),
        ({"chosen": "", "rejected": "b"}, PLAIN, r"field 'chosen' is an empty text without a prompt"),
    ],
    ids=str,
)
def test_a_row_that_is_no_pair(
    row: dict[str, Any], keys: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match=message):
        pairs(tokenizer, row, **keys)
