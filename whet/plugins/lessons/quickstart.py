# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart`: makes data and a model, then does warm-up, RL, evaluation and export, in minutes on a CPU."""

from __future__ import annotations

import json
import platform
import random
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from whet import files
from whet.checkpoints.checkpoint import disk_errors
from whet.checkpoints.export import export
from whet.config import EvalConfig, SFTConfig, TrainConfig, load_config
from whet.data.prompts import PromptFormat
from whet.data.supervised import build_examples
from whet.errors import ConfigError
from whet.keyed import key
from whet.models.load import load_tokenizer, without_weight_bars
from whet.plugins.lessons.init_model import init_model
from whet.registry import PARTS
from whet.tracking.console import shared_console
from whet.tracking.rollouts import read_rollouts
from whet.trainers.build import train
from whet.trainers.run import Run
from whet.trainers.run_dir import lock_folder
from whet.trainers.sft import SFTRun, to_batch, train_sft
from whet.trainers.stop import EarlyStop
from whet.version import __version__

NUM_HELD_OUT = 512
NUM_CHECKED = 256  # training problems by which the warm-up knows when to stop
CHECK_EVERY = 4  # steps
GOOD_ACCURACY = 0.98  # twice in a row, on the held-out problems, ends the training
MARK = ".quickstart"  # in a folder that a quickstart may empty
CURVE = "learning_curve.png"
PAGE = "answers.png"
NEXT = Path(__file__).with_suffix(".txt")  # text printed at the end
WRITTEN = {
    *("train.jsonl", "held_out.jsonl", "images", "model", "sft", "sft_model", "rl", "rl_model"),
    *("before", "after", "summary.json", CURVE, PAGE),
}
Rows = Sequence[dict[str, Any]]
Shown = tuple[str, str, str, str]  # a problem, its answer, the responses before and after RL


@dataclass(frozen=True)
class Lesson:
    """The task of a quickstart: its rows, model, recipe and page of answers."""

    goal: str  # of the model
    curve: str  # title of the learning curve
    recipe: str
    write_problems: Callable[[Path, int], tuple[Rows, Rows]]  # in a folder, by a seed: to train on, held out
    write_model: Callable[[Path, int], str]  # returns a description
    read_back: Callable[[Path, Rows], list[Shown]]  # problems that were wrong before
    warm_up: str | None = None  # its recipe; without one the model itself is evaluated and trained
    warm_enough: float = 1.0  # mean probability of the correct response that ends the warm-up
    warm_steps: int | None = None  # at which the warm-up is expected to end
    stop: str = "whet.plugins.lessons.quickstart:GOOD_ENOUGH"  # callback that ends the training
    problem: str = "problem"
    page: str = ""  # a picture of answers that `read_back` draws


def quickstart(run_dir: Path, seed: int, program: str = "whet", lesson: Lesson | None = None) -> dict[str, Any]:
    """Runs all stages of a lesson (default: addition), prints the results, and returns the content of summary.json.
    `program` is the name of the command in printed advice.

    It replaces an earlier quickstart in `run_dir`.  Raises: ConfigError if anything else fills the folder."""
    with closing(clear(run_dir)):
        return _stages(run_dir, seed, program, lesson or ADDITION)


def clear(run_dir: Path) -> TextIOWrapper:
    """Locks a folder that is new, empty, or an earlier quickstart's, and removes the earlier files.  Returns the lock.
    Raises: ConfigError, StorageError."""
    with disk_errors(run_dir, "--run-dir"):
        run_dir.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in run_dir.iterdir())
        if found and MARK not in found and not {"summary.json", "rl_model"} <= set(found) <= WRITTEN:
            held = f"{run_dir}, with {', '.join(found[:3])}{' and more' * (len(found) > 3)}, which no quickstart wrote"
            raise ConfigError("--run-dir", held, "a new or empty folder, or one of a quickstart", "name one")
        lock = lock_folder(run_dir, MARK)
        for name in WRITTEN:
            files.remove(run_dir / name)
    return lock


