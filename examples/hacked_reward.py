# SPDX-License-Identifier: Apache-2.0
"""A model learns to get a weak reward without being right; a second run has the repaired reward.

    python examples/hacked_reward.py [--run-dir runs/hacked_reward] [--seed 0] [--steps 150]

The task is adding two numbers. The weak reward wants every digit of the sum somewhere in the answer: one that lists
many digits is paid. The run warns of the gap between rewards and held-out accuracy; hacked_reward.png shows both runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from whet.checkpoints.export import export
from whet.config import TrainConfig, load_config
from whet.plugins.lessons.init_model import init_model
from whet.plugins.lessons.quickstart import clear, warm_up, write_problems
from whet.plugins.plots.figures import Series, plot_learning_curve
from whet.trainers.build import train


def weak(solution_str: str, ground_truth: str) -> dict[str, float]:
    """1 where every digit of the sum is in the answer. The accuracy tells the truth."""
    found = all(digit in solution_str for digit in ground_truth)
    return {"score": float(found), "accuracy": float(solution_str.strip() == ground_truth)}


def repaired(solution_str: str, ground_truth: str) -> dict[str, float]:
    """1 where the answer is the sum."""
    return {"score": float(solution_str.strip() == ground_truth)}


def curves(history: Sequence[Mapping[str, float]], label: str) -> list[Series]:
    """The training reward and the held-out accuracy of a run."""
    steps = [record for record in history if "critic/score/mean" in record]
    checked = [record for record in history if "val/accuracy" in record]
    return [
        Series(f"{label}: reward", [r["step"] for r in steps], [r["critic/score/mean"] for r in steps]),
        Series(
            f"{label}: held-out accuracy",
            [r["step"] for r in checked],
            [r["val/accuracy"] for r in checked],
            markers=True,
        ),
    ]


def learn(run_dir: Path, seed: int, steps: int) -> list[Series]:
    """Problems, model, warm-up, and RL with each reward."""
    rows, held_out = write_problems(run_dir, seed)
    (run_dir / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out[:256]))
    init_model(
        run_dir / "model", "qwen3", "nano", alphabet="0123456789+=", num_layers=2, max_position_embeddings=64, seed=seed
    )
    warm_up(run_dir, seed, rows)
    model = export(run_dir / "sft", run_dir / "sft_model")
    shown: list[Series] = []
    for reward in (weak, repaired):
        changes = {
            "model.path": str(model),
            "data.train_files": [str(run_dir / "train.jsonl")],
            "data.val_files": [str(run_dir / "held_out.jsonl")],
            "data.max_response_length": 12,
            "algorithm.filter.name": None,
            "trainer.run_dir": str(run_dir / "rl" / reward.__name__),
            "trainer.seed": seed,
            "trainer.total_steps": steps,
            "trainer.val_freq": 10,
        }
        run = train(load_config(TrainConfig, "quickstart", changes, given={"reward"}).config, reward=reward)
        last = run.history[-1]
        sys.stdout.write(
            f"{reward.__name__}: reward {last['critic/score/mean']:.3f}, held-out accuracy {last['val/accuracy']:.3f}, "
            f"gap {last['val/reward_gap']:.3f}\n"
        )
        shown += curves(run.history, reward.__name__)
    return shown


def main() -> int:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/hacked_reward"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    run_dir, seed = options.run_dir, options.seed
    with closing(clear(run_dir)):
        shown = learn(run_dir, seed, options.steps)
    picture = run_dir / "hacked_reward.png"
    plot_learning_curve(picture, shown, title="A weak reward, and its repair", y_label="mean")
    sys.stdout.write(f"{picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
