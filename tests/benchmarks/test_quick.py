# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.page import BENCHMARKS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_benchmark_runs_and_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """At tiny sizes; with TRL where its environment was made."""
    main(["--quick"])
    page = capsys.readouterr().out
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert titles == [benchmark.TITLE for benchmark in BENCHMARKS.values()]
    assert "| a request alone and among 7 others: the same tokens | yes | yes |" in page
    assert "nan" not in page


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rolout"])
    assert "no benchmark is called rolout; there are machine, rollout, grpo_step" in capsys.readouterr().err
