# SPDX-License-Identifier: Apache-2.0
"""whet's own loop, one step a turn, with answers of given lengths."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.workers.turns import Turns
from benchmarks.workload import score
from whet.config import TrainConfig, load_config
from whet.models.encoders.base import PREPARED
from whet.rollout.protocol import Event, Request, RolloutEngine
from whet.tracking.tracker import read_records
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit
from whet.trainers.run import Run

PHASES = ("rollout", "reward", "log_probs", "advantage", "update", "sync")


def main() -> None:
    """Trains until there are no more turns."""
    turns = Turns()
    settings = turns.settings
    config = load_config(TrainConfig, None, overrides(settings), given={"reward", "data"}).config
    rows: list[dict[str, Any]] = [{"prompt": text, "answer": ""} for text in settings["texts"]]
    for row, image in zip(rows, settings.get("images", []), strict=False):
        row.update(prompt=f"<image>{row['prompt']}", images=[image])
    run = build(config, build_scorer(config.reward, compute_score), rows)
    waiting = Waiting()
    run.rollouts.driver.engine = WithLengths(run.rollouts.driver.engine, settings["lengths"])

    def end_turn(run: Run, step: int, numbers: Mapping[str, float]) -> None:
        turns.done(
            tokens=numbers["response_length/mean"] * len(settings["lengths"]),
            grad_norm=numbers["actor/grad_norm"],
            phases=phases(run.run_dir / "timings.jsonl"),
            waited_seconds=waiting.take(),
        )
        turns.wait()

    run.callbacks = [end_turn]
    turns.ready()
    turns.wait()
    fit(run)


def overrides(settings: Mapping[str, Any]) -> dict[str, Any]:
    """whet's defaults, except for settings of both sides."""
    return {
        "model.path": settings["model"],
        "model.dtype": settings.get("dtype", "bfloat16"),
        "data.apply_chat_template": "images" in settings,
        "data.shuffle": False,
        "data.train_batch_size": settings["prompts"],
        "data.max_response_length": max(settings["lengths"]),
        "rollout.n": settings["n"],
        "rollout.engine.options.compile": settings["compile"],
        "reward.num_workers": 0,
        "actor.optim.lr": settings["lr"],
        "trainer.total_steps": 10**6,
        "trainer.val_freq": -1,
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
        "trainer.run_dir": settings["run_dir"],
        **settings.get("changes", {}),
    }


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The reward that TRL is given too."""
    return score(solution_str)


class Waiting:
    """Seconds for which sampling and training wait for the pixel values of images."""

    def __init__(self) -> None:
        self._seconds = 0.0
        get = PREPARED.get

        def measured(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return get(*args)
            finally:
                self._seconds += time.perf_counter() - start

        PREPARED.get = measured  # type: ignore[method-assign]

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class WithLengths:
    """An engine whose responses have exactly these lengths, in the order of the requests, again and again."""

    def __init__(self, engine: RolloutEngine, lengths: Sequence[int]) -> None:
        self._engine, self._lengths = engine, cycle(lengths)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> bool:
        params = replace(request.params, max_new_tokens=next(self._lengths), stop_token_ids=())
        return self._engine.submit(replace(request, params=params))

    def poll(self, timeout_seconds: float) -> list[Event]:
        return self._engine.poll(timeout_seconds)


def phases(timings: Path) -> dict[str, float]:
    """Seconds of each phase of the last step."""
    last = read_records(timings)[-1]
    return {name: last[f"time/{name}"] for name in PHASES if f"time/{name}" in last}


if __name__ == "__main__":
    main()
