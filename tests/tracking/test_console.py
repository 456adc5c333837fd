# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from whet.tracking.console import HEADER_EVERY, ConsoleTracker, clock_time

STEP = {
    "critic/score/mean": 0.51234,
    "response_length/mean": 12.34,
    "actor/ppo_kl": 0.000123,
    "actor/grad_norm": 1.5,
    "perf/throughput": 12345.6,
}


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=terminal, color_system=None, highlight=False, width=100), written


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_off_the_terminal_a_step_is_one_plain_line() -> None:
    output, written = console(terminal=False)
    clock = Clock()
    tracker = ConsoleTracker(10, console=output, clock=clock)
    clock.now += 20.0
    tracker.log(2, {**STEP, "actor/lr": 1e-6})
    assert written.getvalue() == (
        "step 2/10  reward 0.512  length 12.3  KL 1.23e-04  grad norm 1.500  tokens/s 12,346  left 1:20\n"
    )


def test_memory_is_that_of_all_processes() -> None:
    output, written = console(terminal=False)
    memory = {"system/driver/memory_gib": 0.5, "system/reward/memory_gib": 0.25, "system/driver/cpu_cores": 1.0}
    tracker = ConsoleTracker(10, console=output)
    tracker.log(1, {"critic/score/mean": 0.5, **memory})
    tracker.log(2, {**memory, "system/main_0/accelerator_gib": 8.0, "system/main_1/accelerator_gib": 7.5})
    first, second = written.getvalue().splitlines()
    assert "  GiB 0.75  cores 1.0  left" in first and "  GiB 0.75  cores 1.0  GPU GiB 15.50  left" in second


def test_cores_are_the_sum_and_the_use_of_accelerators_is_the_mean_where_they_are_measured() -> None:
    output, written = console(terminal=False)
    cores = {"system/driver/cpu_cores": 1.25, "system/reward/cpu_cores": 0.5}
    tracker = ConsoleTracker(10, console=output)
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.log(2, {"critic/score/mean": 0.5, **cores})
    use = {"system/main_0/accelerator_use": 0.9, "system/main_1/accelerator_use": 0.7}
    tracker.log(3, {"critic/score/mean": 0.5, **cores, **use})
    first, second, third = written.getvalue().splitlines()
    assert "cores" not in first and second.endswith("  cores 1.8  left 0:00") and "GPU use" not in second
    assert third.endswith("  cores 1.8  GPU use 80%  left 0:00")  # a sum would be 160%


def test_the_line_of_an_asynchronous_run_on_accelerators_fits_120_columns() -> None:
    output, written = console(terminal=True)
    use = {"memory_gib": 1234.5, "cpu_cores": 95.96, "accelerator_gib": 1128.25, "accelerator_use": 1.0}
    numbers = {**STEP, "staleness/mean": 12.5, "perf/mfu": 1.0, **{f"system/main_0/{k}": v for k, v in use.items()}}
    ConsoleTracker(9999, console=output).log(999, numbers)
    header, line = written.getvalue().splitlines()
    assert header.endswith("  GPU use      left") and len(header) == len(line) == 118
    assert line.split()[7:] == ["100.0%", "1234.50", "96.0", "1128.25", "100%", "0:00"]


def test_the_time_left_is_what_the_steps_to_come_take_at_the_pace_so_far() -> None:
    output, written = console(terminal=False)
    clock = Clock()
    tracker = ConsoleTracker(50, first_step=40, console=output, clock=clock)  # resumed at 40
    clock.now += 5.0
    tracker.log(41, STEP)
    clock.now += 11.0  # 16 s for 2 steps, 8 to go
    tracker.log(42, STEP)
    assert re.findall(r"left (\S+)", written.getvalue()) == ["0:45", "1:04"]


def test_on_a_terminal_lines_stand_in_columns_under_a_header() -> None:
    output, written = console(terminal=True)
    tracker = ConsoleTracker(100, console=output)
    for step in range(1, HEADER_EVERY + 2):
        tracker.log(step, STEP)
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    headers = [i for i, line in enumerate(lines) if "grad norm" in line]
    assert headers == [0, HEADER_EVERY + 1]
    assert lines[1].split()[:6] == ["1/100", "0.512", "12.3", "1.23e-04", "1.500", "12,346"]
    for title, cell in (("reward", "0.512"), ("grad norm", "1.500"), ("tokens/s", "12,346")):
        assert lines[0].index(title) + len(title) == lines[1].index(cell) + len(cell)  # aligned on the right


