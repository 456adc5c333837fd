# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gsm8k FOLDER --model DIR --train FILE --test FILE`: SFT on GSM8K's solutions, then GRPO.

For each seed `whet sft`, then `whet train` with 64 prompts x 8 responses a step and the rule reward, and `whet eval`
with greedy sampling on all test problems before, between and after. Stages that have ended are not run again, one that
was cut off goes on from its checkpoint, and `--minutes` ends a call: call it until it says that all is done.
FOLDER/results.jsonl has a line an evaluation; the table is printed each time. Files are JSONL with question and answer
as published; --set KEY=VALUE changes a key of the commands' settings below.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.competitor import ROOT
from whet.files import shipped_yaml

SEEDS = (0, 1, 2)
CALCULATOR = re.compile(r"<<[^<>]*>>")  # what a published solution would have a calculator compute
SFT = {
    "data.train_batch_size": 64,
    "data.max_length": 640,
    "optim.lr": 5e-5,
    "optim.schedule": "cosine",
    "optim.warmup_steps": 20,
    "trainer.total_epochs": 3,
    "trainer.val_freq": 0,
}
RL = {
    "data.train_batch_size": 64,
    "data.max_response_length": 256,
    "rollout.n": 8,
    "actor.optim.lr": 2e-6,
    "algorithm.kl.where": "none",
    "trainer.total_steps": 200,
    "trainer.val_freq": 50,
}
EVAL = {"data.max_response_length": 256}


def main(options: argparse.Namespace) -> int:
    """Runs the stages that have not ended; 0 where all have."""
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    examples = folder / "sft.jsonl"
    if not examples.exists():
        write_examples(options.train, examples)
    changes, until = changed(options, SFT, RL, EVAL), time.monotonic() + 60 * options.minutes
    test = [f"data.val_files={options.test}", *keys(EVAL, changes)]
    for seed in options.seeds:
        place = folder / f"seed_{seed}"
        trained = {
            "sft": ["sft", "model.path=" + options.model, f"data.train_files={examples}", f"trainer.seed={seed}"],
            "rl": [
                *("train", "gsm8k", f"model.path={place / 'sft' / 'model'}", f"data.train_files={options.train}"),
                *(f"data.val_files={options.test}", f"trainer.seed={seed}"),
            ],
        }
        for name, settings in (("before", {}), ("sft", SFT), ("rl", RL)):
            at = folder if name == "before" else place / name
            model = options.model if name == "before" else str(at / "model")
            if name in trained and not Path(model).exists():
                words = [*trained[name], *keys({**settings, "trainer.run_dir": str(at / "run")}, changes)]
                if not ended(words, at / "log", until) or not ended(
                    ["export", str(at / "run"), model], at / "log", until
                ):
                    return report(folder, f"{name} of seed {seed} goes on with the next call")
            if not evaluated(folder, name, seed, model, at, test, until):
                return report(folder, f"the evaluation after {name} of seed {seed} goes on with the next call")
    return report(folder, "")


def write_examples(train: Path, examples: Path) -> None:
    """Prompts as the recipe gsm8k writes them, and solutions without the marks of a calculator."""
    form = shipped_yaml("recipes/data/gsm8k.yaml")["format_prompt"]
    with examples.open("w", encoding="utf-8") as file:
        for row in map(json.loads, Path(train).read_text(encoding="utf-8").splitlines()):
            solution = CALCULATOR.sub("", row["answer"])
            prompt = form.replace("{{ content }}", row["question"])
            file.write(json.dumps({"prompt": prompt, "response": solution}) + "\n")


def changed(options: argparse.Namespace, *settings: Mapping[str, Any]) -> dict[str, str]:
    """The changes of `--set`.  Raises: SystemExit for a key of no settings."""
    changes = dict(each.partition("=")[::2] for each in options.set)
    if unknown := sorted(changes.keys() - {name for each in settings for name in each}):
        raise SystemExit(f"--set {unknown[0]}: no key of a command's settings")
    return changes


def keys(settings: Mapping[str, Any], changes: Mapping[str, str]) -> list[str]:
    """The words of settings, with changes applied in place."""
    return [f"{name}={changes.get(name, json.dumps(value))}" for name, value in settings.items()]


def ended(words: Sequence[str], log: Path, until: float) -> bool:
    """Runs a command of whet; False where the time was over. Raises: RuntimeError where it failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    left = until - time.monotonic()
    if left <= 0:
        return False
    with log.open("a") as file:
        process = subprocess.Popen([sys.executable, "-m", "whet", *words], cwd=ROOT, stdout=file, stderr=file)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # it saves a checkpoint first
            process.wait(120)
            return False
    if status:
        raise RuntimeError(f"whet {words[0]} ended with {status}: {log.read_text()[-1500:]}")
    return True


def evaluated(folder: Path, stage: str, seed: int, model: str, at: Path, words: Sequence[str], until: float) -> bool:
    """Evaluates a model into `at` and adds a line to the results, unless done before; False where the time was over."""
    file = at / "eval" / "summary.json"
    if file.exists():
        return True
    if not ended(["eval", "gsm8k", f"model.path={model}", f"output={file.parent}", *words], at / "log", until):
        return False
    summary = json.loads(file.read_text())
    found = summary["metrics"][f"mean@{summary['n']}"]
    record = {"stage": stage, "seed": seed, "accuracy": found["value"], "low": found["low"], "high": found["high"]}
    with (folder / "results.jsonl").open("a") as results_file:
        results_file.write(json.dumps(record) + "\n")
    return True


def results(folder: Path) -> list[dict[str, Any]]:
    """The evaluations that have ended."""
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def report(folder: Path, left: str) -> int:
    """Prints the table, and the remaining runs."""
    found = results(folder)
    print("| stage | seeds | accuracy, mean | accuracy with its 95 % interval, by seed |\n|---|--:|--:|---|")
    for stage in dict.fromkeys(each["stage"] for each in found):
        rows = [each for each in found if each["stage"] == stage]
        shown = ", ".join(f"{each['accuracy']:.3f} ({each['low']:.3f} to {each['high']:.3f})" for each in rows)
        print(f"| {stage} | {len(rows)} | {mean(each['accuracy'] for each in rows):.3f} | {shown} |")
    print(left or "all is done")
    return int(bool(left))


def arguments() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--set", action="append", default=[])
    return parser


if __name__ == "__main__":
    sys.exit(main(arguments().parse_args()))
