# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gsm8k_preference FOLDER --model DIR --train FILE --test FILE`: DPO on GSM8K's solutions against
a model's own answers.

The model samples an answer to training problems, some at a time, until 700 problems have a wrong one (the rule reward
says which) that ended by itself, so that a pair is not told apart by its cut end. The problem's published solution is
the better response: of 1,536 sampled answers of SmolLM2-135M-Instruct 8 were right and ended by themselves, so that
pairs of its own answers alone would need more than 100,000 samples. The loss is DPO with an SFT term (`rpo`). For each
seed 500 pairs are trained on and 200 held out, then `whet eval` answers the test problems greedily, as before. The
table has the accuracy of the implicit reward on the held-out pairs (0.5 before: policy and reference are equal), by the
length of the better answer too, and the minutes of the steps. The samples are drawn once, for all seeds. Stages that
have ended are not run again, one that was cut off goes on, `--minutes` ends a call, and --set KEY=VALUE changes a key
(`model.dtype=float32`, `rollout.dtype=float32` for processors that multiply no bfloat16).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.gsm8k import CALCULATOR, EVAL, arguments, changed, ended, evaluated, keys, results
from whet.evaluation.answers import read_answers
from whet.files import shipped_yaml
from whet.models.load import load_tokenizer
from whet.tracking.tracker import read_records

SLICE = 128  # problems that are sampled at a time
ANY_DTYPE = {"model.dtype": "auto", "rollout.dtype": "auto"}
TEST = {**EVAL, **ANY_DTYPE}
SAMPLING = {**TEST, "rollout.temperature": 1.0}
DPO = {
    "model.dtype": "auto",
    "loss": "rpo",
    "loss_options.beta": 0.1,
    "reference.mode": "cached",
    "data.train_batch_size": 20,
    "data.max_length": 768,
    "optim.lr": 1e-4,
    "optim.weight_decay": 0.0,
    "optim.schedule": "linear",
    "optim.warmup_steps": 5,
    "trainer.total_epochs": 1,
    "trainer.val_freq": 25,
    "trainer.val_before_train": True,
}


def main(options: argparse.Namespace) -> int:
    """Runs the stages that have not ended; 0 where all have."""
    folder, until = options.folder.resolve(), time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    changes = changed(options, SAMPLING, DPO)
    test = [f"data.val_files={options.test}", *keys(TEST, changes)]
    test += [f"data.val_max_prompts={options.problems}"] if options.problems else []
    if not evaluated(folder, "before", 0, options.model, folder, test, until):
        return report(folder, "the evaluation before goes on with the next call")
    needed = options.pairs + options.held_out
    pairs = sampled(folder, needed, options, changes, until)
    if pairs is None:
        return report(folder, "sampling goes on with the next call")
    for seed in options.seeds:
        place = folder / f"seed_{seed}"
        place.mkdir(exist_ok=True)
        drawn = random.Random(seed).sample(pairs, needed)
        for name, rows in (("pairs", drawn[: options.pairs]), ("held_out", drawn[options.pairs :])):
            (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if not (place / "model").exists():
            words = ["preference", f"model.path={options.model}", f"data.train_files={place / 'pairs.jsonl'}"]
            words += [f"data.val_files={place / 'held_out.jsonl'}", f"trainer.seed={seed}"]
            words += keys({**DPO, "trainer.run_dir": str(place / "run")}, changes)
            for each in (words, ["export", str(place / "run"), str(place / "model")]):
                if not ended(each, place / "log", until):
                    return report(folder, f"DPO of seed {seed} goes on with the next call")
        if not evaluated(folder, "dpo", seed, str(place / "model"), place, test, until):
            return report(folder, f"the evaluation of seed {seed} goes on with the next call")
    return report(folder, "")


def sampled(
    folder: Path, needed: int, options: argparse.Namespace, changes: Mapping[str, str], until: float
) -> list[dict[str, str]] | None:
    """Pairs of the first training problems that have a wrong answer, in order; None where the time was over."""
    problems = Path(options.train).read_text(encoding="utf-8").splitlines()
    form = shipped_yaml("recipes/data/gsm8k.yaml")["format_prompt"]
    specials = load_tokenizer(options.model).all_special_tokens
    pairs: list[dict[str, str]] = []
    for start in range(0, len(problems), SLICE):
        place = folder / "samples" / str(start)
        place.mkdir(parents=True, exist_ok=True)
        (place / "problems.jsonl").write_text("\n".join(problems[start : start + SLICE]) + "\n")
        words = ["eval", "gsm8k", f"model.path={options.model}", f"data.val_files={place / 'problems.jsonl'}"]
        words += [f"output={place / 'eval'}", f"seed={start}", *keys(SAMPLING, changes)]
        if not (place / "eval" / "summary.json").exists() and not ended(words, folder / "log", until):
            return None
        for answer in sorted(read_answers(place / "eval"), key=lambda each: each["index"]):
            row = json.loads(problems[start + answer["index"]])
            if rejected := wrong_answer(answer, specials):
                solution = CALCULATOR.sub("", row["answer"])
                prompt = form.replace("{{ content }}", row["question"])
                pairs.append({"prompt": prompt, "chosen": solution, "rejected": rejected})
        print(f"{start + SLICE} problems, {len(pairs)} pairs", flush=True)
        if len(pairs) >= needed:
            return pairs[:needed]
    raise SystemExit(f"{len(problems)} problems give {len(pairs)} pairs, {needed} are needed")


def wrong_answer(answer: Mapping[str, Any], specials: Sequence[str]) -> str:
    """The text of a wrong answer that ended by itself, without special tokens at its end; empty for others."""
    if answer["finish_reason"] != "stop" or answer["failure"] is not None or answer["accuracy"]:
        return ""
    text = str(answer["response"])
    for special in specials:
        text = text.removesuffix(special)
    return text


def report(folder: Path, left: str) -> int:
    """Prints the table, and the remaining runs."""
    found = results(folder)
    print("| | GSM8K with its 95 % interval | implicit reward | better longer | better shorter | minutes of steps |")
    print("|---|---|--:|--:|--:|--:|")
    for each in found:
        cells = ["0.5", "", "", ""]
        if each["stage"] == "dpo":
            run = folder / f"seed_{each['seed']}" / "run"
            held_out = [line for line in read_records(run / "metrics.jsonl") if "val/accuracy" in line][-1]
            names = ("val/accuracy", "val/accuracy_longer", "val/accuracy_shorter")
            spent = sum(line.get("time/step", 0.0) for line in read_records(run / "timings.jsonl"))
            cells = [*(f"{held_out.get(name, float('nan')):.3f}" for name in names), f"{spent / 60:.1f}"]
        name = "before" if each["stage"] == "before" else f"DPO, seed {each['seed']}"
        shown = f"{each['accuracy']:.3f} ({each['low']:.3f} to {each['high']:.3f})"
        print(f"| {name} | {shown} | {' | '.join(cells)} |")
    if after := [each["accuracy"] for each in found if each["stage"] == "dpo"]:
        print(f"\nGSM8K after DPO, mean of {len(after)} seeds: {mean(after):.3f}")
    print(left or "all is done")
    return int(bool(left))


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--problems", type=int, default=0, help="of the test set; 0: all")
    sys.exit(main(parser.parse_args()))
