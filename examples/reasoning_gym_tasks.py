# SPDX-License-Identifier: Apache-2.0
"""A small model learns sums of reasoning-gym, scored by reasoning-gym.

    pip install reasoning-gym
    python examples/reasoning_gym_tasks.py [STEPS]

The rows name their task by its number; `score` asks the data set. Change `SUMS` for another of its hundred tasks (the
alphabet of the model with it), or take the rows and `score` for a model of yours.
"""

import sys
from pathlib import Path

from whet.errors import ConfigError

try:
    import reasoning_gym
except ImportError as error:
    what = f"this example needs reasoning-gym ({error}): pip install reasoning-gym"
    raise (SystemExit if __name__ == "__main__" else ConfigError)(what) from error

from whet.config import TrainConfig, load_config
from whet.plugins.lessons.init_model import init_model
from whet.plugins.lessons.quickstart import clear, export, warm_up
from whet.trainers.build import train

SUMS = reasoning_gym.create_dataset(
    "chain_sum", seed=0, size=2500, min_terms=3, max_terms=3, min_digits=1, max_digits=1
)


def score(solution_str, extra_info):
    """reasoning-gym's score of an answer, 0 to 1."""
    return SUMS.score_answer(answer=solution_str.strip(), entry=SUMS[extra_info["index"]])


def main(steps, run_dir=Path("runs/reasoning_gym")):
    """Rows, model, warm-up, RL."""
    texts = [f"{task['metadata']['expression']}=".replace(" ", "") for task in SUMS]
    rows = [{"prompt": text, "answer": SUMS[i]["answer"], "index": i} for i, text in enumerate(texts)]
    held_out, known = rows[:256], set(texts[:256])
    trained = [row for row in rows if row["prompt"] not in known]
    lock = clear(run_dir)
    init_model(run_dir / "model", "qwen3", "nano", alphabet="0123456789+-=", num_layers=2, max_position_embeddings=64)
    warm_up(run_dir, 0, trained)
    model = export(run_dir / "sft", run_dir / "sft_model")
    changes = {"model.path": str(model), "trainer.run_dir": str(run_dir / "rl"), "trainer.total_steps": steps}
    config = load_config(TrainConfig, "quickstart", changes, given=("data", "reward", "val_data")).config
    history = train(config, reward=score, data=trained, val_data=held_out).history
    lock.close()
    checked = [record["val/accuracy"] for record in history if "val/accuracy" in record]
    print(f"held-out accuracy {checked[0]:.3f} -> {checked[-1]:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
