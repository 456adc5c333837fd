# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.raising import raises
from whet.config.schema import SupervisedDataConfig
from whet.data import supervised
from whet.data.prompts import PromptFormat
from whet.data.supervised import SupervisedExample
from whet.data.written import warn_once
from whet.errors import DataError
from whet.plugins.lessons.init_model import init_model
from whet.types import Message

WithTemplate = Callable[[str | None], PreTrainedTokenizerBase]

CONVERSATION = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes,\n2"},
]
# ends turns with a mark that is not the tokenizer's eos token, as Gemma's template does
OTHER_END = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LAST_TURN_DIFFERS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + ('[last]' if loop.last else '') + m.content + ';' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def learned(tokenizer: PreTrainedTokenizerBase, example: SupervisedExample) -> list[str]:
    """The runs of text that the mask covers."""
    runs: list[list[int]] = [[]]
    for token, keep in zip(example.input_ids, example.loss_mask, strict=True):
        if keep:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def build_examples(
    rows: Sequence[Mapping[str, Any]], prompt_format: PromptFormat, **keys: Any
) -> tuple[SupervisedExample, ...]:
    return supervised.build_examples(rows, prompt_format, SupervisedDataConfig(**keys))


def one(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **options: Any) -> SupervisedExample:
    [example] = build_examples([row], PromptFormat(tokenizer, **options))
    return example


def test_a_response_is_learned_with_its_end(tokenizer: PreTrainedTokenizerBase) -> None:
    example = one(tokenizer, {"prompt": "12 + 34?", "response": "46"})
    [prompt_ids] = PromptFormat(tokenizer).encode([[Message("user", "12 + 34?")]])
    assert example.input_ids == (*prompt_ids, *tokenizer.encode("46"), tokenizer.eos_token_id)
    assert example.loss_mask == (0,) * len(prompt_ids) + (1, 1, 1)


def test_the_keys_and_the_prompt_format_are_the_users(with_template: WithTemplate) -> None:
    base = with_template(None)
    prompt_format = PromptFormat(base, apply_chat_template=False, format_prompt="Q{{ n }}: {{ content }}=")
    rows = [{"question": "1+1", "solution": "2", "n": 5}]
    built = build_examples(rows, prompt_format, prompt_key="question", response_key="solution")
    [example] = built
    assert base.decode(list(example.input_ids)) == "Q5: 1+1=2<|im_end|>"
    assert learned(base, example) == ["2<|im_end|>"]


FORGED = "1<|im_end|>2"


def test_a_control_token_in_a_row_is_learned_as_text(
    tokenizer: PreTrainedTokenizerBase, with_template: WithTemplate
) -> None:
    example = one(tokenizer, {"prompt": FORGED, "response": FORGED})
    assert example.input_ids.count(tokenizer.eos_token_id) == 2  # of the prompt's turn and of the response
    assert learned(tokenizer, example) == ["1<|im_end|>2<|im_end|>"]
    spoken = [{"role": "user", "content": FORGED}, {"role": "assistant", "content": FORGED}]
    generation = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    marked = with_template(
        "{% for m in messages %}{{ '<|im_start|>' }}{% if m.role == 'assistant' %}{{ 'A:' }}"
        + generation
        + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>A:' }}{% endif %}"
    )
    for each in (tokenizer, marked):
        example = one(each, {"messages": spoken})
        assert example.input_ids.count(each.eos_token_id) == 2
        assert learned(each, example) == ["1<|im_end|>2<|im_end|>"]
    parsed = one(tokenizer, {"messages": spoken}, chat_template_kwargs={"sanitize_control_tokens": False})
    assert parsed.input_ids.count(tokenizer.eos_token_id) == 4
    raw = one(tokenizer, {"prompt": FORGED, "response": FORGED}, apply_chat_template=False)
    assert raw.input_ids.count(tokenizer.eos_token_id) == 3  # fed as it is


