# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from benchmarks.record import Record, speed_up


def record(*seconds: float, first: float = 9.0) -> Record:
    return Record({}, [{"seconds": first}], [{"seconds": each, "peak_bytes": 10 * each} for each in seconds])


def test_ratios_are_taken_within_a_round() -> None:
    slow, fast = record(4.0, 30.0, 6.0), record(2.0, 10.0, 1.0)
    ratio = speed_up(slow, fast)
    assert ratio.by_round == [2.0, 3.0, 6.0]
    assert str(ratio) == "3.00x (2.00 to 6.00)"
    assert str(speed_up(record(3.0), record(2.0))) == "1.50x"


def test_the_first_turn_is_shown_apart() -> None:
    assert record(4.0, 30.0, 6.0).seconds == 6.0
    assert record(4.0, 30.0, 6.0).start_seconds == 3.0
    assert record(4.0, 30.0, 6.0, first=5.0).start_seconds == 0.0
    assert record(4.0, 30.0, 6.0).peak_bytes == 300


def test_what_no_phase_claims_is_the_rest() -> None:
    turns = [
        {"seconds": 10.0, "phases": {"rollout": 6.0, "update": 3.0}},
        {"seconds": 12.0, "phases": {"rollout": 7.0, "update": 1.0}},
        {"seconds": 14.0, "phases": {"rollout": 9.0, "update": 3.0}},
    ]
    assert Record({}, [], turns).phases() == {"rollout": 7.0, "update": 3.0, "rest": 2.0}
