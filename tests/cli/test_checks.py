# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.cli import checks
from whet.planning.doctor import Finding


def test_the_doctor_ends_with_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    note, problem = Finding("b", "x", "change it"), Finding("c", "x", "change it", is_problem=True)
    checks._print({"one": [Finding("a", "x"), note], "two": [note]})
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 problems, 2 notes, 1 ok")
    checks._print({"one": [problem, note]})
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 problem, 1 note, 0 ok")
