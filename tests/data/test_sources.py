# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.raising import raises
from whet.data.sources import read_rows
from whet.errors import DataError

ROWS = [
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}, "level": 3},
    {"prompt": [{"role": "user", "content": "zwei\u2028Zeilen"}], "reward_model": {"ground_truth": "é"}, "level": None},
]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES.encode()),
        ("rows.jsonl", (LINES.replace("\n", "\r\n\r\n") + "\r\n").encode("utf-8-sig")),
        ("rows.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("my.rows.json", json.dumps(ROWS).encode()),
        ("rows.json", json.dumps({"data": ROWS, "version": 1}).encode()),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    ],
)
def test_every_json_form_gives_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    assert read_rows(write(tmp_path / name, content)) == ROWS


def test_parquet_keeps_nested_fields(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert read_rows(str(tmp_path / "rows.parquet")) == ROWS


def test_several_files_follow_one_another(tmp_path: Path) -> None:
    first = write(tmp_path / "b.jsonl", '{"n": 1}\n{"n": 2}')
    second = write(tmp_path / "a.json", '[{"n": 3}]')
    assert read_rows([str(first), second, first]) == [{"n": n} for n in (1, 2, 3, 1, 2)]


def test_rows_from_python_are_copied() -> None:
    given = [{"n": 1}]
    rows = read_rows(given)
    rows[0]["n"] = 2
    assert given == [{"n": 1}]
    with raises(DataError, key="row 1: type", found="str"):
        read_rows([{"n": 1}, "rows.jsonl"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "key", "found"),
    [
        ("a.jsonl", '{"n": 1}\n\n{"n": }', "a.jsonl:3", "Expecting value .* 7$"),
        ("a.jsonl", '{"n": 1}\n[2]', "a.jsonl:2: type", "^list$"),
        ("a.jsonl", b'{"n": 1}\n\xff\xfe', "a.jsonl", r"line \d: 'utf-8' codec"),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}' * 99, mtime=0)[:20], "a.jsonl.gz", "line 0: "),
        ("a.jsonl.gz", '{"n": 1}', "a.jsonl.gz", "gzip"),
        ("a.json", '{"n": 1}\n{"n": 2}', "a.json:2", "Extra data .* 1$"),
        ("a.json", '{"rows": []}', "a.json", "rows$"),
        ("a.json", '[{"n": 1}, 7]', "a.json: row 1: type", "^int$"),
        ("a.jsonl", '{"n": 1}\n' + '{"n":' * 9**5, "a.jsonl:2", "nested"),
        ("a.json", "[" * 9**5, "a.json", "nested"),
        ("a.jsonl", '{"n": 1}\n{"n": %s}' % ("9" * 5000), "a.jsonl:2", "4,300"),
        ("a.parquet", "PAR?", "a.parquet", "Parquet"),
        ("a.csv", "n\n1", "a.csv", ""),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, name: str, content: str | bytes, key: str, found: str) -> None:
    with raises(DataError, f"{tmp_path}/{key}", found=re.compile(found)):
        read_rows(write(tmp_path / name, content))


def test_an_unfit_form_is_answered_with_those_that_fit(tmp_path: Path) -> None:
    with raises(DataError, expected=re.compile(r"\.jsonl, \.jsonl\.gz, ")):
        read_rows(write(tmp_path / "a.csv", "n\n1"))
    with raises(DataError, expected=re.compile(r'\{"data": \[...\]\}')):
        read_rows(write(tmp_path / "a.json", '{"rows": []}'))
    with raises(DataError, change=re.compile(r"\.jsonl")):
        read_rows(write(tmp_path / "a.json", '{"n": 1}\n{"n": 2}'))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    found = []
    for name in ("gone", "folder"):
        with pytest.raises(DataError) as error:
            read_rows(tmp_path / f"{name}.jsonl")
        assert error.value.key == f"{tmp_path}/{name}.jsonl"
        found.append(error.value.found)
    assert found[0] != found[1]


def test_published_files_are_read_whole() -> None:
    data = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    if not data.is_dir():
        pytest.skip("the public data sets are not beside the repository")
    assert len(read_rows([data / "gsm8k" / "train.jsonl", data / "gsm8k" / "test.jsonl"])) == 7473 + 1319
    problems = read_rows(data / "humaneval" / "HumanEval.jsonl.gz")
    assert [problems[0]["task_id"], problems[-1]["task_id"]] == ["HumanEval/0", "HumanEval/163"]