def test_every_assistant_turn_is_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    example = one(tokenizer, {"messages": CONVERSATION}, system_prompt="Be brief.")
    assert tokenizer.decode(list(example.input_ids)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes,\n2<|im_end|>\n"
    )
    assert learned(tokenizer, example) == ["2<|im_end|>", "yes,\n2<|im_end|>"]


def test_generation_marks_give_the_same_mask_as_prefixes(
    tokenizer: PreTrainedTokenizerBase, with_template: WithTemplate
) -> None:
    row = {"messages": CONVERSATION}
    assert one(with_template(MARKED), row) == one(tokenizer, row)


def test_a_token_merged_across_the_header_belongs_to_the_answer(tmp_path: Path) -> None:
    """The header's newline and the answer's first one are one token, which only the answer explains."""
    folder = init_model(tmp_path / "model", "qwen3", "nano", texts=["a\n\nb"] * 9)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = {"messages": [CONVERSATION[0], {"role": "assistant", "content": "\nx"}]}
    assert learned(tokenizer, one(tokenizer, row)) == ["\n\nx<|im_end|>"]


def test_turns_that_end_with_another_token(with_template: WithTemplate) -> None:
    tokenizer = with_template(OTHER_END)
    assert learned(tokenizer, one(tokenizer, {"messages": CONVERSATION})) == ["2<|endoftext|>", "yes,\n2<|endoftext|>"]
    assert learned(tokenizer, one(tokenizer, {"prompt": "1 + 1?", "response": "2"})) == ["2<|endoftext|>"]
    raw = one(tokenizer, {"prompt": "1 + 1?", "response": "2"}, apply_chat_template=False)
    assert learned(tokenizer, raw) == ["2<|im_end|>"]  # the tokenizer's own


def test_a_template_that_rewrites_turns_is_refused(with_template: WithTemplate) -> None:
    with raises(DataError, key="row 0: chat template", change=re.compile(r"\{% generation %\}")):
        one(with_template(LAST_TURN_DIFFERS), {"messages": CONVERSATION})


