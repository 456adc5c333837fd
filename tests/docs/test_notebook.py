# SPDX-License-Identifier: Apache-2.0
"""The notebook in examples/ has the cells of its script, and both run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate.notebook import SCRIPT, cells, run

SOLVED = re.compile(r"^(\d+)% of 256 held-out problems are solved$", re.MULTILINE)


def test_a_script_has_cells_of_prose_and_code() -> None:
    code = "def f():\n    # %%x is no cell\n    pass"
    script = f"# licence\n# %% [markdown]\n# # Title\n#\n# prose\n\n# %%\nx = 1\n\n\n# %%\n{code}\n"
    assert cells(script) == [
        ("markdown", "# Title\n\nprose"),
        ("code", "x = 1"),
        ("code", code),
    ]


def test_the_notebook_is_that_of_the_script() -> None:
    book = json.loads(SCRIPT.with_suffix(".ipynb").read_text(encoding="utf-8"))
    written = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert written == cells(SCRIPT.read_text(encoding="utf-8")), "write it with `python -m docs.generate.notebook`"
    assert all(cell["outputs"] is not None and cell["execution_count"] for cell in book["cells"] if "outputs" in cell)
    assert "/tmp" not in json.dumps(book).replace("/tmp/first_run_", "")


@pytest.mark.slow
def test_the_script_teaches_a_model_to_add(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    [solved] = SOLVED.findall(done.stdout)
    assert int(solved) > 50
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev-services]'")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = run(SCRIPT.read_text(encoding="utf-8"), tmp_path)
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert "image/png" in {kind for output in outputs for kind in output.get("data", ())}  # the curves
    [solved] = SOLVED.findall("".join(output.get("text", "") for output in outputs))
    assert int(solved) > 50
    assert not [output for output in outputs if output.output_type == "error"]
