# SPDX-License-Identifier: Apache-2.0
"""How long the RL stage of `whet quickstart` and TRL take from the same SFT model to the same held-out accuracy."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.competitor import Entry, take_turns
from benchmarks.quickstart import prepare
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting

TITLE = "The quickstart against TRL"
NOTE = """\
Time of training; the clock stops while the held-out problems are answered greedily, every 10 steps. whet trains by
its recipe, which has the Muon optimizer. TRL trains on the same problems with 256 samples a step and AdamW, its
default, with the best learning rate and dtype tried.
"""
log = logging.getLogger(__name__)
EVALUATE_EVERY = 10  # steps
TRL_MAX_STEPS = 1500


@dataclass(frozen=True)
class Choice:
    """The options that matter most for TRL's speed and learning, among the ones that a user would try."""

    lr: float
    bf16: bool = True
    prompts: int = 32
    n: int = 8

    def __str__(self) -> str:
        return f"{self.prompts} x {self.n} samples, learning rate {self.lr:g}, {'bfloat16' if self.bf16 else 'float32'}"


LEARNING_RATES = (1e-3, 5e-4, 2e-3)


def run(setting: Setting) -> dict[str, Any]:
    """TRL's best choice with the first seed, then both in turn with each seed, from the SFT model of that seed."""
    folders = {seed: prepare(setting, seed) for seed in setting.scale.quickstart_seeds}
    trials: dict[Choice, Record] = {}
    if setting.trl_python is not None and setting.scale.is_thorough:
        trials = _trials(setting, *next(iter(folders.items())))
    best = min(trials, key=lambda choice: _seconds(trials[choice]), default=Choice(LEARNING_RATES[0]))
    races = {}
    for seed, folder in folders.items():
        entries = {} if setting.trl_python is None else {"TRL": _trl(setting, seed, folder, best)}
        entries["whet"] = setting.whet("whet_race", **_told(setting, seed, folder))
        records = take_turns(entries, rounds=1, warm_up=0, scratch=setting.scratch)
        races[str(seed)] = {name: asdict(record) for name, record in records.items()}
    return {
        "target": setting.scale.quickstart_target,
        "choice": str(best),
        "trials": {str(choice): asdict(record) for choice, record in trials.items()},
        "races": races,
    }


def _trials(setting: Setting, seed: int, folder: Path) -> dict[Choice, Record]:
    """TRL's run with each dtype, and with each learning rate in the faster of them."""
    trials: dict[Choice, Record] = {}

    def attempt(choice: Choice) -> None:
        log.info("TRL, %s", choice)
        entry = _trl(setting, seed, folder, choice)
        trials[choice] = take_turns({"TRL": entry}, rounds=1, warm_up=0, scratch=setting.scratch)["TRL"]

    for bf16 in (True, False):
        attempt(Choice(LEARNING_RATES[0], bf16=bf16))
    faster = min(trials, key=lambda choice: _seconds(trials[choice]))
    for lr in LEARNING_RATES[1:]:
        attempt(replace(faster, lr=lr))
    return trials


def _trl(setting: Setting, seed: int, folder: Path, choice: Choice) -> Entry:
    return setting.trl("trl_race", **_told(setting, seed, folder), **asdict(choice))


def _told(setting: Setting, seed: int, folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder / "sft_model"),
        "train_file": str(folder / "train.jsonl"),
        "held_out_file": str(folder / "held_out.jsonl"),
        "run_dir": tempfile.mkdtemp(dir=setting.scratch),
        "seed": seed,
        "target": setting.scale.quickstart_target,
        "evaluate_every": EVALUATE_EVERY,
        "max_steps": TRL_MAX_STEPS,
    }


def _seconds(record: Record) -> float:
    """To the target; one that never came there counts as the slowest."""
    return record.seconds if record.rounds[0]["reached"] else float("inf")


def report(results: Mapping[str, Any]) -> list[str]:
    """The race, and the options tried with TRL."""
    section = results["quickstart_race"]
    lines = [
        f"From the SFT model to {section['target']:g} held-out accuracy:",
        "",
        "| | TRL | steps | whet | steps | whet against TRL |",
        "|---|---|---|---|---|---|",
    ]
    for seed, raced in section["races"].items():
        records = {name: Record(**record) for name, record in raced.items()}
        cells = [cell for name in ("TRL", "whet") for cell in _cells(records.get(name))]
        ratio = str(speed_up(records["TRL"], records["whet"])) if "TRL" in records else ""
        lines.append(f"| seed {seed} | {' | '.join(cells)} | {ratio} |")
    if section["trials"]:
        lines += ["", f"TRL ran with {section['choice']}, the best of:", ""]
        lines += ["| tried with seed 0 | seconds to the target | steps |", "|---|---|---|"]
        lines += [
            f"| {choice} | {' | '.join(_cells(Record(**tried)))} |" for choice, tried in section["trials"].items()
        ]
    return lines


def _cells(record: Record | None) -> list[str]:
    if record is None:
        return ["", ""]
    only = record.rounds[0]
    reached = "" if only["reached"] else f" (only {only['accuracies'][-1][2]:.3f})"
    return [f"{record.seconds:.1f} s{reached}", str(only["steps"])]
