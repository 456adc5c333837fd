# SPDX-License-Identifier: Apache-2.0
"""Rows with tools and tool calls, from JSON lines and from tables, under templates of every habit."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from whet.config.schema import DataConfig, SupervisedDataConfig
from whet.data.chat import render_chat
from whet.data.load import load_items
from whet.data.prompts import PromptFormat
from whet.data.supervised import build_examples
from whet.data.written import warn_once
from whet.types import Message

WithTemplate = Callable[[str | None], PreTrainedTokenizerBase]

LOOK_UP = {"name": "look_up", "description": "", "parameters": {"properties": {"city": {"type": "string"}}}}
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }} ARGUMENTS{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
WAYS = {
    "json": "{{ c.function.arguments | tojson }}",
    "either": "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
    "text": "{{ c.function.arguments }}",
    "text by plus": "{{ '' + c.function.arguments }}",
}


def of_way(way: str) -> str:
    return TEMPLATE.replace("ARGUMENTS", WAYS[way])


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "t0000c000", "type": "function", "function": {"name": name, "arguments": arguments}}


def asked(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [*calls]}]


def rendered(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> str:
    [example] = build_examples([row], PromptFormat(tokenizer), SupervisedDataConfig())
    return str(tokenizer.decode(example.input_ids))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["object", "text"])
def test_arguments_are_written_once_as_json(way: str, form: str, with_template: WithTemplate) -> None:
    given = {"city": "Zürich", "days": [1, 2]}
    row = {"messages": asked(call("look_up", given if form == "object" else json.dumps(given)))}
    text = rendered(with_template(of_way(way)), row)
    _, _, after = text.rpartition("look_up ")
    assert json.loads(after.partition("<|im_end|>")[0]) == given


@pytest.mark.parametrize("given", ["no json", "[1]", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(given: str, with_template: WithTemplate) -> None:
    text = rendered(with_template(of_way("text")), {"messages": asked(call("look_up", given))})
    assert f"look_up {given}<|im_end|>" in text


def test_arguments_without_a_text_are_an_empty_object(with_template: WithTemplate) -> None:
    for given in ("", None):  # a table's null is no argument either
        for way in ("json", "text"):
            row = {"messages": asked(call("look_up", given))}
            assert "look_up {}<" in rendered(with_template(of_way(way)), row), (given, way)


def test_the_nulls_of_a_table_are_no_arguments(tmp_path: Path, with_template: WithTemplate) -> None:
    rows = [
        {"messages": asked(call("look_up", {"city": "Bern", "at": {"day": 1}}), call("add", {"expression": "1+1"}))},
        {"messages": asked(call("look_up", {"city": "Genf", "at": {"hour": 2}}))},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tokenizer = with_template(of_way("json"))
    data = SupervisedDataConfig(train_files=[str(tmp_path / "rows.parquet")])
    first, second = (str(tokenizer.decode(each.input_ids)) for each in load_items(data, tokenizer).items)
    assert 'look_up {"city": "Bern", "at": {"day": 1}}add {"expression": "1+1"}' in first
    assert 'look_up {"city": "Genf", "at": {"hour": 2}}' in second
    assert "null" not in first + second and "None" not in first + second


def test_a_null_in_the_json_text_of_arguments_stays(with_template: WithTemplate) -> None:
    row = {"messages": asked(call("look_up", '{"city": null}'))}  # written by the author: in no table
    assert 'look_up {"city": null}<' in rendered(with_template(of_way("json")), row)


@pytest.mark.parametrize("form", ["function", "openai", "text", "table"])
def test_the_tools_of_a_row_reach_the_template(form: str, with_template: WithTemplate) -> None:
    own: Any = [LOOK_UP] if form in ("function", "text") else [{"type": "function", "function": LOOK_UP}]
    if form == "table":
        other = {"name": "add", "parameters": {"properties": {"expression": {"type": "string"}}}}
        table = pa.Table.from_pylist([{"tools": own}, {"tools": [{"type": "function", "function": other}]}])
        own = table.to_pylist()[0]["tools"]
        assert own[0]["function"]["parameters"]["properties"]["expression"] is None
    tools = json.dumps(own) if form == "text" else own
    tokenizer = with_template(of_way("json"))
    head = f"<|im_start|>system\n{json.dumps([{'type': 'function', 'function': LOOK_UP}])}<|im_end|>\n"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    assert rendered(tokenizer, {"messages": talk, "tools": tools}).startswith(head)
    assert rendered(tokenizer, {"prompt": "?", "response": "!", "tools": tools}).startswith(head)
    for prompt in ("?", talk[:1]):
        rows = [{"prompt": prompt, "answer": "1", "tools": tools}, {"prompt": "?", "answer": "1"}]
        with_tools, without = load_items(DataConfig(), tokenizer, rows=rows).items
        assert tokenizer.decode(with_tools.token_ids) == head + "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(without.token_ids).startswith("<|im_start|>user")
        again = render_chat(tokenizer, with_tools.messages, add_generation_prompt=True)  # as a hint is put in
        assert again == tokenizer.decode(with_tools.token_ids)


def test_a_control_token_in_a_tool_of_a_row_stays_text(with_template: WithTemplate) -> None:
    tool = {"name": "look_up", "description": "<|im_end|>", "parameters": {}}
    for template in (of_way("json"), of_way("json").replace("{{ m.content }}", "{% generation %}x{% endgeneration %}")):
        tokenizer = with_template(template)
        row = {"prompt": "?", "response": "!", "tools": [tool]}
        [example] = build_examples([row], PromptFormat(tokenizer), SupervisedDataConfig())
        assert example.input_ids.count(tokenizer.eos_token_id) == 3  # of the system, the user and the response


def test_tools_that_are_not_shown_are_told(with_template: WithTemplate, caplog: pytest.LogCaptureFixture) -> None:
    shows_none = with_template("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")
    shows, row = with_template(of_way("json")), {"prompt": "?", "answer": "1", "tools": [LOOK_UP]}

    def told(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **keys: Any) -> str:
        warn_once.cache_clear()
        caplog.clear()
        load_items(DataConfig(**keys), tokenizer, rows=[{**row, "answer": "1"}])
        return " ".join(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)

    assert "row_tools of message 0" in told(shows_none, row)
    assert "environment.tools" in told(shows, row, chat_template_kwargs={"tools": [LOOK_UP]})
    assert "apply_chat_template" in told(shows, row, apply_chat_template=False)
    for tools in ("hammer, saw", ["hammer"], {"a": 1}, [LOOK_UP, None], 3):
        assert "`tools`" in told(shows, {"prompt": "?", "tools": tools}), tools
    for tools in (None, [], "", "[]"):
        assert told(shows, {"prompt": "?", "tools": tools}) == "", tools
    assert told(shows, row) == ""


def test_a_call_without_arguments_or_of_another_form_is_left_to_the_template(with_template: WithTemplate) -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.tool_calls }}{% endfor %}")
    for calls in ([{"name": "add", "arguments": '{"a": 1}'}], [{"function": {"name": "add"}}], ["add()"], [None]):
        text = render_chat(tokenizer, [Message("assistant", "", {"tool_calls": calls})], add_generation_prompt=False)
        assert text.startswith("[") and ("add" in text or calls == [None])


def test_calls_of_any_form_are_trained_on(with_template: WithTemplate) -> None:
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    for calls in (["add()"], [None], "add()", [{"function": None}], [{"function": "add"}], {"a": 1}):
        row = {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        }
        assert rendered(tokenizer, row).startswith("user?")
