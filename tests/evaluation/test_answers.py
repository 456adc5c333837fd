# SPDX-License-Identifier: Apache-2.0
"""Files of answers: their content read back, and the files of an evaluation that was cut off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.errors import DataError, StorageError
from whet.evaluation.answers import Journal, Record, by_prompt, read_answers

PROMPTS = {0: "1+1=", 1: "1+2=", 2: "1+3="}


def answers(index: int, **changes: Any) -> list[Record]:
    """Two to a prompt."""
    return [
        {
            "index": index,
            "data_source": "a",
            "prompt": PROMPTS[index],
            "ground_truth": "2",
            "reward": 1.0,
            "accuracy": 1.0,
            "failure": None,
            "response": f"é{sample}",
            **changes,
        }
        for sample in range(2)
    ]


def test_a_journal_becomes_answers(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True)
    assert journal.rows == []
    for index in PROMPTS:
        journal.add(answers(index))
    with raises(DataError, str(tmp_path), found=re.compile(r"answers\.jsonl"), change=re.compile("again")):
        read_answers(tmp_path)
    journal.finish({"accuracy": 1.0})
    assert read_answers(tmp_path) == read_answers(tmp_path / "answers.jsonl") == [*answers(0), *answers(1), *answers(2)]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy": 1.0}
    assert (tmp_path / "config.yaml").read_text() == "n: 2\n"
    assert Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True).rows == []  # it is over: another one starts afresh
    assert len(by_prompt(read_answers(tmp_path))) == 3


def test_whole_prompts_are_kept_and_what_is_torn_is_not(tmp_path: Path) -> None:
    Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True).add([*answers(0), *answers(1), *answers(2)])
    partial = tmp_path / "answers.partial.jsonl"
    partial.write_text(partial.read_text()[:-9])  # killed while it wrote the last line
    again = Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True)
    assert again.rows == [*answers(0), *answers(1)]
    assert len(partial.read_text().splitlines()) == 4
    again.add(answers(2))
    assert Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True).rows == [*answers(0), *answers(1), *answers(2)]


@pytest.mark.parametrize("what", ["settings", "prompt", "resume", "n"])
def test_answers_of_another_evaluation_are_not_taken(what: str, tmp_path: Path) -> None:
    Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True).add(answers(1))
    settings, n = ("n: 3\n" if what == "settings" else "n: 2\n"), (1 if what == "n" else 2)
    prompts = {**PROMPTS, 1: "2+2="} if what == "prompt" else PROMPTS
    assert Journal(tmp_path, settings, prompts, n, resume=what != "resume").rows == []
    assert (tmp_path / "answers.partial.jsonl").read_text() == ""


def test_a_journal_writes_through_no_link_in_its_folder(tmp_path: Path) -> None:
    folder, foreign = tmp_path / "out", tmp_path / "foreign"
    folder.mkdir()
    foreign.write_text("precious")
    for name in ("config.yaml", "answers.partial.jsonl", "answers.jsonl", "summary.json"):
        (folder / name).symlink_to(foreign)
    journal = Journal(folder, "n: 2\n", PROMPTS, 2, resume=False)
    journal.add(answers(0))
    journal.finish({"accuracy": 1.0})
    assert foreign.read_text() == "precious"
    assert read_answers(folder) == answers(0)


@pytest.mark.parametrize("line", ["nonsense\n", "5\n", "{}\n", '{"index": 1}\n{"index": 1}\n', "\udcff\n"])
def test_a_damaged_journal_is_begun_again(line: str, tmp_path: Path) -> None:
    Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True)
    (tmp_path / "answers.partial.jsonl").write_bytes(line.encode("utf-8", "surrogateescape"))
    assert Journal(tmp_path, "n: 2\n", PROMPTS, 2, resume=True).rows == []


@pytest.mark.parametrize("place", ["file", "file/below", "n" * 300])
def test_a_place_that_cannot_be_written_to(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(StorageError, "output", found=re.compile(f"^{tmp_path / place} ")):
        Journal(tmp_path / place, "n: 2\n", PROMPTS, 2, resume=True)


def test_what_is_no_file_of_answers(tmp_path: Path) -> None:
    change = re.compile(f"`whet eval` .*output={tmp_path},")
    with raises(DataError, str(tmp_path), found=re.compile(r"answers\.jsonl"), change=change):
        read_answers(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    with raises(DataError, str(file), found="no responses"):
        read_answers(file)
    file.write_text('{"index": 0, "prompt": "1+1=", "ground_truth": "2", "data_source": "a", "failure": null}\n')
    with raises(DataError, f"{file}, line 1", found=re.compile("accuracy, reward$")):
        read_answers(file)
    for field, value in (("index", [0]), ("index", "0"), ("accuracy", "right"), ("reward", {}), ("parts", 5)):
        file.write_text(json.dumps(answers(0)[0] | {field: value}))
        with raises(DataError, f"{file}, line 1", found=re.compile(f"^{field} .*{re.escape(repr(value))}$")):
            read_answers(file)
