# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # A first run, from Python
#
# A small model learns to add: it imitates answers for a moment, then it is paid for right ones. Everything runs on a
# laptop without a GPU in about two minutes. `examples/first_run.py FOLDER` is the same as a script.
#
# All files go to one folder; `whet view FOLDER` shows it in a browser, also while a run trains.

# %%
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import whet
from whet.plugins.lessons.init_model import init_model

given = [word for word in sys.argv[1:] if not word.startswith("-")] if "__file__" in globals() else []
folder = Path(given[0] if given else tempfile.mkdtemp(prefix="first_run_"))
print(folder)

# %% [markdown]
# ## Problems and a model
#
# Rows are dictionaries. This model has random weights and a token for each character; otherwise `model.path` is a
# model's folder, or its name on the hub.

# %%
pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(0).shuffle(pairs)
problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
held_out, rows = problems[:256], problems[256:]
model = init_model(folder / "model", "qwen3", "nano", alphabet="0123456789+=", num_layers=2, max_position_embeddings=64)
print(rows[:3])

# %% [markdown]
# ## Imitation
#
# Keys are those of the command line (docs/config.md), and `quickstart_sft` is a recipe that sets most of them. A
# callback is called with the run after every step; this one ends it when the answers are no longer a surprise.


# %%
def stop_early(run: Any) -> None:
    if run.history[-1].get("val/loss", 1.0) < 0.6:
        run.stop()


def imitate(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]


imitation = whet.sft(
    "quickstart_sft",
    data=imitate(rows),
    val_data=imitate(held_out),
    callbacks=[stop_early],
    **{
        "model.path": str(model),
        "trainer.run_dir": str(folder / "imitation"),
        "trainer.val_freq": 10,
        "trainer.logger": ["jsonl"],  # without this also "console": a line for every step
    },
)
start = whet.export(imitation.run_dir, folder / "start")

# %% [markdown]
# ## A reward of one's own
#
# A reward function gets the response and the row's answer. It returns a number, or a dictionary whose `score` is the
# reward; the other entries become metrics. This one pays for the right sum, and counts how far the others are off.


# %%
def sums(solution_str: str, ground_truth: str) -> dict[str, float]:
    """1 for the right sum, else 0."""
    off = abs(int(solution_str) - int(ground_truth)) if solution_str.isdecimal() else 200
    return {"score": float(solution_str == ground_truth), "off": float(off)}


run = whet.train(
    "quickstart",
    reward=sums,
    data=rows,
    val_data=held_out,
    **{
        "model.path": str(start),
        "trainer.run_dir": str(folder / "paid"),
        "trainer.total_steps": 300,
        "trainer.logger": ["jsonl"],
    },
)

# %% [markdown]
# ## What happened
#
# `history` has a record for every step (docs/metrics.md says what each metric is), and `whet.plot` draws any of them.

# %%
for record in run.history:
    if "val/reward" in record:
        print(f"step {record['step']:.0f}: {record['val/reward']:.0%} of the held-out problems are solved")
whet.plot(run, ["critic/score/mean", "val/reward", "actor/entropy"], output=folder / "curves.png")

# %% [markdown]
# ## Ask the model

# %%
trained = whet.export(run.run_dir, folder / "trained")
limits = {"data.max_prompt_length": 16, "data.max_response_length": 5, "data.apply_chat_template": False}
for line in whet.generate(data=[{"prompt": "17+25="}, {"prompt": "64+58="}], **{"model.path": str(trained)}, **limits):
    print(line["prompt"], line["response"])
found = whet.evaluate(data=held_out, reward=sums, **{"model.path": str(trained)}, **limits)
print(f"{found.accuracy:.0%} of {len(held_out)} held-out problems are solved")
