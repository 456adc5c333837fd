# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from whet.config.schema import DataConfig, SupervisedDataConfig
from whet.data.load import VAL, EntryCounts, listed, load_items
from whet.errors import DataError

FUNCTIONS = """
from whet.types import Message, Prompt

def rows(seed, split, *, count=2):
    return ({"prompt": f"{split} {seed} {i}", "answer": i} for i in range(count))

class Own:
    def __init__(self, tokenizer, size):
        self.size, self.tokenizer = size, tokenizer
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        assert 0 <= index < self.size
        ids = (1, 2, index) if index else ()
        return Prompt("", 9, (Message("user", "hello"),), ids, "own", str(index), {"n": index})

CONSTANT = [{"prompt": "constant", "answer": "c"}]
def broken():
    yield {"prompt": "a"}
    raise KeyError("b")
def number():
    return 7
def text():
    return "text"
def mixed():
    return [Prompt("", 0, (), (1,), "own", "a"), {"prompt": "b"}]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two data sets of different fields, and functions that give data."""
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", [{"prompt": f"a{i}", "answer": i, "level": i % 3} for i in range(6)])
    write("b.jsonl", [{"question": f"b{i}", "solution": f"s{i}", "level": 9} for i in range(3)])
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(*train_files: Any, **keys: Any) -> DataConfig:
    return DataConfig(train_files=list(train_files), apply_chat_template=False, **keys)


B = {"path": "b.jsonl", "prompt_key": "question", "answer_key": "solution", "data_source": "second"}


def test_sources_have_keys_and_templates_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    loaded = load_items(data("a.jsonl", {**B, "format_prompt": "Q {{ content }}"}, data_source="first"), tokenizer)
    assert [p.messages[0].content for p in loaded.items] == ["a0", "a1", "a2", "a3", "a4", "a5", "Q b0", "Q b1", "Q b2"]
    assert [p.ground_truth for p in loaded.items] == [0, 1, 2, 3, 4, 5, "s0", "s1", "s2"]
    assert [p.data_source for p in loaded.items] == ["first"] * 6 + ["second"] * 3
    assert [p.index for p in loaded.items] == list(range(9))
    assert [p.uid for p in loaded.items] == [f"0:{i}" for i in range(9)]
    assert loaded.parts == (EntryCounts("a.jsonl", 6, 6, 6), EntryCounts("b.jsonl", 3, 3, 3))


def test_a_filter_keeps_row_numbers(tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture) -> None:
    own = {**B, "filter": {"level": 9, "question": {"not": "b1"}}}
    caplog.set_level("INFO")
    loaded = load_items(data("a.jsonl", own), tokenizer, where={"level": {"min": 1}})
    assert [p.index for p in loaded.items] == [1, 2, 4, 5, 6, 8]
    assert loaded.parts == (EntryCounts("a.jsonl", 6, 4, 4), EntryCounts("b.jsonl", 3, 2, 2))
    assert [each.args for each in caplog.records if each.name == "whet.data.load"] == [
        ("a.jsonl", 4, 6),
        ("b.jsonl", 2, 3),
    ]
    write("c.jsonl", [{"prompt": "a", "level": 1}, {"level": 2}, {"level": 3}])
    with raises(DataError, key="c.jsonl: row 2: field 'prompt'", found=re.compile("level$")):
        load_items(data("c.jsonl"), tokenizer, where={"level": [1, 3]})


def test_a_window_of_difficulty_is_for_training_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    config = data("a.jsonl", val_files=["a.jsonl"], difficulty_key="level", difficulty_window=(0, 2))
    assert [p.index for p in load_items(config, tokenizer).items] == [1, 4]
    assert len(load_items(config, tokenizer, VAL).items) == 6


