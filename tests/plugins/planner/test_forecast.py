# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from whet.config import TrainConfig
from whet.planning.doctor import Finding
from whet.planning.planner import planner
from whet.plugins.planner import forecast


@dataclass
class Forecast:
    """The parts of a forecast that `whet doctor` reads, of a run of 10 steps that fits."""

    step_seconds: float | None
    rooms: tuple[()] = ()
    disk_bytes: int = 2**30
    free_disk_bytes: int = 2**34
    fits_on_disk: bool = True
    run_dir: Path = Path("run")

    @property
    def seconds(self) -> float | None:
        return None if self.step_seconds is None else 10 * self.step_seconds


@pytest.mark.parametrize(
    ("seconds", "status", "found"),
    [
        (300.0, "ok", "about 5.0 min a step, 50.0 min in all"),
        (400.0, "note", "about 6.7 min a step, 66.7 min in all"),
        (4_000.0, "problem", "about 66.7 min a step, 11.1 h in all"),
        (125 * 3600.0, "problem", "about 5.2 days a step, 52.1 days in all"),
        (None, "ok", "unknown: the speed of accelerators is not measured"),
    ],
)
def test_a_slow_step_is_a_note_and_a_hopeless_one_a_problem(
    seconds: float | None,
    status: str,
    found: str,
    train_config: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast, "forecast_of", lambda config: Forecast(seconds))
    *_, disk, time = planner().findings(train_config({}))
    assert (disk.what, disk.status) == ("disk", "ok")
    assert isinstance(time, Finding) and (time.what, time.status, time.found) == ("time", status, found)
    assert bool(time.advice) == (status != "ok")
