# SPDX-License-Identifier: Apache-2.0
"""Time of DPO and KTO in whet and in TRL, from the same model and the same pairs to the same held-out accuracy."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.competitor import Entry, take_turns
from benchmarks.record import Record
from benchmarks.setting import Setting
from whet import devices

TITLE = "Preferences against TRL"
NOTE = """\
A pair is a problem of the quickstart with its right answer and a wrong one that the SFT model sampled. TRL trains to
its end; its learning rate (of three) and beta (of three) are the pair by which it ends best with the first seed in
float32. Then whet trains from the same model with the same loss, learning rate, beta, AdamW and dtype, on the same
batches in the same order, until it answers as many of the held-out problems right (greedily) as TRL's model did at its
end. The clock stands still while they are answered, every 10 steps. whet computes the reference's log-probs in one pass
over all pairs before its first step (`reference.mode=cached`), and the clock runs; TRL computes them in every step, its
default. The bound is half of TRL's time, by the median of the ratios. TRL may have reached its final accuracy before
its end: the last column compares with that moment. whet may take twice as many steps; a ratio is 0 where it does not
reach the accuracy.
"""
log = logging.getLogger(__name__)
EVALUATE_EVERY = 10  # steps
LOSSES, LEARNING_RATES, BETAS = ("dpo", "kto"), (3e-5, 1e-4, 3e-4), (0.1, 0.5, 2.0)
NEVER = 2.0  # an accuracy that no run reaches
SAMPLES = 4  # of a problem, by the SFT model
UNTUNED = {"lr": 1e-4, "beta": 2.0}


@dataclass(frozen=True)
class Told:
    """The settings of both sides."""

    batch_size: int = 64  # pairs
    max_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    max_length: int = 32


def run(setting: Setting) -> dict[str, Any]:
    """Both in turn with each loss, dtype and seed, after TRL's trials of learning rates and betas."""
    is_tuned = setting.trl_python is not None and setting.scale.is_thorough
    told = asdict(Told() if setting.scale.is_thorough else Told(max_steps=EVALUATE_EVERY, batch_size=8))
    folders = {seed: prepare(setting, seed, told["batch_size"]) for seed in setting.scale.quickstart_seeds}
    dtypes = ("float32", "bfloat16") if devices.bfloat16_instructions() else ("float32",)
    seed, folder = next(iter(folders.items()))
    trials, chosen, races = dict[str, Any](), dict.fromkeys(LOSSES, UNTUNED), dict[str, Any]()
    for loss in LOSSES if is_tuned else ():
        own = {**told, "loss": loss, "seed": seed, "dtype": dtypes[0]}
        grid = [{"lr": lr, "beta": beta} for lr in LEARNING_RATES for beta in BETAS]
        trials[loss] = [(_end(_trl(setting, folder, {**own, **each})), each) for each in grid]
        chosen[loss] = max(trials[loss], key=lambda each: each[0])[1]
    for loss, dtype in product(LOSSES, dtypes):
        of_loss = races[f"{loss}, {dtype}"] = dict[str, Any]()
        for seed, folder in folders.items():
            settings = {**told, "loss": loss, "seed": seed, "dtype": dtype, **chosen[loss]}
            raced = {} if setting.trl_python is None else {"TRL": _trl(setting, folder, settings)}
            target = _end(raced["TRL"]) if raced else 0.0
            longer = {**settings, "max_steps": 2 * told["max_steps"]}
            ours = setting.whet("whet_preference", **_told(setting, folder, longer, target))
            raced["whet"] = _raced("whet", ours, setting)
            of_loss[str(seed)] = {name: asdict(record) for name, record in raced.items()}
    return {"told": told, "chosen": chosen, "trials": trials, "races": races}


def _trl(setting: Setting, folder: Path, settings: Mapping[str, Any]) -> Record:
    """TRL's run to its end."""
    told = (settings[name] for name in ("loss", "dtype", "seed", "lr", "beta"))
    log.info("TRL: %s, %s, seed %d, learning rate %g, beta %g", *told)
    return _raced("TRL", setting.trl("trl_preference", **_told(setting, folder, settings, NEVER)), setting)


def _end(record: Record) -> float:
    """The accuracy at the end of a run."""
    return float(record.rounds[0]["accuracies"][-1][2])


def _told(setting: Setting, folder: Path, settings: Mapping[str, Any], target: float) -> dict[str, Any]:
    files = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("pairs", "labelled", "held_out")}
    run_dir = tempfile.mkdtemp(dir=setting.scratch)
    ends = {"target": target, "evaluate_every": EVALUATE_EVERY, "run_dir": run_dir}
    return {**settings, **files, **ends, "model": str(folder / "sft_model")}


def _raced(name: str, entry: Entry, setting: Setting) -> Record:
    return take_turns({name: entry}, rounds=1, warm_up=0, scratch=setting.scratch)[name]


