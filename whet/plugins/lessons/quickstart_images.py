# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart --images`: a small vision model learns to count figures in pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from whet.plugins.lessons.drawn.figures import counting
from whet.plugins.lessons.init_model import init_model
from whet.plugins.lessons.quickstart import PAGE, Lesson, Rows, Shown, answer_text, write_rows
from whet.tracking.rollouts import Record, read_rollouts

NUM_TRAINED, NUM_HELD_OUT = 8192, 256
GRID = 6  # pictures on a side of the page
FIELDS = ("images", "videos")  # of a row
RIGHT, WRONG = "#2e9e6b", "#c0392b"


def write_problems(
    run_dir: Path,
    seed: int,
    draw: Callable[..., Iterator[dict[str, Any]]] = counting,
    num_trained: int = NUM_TRAINED,
    **options: Any,
) -> tuple[Rows, Rows]:
    """Writes pictures to images/, and rows with their file names to train.jsonl and held_out.jsonl. `options` are
    passed to `draw`, a function of whet.plugins.lessons.drawn."""
    (run_dir / "images").mkdir(parents=True, exist_ok=True)
    written: dict[str, Rows] = {}
    for name, split, count in (("train", "train", num_trained), ("held_out", "val", NUM_HELD_OUT)):
        rows = []
        for number, row in enumerate(draw(split, seed, num_rows=count, **options)):
            path = run_dir.absolute() / "images" / f"{name}_{number:05}.png"
            rows.append({**row, **{field: _save(row[field], path) for field in FIELDS if field in row}})
        written[name] = rows
    return write_rows(run_dir, **written)


def _save(pictures: Any, path: Path) -> Any:
    """Writes PNG files. Returns their paths in place of their bytes; the names of several files are numbered."""
    if isinstance(pictures, bytes):
        path.write_bytes(pictures)
        return str(path)
    if len(pictures) == 1:
        return [_save(pictures[0], path)]
    return [_save(each, path.with_stem(f"{path.stem}_{number}")) for number, each in enumerate(pictures)]


def write_model(path: Path, seed: int) -> str:
    """Writes a model of 0.9 M parameters that reads patches of 8 x 8 pixels."""
    init_model(path, "qwen2.5_vl", "nano", num_layers=2, patch_size=8, max_position_embeddings=64, seed=seed)
    return "a Qwen2.5-VL model with random weights that reads patches of 8 pixels"


def read_back(run_dir: Path, held_out: Rows, question: str = "How many figures?") -> list[Shown]:
    """Returns three rows that were wrong before RL: picture, answer, both responses. Draws more rows on the page."""
    files = sorted((run_dir / "rl" / "rollouts").glob("validation_*.jsonl"))
    before, after = read_rollouts(files[0]), read_rollouts(files[-1])
    answers = list(zip(held_out, before, after, strict=True))
    draw_page(run_dir / PAGE, answers[: GRID * GRID], question)
    wrong = [each for each in answers if not each[1]["accuracy"]]
    return [
        (Path(_files(row)[0]).name, row["answer"], answer_text(old), answer_text(new)) for row, old, new in wrong[:3]
    ]


def draw_page(path: Path, answers: Sequence[tuple[Record, Record, Record]], question: str) -> None:
    """Draws pictures in a grid, each with the response before RL above and the response after RL below it."""
    figure = Figure(figsize=(1.5 * GRID, 2.0 * GRID), dpi=100, layout=ConstrainedLayoutEngine(h_pad=0.12))
    FigureCanvasAgg(figure)
    for place, (row, old, new) in enumerate(answers):
        axes = figure.add_subplot(GRID, GRID, place + 1)
        axes.imshow(side_by_side(row))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(f"{answer_text(old)} before", fontsize=9, color=RIGHT if old["accuracy"] else WRONG)
        axes.set_xlabel(f"{answer_text(new)} after", fontsize=9, color=RIGHT if new["accuracy"] else WRONG)
    figure.suptitle(f"{question} Responses before and after RL; right ones are green", fontsize=11)
    figure.savefig(path)


def side_by_side(row: Record) -> Image.Image:
    """Joins the images of a row, or the frames of its video, all of one size, at most four side by side."""
    pictures = [Image.open(path).convert("RGB") for path in _files(row)]
    (width, height), columns = pictures[0].size, min(4, len(pictures))
    lines = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (width + 2) - 2, lines * (height + 2) - 2), "grey")
    for place, picture in enumerate(pictures):
        sheet.paste(picture, (place % columns * (width + 2), place // columns * (height + 2)))
    return sheet


def _files(row: Record) -> list[str]:
    """Returns the files of a row's images, or of its video's frames."""
    return [*row["images"]] if "images" in row else [*row["videos"][0]]


COUNTING = Lesson(
    goal="to count what it sees",
    curve="Learning to count figures in pictures with GRPO",
    recipe="vlm_quickstart",
    warm_up="vlm_quickstart_sft",
    warm_enough=0.28,
    write_problems=partial(write_problems, prompt="<image>?"),
    write_model=write_model,
    read_back=read_back,
    problem="picture",
    page=PAGE,
)
