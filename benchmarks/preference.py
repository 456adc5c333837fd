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
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.competitor import Entry, take_turns
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting

TITLE = "Preferences against TRL"
NOTE = """\
A pair is a problem of the quickstart with its right answer and a wrong one that the SFT model sampled. TRL trains to
its end, with the learning rate of three by which it ends best with the first seed; then whet from the same model, on
the same pairs with the same loss, learning rate, AdamW, batch and dtype, until it answers as many of the held-out
problems right (greedily) as TRL's model did at its end. The clock stands still while they are answered, every 10 steps.
The bound is half of TRL's time, by the median of the ratios.
"""
log = logging.getLogger(__name__)
EVALUATE_EVERY = 10  # steps
LOSSES, LEARNING_RATES = ("dpo", "kto"), (3e-5, 1e-4, 3e-4)
NEVER = 2.0  # an accuracy that no run reaches
SAMPLES = 4  # of a problem, by the SFT model


@dataclass(frozen=True)
class Told:
    """The settings of both sides."""

    lr: float = 1e-4
    beta: float = 0.1
    batch_size: int = 64  # pairs
    max_steps: int = 200
    dtype: str = "float32"
    precomputes: bool = False  # the log-probs of the reference, before the first step
    betas: tuple[float, float] = (0.9, 0.999)
    max_length: int = 32


def run(setting: Setting) -> dict[str, Any]:
    """Both in turn with each seed and loss, with the learning rate by which TRL ends best with the first seed."""
    told = asdict(Told() if setting.scale.is_thorough else Told(max_steps=EVALUATE_EVERY, batch_size=8))
    folders = {seed: prepare(setting, seed, told["batch_size"]) for seed in setting.scale.quickstart_seeds}
    trials: dict[str, dict[str, float]] = {loss: {} for loss in LOSSES}
    races: dict[str, dict[str, dict[str, Any]]] = {loss: {} for loss in LOSSES}
    rates = dict.fromkeys(LOSSES, told["lr"])
    if setting.trl_python is not None and setting.scale.is_thorough:
        seed, folder = next(iter(folders.items()))
        for loss in LOSSES:
            tried = {lr: {**told, "loss": loss, "seed": seed, "lr": lr} for lr in LEARNING_RATES}
            ends = {lr: _end(_trl(setting, folder, settings)) for lr, settings in tried.items()}
            rates[loss], trials[loss] = max(ends, key=lambda lr: ends[lr]), {str(lr): end for lr, end in ends.items()}
    for seed, folder in folders.items():
        for loss in LOSSES:
            settings = {**told, "loss": loss, "seed": seed, "lr": rates[loss]}
            raced = {} if setting.trl_python is None else {"TRL": _trl(setting, folder, settings)}
            target = _end(raced["TRL"]) if raced else 0.0
            ours = setting.whet("whet_preference", **_told(setting, folder, settings, target))
            raced["whet"] = _raced("whet", ours, setting)
            races[loss][str(seed)] = {name: asdict(record) for name, record in raced.items()}
    return {"told": told, "rates": rates, "trials": trials, "races": races}


def _trl(setting: Setting, folder: Path, settings: Mapping[str, Any]) -> Record:
    """TRL's run to its end."""
    log.info("TRL: %s, seed %d, learning rate %g", settings["loss"], settings["seed"], settings["lr"])
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
    """A line for each loss and seed, and the medians."""
    section = results["preference"]
    told = section["told"]
    lines = [
        f"{told['max_steps']} steps of {told['batch_size']} pairs, beta {told['beta']:g}, "
        f"{told['dtype']}, reference {'computed once' if told['precomputes'] else 'in every step'}:",
        "",
        "| | TRL | accuracy at its end | ms a step | whet to that | steps | ms a step | whet against TRL |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    medians = []
    for loss, by_seed in section["races"].items():
        ratios = []
        for seed, raced in by_seed.items():
            records = {name: Record(**record) for name, record in raced.items()}
            theirs = _cells(records["TRL"], is_target=True) if "TRL" in records else ["", "", ""]
            ratio = speed_up(records["TRL"], records["whet"]) if "TRL" in records else None
            ratios += ratio.by_round if ratio else []
            cells = [*theirs, *_cells(records["whet"]), str(ratio or "")]
            lines.append(f"| {loss}, lr {section['rates'][loss]:g}, seed {seed} | {' | '.join(cells)} |")
        medians += [f"{loss} {median(ratios):.2f}x"] if ratios else []
    return [*lines, "", f"Medians: {', '.join(medians)}."] if medians else lines


def _cells(record: Record, *, is_target: bool = False) -> list[str]:
    only = record.rounds[0]
    spent = only["accuracies"][-1][1]
    reached = "" if is_target or only["reached"] else f" (only {only['accuracies'][-1][2]:.3f})"
    between = f"{only['accuracies'][-1][2]:.3f}" if is_target else str(only["steps"])
    return [f"{spent:.1f} s{reached}", between, f"{1000 * spent / only['steps']:.0f}"]
