# SPDX-License-Identifier: Apache-2.0
"""The quickstart with pictures: its rows and its page; and, in the slow tests, that the model learns."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from whet.plugins.lessons import quickstart_images
from whet.plugins.lessons.drawn.figures import two_images
from whet.plugins.lessons.drawn.videos import flashes
from whet.plugins.lessons.quickstart import PAGE


def test_rows_name_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart_images, "NUM_HELD_OUT", 4)
    trained, held_out = quickstart_images.write_problems(tmp_path, seed=3, num_trained=12, prompt="<image>?")
    assert (len(trained), len(held_out)) == (12, 4)
    for name, rows in (("train", trained), ("held_out", held_out)):
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == rows
    pictures = [Path(row["images"][0]).read_bytes() for row in (*trained, *held_out)]
    assert len({*pictures}) == 16  # none is in both
    assert all(1 <= int(row["answer"]) <= 9 and row["prompt"] == "<image>?" for row in trained)


@pytest.mark.parametrize(("draw", "field", "size"), [(two_images, "images", (98, 48)), (flashes, "videos", (134, 66))])
def test_rows_with_several_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: Any, field: str, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(quickstart_images, "NUM_HELD_OUT", 1)
    trained, _ = quickstart_images.write_problems(tmp_path, seed=3, draw=draw, num_trained=3)
    for row, drawn in zip(trained, draw("train", 3, num_rows=3), strict=True):
        [shown, kept] = (each[field] if field == "images" else each[field][0] for each in (row, drawn))
        assert [Path(path).read_bytes() for path in shown] == kept
        sheet = quickstart_images.side_by_side(row)
        first = Image.open(io.BytesIO(kept[0]))
        assert sheet.size == size and sheet.crop((0, 0, *first.size)).tobytes() == first.tobytes()


def test_the_page_and_three_wrong_answers(tmp_path: Path) -> None:
    rows, rollouts = [], tmp_path / "rl" / "rollouts"
    rollouts.mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"images": [str(tmp_path / f"{number}.png")], "answer": str(number)})

    def answers(step: int, texts: str) -> None:
        found: list[dict[str, Any]] = [
            {"response": f"{text}<|im_end|>", "accuracy": float(text == str(number))}
            for number, text in enumerate(texts)
        ]
        lines = "".join(json.dumps(each) + "\n" for each in found)
        (rollouts / f"validation_{step:06}.jsonl").write_text(lines)

    answers(0, "09273")
    answers(25, "99999")
    answers(200, "01239")
    shown = quickstart_images.read_back(tmp_path, rows)
    assert shown == [("1.png", "1", "9", "1"), ("3.png", "3", "7", "3"), ("4.png", "4", "3", "9")]
    with Image.open(tmp_path / PAGE) as page:
        assert page.size == (900, 1200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "most"),
    [(("-m", "whet", "quickstart", "--images"), 0.7), (("examples/pictures.py", "two_images"), 0.9)],
)
def test_a_model_learns_from_what_it_sees(tmp_path: Path, command: tuple[str, ...], most: float) -> None:
    """The warm-up ends elsewhere on other processors: 0.50 to 0.84 with two pictures."""
    root = Path(__file__).resolve().parents[3]
    subprocess.run(
        [sys.executable, *command, "--run-dir", str(tmp_path / "run")],
        check=True,
        timeout=1200,
        capture_output=True,
        cwd=root,
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.2 < summary["sft_accuracy"] < most
    assert summary["rl_accuracy"] >= max(0.85, summary["sft_accuracy"] + 0.1)
