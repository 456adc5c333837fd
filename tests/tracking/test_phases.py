# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from whet.metrics import Metrics
from whet.phases import watching
from whet.tracking.profile import PhaseClock


def test_each_second_counts_once_in_the_innermost_phase() -> None:
    """Clock readings: made 0; step from 1, rollout 2 to 5, step's end 6; table 10."""
    times = iter([0.0, 1.0, 2.0, 5.0, 6.0, 10.0])
    clock = PhaseClock(lambda: next(times))
    with clock.phase("time/step"), clock.phase("time/rollout"):
        pass
    table = clock.table()
    assert dict(clock.seconds) == {"between steps": 5.0, "rest of the steps": 2.0, "rollout": 3.0}
    assert table.splitlines()[1:] == [
        "between steps            5.00 s  50.0%",
        "rollout                  3.00 s  30.0%",
        "rest of the steps        2.00 s  20.0%",
        "all                     10.00 s  100.0%",
    ]


def test_a_phase_that_raises_ends() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0])
    clock = PhaseClock(lambda: next(times))
    metrics = Metrics()
    try:
        with watching(clock.phase), metrics.time("time/update"):
            raise KeyError
    except KeyError:
        pass
    with metrics.time("time/update"):  # nobody watches any more
        pass
    clock.table()
    assert dict(clock.seconds) == {"between steps": 5.0, "update": 2.0}


def test_the_rollout_of_a_validation_is_validation() -> None:
    """Also where it is left by Ctrl-C: made 0; validation from 1, its rollout 2 to 5, end 6; a rollout 6 to 8."""
    times = iter([0.0, 1.0, 2.0, 5.0, 6.0, 6.0, 8.0, 8.0])
    clock = PhaseClock(lambda: next(times))
    try:
        with clock.phase("time/validation"), clock.phase("time/rollout"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    with clock.phase("time/rollout"):
        pass
    clock.table()
    assert dict(clock.seconds) == {"between steps": 1.0, "validation": 5.0, "rollout": 2.0}
