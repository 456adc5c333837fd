# SPDX-License-Identifier: Apache-2.0
"""Processes that take turns, so that the compared programs run on one machine in one state: A B C A B C ..."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Record

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 1800.0  # of one turn; the first may compile


@dataclass(frozen=True)
class Entry:
    """Who takes part: a module of `benchmarks.workers`, the interpreter that runs it, and its settings."""

    python: Path
    module: str
    settings: Mapping[str, Any]


class Competitor:
    """A worker process and its pipe. Its standard error is kept in `scratch`, and shown where it fails."""

    def __init__(self, name: str, entry: Entry, scratch: Path) -> None:
        self.name = name
        self._log = scratch / f"{name.replace(' ', '_')}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(entry.python), "-m", f"benchmarks.workers.{entry.module}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **_environment(scratch)},
                text=True,
            )
        self._say(entry.settings)

    def __enter__(self) -> Competitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ready(self) -> dict[str, Any]:
        """Waits until the competitor has loaded, and returns its description. To be called once, first."""
        return self._hear()

    def turn(self) -> dict[str, Any]:
        """Lets it compute once, and returns its numbers."""
        self._say({})
        return self._hear()

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # one that has ended says nothing back: `_hear` shows why
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = threading.Timer(DEADLINE_SECONDS, self._process.kill)
        deadline.start()
        line = self._process.stdout.readline()
        deadline.cancel()
        if not line:
            said = "\n".join(self._log.read_text().splitlines()[-20:])
            raise RuntimeError(f"{self.name} ended in the middle (or took over {DEADLINE_SECONDS:.0f} s):\n{said}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def take_turns(entries: Mapping[str, Entry], *, rounds: int, warm_up: int, scratch: Path) -> dict[str, Record]:
    """Each competitor in turn, `warm_up + rounds` times over; by name."""
    with ExitStack() as running:
        started = {name: running.enter_context(Competitor(name, entry, scratch)) for name, entry in entries.items()}
        records = {name: Record(competitor.ready(), [], []) for name, competitor in started.items()}
        for number in range(warm_up + rounds):
            for name, competitor in started.items():
                turn = competitor.turn()
                (records[name].warm_up if number < warm_up else records[name].rounds).append(turn)
                log.info("%s, round %d of %d: %.3f s", name, number - warm_up + 1, rounds, turn["seconds"])
    return records


def _environment(scratch: Path) -> dict[str, str]:
    threads = str(os.cpu_count())
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),  # compiled here and now, not found from an earlier day
    }
