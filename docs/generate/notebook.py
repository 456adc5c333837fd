# SPDX-License-Identifier: Apache-2.0
"""The notebook of a script whose cells begin with `# %%`, examples/first_run.ipynb: `python -m docs.generate.notebook`.

It runs, so that the page shows what the cells print and draw.  Needs nbclient and ipykernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "examples" / "first_run.py"
SECONDS = 900  # the most that a cell may take


def cells(script: str) -> list[tuple[str, str]]:
    """The kind (markdown or code) and the text of each cell of a script."""
    parts = re.split(r"^# %%(.*)\n", script, flags=re.MULTILINE)[1:]
    found = []
    for mark, text in zip(parts[::2], parts[1::2], strict=True):
        is_prose = "[markdown]" in mark
        prose = re.sub("^# ?", "", text.strip(), flags=re.MULTILINE)
        found.append(("markdown", prose) if is_prose else ("code", text.strip()))
    return found


def run(script: str, folder: Path) -> Any:
    """Runs the cells of a script in a kernel, in `folder`, and returns the notebook with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    book.cells = [make[kind](text, id=f"cell-{number}") for number, (kind, text) in enumerate(cells(script))]
    return NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()


def main() -> None:
    """Writes the notebook beside its script."""
    import tempfile

    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        book = run(SCRIPT.read_text(encoding="utf-8"), Path(folder))
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # the times of the cells
        outputs = cell.get("outputs", [])
        outputs[:] = [output for output in outputs if output.get("name") != "stderr"]  # warnings about this machine
    nbformat.write(book, SCRIPT.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