def prepare(setting: Setting, seed: int, batch_size: int) -> Path:
    """A folder with the SFT model of the quickstart, its problems and the pairs; at less than full size without
    training. Made once."""
    from whet.checkpoints.export import export
    from whet.plugins.lessons.init_model import init_model
    from whet.plugins.lessons.quickstart import warm_up, write_adder, write_problems

    folder = setting.scratch / f"preference_{seed}"
    if folder.exists():
        return folder
    train, _ = write_problems(folder, seed)
    if setting.scale.is_thorough:
        write_adder(folder / "model", seed)
        warm_up(folder, seed, train)
        export(folder / "sft", folder / "sft_model")
    else:
        train = train[:64]
        init_model(folder / "sft_model", "qwen3", "nano", alphabet="0123456789+=", num_layers=1)
    (folder / "sampled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    words = [f"model.path={folder}/sft_model", f"input={folder}/sampled.jsonl", f"output={folder}/samples.jsonl"]
    words += ["data.apply_chat_template=false", "data.max_prompt_length=16", "data.max_response_length=5"]
    words += [f"rollout.n={SAMPLES}", f"seed={seed}"]
    whet = [str(Path(sys.executable).parent / "whet"), "generate", "chunk_size=1024", "rollout.max_batch_size=1024"]
    subprocess.run([*whet, *words], check=True, stdout=subprocess.DEVNULL)
    wrong = dict[int, str]()
    for sample in map(json.loads, (folder / "samples.jsonl").read_text().splitlines()):
        if sample["response"] != train[sample["index"]]["answer"]:
            wrong.setdefault(sample["index"], sample["response"])
    pairs = [
        {"prompt": train[index]["prompt"], "chosen": train[index]["answer"], "rejected": text}
        for index, text in sorted(wrong.items())
    ]
    del pairs[len(pairs) // batch_size * batch_size :]  # whole batches, so that every epoch has the same ones
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    _write_labelled(folder, pairs, batch_size)
    log.info("preference: seed %d has %d pairs", seed, len(pairs))
    return folder


def _write_labelled(folder: Path, pairs: Sequence[Mapping[str, str]], batch_size: int) -> None:
    """Writes the pairs in TRL's form for KTO, in this order: of each batch the right responses, then the wrong ones, so
    that the mismatched responses, which it takes from the row before, belong to other prompts."""
    lines = [
        json.dumps({"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"})
        for start in range(0, len(pairs), batch_size)
        for name in ("chosen", "rejected")
        for pair in pairs[start : start + batch_size]
    ]
    (folder / "labelled.jsonl").write_text("".join(f"{line}\n" for line in lines))


def report(results: Mapping[str, Any]) -> list[str]:
    """A line for each loss, dtype and seed, and the medians."""
    section = results["preference"]
    told = section["told"]
    lines = [
        f"{told['max_steps']} steps of {told['batch_size']} pairs; "
        + "; ".join(
            f"{loss} with learning rate {of['lr']:g}, beta {of['beta']:g}" for loss, of in section["chosen"].items()
        )
        + ":",
        "",
        "| | TRL | accuracy | ms a step | whet to that | steps | ms a step | to TRL's end | to its first time there |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    medians, equals = list[str](), list[str]()
    for name, by_seed in section["races"].items():
        ratios, is_equal = list[tuple[float, float]](), list[bool]()
        for seed, raced in by_seed.items():
            ours = raced["whet"]["rounds"][0]
            cells, shown = [""] * 3, ["", ""]
            if "TRL" in raced:
                theirs = raced["TRL"]["rounds"][0]
                spent = _seconds(ours) if ours["reached"] else float("inf")
                ratios.append((_seconds(theirs) / spent, _first(theirs) / spent))
                is_equal += _equal(theirs, ours)
                cells = [f"{_seconds(theirs):.1f} s", _rise(theirs["accuracies"]), _pace(theirs)]
                shown = [f"{ratio:.2f}x" for ratio in ratios[-1]]
            reached = "" if ours["reached"] else f" (only {ours['accuracies'][-1][2]:.3f})"
            cells += [f"{_seconds(ours):.1f} s{reached}", str(ours["steps"]), _pace(ours), *shown]
            lines.append(f"| {name}, seed {seed} | {' | '.join(cells)} |")
        if ratios:
            to_end, to_first = (median(column) for column in zip(*ratios, strict=True))
            medians.append(f"{name} {to_end:.2f}x (to its first time there {to_first:.2f}x)")
            equals.append(f"{name} {sum(is_equal)} of {len(is_equal)}")
    if not medians:
        return lines
    equal = f"Evaluations after the same number of steps in which both had the same accuracy: {'; '.join(equals)}."
    return [*lines, "", f"Medians: {'; '.join(medians)}.", "", equal]


def _seconds(turn: Mapping[str, Any]) -> float:
    return float(turn["accuracies"][-1][1])


def _first(turn: Mapping[str, Any]) -> float:
    """The seconds until the first evaluation with at least the accuracy of the end."""
    return next(seconds for step, seconds, found in turn["accuracies"] if step and found >= turn["accuracies"][-1][2])


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[bool]:
    """Compares the accuracies after each step at which both were evaluated."""
    others = {step: found for step, _, found in other["accuracies"]}
    return [found == others[step] for step, _, found in one["accuracies"] if step in others]


def _rise(accuracies: Sequence[Sequence[float]]) -> str:
    return f"{accuracies[0][2]:.3f} to {accuracies[-1][2]:.3f}"


def _pace(turn: Mapping[str, Any]) -> str:
    return f"{1000 * _seconds(turn) / turn['steps']:.0f}"