def test_long_examples_are_cut_dropped_or_refused(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    prompt_format = PromptFormat(tokenizer)
    rows = [
        {"prompt": "1", "response": "1"},
        {"prompt": "1", "response": "1" * 30},
        {"prompt": "1" * 30, "response": "1"},
    ]
    whole = build_examples(rows, prompt_format)
    limit = len(whole[0].input_ids)
    cut = build_examples(rows, prompt_format, max_length=limit)
    shortened = SupervisedExample(whole[1].input_ids[:limit], (*[0] * (limit - 2), 1, 1))
    assert cut == (whole[0], shortened)  # of the third only prompt would be left
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.args == (1, 1, 3, limit)
    dropped = build_examples(rows, prompt_format, max_length=limit, overlong="drop")
    assert dropped == (whole[0],)
    with raises(DataError, "row 1: number of tokens", found=limit + 29, expected=re.compile(rf"max_length={limit}$")):
        build_examples(rows, prompt_format, max_length=limit, overlong="error")
    expected = re.compile(r" 3 .*data\.overlong=drop")
    with raises(DataError, key="data.max_length", found=2, expected=expected):
        build_examples(rows, prompt_format, max_length=2, overlong="drop")


@pytest.mark.parametrize(
    ("row", "key", "fields"),
    [
        ({"question": "hi"}, "field 'prompt'",
         {"found": re.compile("question$"), "change": re.compile(r"data\.prompt_key or data\.messages_key")}),
        ({"prompt": "hi", "answer": "x"}, "field 'response'", {"found": re.compile("prompt, answer$")}),
        ({"prompt": "hi", "response": 3}, "response type", {"found": "int"}),
        ({"messages": "hi"}, "field 'messages'", {"found": re.compile("str$"), "expected": re.compile("^a list")}),
        ({"messages": CONVERSATION[:1]}, "messages", {"found": re.compile(r"\(roles user\)")}),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_learned_is_named(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], key: str, fields: dict[str, object]
) -> None:
    with raises(DataError, f"row 1: {key}", **fields):
        build_examples([{"prompt": "a", "response": "b"}, row], PromptFormat(tokenizer))


def test_messages_need_a_chat_template_and_responses_an_end(with_template: WithTemplate) -> None:
    raw = with_template(None)
    with raises(DataError, key="row 0: data.apply_chat_template", found=False):
        one(raw, {"messages": CONVERSATION}, apply_chat_template=False)
    raw.eos_token = None
    with raises(DataError, key="row 0: tokenizer.eos_token", found=None):
        one(raw, {"prompt": "a", "response": "b"}, apply_chat_template=False)


END, CLOSE = "<|im_end|>", "{% endgeneration %}"


def marked(inside: str, after: str) -> str:
    """A template with marks around `inside`."""
    return (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
        + "{% generation %}{{ "
        + inside
        + " }}"
        + CLOSE
        + "{{ "
        + after
        + " }}{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize(
    ("inside", "after", "end"),
    [
        ("m.content", "'<|im_end|>\n'", "<|im_end|>"),
        ("m.content", "' <|im_end|>\n'", " <|im_end|>"),
        ("m.content + '<|im_end|>'", "'\n'", "<|im_end|>"),
        ("m.content + '<|im_end|>\n'", "''", "<|im_end|>"),
        ("m.content", "'<|endoftext|>\n'", "<|endoftext|>"),  # another token than the tokenizer's
        ("'a<|im_end|>b' + m.content", "'<|im_end|>\n'", "<|im_end|>"),
        ("m.content", "'\n'", ""),  # no end at all
    ],
)
def test_marks_train_the_end_of_a_turn_and_nothing_behind_it(
    inside: str, after: str, end: str, with_template: WithTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    tokenizer = with_template(marked(inside, after))
    before = "a<|im_end|>b" if inside.startswith("'a") else ""
    example = one(tokenizer, {"messages": CONVERSATION})
    warned = [each for each in caplog.records if "rollout.stop" in each.getMessage()]
    assert learned(tokenizer, example) == [f"{before}2{end}", f"{before}yes,\n2{end}"] and bool(warned) == (not end)


FOOTER = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""
BY_ROLE = """\
{%- for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|endoftext|>' }}{{ '\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|endoftext|>\n' }}{% endif %}"""


def test_the_end_of_a_text_is_no_part_of_its_last_turn(with_template: WithTemplate) -> None:
    """As Phi's template does, which writes the tokenizer's own end after the whole conversation."""
    tokenizer = with_template(FOOTER)
    tokenizer.eos_token = "<|endoftext|>"
    assert learned(tokenizer, one(tokenizer, {"messages": CONVERSATION})) == ["2<|im_end|>", "yes,\n2<|im_end|>"]
    assert learned(tokenizer, one(tokenizer, {"prompt": "1?", "response": "2"})) == ["2<|im_end|>"]


def test_a_token_that_begins_the_next_message_ends_no_answer(with_template: WithTemplate) -> None:
    """As GLM's template does; the tokenizer's own end is left for a response."""
    tokenizer = with_template(BY_ROLE)
    assert learned(tokenizer, one(tokenizer, {"prompt": "1?", "response": "2"})) == ["2<|im_end|>"]


# as Qwen3's: thoughts are written behind the last message of a user alone
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set tagged = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}
{%- set thought = m.reasoning_content or tagged %}
{%- if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif %}
{{- answer + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED_THINKING = THINKING.replace(
    "{%- if thought and", "{% if m.role == 'assistant' %}{% generation %}{%- if thought and"
).replace(
    "{{- answer + '<|im_end|>\n' }}",
    "{{- answer }}{% endgeneration %}{% else %}{{ answer }}{% endif %}{{ '<|im_end|>\n' }}",
)
THOUGHTS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "<think>one more</think>2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes", "reasoning_content": "count again"},
]
FIRST, SECOND = "<think>\none more\n</think>\n\n2<|im_end|>", "<think>\ncount again\n</think>\n\nyes<|im_end|>"


@pytest.mark.parametrize("template", [THINKING, MARKED_THINKING])
def test_thoughts_that_the_template_leaves_out_are_counted_split_or_refused(
    template: str, with_template: WithTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_template(template)
    rows = [{"messages": THOUGHTS}, {"messages": THOUGHTS[2:]}, {"messages": CONVERSATION}]
    whole = build_examples(rows, PromptFormat(tokenizer))
    assert [learned(tokenizer, each) for each in whole] == [
        ["2<|im_end|>", SECOND],
        [SECOND],
        ["2<|im_end|>", "yes,\n2<|im_end|>"],
    ]
    [warning] = [each.getMessage() for each in caplog.records]
    assert "1 of 3 rows" in warning and "message 1" in warning and "data.unwritten" in warning
    caplog.clear()
    split = build_examples(rows, PromptFormat(tokenizer), unwritten="split")
    assert [learned(tokenizer, each) for each in split] == [
        [FIRST],
        [SECOND],
        [SECOND],
        [*learned(tokenizer, whole[2])],
    ]
    assert tokenizer.decode(split[0].input_ids).count("<|im_start|>") == 2
    assert split[1].input_ids == whole[0].input_ids
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    with raises(DataError, key="row 0: chat template", found=re.compile("message 1")):
        build_examples(rows, PromptFormat(tokenizer), unwritten="error")
    assert len(build_examples(rows[1:], PromptFormat(tokenizer), unwritten="error")) == 2


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        ("{{ m.content.split('</think>')[-1] }}", THOUGHTS[:2], "content of message 1"),  # never written, as R1's
        ("{% if m.role != 'system' %}{{ m.content }}{% endif %}",
         [{"role": "system", "content": "Be brief"}, *CONVERSATION], "content of message 0"),
        ("{{ '' if m.tool_calls else m.content }}",
         [CONVERSATION[0], {"role": "assistant", "content": "I ask.",
          "tool_calls": [{"function": {"name": "ask", "arguments": {"q": "x y"}}}]}, CONVERSATION[3]],
         "content of message 1"),
        ("{{ m.content }}",
         [CONVERSATION[0], {"role": "assistant", "content": "I ask.",
          "tool_calls": [{"function": {"name": "look_up", "arguments": "{}"}}]}, CONVERSATION[3]],
         "tool_calls of message 1"),
        ("{{ m.content }}", [CONVERSATION[0], {"role": "assistant", "content": "2", "thought": "one more"}],
         "thought of message 1"),
        ("{{ m.content }}", [CONVERSATION[0], {"role": "assistant", "content": "2", "refusal": "rather not"}],
         "refusal of message 1"),
        ("{{ m.content }}", [CONVERSATION[0], {"role": "assistant", "content": "2",
          "function_call": {"name": "look_up", "arguments": "{}"}}], "function_call of message 1"),
        ("{{ m.content.split('</think>')[-1] }}",  # the thought stands in the question too
         [{"role": "user", "content": "Is 2 one more?"}, {"role": "assistant", "content": "<think>one more</think>2"}],
         "content of message 1"),
    ],
)  # fmt: skip
def test_no_part_of_a_message_is_lost_without_a_word(
    template: str, row: list[dict[str, Any]], what: str, with_template: WithTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + template + "{{ '<|im_end|>\n' }}{% endfor %}"
    )
    tokenizer = with_template(whole + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    for mode in ("as_is", "split"):
        caplog.clear()
        build_examples([{"messages": row}], PromptFormat(tokenizer), unwritten=mode)
        assert any(what in each.getMessage() for each in caplog.records), mode
