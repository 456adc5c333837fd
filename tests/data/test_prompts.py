# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from whet.config.schema import DataConfig
from whet.data import prompts
from whet.data.prompts import PromptFormat, fit_prompts
from whet.data.sources import read_rows
from whet.errors import ConfigError, DataError
from whet.types import Message, Prompt

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
GSM8K_ROW = {"question": "How many?", "answer": "1 + 1 = 2\n#### 2"}


def build_prompts(rows: Sequence[Mapping[str, Any]], prompt_format: PromptFormat, **keys: Any) -> tuple[Prompt, ...]:
    return prompts.build_prompts(rows, prompt_format, DataConfig(**keys))


def texts(tokenizer: PreTrainedTokenizerBase, built: Sequence[Prompt]) -> list[str]:
    return [tokenizer.decode(list(prompt.token_ids)) for prompt in built]


def test_verl_rows(tokenizer: PreTrainedTokenizerBase) -> None:
    [prompt] = build_prompts([VERL_ROW], PromptFormat(tokenizer))
    assert prompt.messages == (Message("system", "Be brief."), Message("user", "1 + 1?"))
    assert prompt.ground_truth == "2"
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.extra_info == {"ability": "math", "split": "train", "index": 7}
    assert (prompt.index, prompt.uid, prompt.is_text) == (0, "0:0", False)
    assert tokenizer.decode(list(prompt.token_ids)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_gsm8k_rows_keep_the_published_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    built = build_prompts(
        [GSM8K_ROW], PromptFormat(tokenizer), prompt_key="question", answer_key="answer", data_source="gsm8k"
    )
    [prompt] = built
    assert prompt.ground_truth == "1 + 1 = 2\n#### 2"
    assert (prompt.data_source, prompt.extra_info, prompt.is_text) == ("gsm8k", {}, True)
    assert texts(tokenizer, built) == ["<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"]


def test_the_other_fields_of_a_plain_row_are_extra_info(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": "2 + 2?", "answer": 4, "level": 3, "tests": ["a"], "data_source": "mine"}
    [prompt] = build_prompts([row], PromptFormat(tokenizer), data_source="config")
    assert (prompt.ground_truth, prompt.data_source) == (4, "mine")
    assert prompt.extra_info == {"answer": 4, "level": 3, "tests": ["a"]}


def test_of_several_names_of_a_field_the_first_there_is(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"Problem": "1+1", "Answer": 2, "year": 2024}, {"problem": "2+2", "answer": None, "solution": "4"}]
    keys = {"prompt_key": ["problem", "Problem"], "answer_key": ["answer", "Answer", "solution"]}
    prompts = build_prompts(rows, PromptFormat(tokenizer), data_source_key="year", data_source="else", **keys)
    assert [(str(p.messages[0].content), p.ground_truth, p.data_source) for p in prompts] == [
        ("1+1", 2, "2024"),
        ("2+2", "4", "else"),
    ]
    assert prompts[0].extra_info == {"year": 2024}
    with raises(DataError, key="row 0: field 'problem or Problem'", found=re.compile("question")):
        build_prompts([{"question": "3+3"}], PromptFormat(tokenizer), **keys)
    with raises(DataError, key="row 0: field 'Problem'", found=re.compile("int")):
        build_prompts([{"problem": None, "Problem": 3}], PromptFormat(tokenizer), **keys)


def test_ids_are_those_of_apply_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "word " * (n % 50) + f"{n}?"} for n in range(1500)]
    tool = {"name": "add"}
    built = build_prompts(rows, PromptFormat(tokenizer, chat_template_kwargs={"tools": [tool]}))
    for index in (0, 1023, 1024, 1499):
        messages = [{"role": "user", "content": rows[index]["prompt"]}]
        expected = tokenizer.apply_chat_template(
            messages, tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert list(built[index].token_ids) == expected
        assert built[index].index == index


@pytest.mark.parametrize(
    ("prompt", "expected_roles"),
    [
        ("hi", ["system", "user"]),
        ([{"role": "user", "content": "hi"}], ["system", "user"]),
        ([{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}], ["system", "user"]),
    ],
)
def test_the_system_prompt_comes_before_prompts_without_one(
    tokenizer: PreTrainedTokenizerBase, prompt: object, expected_roles: list[str]
) -> None:
    built = build_prompts([{"prompt": prompt}], PromptFormat(tokenizer, system_prompt="default"))
    messages = built[0].messages
    assert [message.role for message in messages] == expected_roles
    assert messages[0].content == ("own" if isinstance(prompt, list) and len(prompt) == 2 else "default")


def test_format_prompt_sees_the_content_and_the_fields(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    template = "{{ content | trim }} ({{ level }}{% if hints %}, {{ hints[0] }}{% endif %})\nThink first."
    row = {"prompt": " 1 + 1? ", "level": 2, "hints": ["add"]}
    expected = "1 + 1? (2, add)\nThink first."
    inline = build_prompts([row], PromptFormat(tokenizer, format_prompt=template))
    assert inline[0].messages == (Message("user", expected),)
    (tmp_path / "math.jinja").write_text(template + "\n")
    from_file = build_prompts([row], PromptFormat(tokenizer, format_prompt=str(tmp_path / "math.jinja")))
    assert from_file == inline
    spoken = {**row, "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": " 1 + 1? "}]}
    [prompt] = build_prompts([spoken], PromptFormat(tokenizer, format_prompt=template))
    assert prompt.messages == (Message("system", "S"), Message("user", expected))


