# SPDX-License-Identifier: Apache-2.0
"""Comparisons from rows, in the forms of several frameworks: the prompt, the trained tokens, and the order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.raising import raises
from whet.config.preference import ComparisonDataConfig, PreferenceDataConfig
from whet.data.preferences import Comparison, StepExample, build_comparisons
from whet.data.prompts import PromptFormat
from whet.errors import DataError

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "1+1"), ("assistant", "2"), ("assistant", "3"))
)


@pytest.fixture
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder)


def build(
    tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], chat: bool = True, **keys: Any
) -> list[Comparison]:
    prompt_format = PromptFormat(tokenizer, apply_chat_template=chat)
    return list(build_comparisons(rows, prompt_format, ComparisonDataConfig(**keys)))


def shown(tokenizer: PreTrainedTokenizerBase, made: Comparison) -> tuple[str, list[str]]:
    """The prompt, and the trained text of each response."""
    learned = [[t for t, m in zip(ids, mask, strict=True) if m] for ids, mask in made.responses]
    return tokenizer.decode(made.prompt_ids), [tokenizer.decode(ids) for ids in learned]


PROMPT = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
SHAREGPT = [{"from": "human", "value": "1+1"}]
FORMS: dict[str, dict[str, Any]] = {
    "TRL, texts": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
    "TRL, messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "OpenRLHF": {"prompt": "1+1", "chosen": [GOOD], "rejected": [BAD]},
    "Llama-Factory, alpaca": {"instruction": "1+1", "input": "", "chosen": "2", "rejected": "3"},
    "Llama-Factory, old": {"instruction": "1+1", "input": "", "output": ["2", "3"]},
    "Llama-Factory, sharegpt": {
        "conversations": SHAREGPT,
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    },
    "Axolotl, chat": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "Axolotl, intel": {"system": "", "question": "1+1", "chosen": "2", "rejected": "3"},
    "a list": {"prompt": "1+1", "responses": ["3", "2"], "scores": [0.5, 4.0]},
    "UltraFeedback": {
        "instruction": "1+1",
        "completions": [{"response": "3", "overall_score": 2.0}, {"response": "2", "overall_score": 8.5}],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_in_the_form_of(form: str, tokenizer: PreTrainedTokenizerBase) -> None:
    [made] = build(tokenizer, FORMS[form])
    assert shown(tokenizer, made) == (PROMPT, ["2<|im_end|>", "3<|im_end|>"])
    assert made.scores[0] > made.scores[1] and made.num_tokens == len(made.prompt_ids) + 2


LABELLED: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": "1+1", "completion": "2", "label": True},
    "TRL, messages": {"prompt": [USER], "completion": [GOOD], "label": 1},
    "OpenRLHF": {"prompt": "1+1", "response": "2", "label": 1},
    "Llama-Factory": {"messages": [USER, GOOD], "kto_tag": True},
    "Llama-Factory, sharegpt": {"conversations": [*SHAREGPT, {"from": "gpt", "value": "2"}], "kto_tag": True},
}


@pytest.mark.parametrize("form", LABELLED)
def test_a_labelled_response_in_the_form_of(form: str, tokenizer: PreTrainedTokenizerBase) -> None:
    [made] = build(tokenizer, LABELLED[form])
    assert (shown(tokenizer, made), made.scores) == ((PROMPT, ["2<|im_end|>"]), (1.0,))


def test_only_answers_after_the_shared_turns_are_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    again = {"role": "user", "content": "sure"}
    row = {"chosen": [USER, GOOD, again, GOOD], "rejected": [USER, GOOD, again, BAD, again, GOOD]}
    [made] = build(tokenizer, row)
    prompt, learned = shown(tokenizer, made)
    assert prompt.count("<|im_start|>assistant") == 2 and prompt.endswith("assistant\n")
    assert learned == ["2<|im_end|>", "3<|im_end|>2<|im_end|>"]


def test_a_system_prompt_comes_first(tokenizer: PreTrainedTokenizerBase) -> None:
    [made] = build(tokenizer, {"system": "be brief", "question": "1+1", "chosen": "2", "rejected": "3"})
    assert shown(tokenizer, made)[0] == f"<|im_start|>system\nbe brief<|im_end|>\n{PROMPT}"


SYSTEM, BOTH = {"role": "system", "content": "be brief"}, {"chosen": [USER, GOOD], "rejected": [USER, BAD]}


@pytest.mark.parametrize(
    ("row", "start"),
    [
        ({"prompt": "1+1", "messages": [USER, GOOD], **BOTH}, ""),  # UltraFeedback, binarized
        ({"prompt": "1+1\n", **BOTH}, ""),
        ({"prompt": [USER], **BOTH}, ""),
        ({"prompt": "1+1", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, "system"),
        ({"prompt": [SYSTEM, USER], **BOTH}, "system"),
        ({"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, "system"),
        ({"prompt": "1+1", "system": "be brief", **BOTH}, "system"),
        ({"system": "be brief", **BOTH}, "system"),
    ],
)
def test_conversations_beside_their_prompt_are_read_once(
    row: dict[str, Any], start: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = f"<|im_start|>system\nbe brief<|im_end|>\n{PROMPT}" if start else PROMPT
    assert shown(tokenizer, build(tokenizer, row)[0]) == (prompt, ["2<|im_end|>", "3<|im_end|>"])
    [pair], [other] = pairs(tokenizer, row), pairs(tokenizer, {"prompt": [SYSTEM, USER] if start else "1+1"} | ANSWERS)
    assert pair.content == other.content


def test_the_prompt_may_be_the_first_of_several_shared_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    again = {"role": "user", "content": "sure"}
    talk = {"chosen": [USER, GOOD, again, GOOD], "rejected": [USER, GOOD, again, BAD]}
    assert build(tokenizer, {"prompt": "1+1", **talk}) == build(tokenizer, talk)
    labelled = {"prompt": "1+1", "completion": [USER, GOOD], "label": True}
    assert build(tokenizer, labelled) == build(tokenizer, LABELLED["TRL"])


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "1+2", **BOTH}, "1\\+1"),
        ({"prompt": "1+1", "chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}, "'x'"),
        ({"prompt": [{**SYSTEM, "content": "x"}, USER], "chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]},
         "be brief"),
        ({"prompt": "1+1", "chosen": [USER, GOOD], "rejected": "3"}, ""),
        ({"prompt": "1+1", "chosen": [USER, GOOD], "rejected": [BAD]}, "3"),
        ({"prompt": "1+2", "messages": [USER, GOOD], "label": True}, "1\\+1"),
    ],
)  # fmt: skip
def test_conversations_with_another_prompt_are_refused(
    row: dict[str, Any], found: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with raises(DataError, "row 0: responses", found=re.compile(found)):
        build(tokenizer, row)
    if "label" not in row:
        with raises(DataError, "row 0: responses", found=re.compile(found)):
            pairs(tokenizer, row)


def test_a_system_message_alone_is_no_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"system": "be brief", "chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}
    with raises(DataError, "row 0: responses", found=re.compile("1\\+1")):
        build(tokenizer, row)
    [pair] = pairs(tokenizer, row)
    assert tokenizer.decode(list(pair.rejected)).startswith("<|im_start|>system\nbe brief<|im_end|>\n")


ANSWERS = {"chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": [USER], "good": "2", "bad": "3"}, {"prompt_key": "messages"}),
        ({"prompt": [USER], "good": "2", "bad": "3", "label": "x", "response": "7"}, {}),
        ({"prompt": "1+1", "good": [GOOD], "bad": [BAD], "completions": ["7", "8"], "output": ["7", "8"]}, {}),
        ({"prompt": "1+1", **ANSWERS, "responses": ["7", "8"]}, {"chosen_key": "chosen", "rejected_key": "rejected"}),
    ],
)
def test_named_answers_are_a_pair_whatever_other_fields_a_row_has(
    row: dict[str, Any], keys: dict[str, str], tokenizer: PreTrainedTokenizerBase
) -> None:
    [made] = build(tokenizer, row, **({"chosen_key": "good", "rejected_key": "bad"} | keys))
    assert shown(tokenizer, made) == (PROMPT, ["2<|im_end|>", "3<|im_end|>"])


def test_a_labelled_conversation_in_a_field_of_any_name(tokenizer: PreTrainedTokenizerBase) -> None:
    expected = build(tokenizer, LABELLED["TRL"])
    assert build(tokenizer, {"talk": [USER, GOOD], "label": True}, prompt_key="talk") == expected
    [made] = build(tokenizer, {"messages": [USER, GOOD], "label": True, "system": "be brief"})
    assert shown(tokenizer, made)[0] == f"<|im_start|>system\nbe brief<|im_end|>\n{PROMPT}"
    with raises(DataError, re.compile("^row 0: field 'messages or conv"), found=re.compile("prompt, label$")):
        build(tokenizer, {"prompt": "1+1", "label": True})


def test_texts_without_a_prompt_share_their_beginning(tokenizer: PreTrainedTokenizerBase) -> None:
    [made] = build(tokenizer, {"chosen": "1+1=2", "rejected": "1+1=33"}, chat=False)
    assert shown(tokenizer, made) == ("1+1=", ["2<|im_end|>", "33<|im_end|>"])
    with raises(DataError, "row 0: prompt"):
        build(tokenizer, {"chosen": "1+1=2", "rejected": "1+1=33"})


def test_lists_are_in_the_order_of_their_scores(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "1+1", "responses": ["3", [GOOD], "4", "1"], "scores": [1, 5, 0.5, 1]}
    [made] = build(tokenizer, row)
    assert shown(tokenizer, made)[1] == [f"{text}<|im_end|>" for text in ("2", "3", "1", "4")]
    assert made.scores == (5.0, 1.0, 1.0, 0.5)


def test_rows_that_teach_nothing_or_are_too_long_are_counted(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    equal, tie = {**pair, "rejected": "2"}, {"prompt": "1", "responses": ["1", "2"], "scores": [1, 1]}
    long = {**pair, "rejected": "3" * 50}
    made = build(tokenizer, equal, pair, tie, long, max_length=40)
    assert len(made) == 1 and re.search(r"\b1 of 4 .*\b2\b", caplog.text)
    with raises(DataError, "row 1: number of tokens"):
        build(tokenizer, pair, long, max_length=40, overlong="error")
    with raises(DataError, "data.max_length"):
        build(tokenizer, equal)


@pytest.mark.parametrize(
    ("row", "key", "found"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 0: field 'rejected'", "missing"),
        ({"prompt": "a", "completion": "b", "label": 3}, "row 0: field 'label'", "3"),
        ({"prompt": "a", "responses": ["b"], "scores": [1]}, "row 0: field 'responses'", "b"),
        ({"prompt": "a", "responses": ["b", "c"]}, "row 0: field 'responses'", ""),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1]}, "row 0: field 'scores'", "1"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1, "x"]}, "row 0: field 'scores'", "x"),
        ({"prompt": "a", "chosen": [USER], "rejected": "b"}, "row 0: field 'chosen'", "user"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "row 0: field 'chosen'", "int"),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}, "row 0: responses", "1\\+1"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["d.png"]}, "row 0: field 'images'", ""),
    ],
)
def test_a_malformed_row_is_named(
    row: dict[str, Any], key: str, found: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with raises(DataError, key, found=re.compile(found)):
        build(tokenizer, row)


def test_data_says_how_much_the_length_tells(tokenizer: PreTrainedTokenizerBase) -> None:
    """The better response is the longer one twice, once the shorter one and once as long: (2 + 0.5) / 4."""
    pairs = [("22", "3"), ("222", "33"), ("2", "333"), ("2", "3")]
    made = build(tokenizer, *({"prompt": "1", "chosen": good, "rejected": bad} for good, bad in pairs))
    [note] = Comparison.notes(made)
    assert "62.5%" in note and "of 4 " in note and note.count("2.8") == 2  # 3 + 4 + 2 + 2 tokens each


def test_data_says_how_much_the_length_tells_of_labels(tokenizer: PreTrainedTokenizerBase) -> None:
    """Of the six pairs of a good and a bad response the good one is longer in four, as long in one: (4 + 0.5) / 6."""
    texts = [("22", True), ("2222", True), ("22", False), ("222", False), ("2", False)]
    rows = [{"prompt": "1", "completion": text, "label": label} for text, label in texts]
    shares, lengths = Comparison.notes(build(tokenizer, *rows))
    by_hand = sum((len(one) > len(other)) + 0.5 * (one == other) for one, _ in texts[:2] for other, _ in texts[2:])
    assert shares.startswith("2 of 5") and f"{by_hand / 6:.1%}" in lengths and by_hand == 4.5
    assert "of 6 " in lengths and "4.0" in lengths and "3.0" in lengths  # with the end token
    assert [note[:6] for note in Comparison.notes(build(tokenizer, *rows[:2]))] == ["2 of 2"]
    assert Comparison.notes([])[0].startswith("0 of 0")


STEPS = {"prompt": "1+1", "completions": ["1+1", "2"], "labels": [True, 0.25]}


def judged(tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], **keys: Any) -> list[Any]:
    return list(build_comparisons(rows, PromptFormat(tokenizer), PreferenceDataConfig(**keys)))


def test_a_step_ends_in_a_line_break_and_is_marked_on_the_token_after_it(tokenizer: PreTrainedTokenizerBase) -> None:
    [made] = judged(tokenizer, STEPS)
    assert isinstance(made, StepExample) and made.labels == (1.0, 0.25)
    assert tokenizer.decode(made.input_ids) == f"{PROMPT}1+1\n2\n<|im_end|>"
    ends = [place for place, mark in enumerate(made.loss_mask) if mark]
    assert [tokenizer.decode(made.input_ids[:end]) for end in ends] == [f"{PROMPT}1+1\n", f"{PROMPT}1+1\n2\n"]
    [told] = judged(tokenizer, {**STEPS, "system": "be brief"})
    assert tokenizer.decode(told.input_ids).startswith(f"<|im_start|>system\nbe brief<|im_end|>\n{PROMPT}1+1")
    assert judged(tokenizer, STEPS, {**STEPS, "prompt": "1" * 99}, max_length=40) == [made]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"labels": [True]}, "labels"),
        ({"labels": [True, 2]}, "labels"),
        ({"labels": [True, None]}, "labels"),
        ({"labels": None}, "labels"),
        ({"completions": "1+1"}, "completions"),
        ({"completions": [1, 2]}, "completions"),
        ({"completions": []}, "completions"),
    ],
    ids=str,
)
def test_a_malformed_row_of_steps_is_named(
    changes: dict[str, Any], field: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with raises(DataError, f"row 1: field '{field}'"):
        judged(tokenizer, STEPS, {**STEPS, **changes})


# -- pairs for a reward model

PLAIN = {"apply_chat_template": False}


def pairs(tokenizer: PreTrainedTokenizerBase, *rows: dict[str, Any], **keys: Any) -> tuple[Comparison, ...]:
    data = PreferenceDataConfig(**keys)
    return build_comparisons(rows, PromptFormat.of(tokenizer, data), data)


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
    assert all(other.content == first.content == (first.chosen, first.rejected, 0.0) for other in others)
    text = str(tokenizer.decode(list(first.chosen)))
    assert text.endswith("assistant\n2<|im_end|>") and "1+1=" in text  # up to what a policy would sample last


def test_texts_without_a_template(tokenizer: PreTrainedTokenizerBase) -> None:
    with_prompt, whole = pairs(
        tokenizer,
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"chosen": "1+1=2", "rejected": "1+1=3"},
        **PLAIN,
    )
    assert tokenizer.decode(list(with_prompt.chosen)) == "1+1=2<|im_end|>" == tokenizer.decode(list(whole.chosen))
    assert with_prompt.num_tokens == max(len(with_prompt.chosen), len(with_prompt.rejected))


def test_whole_texts_need_not_begin_alike(tokenizer: PreTrainedTokenizerBase) -> None:
    """A reward model compares any two; a policy needs the prompt that both answer."""
    row, ids = {"chosen": "1+1", "rejected": "2"}, [*tokenizer.encode("2"), tokenizer.eos_token_id]
    [pair] = pairs(tokenizer, row, **PLAIN)
    assert (pair.prompt_ids, list(pair.rejected)) == ((), ids)
    talks = {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}
    [pair] = pairs(tokenizer, talks)
    assert str(tokenizer.decode(list(pair.rejected))).endswith("user\nx<|im_end|>\n<|im_start|>assistant\n3<|im_end|>")
    with raises(DataError, "row 0: prompt"):
        build(tokenizer, row, chat=False)


def test_a_pair_in_every_form_and_the_ends_of_a_list(tokenizer: PreTrainedTokenizerBase) -> None:
    first, *others = pairs(tokenizer, *FORMS.values())
    assert all(other.content == first.content for other in others)
    [made] = pairs(tokenizer, {"prompt": "1+1", "responses": ["7", "3", "2"], "scores": [0.7, 0.5, 4.0]})
    assert made.content == first.content


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
    assert record.levelname == "WARNING" and re.search(r"1 of 3 .*=20 .* and 1 with", str(record.args))


@pytest.mark.parametrize(
    ("row", "keys", "key", "fields"),
    [
        ({"prompt": "a", "rejected": "c"}, {}, "row 0: field 'chosen'",
         {"found": re.compile("prompt, rejected$"), "change": re.compile("data.chosen_key")}),
        ({"prompt": "a", "chosen": "b"}, {}, "row 0: field 'rejected'", {"found": re.compile("prompt, chosen$")}),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, {}, "row 0: field 'chosen'",
         {"found": re.compile("int$"), "expected": re.compile("^text, ")}),
        ({"chosen": "b", "rejected": "c"}, {}, "row 0: prompt", {"found": re.compile("chosen, rejected")}),
        ({"prompt": "a", "completion": "b", "label": True}, {}, "row 0: field 'completion'",
         {"expected": re.compile("two")}),
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
         {"expected": re.compile(" 0 of 1 .* and 1 with")}),
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
