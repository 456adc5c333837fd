# SPDX-License-Identifier: Apache-2.0
"""Every slow test belongs to one part, and a part is due when it should be."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.parts import (
    GATES,
    HEADER,
    LOG,
    ROOT,
    Part,
    choose,
    last_runs,
    load_parts,
    reason_due,
    reasons_skipped,
    with_run,
)

PARTS = load_parts()
PART = Part("ray", ["tests/controller/test_ray_nodes.py"], ["whet/controller/"], minutes=5)
LAST = ("2026-11-22", "63aba1a")
AFTER = "\n## 2026-11-21\n\n| x | y |\n"
OLD_LOG = f"# Log\n\n{HEADER}| faults | 2026-11-20 | aaaaaaa |\n| ray | 2026-11-22 | 63aba1a |\n{AFTER}"


@pytest.mark.shipped
def test_every_slow_test_belongs_to_exactly_one_part() -> None:
    mark = "mark." + "slow"
    slow = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if mark in path.read_text()}
    named = Counter(file for part in PARTS.values() for file in part.files)
    assert not slow - named.keys(), "name these files in one part of tests/parts.toml"
    assert not named.keys() - slow, "tests/parts.toml names these files, which have no slow test"
    assert not [file for file, times in named.items() if times > 1], "tests/parts.toml names these files twice"


@pytest.mark.shipped
def test_what_is_watched_is_there() -> None:
    wrong = [path for part in PARTS.values() for path in part.watches if not (ROOT / path).exists()]
    assert not wrong, "correct `watches` in tests/parts.toml"


def test_a_part_takes_at_most_twelve_minutes() -> None:
    assert {name: part.minutes for name, part in PARTS.items() if part.minutes > 12} == {}


def test_the_table_names_only_parts_that_there_are() -> None:
    text = LOG.read_text()
    assert text.count(HEADER) == 1 and last_runs(text).keys() <= PARTS.keys()


@pytest.mark.parametrize(
    ("last", "changed", "reason"),
    [
        (None, None, "no whole run is recorded"),
        (LAST, None, "commit 63aba1a of its last run is not in this clone"),
        (LAST, [], None),
        (LAST, ["whet/cli/app.py", "docs/whet/controller/a.md"], None),
        (LAST, ["whet/controller/launch.py"], "whet/controller/launch.py changed since 63aba1a"),
        (
            LAST,
            ["README.md", "tests/controller/test_ray_nodes.py", "whet/controller/launch.py"],
            "tests/controller/test_ray_nodes.py and 1 more changed since 63aba1a",
        ),
    ],
)
def test_a_part_is_due_when_what_it_watches_changed(
    last: tuple[str, str] | None, changed: list[str] | None, reason: str | None
) -> None:
    assert reason_due(PART, last, changed) == reason


def test_due_parts_come_first_and_one_other_takes_its_turn() -> None:
    parts = {name: Part(name, [], [], minutes) for name, minutes in (("a", 4), ("b", 3), ("c", 2), ("d", 1))}
    parts |= {name: Part(name, [], [], 9) for name in GATES}
    due = {"a": None, "b": "changed", "c": None, "d": "changed", **dict.fromkeys(GATES, "changed")}
    assert choose(parts, due, 100, turn=0) == ["b", "d", "a"]
    assert choose(parts, due, 100, turn=1) == ["b", "d", "c"]
    assert choose(parts, due, 100, turn=3) == ["d", "b", "a"]
    assert choose(parts, due, 6, turn=0) == ["b", "d", "c"]  # 3 + 1, then what fits into 2
    assert choose(parts, due, 2, turn=0) == ["d"]
    assert choose(parts, dict.fromkeys(parts), 100, turn=6) == ["c"]


def test_a_run_is_recorded_in_its_row() -> None:
    assert last_runs(OLD_LOG) == {"faults": ("2026-11-20", "aaaaaaa"), "ray": LAST}
    log = with_run(with_run(OLD_LOG, "faults", "2026-11-23", "bbbbbbb"), "kills", "2026-11-23", "ccccccc")
    assert log == (
        f"# Log\n\n{HEADER}| faults | 2026-11-23 | bbbbbbb |\n| kills | 2026-11-23 | ccccccc |\n"
        f"| ray | 2026-11-22 | 63aba1a |\n{AFTER}"
    )
    elsewhere = f"{HEADER}\n| folder | lines |\n|---|--:|\n| ray | 2026-11-22 | 63aba1a |\n"
    assert last_runs(elsewhere) == {}
    assert last_runs(with_run(elsewhere, "reward-models", *LAST)) == {"reward-models": LAST}
    assert with_run(HEADER, "ray", *LAST) == HEADER + "| ray | 2026-11-22 | 63aba1a |\n"
    assert last_runs(with_run(HEADER, "recipes-fsdp2", *LAST)) == {"recipes-fsdp2": LAST}


def test_a_run_with_skipped_tests_is_not_whole() -> None:
    cases = "".join(
        f'<testcase name="t{number}"><skipped type="pytest.skip" message="{reason}"/></testcase>'
        for number, reason in enumerate(["no environment with vLLM here", "needs a CUDA device"])
    )
    report = f'<testsuites><testsuite name="pytest"><testcase name="passed"/>{cases}</testsuite></testsuites>'
    assert reasons_skipped(report) == ["no environment with vLLM here"]
