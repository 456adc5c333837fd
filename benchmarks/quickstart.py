# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart`, and how long its RL stage and TRL take from the same SFT model to the same held-out accuracy."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.competitor import Entry, take_turns
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting

TITLE = "The quickstart"
NOTE = """\
Training by a clock that stands still while the held-out problems are answered greedily, every 10 steps. whet trains by
its recipe, which has the Muon optimizer. TRL trains on the same problems with 256 samples a step and AdamW, its
default, with the best learning rate and dtype tried.
"""
log = logging.getLogger(__name__)
EVALUATE_EVERY = 10  # steps
TRL_MAX_STEPS = 1500


@dataclass(frozen=True)
class Choice:
    """What TRL's speed and learning depend on most, of what a user would try."""

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
    summaries = [folder / "summary.json" for folder in folders.values()]
    races = {}
    for seed, folder in folders.items():
        entries = {} if setting.trl_python is None else {"TRL": _trl(setting, seed, folder, best)}
        entries["whet"] = setting.whet("whet_race", **_told(setting, seed, folder))
        records = take_turns(entries, rounds=1, warm_up=0, scratch=setting.scratch)
        races[str(seed)] = {name: asdict(record) for name, record in records.items()}
    return {
        "target": setting.scale.quickstart_target,
        "summaries": [json.loads(path.read_text()) for path in summaries if path.exists()],
        "choice": str(best),
        "trials": {str(choice): asdict(record) for choice, record in trials.items()},
        "races": races,
    }


def prepare(setting: Setting, seed: int) -> Path:
    """A folder with what `whet quickstart` writes; at less than full size without any training. Made once."""
    folder = setting.scratch / f"quickstart_{seed}"
    if folder.exists():
        return folder
    if setting.scale.is_thorough:
        log.info("whet quickstart, seed %d", seed)
        whet = str(Path(sys.executable).parent / "whet")
        subprocess.run(
            [whet, "quickstart", "--run-dir", str(folder), "--seed", str(seed)], check=True, capture_output=True
        )
        return folder
    from whet.models.init import init_model
    from whet.trainers.quickstart import write_problems

    write_problems(folder, seed)
    init_model(folder / "sft_model", "qwen3", "nano", alphabet="0123456789+=", num_layers=1)
    return folder


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
    """The quickstart's own figures, the race, and what TRL was tried with."""
    section = results["quickstart"]
    lines = []
    if section["summaries"]:
        lines += [
            "| `whet quickstart` | accuracy after SFT | after RL | in all | to the first RL step |",
            "|---|---|---|---|---|",
            *(
                f"| seed {each['seed']} | {each['sft_accuracy']:.3f} | {each['rl_accuracy']:.3f} "
                f"| {each['seconds_total']:.0f} s | {each['seconds_to_first_rl_step']:.1f} s |"
                for each in section["summaries"]
            ),
            "",
        ]
    lines += [
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
