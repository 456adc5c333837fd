# SPDX-License-Identifier: Apache-2.0
"""The path of one GRPO step: the files of whet whose functions are entered during one traced, warm step in one process,
the lines of these functions, and how deep their calls are. docs/architecture.md has the limits.
"""

from __future__ import annotations

import ast
import math
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import whet
from docs.generate import layers
from whet import threads
from whet.config import TrainConfig
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit

MakeConfig = Callable[..., TrainConfig]
PACKAGE = Path(whet.__file__).parent
PAGE = layers.PAGE.read_text(encoding="utf-8")
MAX_FILES, MAX_LINES = (layers.limit(f"{what} of a step", PAGE) for what in ("files", "lines"))
MAX_DEPTH = layers.limit("calls of a step above each other", PAGE)
# Models, kernels, the native engine and the training engine: the real work, which no shorter ladder would leave out.
WORK = (
    "models/",
    "kernels/",
    "engines/",
    "rollout/native/",
    "rollout/in_process",
    "rollout/ledger",
    "rollout/stop_strings",
)


@pytest.mark.slow
def test_the_path_of_a_step_stays_short(
    train_config: MakeConfig, additions: list[dict[str, str]], tmp_path: Path
) -> None:
    """The path is traced in a separate process, as leftovers of other tests are not part of it."""
    configs = [train_config({"trainer.total_steps": 3, "trainer.run_dir": str(tmp_path / each)}) for each in "ab"]
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        whole, deepest = process.submit(path_of, configs, additions).result()
    lines = {file: found for file, found in whole.items() if not str(file.relative_to(PACKAGE)).startswith(WORK)}
    shown = "\n".join(f"{len(found):4} {file.relative_to(PACKAGE)}" for file, found in sorted(lines.items()))
    total = sum(map(len, lines.values()))
    assert len(lines) <= MAX_FILES and total <= MAX_LINES, f"{len(lines)} files, {total} lines:\n{shown}"
    assert len(deepest) <= MAX_DEPTH, f"{len(deepest)} calls:\n" + "\n".join(deepest)


def path_of(configs: Sequence[TrainConfig], rows: list[dict[str, str]]) -> tuple[dict[Path, set[int]], list[str]]:
    """The lines of the second step of the last run, when one-time work of a process is done, and its deepest calls."""
    entered: set[CodeType] = set()
    deepest: list[str] = []
    threads.WAITS = threads.WAITS_NO_MORE = math.inf  # a busy machine takes the same way as an idle one

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)
            if len(calls := calls_of(frame)) > len(deepest):
                deepest[:] = calls

    def trace(run: Any, step: int, numbers: Any) -> None:
        """Watches calls from the line of step 2 to the line of step 3."""
        watched = {2: enter}.get(step)
        sys.setprofile(watched)
        threading.setprofile(watched)

    for config in configs:
        run = build(config, build_scorer(config.reward, score), rows)
        run.callbacks = [trace] if config is configs[-1] else []
        fit(run)
        run.close()
    return lines_of(entered), deepest


def calls_of(frame: FrameType | None) -> list[str]:
    """The functions of whet that are being called below the loop, the first first."""
    found: list[str] = []
    while frame is not None and frame.f_code is not fit.__code__:
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            found.append(f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}")
        frame = frame.f_back
    return found[::-1]


def lines_of(codes: set[CodeType]) -> dict[Path, set[int]]:
    """The lines of the functions of whet to which the codes belong, by file; decorators and docstrings count."""
    first: dict[Path, set[int]] = {}
    for code in codes:
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE) and not code.co_name.startswith("<"):  # lambdas stand in functions
            first.setdefault(file, set()).add(code.co_firstlineno)
    found = {file: _lines(file, starts) for file, starts in first.items()}
    return {file: lines for file, lines in found.items() if lines}


def _lines(file: Path, starts: set[int]) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if start in starts:
                lines |= set(range(start, (node.end_lineno or start) + 1))
    return lines


def score(solution_str: str) -> float:
    """Pays for sevens."""
    return float(solution_str.count("7"))
