# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping

import pytest

from whet.tracking.tracker import NO_TABLES, Tables, Tracker, Trackers


class Recorder:
    def __init__(self, events: list[str], name: str, fails: bool = False) -> None:
        self.events, self.name, self.fails = events, name, fails

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        self.events.append(" ".join([f"{self.name} {step} {dict(metrics)}", *map(str, tables.items())]))

    def close(self, failed: bool = False) -> None:
        self.events.append(f"{self.name} closed" + " after a failure" * failed)
        if self.fails:
            raise OSError(f"{self.name} cannot write")


def test_every_tracker_gets_every_step_in_order_and_is_closed() -> None:
    events: list[str] = []
    first: Tracker = Recorder(events, "first")
    trackers = Trackers([first, Recorder(events, "second")])
    trackers.log(3, {"x": 1.0})
    trackers.close()
    assert events == ["first 3 {'x': 1.0}", "second 3 {'x': 1.0}", "first closed", "second closed"]


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open() -> None:
    events: list[str] = []
    trackers = Trackers([Recorder(events, "first", fails=True), Recorder(events, "second")])
    with pytest.raises(OSError, match="first cannot write"):
        trackers.close()
    assert events == ["first closed", "second closed"]


def test_trackers_are_told_that_the_run_failed() -> None:
    events: list[str] = []
    Trackers([Recorder(events, "only")]).close(failed=True)
    assert events == ["only closed after a failure"]


def test_a_table_goes_out_with_its_step_and_through_trackers_of_trackers() -> None:
    events: list[str] = []
    trackers = Trackers([Trackers([Recorder(events, "inner")]), Recorder(events, "outer")])
    trackers.add_table(1, "generations/rollout", [{"prompt": "1+1=", "reward": 1.0}])
    trackers.add_table(1, "generations/validation", [])  # nothing to show
    trackers.add_table(3, "generations/rollout", [{"prompt": "1+2=", "reward": 0.0}])  # sampled before step 1 is logged
    trackers.log(1, {"x": 1.0})
    trackers.log(2, {"x": 2.0})
    table = "('generations/rollout', [{'prompt': '1+1=', 'reward': 1.0}])"
    assert events == [
        f"inner 1 {{'x': 1.0}} {table}",
        f"outer 1 {{'x': 1.0}} {table}",
        "inner 2 {'x': 2.0}",
        "outer 2 {'x': 2.0}",
    ]
