# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command, view


def results(longest: float, again: float) -> dict[str, Any]:
    seconds = {"the runs": [[0.5], [0.25] * 5], "all steps": [[0.25, longest, 0.125], [again] * 5]}
    return {"view": {"trajectories": 100_000, "mib": 90.0, "browser": {}, "seconds": seconds}}


@pytest.mark.parametrize(("longest", "again"), [(1.25, 0.01), (0.5, 1.5)])
def test_an_answer_over_the_bound_is_marked_and_fails_the_command(
    longest: float, again: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(found: dict[str, Any], *_: Any) -> None:
        found.update(results(longest, again))

    found = results(longest, again)
    assert view.over_bound(found) == ["all steps"]
    rows = [line for line in view.report(found) if line.startswith(("| the runs", "| all steps"))]
    assert rows[0] == "| the runs | 500 ms | 500 ms | 250.0 ms |"
    assert rows[1].startswith(f"| all steps **over the bound** | {1e3 * longest:.0f} ms | ")
    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "page", lambda found: "the page")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(command, "PAGE", tmp_path / "benchmarks.md")
    with pytest.raises(SystemExit) as ended:
        command.main(["view"])
    assert ended.value.code == "view: answers took more than 1 s: all steps"
    assert command.PAGE.read_text() == "the page"
    (tmp_path / "results.json").write_text("{}")
    command.main(["--page"])  # measures nothing
    command.main(["view", "--quick"])  # of sizes that the bound is not of


def test_answers_within_the_bound_are_not_marked() -> None:
    found = results(0.75, 0.5)
    assert view.over_bound(found) == [] and command.late(found) is None
    assert not any("bound" in line for line in view.report(found)[2:])
    assert command.late({}) is None