def _stages(run_dir: Path, seed: int, program: str, lesson: Lesson) -> dict[str, Any]:
    started, console = time.time(), shared_console()
    console.rule(f"whet {__version__} quickstart: a small model learns {lesson.goal}, seed {seed}")
    train_rows, held_out = lesson.write_problems(run_dir, seed)
    say = partial(console.print, soft_wrap=True, markup=False)  # a path that is broken in two cannot be copied
    say(f"1  {len(train_rows)} problems to train on, {len(held_out)} held out, in {run_dir}/*.jsonl")
    say(f"2  {lesson.write_model(run_dir / 'model', seed)}, in {run_dir}/model")
    start, estimates = run_dir / "model", dict[str, Any]()
    if lesson.warm_up is None:
        say(f"3  evaluation of the model as it is, as `{program} eval` does")
        estimates["before"] = evaluated(lesson, run_dir, start, "before")
    else:
        say("3  supervised warm-up on correct responses, stopped early")
        warm_up(run_dir, seed, train_rows, lesson)
        start = export(run_dir / "sft", run_dir / "sft_model")

    good = f"until {GOOD_ACCURACY:.0%} of the held-out problems are solved twice in a row"
    say(f"4  reinforcement learning (GRPO) from right and wrong alone, {good}")
    rl_started = time.time()
    run = reinforce(run_dir, seed, start, lesson)
    assert run.first_update_at is not None
    export(run_dir / "rl", run_dir / "rl_model")
    if estimates:
        estimates["after"] = evaluated(lesson, run_dir, run_dir / "rl_model", "after")

    examples = lesson.read_back(run_dir, held_out)
    accuracies = [(record["step"], record["val/accuracy"]) for record in run.history if "val/accuracy" in record]
    summary = {
        "sft_accuracy": accuracies[0][1],
        "rl_accuracy": accuracies[-1][1],
        "seconds_total": round(time.time() - started, 1),
        "seconds_to_first_rl_step": round(run.first_update_at - rl_started, 1),
        "steps": run.total_steps,
        "seed": seed,
        "held_out_problems": len(held_out),
        **estimates,
        "versions": {
            "whet": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    plot(run_dir / CURVE, run.history, lesson)
    show(console, summary, examples, run_dir, program, lesson)
    return summary


def evaluated(lesson: Lesson, run_dir: Path, model: Path, name: str) -> dict[str, list[float]]:
    """Evaluates a model on the held-out problems as `whet eval` does, and writes to the folder `name`.  Returns by data
    source the accuracy and the bounds of its 95 % interval."""
    from whet.evaluation.evaluate import evaluate

    values = {"model.path": str(model), "data.val_files": [str(run_dir / "held_out.jsonl")]}
    recipe = load_config(TrainConfig, lesson.recipe, values, given={"data"}).config
    parts = {"model": recipe.model, "data": recipe.data, "reward": recipe.reward}
    found = evaluate(EvalConfig.model_validate({**parts, "output": str(run_dir / name)}))
    by_source = {**found.by_data_source, "all": found.metrics}
    means = {source: metrics[f"mean@{found.n}"] for source, metrics in by_source.items()}
    return {source: [mean.value, mean.low, mean.high] for source, mean in means.items()}


def write_problems(run_dir: Path, seed: int) -> tuple[Rows, Rows]:
    """Writes all sums of two two-digit numbers; each is either in train.jsonl or in held_out.jsonl."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(key(seed, "quickstart split")).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    return write_rows(run_dir, rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT])


def write_rows(run_dir: Path, train: Rows, held_out: Rows) -> tuple[Rows, Rows]:
    """Writes train.jsonl and held_out.jsonl, and returns their rows."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("held_out", held_out)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train, held_out


def write_adder(path: Path, seed: int) -> str:
    """Writes a model with random weights and a vocabulary of digits, + and =.  Returns its description."""
    alphabet = "0123456789+="
    init_model(path, "qwen3", "nano", alphabet=alphabet, num_layers=2, max_position_embeddings=64, seed=seed)
    return f"a Qwen3 model with random weights and a tokenizer of the characters {alphabet}"


def warm_up(run_dir: Path, seed: int, rows: Rows, lesson: Lesson | None = None) -> SFTRun:
    """Runs SFT until the mean probability of correct responses on some training problems is `warm_enough`."""
    lesson = lesson or ADDITION
    imitated = [{**row, "response": row["answer"]} for row in rows]
    overrides = {"model.path": str(run_dir / "model"), "trainer.run_dir": str(run_dir / "sft"), "trainer.seed": seed}
    config = load_config(SFTConfig, lesson.warm_up, overrides, given={"data"}).config
    warm = stop_when_warm(config, imitated[:NUM_CHECKED], lesson.warm_enough, lesson.warm_steps)
    return train_sft(config, data=imitated, callbacks=[warm])


def stop_when_warm(config: SFTConfig, rows: Rows, warm_enough: float, likely_steps: int | None = None) -> EarlyStop:
    """Returns a callback that ends SFT once the mean probability of the responses of `rows` is `warm_enough`."""
    assert config.model.path is not None
    tokenizer = load_tokenizer(config.model.path)
    examples = build_examples(rows, PromptFormat.of(tokenizer, config.data), config.data)
    assert isinstance(tokenizer.pad_token_id, int)
    batch = to_batch(examples, tokenizer.pad_token_id)

    def is_warm(run: SFTRun) -> bool:
        if run.step % CHECK_EVERY:
            return False
        log_probs = run.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        return float(log_probs.sum(1).exp().mean()) >= warm_enough

    return EarlyStop(likely_steps, is_warm)


def is_good(run: Run) -> bool:
    """Tells whether the last two validations, one of them at this step, reached the accuracy `GOOD_ACCURACY`."""
    found = [record["val/accuracy"] for record in run.history if "val/accuracy" in record][-2:]
    return "val/accuracy" in run.history[-1] and len(found) == 2 and min(found) >= GOOD_ACCURACY


def reinforce(run_dir: Path, seed: int, model: Path, lesson: Lesson) -> Run:
    """Trains by GRPO with the lesson's recipe. Validates on the held-out problems before, during and after."""
    overrides = {
        "model.path": str(model),
        "data.train_files": [str(run_dir / "train.jsonl")],
        "data.val_files": [str(run_dir / "held_out.jsonl")],
        "trainer.run_dir": str(run_dir / "rl"),
        "trainer.seed": seed,
        "trainer.callbacks": [lesson.stop],
    }
    return train(load_config(TrainConfig, lesson.recipe, overrides).config)


def read_back(run_dir: Path, held_out: Rows) -> list[Shown]:
    """Returns three sums that were wrong before RL, with responses that plain transformers generates after RL."""
    exported = run_dir / "rl_model"
    before = read_rollouts(run_dir / "rl" / "rollouts" / "validation_000000.jsonl")
    wrong = [(row, answer) for row, answer in zip(held_out, before, strict=True) if not answer["accuracy"]]
    with without_weight_bars():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    shown = []
    for row, answer in wrong[:3]:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        after = str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        shown.append((row["prompt"], row["answer"], answer["response"].replace(tokenizer.eos_token, ""), after))
    return shown


def answer_text(answer: Mapping[str, Any]) -> str:
    """Returns the response of a scored record in one line, without the tokens that end it."""
    return " ".join(str(answer["response"]).partition("<|")[0].split()) or "nothing"


def plot(path: Path, history: Sequence[Mapping[str, float]], lesson: Lesson) -> None:
    """Plots the learning curve: the reward of every step, over all responses and over groups that the filter kept, and
    the accuracy on the held-out problems at each validation."""
    curves = {
        "filter/sampled_score": "reward, all responses sampled",
        "critic/score/mean": "reward, groups that the filter kept",
        "val/accuracy": "accuracy, held-out problems",
    }
    series = []
    for name, label in curves.items():
        steps = [record for record in history if name in record]
        numbers = [record["step"] for record in steps], [record[name] for record in steps]
        series.append((label, *numbers, name == "val/accuracy"))
    if "learning_curve" in PARTS:
        PARTS["learning_curve"].load()(path, series, title=lesson.curve, y_label="mean")


def show(
    console: Console, summary: Mapping[str, Any], examples: Sequence[Shown], run_dir: Path, program: str, lesson: Lesson
) -> None:
    """Prints the results, and suggests commands to try next."""
    table = Table(title="held-out problems before and after RL")
    for name in (lesson.problem, "answer", "before", "after"):
        table.add_column(name, justify="right")
    for row in examples:
        table.add_row(*row)
    table.add_section()
    stages = (("before", "sft"), ("after", "rl"))
    before, after = (summary.get(name, {"all": [summary[f"{stage}_accuracy"]]}) for name, stage in stages)
    for source in before:
        count = f"all {summary['held_out_problems']}" if source == "all" else source
        table.add_row(count, "correct", *(_shown(each[source]) for each in (before, after)))
    console.print(table)
    page = f"answers          {run_dir}/{lesson.page}\n" if lesson.page else ""
    start = run_dir / ("sft_model" if lesson.warm_up else "model")
    names = {"run_dir": run_dir, "curve": CURVE, "page": page, "program": program, "recipe": lesson.recipe}
    names |= {name: shlex.quote(str(path)) for name, path in (("start", start), ("folder", run_dir))}  # in commands
    told = NEXT.read_text(encoding="utf-8").format(**summary, **names)
    lines = [line.partition(" | ") for line in told.splitlines()]
    width = max(len(command) for command, bar, _ in lines if bar)
    for command, _, meaning in lines:
        console.print(f"{command:{width}}  {meaning}".rstrip(), soft_wrap=True, markup=False)


def _shown(estimate: Sequence[float]) -> str:
    """Formats an estimate as `48.4%`, or with the bounds of its interval as `48.4% (36–61)`."""
    value, *ends = estimate
    return f"{value:.1%}" + (f" ({'–'.join(f'{100 * end:.0f}' for end in ends)})" if ends else "")


GOOD_ENOUGH, ADDS = EarlyStop(None, is_good), EarlyStop(400, is_good)
ADDITION = Lesson(
    goal="to add",
    curve="Learning to add two-digit numbers with GRPO",
    recipe="quickstart",
    warm_up="quickstart_sft",
    warm_enough=0.26,
    warm_steps=370,
    stop="whet.plugins.lessons.quickstart:ADDS",
    write_problems=write_problems,
    write_model=write_adder,
    read_back=read_back,
)