@pytest.mark.parametrize(
    ("template", "key", "fields"),
    [
        ("{{ contents }}", "row 0: format_prompt",
         {"found": "'contents' is undefined", "expected": re.compile("prompt, level, content")}),
        ("{{ level.name }}", "row 0: format_prompt", {"found": "'int object' has no attribute 'name'"}),
        ("{{ 1 / 0 if false else level + content }}", "row 0: format_prompt",
         {"found": re.compile("unsupported operand")}),
        ("{% if %}", "format_prompt: line 1", {"found": re.compile("Expected an expression")}),
        ("no/such.jinja", "format_prompt", {"found": re.compile(r"no/such\.jinja")}),
    ],
)  # fmt: skip
def test_a_wrong_format_prompt_says_what_is_wrong(
    tokenizer: PreTrainedTokenizerBase, template: str, key: str, fields: dict[str, object]
) -> None:
    with raises(DataError, key, **fields):
        build_prompts([{"prompt": "hi", "level": 1}], PromptFormat(tokenizer, format_prompt=template))


def test_over_long_prompts_are_dropped_with_a_count(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1" * n, "answer": "x"} for n in (5, 50, 6, 60)]
    whole = build_prompts(rows, PromptFormat(tokenizer))
    limit = len(whole[2].token_ids)
    assert [len(prompt.token_ids) - limit for prompt in whole] == [-1, 44, 0, 54]  # a token a digit
    built = build_prompts(rows, PromptFormat(tokenizer), max_prompt_length=limit)
    assert built == (whole[0], whole[2])
    assert [prompt.uid for prompt in built] == ["0:0", "0:2"]
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.args == (2, 4, limit, limit + 54, "1, 3", "")


def test_over_long_prompts_are_refused_if_so_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt_format = PromptFormat(tokenizer)
    rows = [{"prompt": "1"}, {"prompt": "1" * 50}]
    short, long = (len(prompt.token_ids) for prompt in build_prompts(rows, prompt_format))
    expected = re.compile(r"data\.max_prompt_length=40$")
    with raises(DataError, key="row 1: prompt tokens", found=long, expected=expected):
        build_prompts(rows, prompt_format, max_prompt_length=40, overlong_prompts="error")
    shortest = re.compile(rf"of 2 .* {short} ")
    with raises(DataError, key="data.max_prompt_length", found=3, expected=shortest):
        build_prompts(rows, prompt_format, max_prompt_length=3)
    with raises(DataError, key="data.max_prompt_length", expected=re.compile("of 0 ")):
        build_prompts([], prompt_format)


LIST = re.compile("^text, .*role.*content")  # expected, for a prompt
IMAGES = re.compile("text")


@pytest.mark.parametrize(
    ("row", "options", "key", "fields"),
    [
        (GSM8K_ROW, {}, "field 'prompt'",
         {"found": re.compile("question, answer$"), "change": re.compile(r"data\.prompt_key=question")}),
        ({"prompt": None, "x": 1}, {}, "field 'prompt'",
         {"found": re.compile("null.* prompt, x$"), "change": re.compile(r"data\.prompt_key$")}),
        ({"prompt": "hi"}, {"answer_key": "solution"}, "field 'solution'", {"found": re.compile("prompt$")}),
        ({"prompt": 3}, {}, "field 'prompt'", {"found": re.compile("int$"), "expected": LIST}),
        ({"prompt": []}, {}, "field 'prompt'", {"found": re.compile("list$"), "expected": LIST}),
        ({"prompt": [{"from": "human"}]}, {}, "field 'prompt'", {"found": "[{'from': 'human'}]", "expected": LIST}),
        ({"prompt": "hi", "extra_info": "x"}, {}, "extra_info", {"found": re.compile("str$")}),
        ({"prompt": ["hi"]}, {}, "field 'prompt'", {"found": "['hi']", "expected": LIST}),
        ({"prompt": [{"role": 5, "content": "hi"}]}, {}, "message 0: role", {"found": 5}),
        ({"prompt": [{"role": "user", "content": 5}]}, {}, "message 0: content", {"found": "5"}),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, {}, "message 0: content", {"found": "['hi']"}),
        ({"prompt": "hi", "images": ["a.png"]}, {}, "field 'images'", {"expected": IMAGES}),
        ({"prompt": "hi", "video": {"bytes": b"x"}}, {}, "field 'video'", {"expected": IMAGES}),
        ({"prompt": [{"role": "user", "content": [{"type": "input_audio", "data": "x"}]}]}, {}, "message 0",
         {"found": re.compile("'input_audio'"), "expected": IMAGES}),
        ({"prompt": "1" * 4_000_001}, {}, "number of characters",
         {"found": 4_000_051, "expected": re.compile("4,000,000")}),
        ({"prompt": "a\udcffb"}, {}, "text", {"found": re.compile(r"character 18, .*user.na'")}),
    ],
)  # fmt: skip
def test_a_row_that_lacks_something_is_named(
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    options: dict[str, Any],
    key: str,
    fields: dict[str, object],
) -> None:
    first = {"prompt": "fine", "solution": "1"}
    with raises(DataError, f"row 1: {key}", **fields):
        build_prompts([first, row], PromptFormat(tokenizer), **options)


