# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from whet.config.schema import SupervisedDataConfig
from whet.data import supervised
from whet.data.prompts import PromptFormat
from whet.data.supervised import SupervisedExample
from whet.errors import DataError
from whet.models.init import init_model
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
    assert learned(tokenizer, one(tokenizer, {"messages": CONVERSATION})) == [
        "2<|endoftext|>\n",
        "yes,\n2<|endoftext|>\n",
    ]


def test_a_template_that_rewrites_turns_is_refused(with_template: WithTemplate) -> None:
    with pytest.raises(DataError, match=r"row 0: the chat template rewrites earlier turns.*\{% generation %\}"):
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
    assert f"truncated 1 and dropped 1 of 3 examples over data.max_length={limit} tokens" in caplog.text
    dropped = build_examples(rows, prompt_format, max_length=limit, overlong="drop")
    assert dropped == (whole[0],)
    with pytest.raises(DataError, match=rf"row 1 has {limit + 29} tokens, over data.max_length={limit}"):
        build_examples(rows, prompt_format, max_length=limit, overlong="error")
    with pytest.raises(DataError, match=r"no example is left of 3 rows \(data.max_length=2, data.overlong=drop\)"):
        build_examples(rows, prompt_format, max_length=2, overlong="drop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "hi"}, r"row 1: field 'prompt' is missing; the row has question; set data\.prompt_key or"),
        ({"prompt": "hi", "answer": "x"}, r"row 1: field 'response' is missing; the row has prompt, answer"),
        ({"prompt": "hi", "response": 3}, "row 1: expected text as the response, found int"),
        ({"messages": "hi"}, r"row 1: field 'messages': expected a list of messages .*, found str; correct the row"),
        ({"messages": CONVERSATION[:1]}, r"row 1: the messages \(roles user\) have no assistant text to train on"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_examples([{"prompt": "a", "response": "b"}, row], PromptFormat(tokenizer))


def test_messages_need_a_chat_template_and_responses_an_end(with_template: WithTemplate) -> None:
    raw = with_template(None)
    with pytest.raises(DataError, match="row 0: a list of messages needs a chat template"):
        one(raw, {"messages": CONVERSATION}, apply_chat_template=False)
    raw.eos_token = None
    with pytest.raises(DataError, match="the tokenizer has no eos token"):
        one(raw, {"prompt": "a", "response": "b"}, apply_chat_template=False)
