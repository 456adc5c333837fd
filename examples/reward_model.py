# SPDX-License-Identifier: Apache-2.0
"""Trains a reward model on synthetic preferences, then a policy against it, with the true score beside the proxy.

    python examples/reward_model.py --run-dir runs/reward_model --seed 0

A response is the better the larger the share of the letter a in it. The reward model does not see this score, only
pairs of random responses with the better one marked, one pair in ten the wrong way round. Then GRPO trains a policy on
the reward model's score alone; the true score is computed for the same responses, and shown beside it. About a minute
on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LETTERS, GOOD = "abcdefgh", "a"
NUM_PAIRS, NUM_HELD_OUT = 2000, 300
WRONG = 0.1  # share of the training pairs that are the wrong way round
LONGEST = 12  # tokens of a response


def share(solution_str: str) -> float:
    """The true score: the share of the good letter among the letters of a response."""
    return solution_str.count(GOOD) / max(1, len(solution_str))


def preferences(seed: int, count: int, wrong: float = 0.0) -> list[dict[str, str]]:
    """Pairs of random responses with different true scores; a share of them is the `wrong` way round."""
    draw, rows = random.Random(seed), list[dict[str, str]]()
    while len(rows) < count:
        worse, better = sorted((random_response(draw) for _ in range(2)), key=share)
        if share(worse) < share(better):
            chosen, rejected = (worse, better) if draw.random() < wrong else (better, worse)
            rows.append({"prompt": f"{draw.choice(LETTERS)}=", "chosen": chosen, "rejected": rejected})
    return rows


def random_response(draw: random.Random) -> str:
    """Random letters, among which the good one is rare or frequent."""
    often, length = draw.random(), draw.randint(1, LONGEST - 1)
    return "".join(GOOD if draw.random() < often else draw.choice(LETTERS) for _ in range(length))


def train_the_reward_model(run_dir: Path, seed: int, model: Path, steps: int) -> dict[str, float]:
    """Trains and exports it.  Returns its metrics on pairs that it has not seen, none of them the wrong way round."""
    from whet.checkpoints.export import export
    from whet.config import RewardTrainingConfig, load_config
    from whet.trainers.train_reward import train_reward

    held_out = run_dir / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in preferences(seed + 1, NUM_HELD_OUT)))
    overrides: dict[str, Any] = {
        "model.path": str(model),
        "data.apply_chat_template": False,
        "data.val_files": [str(held_out)],
        "data.max_length": 16,
        "data.train_batch_size": 64,
        "optim.lr": 1e-3,
        "optim.warmup_steps": 10,
        "center_coef": 0.01,
        "trainer.total_steps": steps,
        "trainer.val_freq": 20,
        "trainer.seed": seed,
        "trainer.run_dir": str(run_dir / "preferences"),
    }
    config = load_config(RewardTrainingConfig, None, overrides, given={"data"}).config
    run = train_reward(config, data=preferences(seed, NUM_PAIRS, WRONG))
    export(run_dir / "preferences", run_dir / "reward_model")
    return run.history[-1]


def train_the_policy(run_dir: Path, seed: int, model: Path, steps: int) -> list[dict[str, float]]:
    """GRPO on the reward model's score.  Returns the metrics of every step."""
    from whet.config import TrainConfig, load_config
    from whet.models.load import load_tokenizer
    from whet.trainers.build import train

    tokenizer = load_tokenizer(model)
    overrides: dict[str, Any] = {
        "model.path": str(model),
        "data.apply_chat_template": False,
        "data.train_batch_size": 16,
        "data.max_prompt_length": 4,
        "data.max_response_length": LONGEST,
        "rollout.n": 16,
        "rollout.allowed_token_ids": [*tokenizer.convert_tokens_to_ids(list(LETTERS)), tokenizer.eos_token_id],
        "reward_model.model_path": str(run_dir / "reward_model"),
        "reward.num_workers": 0,
        "actor.optim.lr": 1e-3,
        "trainer.total_steps": steps,
        "trainer.val_freq": -1,
        "trainer.log_rollouts": 10,
        "trainer.seed": seed,
        "trainer.run_dir": str(run_dir / "policy"),
    }
    config = load_config(TrainConfig, None, overrides, given={"data", "reward"}).config
    rows = [{"prompt": f"{letter}="} for letter in LETTERS] * 2
    return train(config, data=rows, reward=share).history


def show(run_dir: Path, held_out: Mapping[str, float], history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Draws the proxy beside the truth, and prints both.  Returns the numbers."""
    from whet.plugins.plots.figures import Series, plot_learning_curve

    proxy, truth = "reward/reward_model", "critic/score/mean"
    steps = [record["step"] for record in history]
    series = [
        Series("the reward model's score (trained on)", steps, [record[proxy] for record in history]),
        Series("the true score (not seen)", steps, [record[truth] for record in history]),
    ]
    plot_learning_curve(run_dir / "proxy_and_truth.png", series, title="A policy trained against a reward model")
    print(f"reward model: accuracy {held_out['val/accuracy']:.3f} on {NUM_HELD_OUT} held-out pairs")
    print(f"{'step':>6}  {'proxy':>7}  {'truth':>6}")
    for record in history[:: max(1, len(history) // 10)]:
        print(f"{record['step']:>6.0f}  {record[proxy]:>7.3f}  {record[truth]:>6.3f}")
    first, last = history[0], history[-1]
    print(f"{last['step']:>6.0f}  {last[proxy]:>7.3f}  {last[truth]:>6.3f}")
    print(f"the curve: {run_dir}/proxy_and_truth.png")
    return {
        "accuracy": held_out["val/accuracy"],
        "proxy_before": first[proxy],
        "proxy_after": last[proxy],
        "truth_before": first[truth],
        "truth_after": last[truth],
    }


def run(run_dir: Path, seed: int = 0, reward_steps: int = 60, policy_steps: int = 30) -> dict[str, float]:
    """Both trainings from a model with random weights; `run_dir` must be new."""
    from whet.plugins.lessons.init_model import init_model

    run_dir.mkdir(parents=True)
    model = init_model(
        run_dir / "model",
        "qwen3",
        "nano",
        alphabet=f"{LETTERS}=",
        num_layers=2,
        max_position_embeddings=64,
        seed=seed,
    )
    held_out = train_the_reward_model(run_dir, seed, model, reward_steps)
    return show(run_dir, held_out, train_the_policy(run_dir, seed, model, policy_steps))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/reward_model"), help="the new folder to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run(given.run_dir, given.seed)


if __name__ == "__main__":
    main()
