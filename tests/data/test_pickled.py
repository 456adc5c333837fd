# SPDX-License-Identifier: Apache-2.0
"""Pickles are refused as data, and read by `whet data convert` without running the functions that they name."""

from __future__ import annotations

import json
import pickle
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.raising import raises
from whet.cli.app import app
from whet.data.sources import read_pickle, read_rows, write_rows
from whet.errors import DataError

ROWS = [
    {"prompt": [{"role": "user", "content": "1 + 1 ="}], "reward_model": {"ground_truth": '["2"]'}, "level": 3},
    {"prompt": [{"role": "user", "content": "1 + 2 ="}], "reward_model": {"ground_truth": '["3"]'}, "level": 4},
]


def pickled(folder: Path, content: Any, protocol: int = 4) -> Path:
    path = folder / "rows.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    return path


class Runs:
    """Its pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        {name: [row[name] for row in ROWS] for name in ROWS[0]},
        pd.DataFrame(ROWS),
        [{**row, "level": np.int64(row["level"]), "prompt": np.array(row["prompt"], dtype=object)} for row in ROWS],
    ],
    ids=["rows", "columns", "frame", "numpy"],
)
def test_the_rows_of_a_pickle(tmp_path: Path, content: Any, protocol: int) -> None:
    rows = read_pickle(pickled(tmp_path, content, protocol))
    assert rows == ROWS
    assert {type(row["level"]) for row in rows} == {int}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (Path.touch, ("{}",)),
        (eval, ("open({!r}, 'w')",)),
        (exec, ("open({!r}, 'w')",)),
        (pickle.loads, (b"cos\nsystem\n.",)),
    ],
)
def test_no_function_of_a_pickle_is_called(tmp_path: Path, function: Any, arguments: tuple[Any, ...]) -> None:
    mark = tmp_path / "ran"
    given = [each.format(f"{mark}") if isinstance(each, str) else each for each in arguments]
    path = pickled(tmp_path, [{"a": Runs(function, *([Path(given[0])] if function is Path.touch else given))}])
    with raises(DataError, f"{path}", found=re.compile("would call")):
        read_pickle(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04garbage", pickle.dumps(3), pickle.dumps([1, 2]), pickle.dumps({"a": [1], "b": [1, 2]})]
)
def test_other_contents_are_named(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "rows.pkl").write_bytes(content)
    with raises(DataError, f"{path}"):
        read_pickle(path)


def test_training_refuses_a_pickle_and_the_command_converts_it(tmp_path: Path) -> None:
    path = pickled(tmp_path, pd.DataFrame(ROWS))
    with raises(DataError, f"{path}", change=re.compile(f"data convert {path}")):
        read_rows(path)
    done = CliRunner().invoke(app, ["data", "convert", f"{path}"])
    assert done.exit_code == 0, done.output
    assert read_rows(path.with_suffix(".jsonl")) == ROWS
    assert CliRunner().invoke(app, ["data", "convert", f"{path}"]).exit_code != 0  # nothing is overwritten


def test_rows_that_json_cannot_hold_become_parquet(tmp_path: Path) -> None:
    rows = [{"image": b"\x89PNG", "day": date(2026, 1, 2)}]
    written = write_rows(tmp_path / "rows.jsonl", rows)
    assert written == tmp_path / "rows.parquet" and read_rows(written) == rows
    assert json.loads(write_rows(tmp_path / "b.jsonl", [{"a": "é"}]).read_text()) == {"a": "é"}


def test_a_field_of_later_rows_alone_is_a_column_of_all(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "images": [b"\x89PNG"]}]
    assert read_rows(write_rows(tmp_path / "rows.jsonl", rows)) == [{"prompt": "a", "images": None}, rows[1]]
    with raises(DataError, f"{tmp_path / 'more.parquet'}", found=re.compile("hard")):
        write_rows(tmp_path / "more.jsonl", [{"level": 1, "image": b""}, {"level": "hard", "image": b""}])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_conversion_replaces_no_file(tmp_path: Path, name: str) -> None:
    path = pickled(tmp_path, pd.DataFrame([{"image": b"\x89PNG"}]))
    kept = path.with_name(name).with_stem(path.stem)
    kept.write_text("kept")
    done = CliRunner().invoke(app, ["data", "convert", f"{path}"])
    assert done.exit_code != 0 and kept.read_text() == "kept"
