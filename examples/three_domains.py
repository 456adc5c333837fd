# SPDX-License-Identifier: Apache-2.0
"""One small model learns sums, programs and instructions at the same time, each from a reward of its own.

    python examples/three_domains.py [--run-dir runs/three_domains] [--seed 0] [key=value ...]

Writes the problems, makes a model, shows it examples (many of them wrong), and trains it with the recipe
`rlvr_three_domains`, to which `key=value` are changes. Programs run in the sandbox; it takes six minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from whet.checkpoints.export import export
from whet.config import SFTConfig, TrainConfig, load_config
from whet.plugins.lessons.init_model import init_model
from whet.plugins.lessons.quickstart import NUM_CHECKED, clear, stop_when_warm
from whet.plugins.plots.figures import Series, plot_learning_curve
from whet.trainers.build import train
from whet.trainers.sft import train_sft

ALPHABET = 'abcdefghijklmnopqrstuvwxyz0123456789+-*=()_ "#:,\n'
NOUNS = (
    *("otter", "heron", "maple", "river", "stone", "cloud", "tiger"),
    *("lemon", "violin", "candle", "bridge", "garden", "window", "pepper"),
)
NUM_HELD_OUT = 96  # of each domain
SHARE_RIGHT = 0.35  # of the examples of programs and instructions
Problem = tuple[dict[str, Any], str, str]  # the row, a right answer, a wrong answer


def sums() -> Iterator[Problem]:
    """Additions of two two-digit numbers."""
    for a in range(10, 100):
        for b in range(10, 100):
            row = {"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": "sums"}
            yield row, str(a + b), str(a + b)


def programs() -> Iterator[Problem]:
    """Functions of one number, each said in words and tested at three places."""
    said = {"*+": "x times {a} plus {b}", "*-": "x times {a} minus {b}", "-*": "{b} minus x times {a}"}
    written = {"*+": " x*{a}+{b}", "*-": " x*{a}-{b}", "-*": " {b}-x*{a}"}
    for form, words in said.items():
        for a in range(2, 10):
            for b in range(1, 40):
                right = written[form].format(a=a, b=b)
                prompt = f"def f(x): # {words.format(a=a, b=b)}\n return"
                assertions = [f"assert f({x}) == {eval(right, {'x': x})}" for x in (0, 1, 7)]
                truth = {"test": "\n".join(assertions), "entry_point": "f", "prompt": prompt}
                row = {"prompt": prompt, "answer": json.dumps(truth), "data_source": "code"}
                yield row, right, written["*+" if form == "*-" else "*-"].format(a=a, b=b)


def instructions() -> Iterator[Problem]:
    """Texts with two nouns, of a number of words or more, some in quotation marks."""
    for first in NOUNS:
        for second in NOUNS:
            for least in (3, 4, 5):
                for is_quoted in (False, True):
                    if first == second:
                        continue
                    checks: list[tuple[str, dict[str, Any]]] = [
                        ("keywords:existence", {"keywords": [first, second]}),
                        ("length_constraints:number_words", {"relation": "at least", "num_words": least}),
                        *([("startend:quotation", {})] if is_quoted else []),
                    ]
                    truth = {
                        "instruction_id_list": [name for name, _ in checks],
                        "kwargs": [each for _, each in checks],
                    }
                    prompt = f"{least} words{' quoted' if is_quoted else ''}: {first} {second}\n"
                    right = " ".join([first, second, *["a"] * (least - 2)])
                    wrong = " ".join([first, second])
                    row = {"prompt": prompt, "answer": json.dumps(truth), "data_source": "words"}
                    yield row, f'"{right}"' if is_quoted else right, wrong


def write_problems(run_dir: Path, seed: int) -> list[dict[str, str]]:
    """Writes train.jsonl and held_out.jsonl.  Returns the examples for the warm-up."""
    draws = random.Random(seed)
    train_rows, held_out, examples = [], [], []
    for domain in (sums, programs, instructions):
        problems = list(domain())
        draws.shuffle(problems)
        held_out += [row for row, _, _ in problems[:NUM_HELD_OUT]]
        train_rows += [row for row, _, _ in problems[NUM_HELD_OUT:]]
        shown = [
            {"prompt": row["prompt"], "response": right if draws.random() < SHARE_RIGHT else wrong}
            for row, right, wrong in problems[NUM_HELD_OUT:]
        ]
        examples += draws.choices(shown, k=8000)
    draws.shuffle(examples)
    for name, rows in (("train", train_rows), ("held_out", held_out)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return examples


def plot(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Draws the held-out accuracy of each domain."""
    records = [record for record in history if "val/accuracy" in record]
    steps = [record["step"] for record in records]
    domains = ("sums", "code", "words")
    series = [Series(name, steps, [record[f"val/{name}/accuracy"] for record in records]) for name in domains]
    plot_learning_curve(path, series, title="One model, three domains", y_label="held-out accuracy")


def main() -> int:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/three_domains"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-enough", type=float, default=0.3, help="mean probability of right sums that ends it")
    options, changes = parser.parse_known_args()
    run_dir = options.run_dir
    with closing(clear(run_dir)):
        history = learn(run_dir, options.seed, options.warm_enough, changes)
    plot(run_dir / "learning_curve.png", history)
    records = [record for record in history if "val/accuracy" in record]
    for name in ("sums", "code", "words"):
        before, after = (record[f"val/{name}/accuracy"] for record in (records[0], records[-1]))
        sys.stdout.write(f"{name:6} held-out accuracy {before:.3f} -> {after:.3f}\n")
    sys.stdout.write(f"learning curve: {run_dir}/learning_curve.png\n")
    return 0


def learn(run_dir: Path, seed: int, warm_enough: float, changes: Sequence[str]) -> Sequence[Mapping[str, float]]:
    """Problems, model, warm-up and RL.  Returns the numbers of all steps."""
    examples = write_problems(run_dir, seed)
    init_model(
        run_dir / "model", "qwen3", "nano", alphabet=ALPHABET, num_layers=2, max_position_embeddings=128, seed=seed
    )
    warm_up = {
        "model.path": str(run_dir / "model"),
        "data.max_length": 96,
        "trainer.run_dir": str(run_dir / "sft"),
        "trainer.seed": seed,
    }
    config = load_config(SFTConfig, "quickstart_sft", warm_up, given={"data"}).config
    added = [row for row in examples if row["prompt"].endswith("=")][:NUM_CHECKED]  # what takes longest
    train_sft(config, data=examples, callbacks=[stop_when_warm(config, added, warm_enough)])
    overrides = [
        f"model.path={export(run_dir / 'sft', run_dir / 'sft_model')}",
        f"data.train_files={run_dir}/train.jsonl",
        f"data.val_files={run_dir}/held_out.jsonl",
        f"trainer.run_dir={run_dir}/rl",
        f"trainer.seed={seed}",
        *changes,
    ]
    return train(load_config(TrainConfig, "rlvr_three_domains", overrides).config).history


if __name__ == "__main__":
    sys.exit(main())