def test_rows_without_answers_are_announced_and_refused_among_rows_with_answers(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "label": "2"}]
    built = build_prompts(rows[1:], PromptFormat(tokenizer))
    assert [prompt.ground_truth for prompt in built] == [None]
    [record] = caplog.records
    assert record.levelname == "WARNING" and record.args == (1,)
    change = re.compile(r"data\.filter\.answer\.not=null")
    with raises(DataError, "row 1: ground truth", found=None, expected=re.compile("1 of 2"), change=change):
        build_prompts(rows, PromptFormat(tokenizer))


def test_fields_of_media_that_hold_nothing_are_no_media(tokenizer: PreTrainedTokenizerBase) -> None:
    content = [{"type": "text", "text": "hi"}]
    rows = [{"prompt": "hi", "images": [], "audio": None}, {"prompt": [{"role": "user", "content": content}]}]
    built = build_prompts(rows, PromptFormat(tokenizer))
    assert built[0].token_ids == built[1].token_ids


def test_an_empty_prompt_is_named_before_it_is_drawn(
    with_template: Callable[[str | None], PreTrainedTokenizerBase],
) -> None:
    raw = PromptFormat(with_template(None), apply_chat_template=False)
    with raises(DataError, key="row 1: prompt", change=re.compile(r"data\.filter\.FIELD\.not=''")):
        build_prompts([{"prompt": "1"}, {"prompt": ""}], raw)
    with raises(DataError, key="row 7: prompt"):
        fit_prompts([Prompt("0:7", 7, (), (), "mine", None)], raw, DataConfig(max_prompt_length=8))


def test_raw_text_is_fed_as_it_is(with_template: Callable[[str | None], PreTrainedTokenizerBase]) -> None:
    base = with_template(None)
    with raises(DataError, change=re.compile(r"data\.apply_chat_template=false")):
        build_prompts([{"prompt": "12+34="}], PromptFormat(base))
    raw = PromptFormat(base, apply_chat_template=False, format_prompt="Q: {{ content }}")
    built = build_prompts([{"prompt": "12+34="}, {"prompt": [{"role": "user", "content": "5"}]}], raw)
    assert texts(base, built) == ["Q: 12+34=", "Q: 5"]
    with raises(DataError, key="row 0: prompt", found=re.compile(r"\(roles system, user\)")):
        build_prompts([VERL_ROW], raw)
    with raises(ConfigError, key="data.system_prompt"):
        PromptFormat(base, apply_chat_template=False, system_prompt="Be brief.")


@pytest.mark.slow
def test_gsm8k_as_published(tokenizer: PreTrainedTokenizerBase) -> None:
    path = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip("the public data sets are not beside the repository")
    rows = read_rows(path)
    built = build_prompts(
        rows, PromptFormat(tokenizer), prompt_key="question", answer_key="answer", max_prompt_length=300
    )
    lengths = [
        len(tokenizer.encode(f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n")) for row in rows
    ]
    assert 0 < len(built) == sum(length <= 300 for length in lengths) < 1319
    assert all(rows[prompt.index]["answer"] == prompt.ground_truth for prompt in built)
