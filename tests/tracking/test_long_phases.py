# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import time

from rich.console import Console

from whet.metrics import Metrics
from whet.phases import counted, phase, watching
from whet.tracking.console import LONG_SECONDS, REFRESH_SECONDS, LongPhases


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def shown_on(terminal: bool) -> tuple[LongPhases, Clock, io.StringIO]:
    written, clock = io.StringIO(), Clock()
    console = Console(file=written, force_terminal=terminal, color_system=None, highlight=False, width=100)
    return LongPhases(console, clock), clock, written


def test_off_the_terminal_a_long_phase_is_a_line_now_and_then_and_one_at_its_end() -> None:
    shown, clock, written = shown_on(terminal=False)
    with watching(shown.phase, shown.count), Metrics().time("time/validation"), phase("rollout"):
        for seconds in range(1, 45):
            clock.now += 1.0
            counted(seconds, 44)
            shown.refresh()
    assert written.getvalue().splitlines() == [
        "validation, rollout: 10/44, 0:10, about 0:34 left",
        "validation, rollout: 20/44, 0:20, about 0:24 left",
        "validation, rollout: 40/44, 0:40, about 0:04 left",
        "validation, rollout: 44/44, 0:44",
    ]


def test_what_is_short_is_not_shown_and_the_phases_of_a_step_are_only_after_a_minute() -> None:
    shown, clock, written = shown_on(terminal=False)
    with watching(shown.phase, shown.count):
        with phase("reading data"):
            clock.now += 1.0
            counted(1, 1)
            shown.refresh()
        with phase("time/step"), phase("time/rollout"):
            clock.now += 59.0
            counted(1, 3)
            shown.refresh()
            assert written.getvalue() == ""
            clock.now += 1.0
            shown.refresh()
    assert written.getvalue() == "rollout: 1/3, 1:00, about 2:00 left\n"


def test_counts_of_an_outer_phase_go_before_those_of_an_inner_one_and_notes_are_shown() -> None:
    shown, clock, written = shown_on(terminal=False)
    with watching(shown.phase, shown.count), phase("answers"):
        counted(128, 1319, "12 tokens/s")
        clock.now += 12.0
        with phase("sampling"):
            counted(3, 128)
            shown.refresh()
    assert written.getvalue().splitlines()[0] == "answers: 128/1319, 0:12, about 1:52 left, 12 tokens/s"


def test_on_a_terminal_a_bar_is_drawn_after_two_seconds_and_goes_away_with_its_phase() -> None:
    shown, clock, written = shown_on(terminal=True)
    with watching(shown.phase, shown.count), phase("time/step"):
        with phase("time/rollout"):
            clock.now += 1.9
            shown.refresh()
            assert written.getvalue() == ""
            counted(5, 20)
            clock.now += 0.1
            shown.refresh()
            assert "rollout" in written.getvalue() and "5/20, 0:02, about 0:06 left" in written.getvalue()
        assert written.getvalue().rstrip().endswith("\x1b[2K")  # the bar's line is cleared
        drawn = written.getvalue()
        clock.now += 60.0
        shown.refresh()  # between phases of a step there is nothing to show
    assert written.getvalue() == drawn


def test_a_thread_looks_by_itself() -> None:
    shown, clock, written = shown_on(terminal=False)
    with shown.watch(), phase("loading models"):
        clock.now += 20.0
        until = time.monotonic() + 30.0
        while not written.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert written.getvalue() == "loading models: 0:20\n"
    assert REFRESH_SECONDS < LONG_SECONDS


def test_a_count_that_begins_again_is_timed_from_there() -> None:
    shown, clock, written = shown_on(terminal=False)
    with watching(shown.phase, shown.count), phase("update"):
        for done in (1, 2, 3, 4):
            clock.now += 10.0
            counted(done, 4)
        clock.now += 5.0  # the next mini-batch, which is quicker
        counted(1, 4)
        clock.now += 5.0
        counted(2, 4, "80 tokens/s")
        shown.refresh()
    assert written.getvalue().splitlines()[0] == "update: 2/4, 0:50, about 0:05 left, 80 tokens/s"


def test_a_count_of_a_step_itself_is_not_shown() -> None:
    """A forward pass between two phases of a step, such as for `trainer.log_tokens`, shows no count."""
    shown, clock, written = shown_on(terminal=False)
    with watching(shown.phase, shown.count), phase("time/step"):
        clock.now += 100.0
        counted(1, 1)
        shown.refresh()
    assert written.getvalue() == ""