def test_the_kl_that_is_trained_against_is_shown_before_that_of_the_update() -> None:
    output, written = console(terminal=False)
    ConsoleTracker(10, console=output).log(1, {**STEP, "actor/kl_loss": 0.5})
    assert "KL 5.00e-01" in written.getvalue()


def test_a_column_is_shown_from_when_it_says_something() -> None:
    """On-policy the KL of the update is 0; an accuracy that is the reward says nothing new."""
    output, written = console(terminal=False)
    tracker = ConsoleTracker(10, console=output)
    tracker.log(1, {**STEP, "actor/ppo_kl": 0.0, "reward/accuracy": STEP["critic/score/mean"]})
    tracker.log(2, {**STEP, "actor/ppo_kl": 1e-3, "reward/accuracy": 0.25})
    tracker.log(3, {**STEP, "actor/ppo_kl": 0.0, "reward/accuracy": STEP["critic/score/mean"]})
    first, second, third = written.getvalue().splitlines()
    assert "KL" not in first and "accuracy" not in first
    assert "accuracy 0.250" in second and "KL 1.00e-03" in second
    assert "accuracy 0.512" in third and "KL 0.00e+00" in third


def test_the_reward_is_that_of_all_answers_and_beside_it_stands_that_of_those_that_a_filter_kept() -> None:
    output, written = console(terminal=True)
    tracker = ConsoleTracker(10, console=output)
    sampled = {"filter/sampled_score": 0.9, "filter/sampled_accuracy": 0.9, "reward/accuracy": 0.51234}
    tracker.log(1, STEP)
    tracker.log(2, {**STEP, **sampled})
    lines = [line.split() for line in written.getvalue().splitlines()]
    assert [line[:3] for line in lines] == [
        ["step", "reward", "length"],
        ["1/10", "0.512", "12.3"],
        ["step", "reward", "kept"],  # a new header with the new column
        ["2/10", "0.900", "0.512"],
        ["(kept:", "the", "mean"],
    ]
    tracker.log(3, {**STEP, **sampled, "val/reward_gap": 0.1})
    tracker.log(4, {**STEP, **sampled, "val/reward_gap": 0.2})
    explained = [line.split(":")[0] for line in written.getvalue().splitlines() if line.startswith("(")]
    assert explained == ["(kept", "(reward_gap"]  # each once


def test_what_is_missing_leaves_no_gap_and_validation_has_its_own_line() -> None:
    output, written = console(terminal=False)
    tracker = ConsoleTracker(10, console=output)
    tracker.log(0, {"val/gsm8k/accuracy": 0.25})
    tracker.log(1, {"critic/score/mean": 0.5, "val/gsm8k/accuracy": 0.75})
    lines = written.getvalue().splitlines()
    assert lines[0] == "step 0 validation  gsm8k/accuracy 0.25"
    assert lines[1].startswith("step 1/10  reward 0.500  left ")
    assert lines[2] == "step 1 validation  gsm8k/accuracy 0.75"


def test_a_validation_says_nothing_twice() -> None:
    output, written = console(terminal=False)
    tracker = ConsoleTracker(10, console=output)
    one = {"val/accuracy": 0.5, "val/reward": 0.5, "val/a/accuracy": 0.5, "val/a/reward": 0.5, "val/failures": 0.0}
    tracker.log(1, {**one, "val/response_length": 3.0})
    tracker.log(2, {**one, "val/reward": 0.7, "val/failures": 2.0})
    tracker.log(3, {**one, "val/b/accuracy": 0.5, "val/b/reward": 0.6})
    assert written.getvalue().splitlines() == [
        "step 1 validation  accuracy 0.5  response_length 3",
        "step 2 validation  accuracy 0.5  reward 0.7  failures 2",
        "step 3 validation  accuracy 0.5  a/accuracy 0.5  b/accuracy 0.5  b/reward 0.6",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3661, "1:01:01"), (90000, "25:00:00")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_the_time_left_is_that_to_the_likely_end_and_behind_it_to_the_last_step() -> None:
    output, written = console(terminal=False)
    clock = Clock()
    tracker = ConsoleTracker(1000, likely_steps=370, console=output, clock=clock)
    for step in (100, 369, 370, 400):
        clock.now = 100.0 + step  # a second a step
        tracker.log(step, STEP)
    left = [line.rpartition("left ")[2] for line in written.getvalue().splitlines()]
    assert left == ["4:30", "0:01", "10:30", "10:00"]
