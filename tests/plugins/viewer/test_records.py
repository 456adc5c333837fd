# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plugins.viewer.conftest import DIGEST, record, write_lines
from whet.plugins.viewer import records
from whet.plugins.viewer.records import Query, Records


@pytest.fixture
def one(folder: Path) -> Records:
    return Records(folder / "one")


def uids(page: dict[str, Any]) -> list[str]:
    return [row["uid"] for row in page["rows"]]


def test_steps_are_listed_by_kind(one: Records) -> None:
    for name in (
        "step_5",
        "step_0000007",
        "step_\u0663\u0663\u0663\u0663\u0663\u0663",
        "step_" + "9" * 99,
    ):  # no run writes them
        (one.folder / f"rollouts/{name}.jsonl").write_text("{}\n", encoding="utf-8")
    assert one.steps() == {"step": [1, 2], "validation": [], "dropped": [2], "tokens": [1]}
    assert one.page(Query(), 0, 100)["total"] == 6


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(step=1), ["0:0:0", "0:0:1", "0:1:0"]),
        (Query(), ["0:0:0", "0:0:1", "0:1:0", "0:2:0", "0:2:1", "0:3:0"]),
        (Query(kind="dropped"), ["0:4:0"]),
        (Query(show="right"), ["0:0:0", "0:1:0", "0:2:0"]),
        (Query(show="wrong"), ["0:0:1", "0:2:1"]),
        (Query(show="failed"), ["0:3:0"]),
        (Query(show="truncated"), ["0:2:1"]),
        (Query(step=1, sort="worst"), ["0:0:1", "0:0:0", "0:1:0"]),
        (Query(sort="best"), ["0:0:0", "0:1:0", "0:2:0", "0:0:1", "0:2:1", "0:3:0"]),  # the failed one last
        (Query(sort="turns", step=1), ["0:1:0", "0:0:0", "0:0:1"]),
        (Query(text="FIVE"), ["0:0:1"]),
        (Query(text="ééé"), ["0:2:1"]),
        (Query(text='"uid": "0:2'), []),  # of values, a quote is escaped
        (Query(text="five", show="right"), []),
    ],
)
def test_a_query_shows_sorts_and_finds(one: Records, query: Query, expected: list[str]) -> None:
    page = one.page(query, 0, 99)
    assert uids(page) == expected and page["total"] == len(expected) and page["read"] == page["files"]


def test_a_page_is_a_stretch_of_the_list(one: Records) -> None:
    page = one.page(Query(), 2, 2)
    assert uids(page) == ["0:1:0", "0:2:0"] and page["total"] == 6
    assert page["rows"][0] | {"prompt": "", "response": ""} == {
        "kind": "step",
        "step": 1,
        "line": 2,
        "group": "0:1",
        "reward": 1.0,
        "accuracy": 1.0,
        "tokens": 3,
        "turns": 2,
        "truncated": False,
        "failed": False,
        "uid": "0:1:0",
        "prompt": "",
        "response": "",
        "has_media": True,
        "agents": [],
    }


def test_a_trajectory_comes_with_its_tokens_and_its_group(one: Records) -> None:
    found = one.trajectory("step", 1, 2)
    assert found["record"]["turns"] == 2 and found["tokens"][0]["tokens"] == ["lo", "ok", "it", " is", "four"]
    members = one.trajectory("step", 1, 1)["group"]
    assert members == [{"line": 0, "reward": 1.0, "failed": False}, {"line": 1, "reward": 0.0, "failed": False}]
    for kind, step, line in (("step", 1, 3), ("step", 7, 0), ("../../x", 1, 0)):
        with pytest.raises(LookupError):
            one.trajectory(kind, step, line)


def test_players_of_an_episode_have_rows_of_tokens_of_their_own(folder: Path) -> None:
    write_lines(
        folder / "one/tokens/step_000001.jsonl", [{"uid": f"0:0:{name}", "tokens": []} for name in ("0/a", "0/b", "01")]
    )
    found = Records(folder / "one").trajectory("step", 1, 0)
    assert [row["uid"] for row in found["tokens"]] == ["0:0:0/a", "0:0:0/b"]


def test_a_file_that_was_replaced_is_read_again_and_damaged_lines_are_left_out(folder: Path, one: Records) -> None:
    assert one.page(Query(step=1), 0, 9)["total"] == 3
    path = folder / "one/rollouts/step_000001.jsonl"
    write_lines(path, [record("new:0")])
    path.write_bytes(b"[1]\n{torn\n" + path.read_bytes() + b'{"uid": "x", "tokens": "many"}\n')
    assert uids(one.page(Query(step=1), 0, 9)) == ["new:0"]
    assert one.trajectory("step", 1, 0)["record"]["uid"] == "new:0"


def test_a_query_over_many_files_answers_before_all_are_read(one: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "INDEX_SECONDS", -1.0)
    first = one.page(Query(), 0, 9)
    assert (first["read"], first["files"], first["total"]) == (1, 2, 3)


def test_media_are_found_by_digest_and_inside_the_folder_alone(folder: Path, one: Records, tmp_path: Path) -> None:
    assert one.media(DIGEST) == folder / "one" / "media" / f"{DIGEST}.png"
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "one" / "media" / f"{'cd' * 32}.png").symlink_to(tmp_path / "secret.png")
    for name in ("cd" * 32, "ef" * 32, "../config", "*"):
        with pytest.raises(LookupError):
            one.media(name)


def test_the_same_prompt_in_another_run_is_found(folder: Path) -> None:
    path = folder / "deep/two/rollouts/step_000001.jsonl"
    asked = record("0:0:1", prompt='say "é"\nnow')
    lines = [
        record("0:5:1", prompt="say"),
        record("0:6:0", prompt=asked["prompt"]),
        record("0:6:1", prompt=asked["prompt"]),
    ]
    write_lines(path, [*lines, record("0:9:1", response=asked["prompt"])])
    other = Records(folder / "deep/two")
    assert other.beside("step", 1, asked)["record"]["uid"] == "0:6:1"
    assert other.beside("step", 1, {**asked, "uid": "0:0:4"})["record"]["uid"] == "0:6:0"
    assert other.beside("step", 1, {**asked, "uid": "3:5:7"})["record"]["uid"] == "0:6:0"
    write_lines(path, [record(f"0:{row}:0", prompt="?", media=[{"digest": f"{row}"}]) for row in range(3)])
    other, of_second = Records(folder / "deep/two"), record("1:2:0", prompt="?", media=[{"digest": "1"}])
    assert other.beside("step", 1, of_second)["record"]["uid"] == "0:1:0"
    write_lines(path, [record(f"0:{row}:0", prompt="?") for row in range(3)])
    assert Records(folder / "deep/two").beside("step", 1, record("1:2:0", prompt="?"))["record"]["uid"] == "0:2:0"
    write_lines(path, lines)
    other = Records(folder / "deep/two")
    for kind, step, prompt in (("step", 1, "nothing"), ("step", 2, asked["prompt"]), ("passwd", 1, asked["prompt"])):
        with pytest.raises(LookupError):
            other.beside(kind, step, {**asked, "prompt": prompt})
