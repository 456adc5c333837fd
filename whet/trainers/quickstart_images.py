# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart --images`: a small model that sees learns to count figures in pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.layout_engine import ConstrainedLayoutEngine

from whet.data.drawn.figures import counting
from whet.models.init import init_model
from whet.trainers.quickstart import PAGE, Lesson, Rows, Shown

NUM_TRAINED, NUM_HELD_OUT = 8192, 256
GRID = 6  # pictures on a side of the page
RIGHT, WRONG = "#2e9e6b", "#c0392b"


def write_problems(run_dir: Path, seed: int) -> tuple[Rows, Rows]:
    """Writes pictures to images/, and rows that name them to train.jsonl and held_out.jsonl."""
    (run_dir / "images").mkdir(parents=True, exist_ok=True)
    written: dict[str, Rows] = {}
    for name, split, count in (("train", "train", NUM_TRAINED), ("held_out", "val", NUM_HELD_OUT)):
        rows = []
        for number, row in enumerate(counting(split, seed, num_rows=count, prompt="<image>?")):
            path = run_dir.absolute() / "images" / f"{name}_{number:05}.png"
            path.write_bytes(row["images"][0])
            rows.append({**row, "images": [str(path)]})
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        written[name] = rows
    return written["train"], written["held_out"]


def write_model(path: Path, seed: int) -> str:
    """Writes a model of 0.9 M parameters that reads patches of 8 pixels."""
    init_model(path, "qwen2.5_vl", "nano", num_layers=2, patch_size=8, max_position_embeddings=64, seed=seed)
    return "a Qwen2.5-VL model with random weights that reads patches of 8 pixels"


def read_back(run_dir: Path, held_out: Rows) -> list[Shown]:
    """Three pictures that were counted wrong before RL; more of them are drawn."""
    files = sorted((run_dir / "rl" / "rollouts").glob("validation_*.jsonl"))
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (files[0], files[-1]))
    answers = list(zip(held_out, before, after, strict=True))
    draw_page(run_dir / PAGE, answers[: GRID * GRID])
    wrong = [each for each in answers if not each[1]["accuracy"]]
    return [(Path(row["images"][0]).name, row["answer"], _text(old), _text(new)) for row, old, new in wrong[:3]]


def draw_page(path: Path, answers: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Draws pictures in a grid, with the responses before and after RL below each."""
    figure = Figure(figsize=(1.5 * GRID, 2.0 * GRID), dpi=100, layout=ConstrainedLayoutEngine(h_pad=0.12))
    FigureCanvasAgg(figure)
    for place, (row, old, new) in enumerate(answers):
        axes = figure.add_subplot(GRID, GRID, place + 1)
        axes.imshow(imread(row["images"][0]))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"{_text(old)} before", fontsize=9, color=RIGHT if old["accuracy"] else WRONG)
        axes.set_xlabel(f"{_text(new)} after", fontsize=9, color=RIGHT if new["accuracy"] else WRONG)
    figure.suptitle("How many figures? Responses before and after RL; right ones are green", fontsize=11)
    figure.savefig(path)


def _text(answer: Mapping[str, Any]) -> str:
    return str(answer["response"]).partition("<|")[0].strip() or "nothing"


COUNTING = Lesson(
    goal="to count what it sees",
    curve="Learning to count figures in pictures with GRPO",
    recipe="vlm_quickstart",
    warm_up="vlm_quickstart_sft",
    warm_enough=0.28,
    write_problems=write_problems,
    write_model=write_model,
    read_back=read_back,
    problem="picture",
    page=PAGE,
)
