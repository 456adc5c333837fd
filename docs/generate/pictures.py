# SPDX-License-Identifier: Apache-2.0
"""The pictures of README.md and of the front page, from a finished quickstart: `python -m docs.generate.pictures RUN`.

Its learning curve, and what a terminal showed: the lines of some steps and the end, printed again from its files by the
code that printed them.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI

from whet.plugins.lessons.quickstart import ADDITION, CURVE, show
from whet.tracking.console import ConsoleTracker

DOCS = Path(__file__).parents[1]
TERMINAL = "quickstart.svg"
STEPS = ((1, 4), (297, 300), (598, 600))  # shown, first and last
WIDTH = 100  # columns
COLOURS = 48  # of the curve: a fifth of the bytes


def main(run_dir: Path) -> None:
    """Writes the pictures into docs/."""
    Image.open(run_dir / CURVE).convert("RGB").quantize(COLOURS).save(DOCS / CURVE, optimize=True)
    (DOCS / TERMINAL).write_text(terminal(run_dir), encoding="utf-8")
    print(f"wrote {DOCS / CURVE} and {DOCS / TERMINAL}")


def terminal(run_dir: Path) -> str:
    """The terminal as SVG."""
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), highlight=False)
    console.print("[bold]$ make quickstart[/bold]")
    metrics, timings = (_by_step(run_dir / "rl" / f"{name}.jsonl") for name in ("metrics", "timings"))
    total, now = max(metrics), 0.0
    tracker = ConsoleTracker(total, console=console, clock=lambda: now)
    for step in sorted(metrics):
        now += sum(timings[step].get(f"time/{name}", 0.0) for name in ("step", "validation"))
        shown = any(first <= step <= last for first, last in STEPS)
        if shown:
            tracker.log(step, {**metrics[step], **timings[step]})
        if any(step == last for _, last in STEPS[:-1]):
            console.print("[dim]     ...[/dim]")
    summary = json.loads((run_dir / "summary.json").read_text())
    held_out = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    examples = ADDITION.read_back(run_dir, held_out)
    show(console, summary, examples, Path("runs/quickstart"), ".venv/bin/whet", ADDITION)
    svg = console.export_svg(title="whet", theme=MONOKAI, unique_id="whet")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # fonts are not fetched from elsewhere


def _by_step(file: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in map(json.loads, file.read_text().splitlines())}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
