# SPDX-License-Identifier: Apache-2.0
"""The times of the page of `whet view` with 100,000 trajectories: answers of its server, and display in Chromium."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

from benchmarks.setting import Setting
from whet.plugins.viewer.server import open_server

TITLE = "The page of a run"
NOTE = """\
`whet view` over a run of 1,000 steps with 40 metrics and 100,000 trajectories of about a kilobyte, 1,000 in each of
100 files. "First" is a new server's first answer, which reads files; "again" is the median of the next ones. A query
over all steps is answered in parts while files are read: the longest part is what a reader waits for.
Chromium's times are from the call until the page shows the result.
"""
FILES, ROWS, STEPS, METRICS = 100, 1000, 1000, 40
BOUND_SECONDS = 1.0  # of every answer


def run(setting: Setting) -> dict[str, Any]:
    """Seconds by request: the first answer, and the next ones."""
    files, rows = (FILES, ROWS) if setting.scale.is_thorough else (3, 50)
    folder = setting.scratch / "view" / "run"
    size = write_run(folder, files, rows)
    server = open_server(folder.parent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = f"http://127.0.0.1:{server.server_address[1]}"
    asked = {
        "the runs": ("runs", {}),
        "eight curves": ("curves", {"names": ",".join(f"area/metric_{i}" for i in range(8))}),
        "a step's list": ("trajectories", {"step": files}),
        "a trajectory with its tokens": ("trajectory", {"kind": "step", "step": files, "line": rows - 1}),
        "all steps": ("trajectories", {}),
        "all steps, the middle of the list": ("trajectories", {"offset": files * rows // 2}),
        "all steps, sorted": ("trajectories", {"sort": "worst"}),
        "all steps, wrong ones": ("trajectories", {"show": "wrong"}),
        "all steps, a text": ("trajectories", {"text": "needle"}),
    }
    seconds = {}
    for name, (what, query) in asked.items():
        url = f"{own}/api/{what}?{urlencode({'run': 'run', **query})}"
        seconds[name] = [answer(url), [answer(url)[0] for _ in range(5)]]
    found = {"mib": size / 2**20, "trajectories": files * rows, "seconds": seconds, "browser": browse(own, files)}
    server.shutdown()
    server.server_close()
    return found


def answer(url: str) -> list[float]:
    """Seconds of the answers until one has read all files: one, where there is nothing to wait for."""
    taken = []
    while True:
        start = time.perf_counter()
        with urllib.request.urlopen(url) as response:
            found = json.load(response)
        taken.append(time.perf_counter() - start)
        if found.get("read") == found.get("files") or not isinstance(found.get("files"), int):
            return taken


def browse(own: str, last: int) -> dict[str, float]:
    """Seconds in Chromium by displayed part; empty without Chromium or playwright."""
    with suppress(ImportError):
        from playwright.sync_api import sync_playwright

        if (chromium := shutil.which("chromium")) is not None:
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=chromium, args=["--disable-gpu", "--no-sandbox"])
                page = browser.new_page()
                everything = f"{own}/#tab=trajectories&run=run&kind=step&step="
                chosen = '.row[aria-selected="true"]'
                found = {
                    "the curves": timed(lambda: (page.goto(own), page.wait_for_selector("figure canvas"))),
                    "a step's list": timed(
                        lambda: (page.goto(f"{everything}{last}"), page.wait_for_selector(".tokens span"))
                    ),
                    "the list of all": timed(lambda: (page.goto(f"{everything}all"), page.wait_for_selector(chosen))),
                }
                page.wait_for_timeout(5000)  # until all files are read
                title = page.locator(".detail h3")
                steps = [timed(lambda: _next(page, title)) for _ in range(20)]
                found["the next trajectory (an arrow key)"] = median(steps)
                end = "list => list.scrollTop = list.scrollHeight"
                found["the end of the list"] = timed(
                    lambda: (page.locator(".list").evaluate(end), page.locator(".row .badge").last.wait_for())
                )
                browser.close()
            return found
    return {}


def _next(page: Any, title: Any) -> None:
    before = title.inner_text()
    page.keyboard.press("ArrowDown")
    while title.inner_text() == before:
        pass


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_run(folder: Path, files: int, rows: int) -> int:
    """Writes the run's folder.  Returns the bytes of its trajectories."""
    draw, words = random.Random(0), [f"word{i}" for i in range(1000)]
    (folder / "rollouts").mkdir(parents=True)
    (folder / "tokens").mkdir()
    names = [f"area/metric_{i}" for i in range(METRICS)]
    numbers = ({"step": step, **{name: draw.random() for name in names}} for step in range(1, STEPS + 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in numbers))
    size = 0
    for step in range(1, files + 1):
        lines = []
        for row in range(rows):
            response = " ".join(draw.choices(words, k=80)) + (" needle" if draw.random() < 0.001 else "")
            reward = draw.random()
            record = {
                "uid": f"0:{row // 8}:{row % 8}",
                "index": row // 8,
                "prompt": " ".join(words[:40]),
                "response": response,
                "ground_truth": "7",
                "reward": reward,
                "accuracy": round(reward),
                "parts": {},
                "tokens": 80,
                "turns": 1,
                "finish_reason": "stop",
                "failure": None,
            }
            lines.append(json.dumps(record) + "\n")
        size += (folder / "rollouts" / f"step_{step:06}.jsonl").write_text("".join(lines))
    columns = ("rollout_log_probs", "old_log_probs", "advantages", "entropy")
    with (folder / "tokens" / f"step_{files:06}.jsonl").open("w") as file:
        for row in range(rows):
            values = {name: [round(-draw.random(), 6) for _ in range(80)] for name in columns}
            marks = {"tokens": words[:80], "response_mask": [1] * 80, "turn_ids": [0] * 80}
            file.write(json.dumps({"uid": f"0:{row // 8}:{row % 8}", **marks, **values}) + "\n")
    return size


def report(results: Mapping[str, Any]) -> list[str]:
    """Two tables."""
    found = results["view"]
    lines = [
        f"{found['trajectories']:,} trajectories, {found['mib']:.0f} MiB; no answer may take {BOUND_SECONDS:.0f} s.",
        "",
        "| answer | first: longest part | first: all of it | again |",
        "|---|--:|--:|--:|",
    ]
    late = over_bound(results)
    for name, (first, again) in found["seconds"].items():
        longest, whole = max(first), sum(first)
        shown = f"{name} **over the bound**" if name in late else name
        lines.append(f"| {shown} | {1e3 * longest:.0f} ms | {1e3 * whole:.0f} ms | {1e3 * median(again):.1f} ms |")
    if found["browser"]:
        lines += ["", "| Chromium shows | after |", "|---|--:|"]
        lines += [f"| {name} | {1e3 * seconds:.0f} ms |" for name, seconds in found["browser"].items()]
    return lines


def over_bound(results: Mapping[str, Any]) -> list[str]:
    """The requests with an answer that took longer than BOUND_SECONDS."""
    seconds = results["view"]["seconds"]
    return [name for name, (first, again) in seconds.items() if max(*first, median(again)) > BOUND_SECONDS]
