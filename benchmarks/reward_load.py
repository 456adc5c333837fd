# SPDX-License-Identifier: Apache-2.0
"""A hundred thousand answers through a pool of two reward processes: memory, order, and the longest wait."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from benchmarks.setting import Setting
from whet.rewards.pool import RewardPool
from whet.types import Failure, Outcome, RewardItem

TITLE = "Rewards under load"
NOTE = """\
Answers of about 1,500 characters and 500 tokens, in batches of 500, of which four wait at a time, go through two reward
processes (`gsm8k` in a user's file, deadline 2 s). One answer in 1,000 raises; among the first tenth five hang and five
end their process. Memory is what is resident after so many answers. A batch may wait for several answers that hang, one
after the other; the time without any outcome is at most the deadline plus the start of a process. `python -m benchmarks
reward_load` measures it, and tests/rewards/test_steady.py has the bounds.
"""
ANSWERS, BATCH, PART, AHEAD, SECONDS, POINTS = 100_000, 500, 10, 4, 2.0, 5
WORDS = "Each of the boxes holds as many as the one before it, so the sum is what was asked for. " * 17
FUNCTION = """
import os, time
from whet.rewards.gsm8k import compute_score as gsm8k

def compute_score(solution_str, ground_truth, extra_info):
    what, number = extra_info["what"], extra_info["number"]
    if what == "raise": raise ValueError(number)
    if what == "hang": time.sleep(1000)
    if what == "exit": os._exit(7)
    return {"reward": number, "accuracy": gsm8k(solution_str, ground_truth)["reward"], "pid": os.getpid()}
"""


def run(setting: Setting) -> dict[str, Any]:
    """The numbers of `measure`."""
    return measure(ANSWERS if setting.scale.is_thorough else 20 * BATCH, setting.scratch)


def measure(answers: int, folder: Path) -> dict[str, Any]:
    """Scores so many answers.  Returns memory in MB at five points, the longest wait of a batch, and counts."""
    file = folder / "loaded_grader.py"
    file.write_text(FUNCTION)
    found: dict[str, Any] = {"trainer_mb": [], "processes_mb": [], "answers": [], "longest_seconds": 0.0}
    found["longest_pause_seconds"] = 0.0  # between two outcomes
    found |= dict.fromkeys(("raised", "hung", "ended", "wrong"), 0)
    waiting: deque[tuple[int, float, list[Future[list[Outcome]]]]] = deque()
    last = [time.monotonic()]  # when the last outcome came

    def note(_: object) -> None:
        now = time.monotonic()
        found["longest_pause_seconds"] = max(found["longest_pause_seconds"], now - last[0])
        last[0] = now

    pids: dict[int, None] = {}  # of the processes, those used last at the end
    start = time.monotonic()
    with RewardPool(f"{file}:compute_score", num_workers=2, timeout_seconds=SECONDS, correct_threshold=1.0) as pool:
        for first in range(0, answers, BATCH):
            items = [_item(number, answers) for number in range(first, first + BATCH)]
            parts = [pool.submit_batch(items[start : start + PART]) for start in range(0, BATCH, PART)]
            for each in parts:
                each.add_done_callback(note)
            waiting.append((first, time.monotonic(), parts))
            is_point = (first + BATCH) % (answers // POINTS) == 0
            while len(waiting) > AHEAD or (waiting and is_point):
                _count(*waiting.popleft(), answers, found, pids)
            if is_point:
                found["answers"].append(first + BATCH)
                found["trainer_mb"].append(_resident_mb("self"))
                alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # one that ended may not be replaced yet
                found["processes_mb"].append([_resident_mb(pid) for pid in alive[-2:]])
    return {**found, "seconds": time.monotonic() - start}


def report(results: Mapping[str, Any]) -> list[str]:
    """Memory by number of answers, and the counts."""
    found = results["reward_load"]
    lines = ["| answers scored | trainer, MB | reward processes, MB |", "|--:|--:|--:|"]
    for answers, own, others in zip(found["answers"], found["trainer_mb"], found["processes_mb"], strict=True):
        lines.append(f"| {answers:,} | {own:.1f} | {' and '.join(f'{each:.1f}' for each in others)} |")
    rate = found["answers"][-1] / found["seconds"]
    pause = found.get("longest_pause_seconds")  # an earlier result has none
    paused = "" if pause is None else f"; the longest pause between two outcomes {pause:.1f} s"
    return [
        *lines,
        "",
        f"{rate:,.0f} answers a second; the longest that a batch took is {found['longest_seconds']:.1f} s{paused}. "
        f"Failed: {found['raised']} that raised, {found['hung']} that hung, {found['ended']} that ended their "
        f"process, and no other; {found['wrong']} were lost or out of order.",
    ]


def _what(number: int, answers: int) -> str:
    """The fault of a response, if any; the ones that end processes come first. Those that end processes come first."""
    if number % 1000 == 999:
        return "raise"
    place = number % (answers // 50) if number < answers // 10 else -1
    return {3: "hang", 105: "exit"}.get(place, "")


def _item(number: int, answers: int) -> RewardItem:
    ids = tuple(range(number % 7, number % 7 + 500))
    extra = {"number": number, "what": _what(number, answers)}
    return RewardItem("load", f"{WORDS}{number} #### {number}", str(number), extra, "How many?", ids[:50], ids)


def _count(
    first: int,
    begun: float,
    pending: Sequence[Future[list[Outcome]]],
    answers: int,
    found: dict[str, Any],
    pids: dict[int, None],
) -> None:
    kinds = {"raise": ("raised", "ValueError"), "hang": ("hung", "timed out"), "exit": ("ended", "exit code 7")}
    for number, outcome in enumerate((each for part in pending for each in part.result()), start=first):
        what = _what(number, answers)
        if isinstance(outcome, Failure):
            count, said = kinds.get(what, ("wrong", ""))
            found[count if said in outcome.message else "wrong"] += 1
        elif what or outcome.reward != number or outcome.accuracy != 1.0:
            found["wrong"] += 1
        else:
            pid = int(outcome.parts["pid"])
            pids.pop(pid, None)
            pids[pid] = None
    found["longest_seconds"] = max(found["longest_seconds"], time.monotonic() - begun)


def _resident_mb(pid: int | str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
