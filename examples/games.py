# SPDX-License-Identifier: Apache-2.0
"""A small model learns a game or the use of a calculator: one command makes it, warms it up, trains and tests it.

    python examples/games.py number_game [--run-dir runs/games/number_game] [--seed 0] [key=value ...]

Writes rows that name games by their seeds, makes a model with random weights, shows it scripted play full of random
moves, and trains it with the recipe of that name, to which `key=value` are changes. Held-out games are played before
and after. `pip install ./examples/environments` makes the games a package; from a clone this works without it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "environments"))

from whet_environments.game import Game
from whet_environments.webshop.compact import sample_texts

from whet.checkpoints.export import export
from whet.config import SFTConfig, TrainConfig, load_config
from whet.environments.protocol import Answer
from whet.environments.running import EnvironmentSpec
from whet.errors import ConfigError
from whet.plugins.lessons.init_model import END_OF_TURN, Arch, init_model
from whet.plugins.lessons.quickstart import NUM_CHECKED, clear, stop_when_warm
from whet.plugins.plots.figures import Series, plot_learning_curve
from whet.trainers.build import train
from whet.trainers.sft import train_sft
from whet.types import Message, Prompt

NUM_TRAINED, NUM_HELD_OUT, NUM_SHOWN = 3000, 256, 6000  # rows to train on, to test with, of the warm-up
MAX_STATE = 512  # tokens that a model can read
MAX_WORDS = 848  # tokens of a vocabulary of words

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """A recipe with its alphabet, the share of random moves in the warm-up, and the warm-up's steps. Without an
    alphabet the tokenizer has the words of `texts`."""

    alphabet: str | None
    noise: float
    warm_up_steps: int
    metric: str = "val/accuracy"
    label: str = "share of games won"  # of held-out games
    has_few_states: bool = False  # so that trained and held-out games begin in the same ones
    texts: Callable[[], Sequence[str]] | None = None
    warm_up: Mapping[str, Any] = field(default_factory=dict)  # changes to the recipe of the warm-up
    warm_enough: float | None = None  # mean probability of the shown answers that ends the warm-up before its last step
    arch: Arch = "qwen3"


PLANS = {
    "calculator_quickstart": Plan("0123456789+-*/=<>:. abcdefghijklmnopqrstuvwxyz", noise=0.7, warm_up_steps=300),
    "nim_self_play": Plan(
        "0123456789abcdefghijk>", 1.0, 150, "val/env/nim/right", "share of winning moves", has_few_states=True
    ),
    "nim_one_side": Plan(
        "0123456789abcdefghijk>", 1.0, 150, "val/env/nim/right", "share of winning moves", has_few_states=True
    ),
    "number_game": Plan(
        "123456789ryg>", noise=0.9, warm_up_steps=150, metric="val/reward", label="share of right cards"
    ),
    "tree_game": Plan(
        "123456789abcdefghirT>",
        noise=0.7,
        warm_up_steps=150,
        metric="val/reward",
        label="share of the reward of perfect play",
    ),
    "frozen_lake": Plan("P_OGudlr>X√", noise=1.0, warm_up_steps=150),
    "sokoban_grpo": Plan("P_OXS√#udlr>", noise=0.5, warm_up_steps=300),
    "sokoban_ppo": Plan("P_OXS√#udlr>", noise=0.5, warm_up_steps=300),
    "sokoban_vision": Plan(
        "udlr>",
        noise=0.0,
        warm_up_steps=400,
        warm_up={
            "data.apply_chat_template": True,
            "data.max_length": 64,
            "data.train_batch_size": 64,
            "optim.name": "muon",
            "optim.lr": 5e-3,
        },
        warm_enough=0.6,
        arch="qwen3_vl",  # learns where a patch is; Qwen2.5-VL stays at chance here
    ),
    "webshop_grpo": Plan(
        None,
        noise=0.3,
        warm_up_steps=400,
        metric="val/reward",
        label="reward",
        texts=sample_texts,
        warm_up={"data.train_batch_size": 64, "optim.name": "muon", "optim.lr": 5e-3},
    ),
}


def game_rows(
    make: Callable[[Prompt], Any], noise: float, draws: random.Random, has_few_states: bool = False
) -> tuple[Rows, Rows, Rows]:
    """Rows to train on, held-out rows whose games begin in other states where there are enough of them, and turns of
    the scripted play."""
    held_out = [{"prompt": ">", "seed": seed} for seed in range(NUM_HELD_OUT)]
    begins = set() if has_few_states else {begin(make, row) for row in held_out}
    trained: Rows = []
    seed = NUM_HELD_OUT
    while len(trained) < NUM_TRAINED:
        row = {"prompt": ">", "seed": seed}
        trained += [row] if begin(make, row) not in begins else []
        seed += 1
    shown = [draws.choice(turns(make, draws.choice(trained), noise, draws)) for _ in range(NUM_SHOWN)]
    return trained, held_out, shown


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt of a row, as an environment gets it."""
    return Prompt("0:0", 0, (Message("user", row["prompt"]),), (0,), "games", None, extra_info={"seed": row["seed"]})


def begin(make: Callable[[Prompt], Any], row: Mapping[str, Any]) -> str | None:
    """The state in which the game of a row begins."""
    prompt = prompt_of(row)
    key: str | None = make(prompt).reset(prompt, 0).state_key
    return key


