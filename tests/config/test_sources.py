# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config.schema import DataConfig, SupervisedDataConfig
from whet.config.sources import Source, check_files, files_of, read_sources, read_weights
from whet.errors import ConfigError

KEY = "data.train_files"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files, a folder, and a function's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved" / "shards").mkdir(parents=True)
    for name in ("a.jsonl", "b.csv", "mine.py", "saved/x-1.jsonl", "saved/x-0.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


def read(*entries: str | dict[str, Any]) -> list[Source]:
    return read_sources(KEY, entries, DataConfig())


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("a.jsonl", Source("file", "a.jsonl")),
        ("no/such.parquet", Source("file", "no/such.parquet")),
        ("saved/*.jsonl", Source("file", "saved/*.jsonl")),
        ("saved", Source("folder", "saved")),
        ("saved/shards@test", Source("folder", "saved/shards", split="test")),
        ("openai/gsm8k", Source("hub", "openai/gsm8k")),
        ("openai/gsm8k:main@train", Source("hub", "openai/gsm8k", config="main", split="train")),
        ("hiyouga/math12k@train[:10%]", Source("hub", "hiyouga/math12k", split="train[:10%]")),
        ("hub:saved/shards", Source("hub", "saved/shards")),
        ("hub:squad@train", Source("hub", "squad", split="train")),
        ("mine.py:rows", Source("function", "mine.py:rows")),
        ("my_package.data:rows", Source("function", "my_package.data:rows")),
        (
            {"path": "openai/gsm8k", "config": "main", "split": "test", "weight": 2, "prompt_key": "question"},
            Source("hub", "openai/gsm8k", "main", "test", 2, fields={"prompt_key": "question"}),
        ),
        (
            {"path": "mine.py:rows", "options": {"n": 3}, "filter": {"level": 1}},
            Source("function", "mine.py:rows", where={"level": 1}, options={"n": 3}),
        ),
    ],
)
def test_what_an_entry_names(entry: Any, source: Source) -> None:
    assert read(entry) == [source]


@pytest.mark.parametrize(
    ("entry", "key", "found", "advice"),
    [
        ("b.csv", "", re.compile(r"^b\.csv .*\.csv$"), r"\.jsonl, \.json, \.parquet"),
        ("saved/nothing", "", re.compile("^saved/nothing .*/"), ""),
        ("./owner/name", "", re.compile(r"^\./owner/name "), ""),
        ("nothing", "", re.compile("^nothing "), ""),
        ("yours.py:rows", "", re.compile(r"^yours\.py "), ""),
        ({"file": "a.jsonl"}, "", re.compile("'file'"), r"filter\?"),
        ({"path": "a.jsonl", "wieght": 1}, "", re.compile("'wieght'"), r"weight\?"),
        ({"path": "a.jsonl", "response_key": "r"}, "", re.compile("'response_key'"), "prompt_key"),
        ({"weight": 1}, "", {"weight": 1}, "path: "),
        ({"path": "a.jsonl", "weight": 0}, ": weight of a.jsonl", 0, "> 0"),
        ({"path": "a.jsonl", "split": "train"}, ": a.jsonl", re.compile(" file,.* split$"), ""),
        ({"path": "a.jsonl", "options": {"n": 1}}, ": a.jsonl", re.compile(" file,.* options$"), ""),
        ({"path": "a.jsonl", "filter": "level"}, ": filter of a.jsonl", "level", "mapping"),
    ],
)
def test_what_names_nothing_is_refused(entry: Any, key: str, found: object, advice: str) -> None:
    with raises(ConfigError, f"{KEY}{key}", found=found) as raised:
        read(entry)
    assert re.search(advice, f"{raised.value.expected}; {raised.value.change}")


def test_entries_of_sft_have_its_keys() -> None:
    [source] = read_sources(KEY, [{"path": "a.jsonl", "response_key": "r"}], SupervisedDataConfig())
    assert source.fields == {"response_key": "r"}


def test_weights_are_shares() -> None:
    sources = read("a.jsonl", "openai/gsm8k")
    assert read_weights(sources, None) is None
    assert read_weights(sources, [1, 3]) == [0.25, 0.75]
    own = read({"path": "a.jsonl", "weight": 4}, {"path": "saved", "weight": 1})
    assert read_weights(own, None) == [0.8, 0.2]
    with raises(ConfigError, "data.weights", found=[1], expected=re.compile("2")):
        read_weights(sources, [1])
    with raises(ConfigError, "data.weights", found=[1, 2], expected=re.compile(r"a\.jsonl")):
        read_weights(own, [1, 2])
    with raises(ConfigError, "data.train_files", found=re.compile(r"^a\.jsonl .*openai/gsm8k")):
        read_weights([own[0], sources[1]], None)


def test_files_are_looked_for(folder: Path) -> None:
    assert files_of("saved/*.jsonl") == [Path("saved/x-0.jsonl"), Path("saved/x-1.jsonl")]
    assert files_of(f"{folder}/saved/*-0.jsonl") == [folder / "saved" / "x-0.jsonl"]
    assert files_of("a.jsonl") == [Path("a.jsonl")] and files_of("c.jsonl") == []
    check_files(KEY, ["saved/*.jsonl", "saved", "owner/name", "mine.py:rows"], DataConfig(), required=True)
    with raises(ConfigError, KEY, found=re.compile(r"saved/\*\.parquet ")):
        check_files(KEY, ["saved/*.parquet"], DataConfig(), required=True)
    with raises(ConfigError, "data.val_files", found=re.compile(r"a\.jsonl .*weight"), change=re.compile("weight")):
        check_files("data.val_files", [{"path": "a.jsonl", "weight": 1}], DataConfig(), required=False)