def test_functions_and_classes_give_rows_and_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    files = ["mine.py:rows", {"path": "mine.py:Own", "options": {"size": 3}}, "mine.py:CONSTANT"]
    loaded = load_items(data(*files), tokenizer, seed=5)
    assert [p.messages[0].content for p in loaded.items] == ["train 5 0", "train 5 1", *["hello"] * 3, "constant"]
    assert [p.index for p in loaded.items] == list(range(6))
    own = loaded.items[2:5]
    assert own[0].token_ids == tuple(tokenizer("hello")["input_ids"]) and own[1].token_ids == (1, 2, 1)
    assert [p.ground_truth for p in own] == ["0", "1", "2"] and own[2].extra_info == {"n": 2}
    val = load_items(data(val_files=[{"path": "mine.py:rows", "options": {"count": 1}}]), tokenizer, VAL)
    assert [p.messages[0].content for p in val.items] == ["val 0 0"]


@pytest.mark.parametrize(
    ("entry", "key", "fields"),
    [
        ("mine.py:broken", "mine.py:broken", {"found": re.compile("KeyError: 'b'")}),
        ("mine.py:number", "mine.py:number: type", {"found": "int"}),
        ("mine.py:text", "mine.py:text: type", {"found": "str", "change": re.compile("data.train_files")}),
        ("mine.py:mixed", "mine.py:mixed: item 1", {"found": re.compile("dict")}),
        (
            "mine.py:Own",
            "mine.py:Own: parameter 'size'",
            {"found": None, "expected": re.compile("split, tokenizer, seed")},
        ),
        (
            {"path": "mine.py:rows", "options": {"cuont": 3}},
            "mine.py:rows: option 'cuont'",
            {"expected": "seed, split, count"},
        ),
        ({"path": "mine.py:Own", "options": {"size": -1}}, "mine.py:Own", {"found": re.compile("ValueError")}),
        ({"path": "mine.py:rows", "options": {"count": 0}}, "mine.py:rows: number of rows", {"found": 0}),
        (
            {"path": "mine.py:Own", "options": {"size": 2}, "filter": {"n": 1}},
            "mine.py:Own: data.filter",
            {"found": re.compile(r"\(n\)")},
        ),
    ],
)
def test_a_function_that_gives_no_data_is_named(
    tokenizer: PreTrainedTokenizerBase, entry: Any, key: str, fields: dict[str, object]
) -> None:
    with raises(DataError, key, **fields):
        load_items(data(entry), tokenizer)


def test_what_ends_is_listed() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    assert listed(iter([1, 2])) == [1, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.data.load.MAX_ITEMS", 5)
        with raises(DataError, key="number of rows", found=re.compile("5$")):
            listed(endless())


def test_rows_from_python_take_the_place_of_files(tokenizer: PreTrainedTokenizerBase) -> None:
    loaded = load_items(data("gone.jsonl", weights=[1.0]), tokenizer, rows=({"prompt": c} for c in "ab"))
    assert [p.messages[0].content for p in loaded.items] == ["a", "b"]
    assert loaded.parts == (EntryCounts("data", 2, 2, 2),)


def test_examples_come_from_several_sources_too(tokenizer: PreTrainedTokenizerBase) -> None:
    write("c.jsonl", [{"q": f"c{i}", "r": "x" * (1 + 40 * (i == 1)), "ok": i} for i in range(4)])
    files = [{"path": "a.jsonl", "response_key": "prompt"}, {"path": "c.jsonl", "prompt_key": "q", "response_key": "r"}]
    config = SupervisedDataConfig(
        train_files=files, weights=[1, 3], apply_chat_template=False, max_length=20, overlong="drop"
    )
    loaded = load_items(config, tokenizer, where={})
    assert loaded.parts == (EntryCounts("a.jsonl", 6, 6, 6, 0.25), EntryCounts("c.jsonl", 4, 4, 3, 0.75))
    assert len(loaded.items) == 9 and tokenizer.decode(list(loaded.items[-1].input_ids)).startswith("c3x")
    with raises(DataError, key="c.jsonl: row 3: field 'response'"):
        only = SupervisedDataConfig(train_files=[{"path": "c.jsonl", "prompt_key": "q", "filter": {"ok": 3}}])
        load_items(only, tokenizer)
    with raises(DataError, key="mine.py:Own: item type", found="Prompt"):
        load_items(SupervisedDataConfig(train_files=[{"path": "mine.py:Own", "options": {"size": 2}}]), tokenizer)
