# SPDX-License-Identifier: Apache-2.0
"""The command `whet check-reward`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from whet.cli.algorithms import console, print_pairs
from whet.cli.arguments import KeyValues, read_options
from whet.cli.rewards import examples_of
from whet.errors import DataError
from whet.registry import REWARDS, Entry, register_command
from whet.rewards.adapter import stand_ins

if TYPE_CHECKING:
    from whet.plugins.scores.check import CheckedPrompt, Report

WHOLE = {"ground_truth", "ground_truths", "reward_input", "reward_inputs", "data"}  # parameters with the ground truth


@register_command("check-reward")
def check_reward(
    function: Annotated[str, typer.Argument(help="a name that `whet rewards` lists, or path/file.py:function")],
    data: Annotated[Path | None, typer.Option(help="file with rows to make responses for; unset: rows of whet")] = None,
    rows: Annotated[int, typer.Option(min=1, help="number of rows to use from the file")] = 8,
    prompt_key: Annotated[str, typer.Option(help="field of the prompt in the file")] = "prompt",
    answer_key: Annotated[
        str | None, typer.Option(help="field of the ground truth; unset: reward_model.ground_truth, else answer")
    ] = None,
    option: KeyValues = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="time limit of one response, in seconds")] = 30.0,
    threshold: Annotated[float, typer.Option(help="lowest reward of a correct response")] = 1.0,
) -> None:
    """Look for wrong responses that a reward function pays.

    It scores empty, echoed, hedged, malformed, huge, hostile and nearly right responses, each twice. The exit status is
    1 if there is a finding."""
    from whet.plugins.scores.check import ROWS, check
    from whet.rewards.pool import RewardPool
    from whet.tracking.console import long_phase

    with stand_ins():
        entry = REWARDS[function]
    used = _rows_of(data, rows, prompt_key, answer_key) if data else example_rows(entry) or ROWS
    options = read_options(option or [])
    entry.check(options, "--option ")
    takes_truth = entry.accepts_any_option or bool({*entry.parameters, *entry.options} & WHOLE)
    reads_truth = takes_truth and any(row.truth is not None and row.truth != "" for row in used)
    workers = 4 if all(row.programs for row in used) else 1  # programs run side by side
    limits: Mapping[str, Any] = {"timeout_seconds": timeout, "correct_threshold": threshold}
    with long_phase("checking"), RewardPool(function, num_workers=workers, kwargs=options, **limits) as pool:
        report = check(pool, used, reads_truth=reads_truth)
    _print_report(report, len(used), reads_truth)
    if report.findings:
        raise typer.Exit(1)


def example_rows(entry: Entry) -> list[CheckedPrompt]:
    """Returns the examples of a reward function that have the highest reward, as rows with a right response."""
    from whet.plugins.scores.check import CheckedPrompt

    given = examples_of(entry)
    best = max((reward for _, _, reward, *_ in given), default=0.0)
    rows = []
    for response, truth, reward, *more in given:
        fields = dict(more[0]) if more else {}
        extra = fields.get("extra_info", {})
        if reward == best:
            prompt, source = fields.get("prompt_str", ""), fields.get("data_source", "unknown")
            rows.append(CheckedPrompt(prompt, truth, response, source, extra))
    return rows


def _rows_of(file: Path, count: int, prompt_key: str, answer_key: str | None) -> list[CheckedPrompt]:
    """Reads up to `count` rows of a file as prompts to check.  Raises: DataError."""
    from whet.data.prompts import find_field, ground_truth, read_messages
    from whet.data.sources import read_rows
    from whet.plugins.scores.check import CheckedPrompt

    found = []
    for row in read_rows(file)[:count]:
        field = find_field(row, prompt_key, "--prompt-key", ("question", "problem", "instruction"))
        text = row[field] if isinstance(row[field], str) else str(read_messages(row, field)[-1].content)
        extra = {**row, **(row.get("extra_info") or {})}
        source = str(row.get("data_source") or "unknown")
        found.append(CheckedPrompt(text, ground_truth(row, answer_key), data_source=source, extra=extra))
    if not found:
        raise DataError("--data", f"{file} has no rows", "at least one row", "name another file")
    return found


def _print_report(report: Report, rows: int, reads_truth: bool) -> None:
    output = console()
    for finding in report.findings:
        output.print(Text.assemble((finding.name, "bold red"), f"  {finding.what}"))
        if finding.response:
            output.print(Text(f"    {finding.response}", style="dim"))
    if report.findings:
        output.print()
    forms = ", ".join(report.forms) or "none of the usual ones"
    told = f"paid forms of the ground truth: {forms}" if reads_truth else "no ground truth is read, so nothing is wrong"
    pairs = [
        ("responses", f"{report.responses}, for {rows} rows"),
        ("right", told),
        ("rewards", "none" if math.isnan(report.lowest) else f"{report.lowest:g} to {report.highest:g}"),
        ("speed", f"{1e3 * report.seconds:.2g} ms for a response"),
        ("findings", str(len(report.findings)) if report.findings else "none"),
    ]
    print_pairs(output, pairs)
