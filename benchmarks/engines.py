# SPDX-License-Identifier: Apache-2.0
"""Useful tokens a second, and the time of a weight update: the native engine, vLLM, and `transformers.generate`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.competitor import take_turns
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers, make_workload
from whet.errors import ConfigError
from whet.plugins.inference.servers.environment import find_environment
from whet.plugins.inference.vllm.engine import PACKAGE

TITLE = "Rollout engines"
NOTE = """\
The same requests, with log-probs from whet's two engines. vLLM runs in a server of its own, which whet starts and
calls. A weight update sends all weights to an engine that has no requests.
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """A model of random weights, and answers to sample with it."""

    size: str  # as `whet init-model` knows it
    num_layers: int
    answers: Answers
    rounds: int
    warm_up: int = 1


FULL = {
    "3.3 M parameters, ragged": Case("tiny", 4, Answers(prompts=16, n=8, shortest=16, longest=512), 3),
    "3.3 M parameters, equal": Case("tiny", 4, Answers(prompts=8, n=8, shortest=128, longest=128), 3),
    "352 M parameters, ragged": Case("base", 28, Answers(prompts=8, n=4, shortest=4, longest=64), 2),
    "352 M parameters, equal": Case("base", 28, Answers(prompts=8, n=4, shortest=32, longest=32), 2),
}
QUICK = {"tiny": Case("nano", 1, Answers(prompts=2, n=2, shortest=2, longest=8), 1)}


def run(setting: Setting) -> dict[str, Any]:
    """All engines in turns, case by case; vLLM where its environment is there."""
    engines = ["transformers", "native", "vllm"]
    try:
        find_environment(PACKAGE, None)
    except ConfigError as error:
        log.warning("vLLM takes no part: %s", error)
        engines.remove("vllm")
    found = {}
    for number, (name, case) in enumerate((FULL if setting.scale.is_thorough else QUICK).items()):
        folder, answers = setting.scratch / f"engines_{number}", case.answers
        workload = make_workload(
            folder, size=case.size, num_layers=case.num_layers, vocab_size=512, prompts=answers.prompts
        )
        requests = workload.requests(answers)
        entries = {
            engine: setting.whet("engines", model=str(workload.model), engine=engine, requests=requests)
            for engine in engines
        }
        log.info("%s", name)
        records = take_turns(entries, rounds=case.rounds, warm_up=case.warm_up, scratch=folder)
        found[name] = {
            "answers": asdict(answers),
            "records": {engine: asdict(record) for engine, record in records.items()},
        }
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """One table."""
    lines = ["| | useful tokens/s | seconds | against generate | a weight update |", "|---|---|---|---|---|"]
    for name, section in results["engines"].items():
        answers = Answers(**section["answers"])
        records = {engine: Record(**record) for engine, record in section["records"].items()}
        lines.append(
            f"| **{name}**: {len(answers.lengths)} answers of {min(answers.lengths)} to {answers.longest} | | | | |"
        )
        for engine, record in records.items():
            against = "" if engine == "transformers" else str(speed_up(records["transformers"], record))
            loads = [turn["load_seconds"] for turn in record.rounds if turn["load_seconds"] is not None]
            load = f"{1000 * median(loads):,.0f} ms" if loads else ""
            tokens = sum(answers.lengths) / record.seconds
            lines.append(f"| {engine} | {tokens:,.0f} | {record.seconds:.2f} | {against} | {load} |")
    return lines