def turns(make: Callable[[Prompt], Any], row: Mapping[str, Any], noise: float, draws: random.Random) -> Rows:
    """A scripted game: the text before each turn, and the answer, which is random with the probability `noise`."""
    prompt, found = prompt_of(row), Rows()
    game: Game = make(prompt)
    observation, context = game.reset(prompt, 0), ""
    while not (observation.done or observation.truncated):
        text = "".join(map(written, observation.messages))
        context = text if observation.context == "replace" else context + text
        answer = draws.choice(game.choices()) if draws.random() < noise else game.best()
        images = {"images": [media.source for media in observation.media]} if observation.media else {}
        found.append({"prompt": context, "response": answer, **images})
        observation, context = game.step(Answer(answer)), f"{context}{answer}{END_OF_TURN}"
    return found


def written(message: Message) -> str:
    """The text of a message, with the tag <image> for an image."""
    if isinstance(message.content, str):
        return message.content
    return "".join("<image>" if part["type"] == "image" else part["text"] for part in message.content)


def product_rows(noise: float, draws: random.Random) -> tuple[Rows, Rows, Rows]:
    """Products of two-digit numbers that have four digits; a share `1 - noise` of the play asks the calculator."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a * b >= 1000]
    draws.shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]

    def shown() -> Iterator[dict[str, str]]:
        for row in draws.choices(rows[NUM_HELD_OUT:], k=NUM_SHOWN):
            question, answer = row["prompt"], f"={row['answer']}"
            call = f"<calc>{question}</calc>"
            if draws.random() < noise:
                yield {"prompt": question, "response": answer}
            elif draws.random() < 0.5:
                yield {"prompt": question, "response": call}
            else:
                yield {"prompt": f"{question}{call}{END_OF_TURN}{row['answer']}", "response": answer}

    return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT], list(shown())


def learn(name: str, run_dir: Path, seed: int, changes: Sequence[str]) -> Sequence[Mapping[str, float]]:
    """Rows, model, warm-up and RL.  Returns the numbers of all steps."""
    plan, draws = PLANS[name], random.Random(seed)
    init_model(
        run_dir / "model",
        plan.arch,
        "nano",
        alphabet=plan.alphabet,
        texts=plan.texts() if plan.texts is not None else None,
        vocab_size=None if plan.texts is None else MAX_WORDS,
        num_layers=2,
        max_position_embeddings=MAX_STATE,
        patch_size=8,
        seed=seed,
    )
    if name == "calculator_quickstart":
        trained, held_out, shown = product_rows(plan.noise, draws)
    else:
        known = [*changes, f"model.path={run_dir}/model", "trainer.val_freq=0"]
        recipe = load_config(TrainConfig, name, known, given={"data"}).config
        make = EnvironmentSpec(recipe.environment.name, recipe.environment.options).load()
        trained, held_out, shown = game_rows(make, plan.noise, draws, plan.has_few_states)
    for file, rows in (("train", trained), ("held_out", held_out)):
        (run_dir / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warm_up = {
        "model.path": str(run_dir / "model"),
        "model.dtype": "float32",
        "data.max_length": max(len(row["prompt"].replace(END_OF_TURN, "!") + row["response"]) for row in shown) + 1,
        "trainer.run_dir": str(run_dir / "sft"),
        "trainer.seed": seed,
        "trainer.total_steps": plan.warm_up_steps,
        **plan.warm_up,
    }
    config = load_config(SFTConfig, "quickstart_sft", warm_up, given={"data"}).config
    stops = [] if plan.warm_enough is None else [stop_when_warm(config, shown[:NUM_CHECKED], plan.warm_enough)]
    train_sft(config, data=shown, callbacks=stops)
    export(run_dir / "sft", run_dir / "sft_model")
    overrides = [
        f"model.path={run_dir}/sft_model",
        f"data.train_files={run_dir}/train.jsonl",
        f"data.val_files={run_dir}/held_out.jsonl",
        f"trainer.run_dir={run_dir}/rl",
        f"trainer.seed={seed}",
        *changes,
    ]
    return train(load_config(TrainConfig, name, overrides).config).history


def interval(mean: float) -> float:
    """Half of the 95 % interval of a mean over the held-out games; for values from 0 to 1 it is at most this."""
    return 1.96 * math.sqrt(max(0.0, mean * (1.0 - mean)) / NUM_HELD_OUT)


def main() -> int:
    """Runs all stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(PLANS), help="the recipe")
    parser.add_argument("--run-dir", type=Path, help="folder of the run; unset: runs/games/NAME")
    parser.add_argument("--seed", type=int, default=0)
    options, changes = parser.parse_known_args()
    run_dir = options.run_dir or Path("runs/games") / options.name
    try:  # before the last run is removed
        load_config(TrainConfig, options.name, changes, checked=False)
    except ConfigError as error:
        parser.error(str(error))
    with closing(clear(run_dir)):
        history = learn(options.name, run_dir, options.seed, changes)
    metric, label = PLANS[options.name].metric, PLANS[options.name].label
    checked = [(int(record["step"]), record[metric]) for record in history if metric in record]
    summary = {"name": options.name, "seed": options.seed, "curve": checked, "cpu_seconds": round(time.process_time())}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    curve = Series(f"held-out games: {label}", *map(list, zip(*checked, strict=True)), markers=True)
    plot_learning_curve(run_dir / "learning_curve.png", [curve], title=options.name, y_label=label)
    before, after = (f"{value:.3f} ± {interval(value):.3f}" for value in (checked[0][1], checked[-1][1]))
    sys.stdout.write(f"{options.name}: held-out {label} {before} -> {after}\n")
    sys.stdout.write(f"{summary['cpu_seconds']} CPU seconds; learning curve: {run_dir}/learning_curve.png\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
