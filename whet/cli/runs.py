# SPDX-License-Identifier: Apache-2.0
"""`whet runs` and `whet show`: runs and their trajectories, and the table at the end of a run."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from whet.cli.arguments import program
from whet.cli.tables import table
from whet.errors import DataError

if TYPE_CHECKING:
    from whet.tracking.rollouts import Record
    from whet.tracking.runs import RunFolder

log = logging.getLogger(__name__)
COLOURS = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red", "killed": "red"}
TOKENS = ("perf/total_num_tokens", "*/tokens")  # patterns of a step's metric


def runs(
    folder: Annotated[Path, typer.Argument(help="a folder with runs, or a run")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print the runs as JSON")] = False,
) -> None:
    """List runs with their state, best metric and next command.

    Of a single run: a table of its main metrics, its time, its tokens and its files."""
    from whet.tracking.console import shared_console
    from whet.tracking.runs import find_runs, is_run, read_run

    if not folder.exists():
        expected = "a run's folder, or a folder with runs: `whet runs FOLDER`"
        raise DataError(str(folder), "does not exist", expected, "correct the path")
    found, console = [], shared_console()
    for each in find_runs(folder):
        try:
            found.append(read_run(each))
        except DataError as error:
            typer.echo(f"not listed: {error}", err=True)
    if as_json:
        typer.echo(json.dumps([as_record(run) for run in found], indent=1))
    elif not found:
        typer.echo(f"no runs in {folder}; `{program()} quickstart` makes one")
    elif is_run(folder):
        show_end(found[0])
    else:
        names = [str(run.path.relative_to(folder)) for run in found]
        several = len({run.command for run in found}) > 1
        kinds = [{"trainer": run.command.rpartition(":")[2]} if several else {} for run in found]
        made = runs_table(found, [{f"run in {folder}": name, **kind} for name, kind in zip(names, kinds, strict=True)])
        whole = console.measure(made, options=console.options.update(width=10_000)).maximum
        if whole > console.width:  # names go before the table, whose first column numbers them
            for number, name in enumerate(names, start=1):
                console.print(f"{number}  {name}", markup=False, soft_wrap=True)
            made = runs_table(found, [{"run": str(number), **kind} for number, kind in enumerate(kinds, start=1)])
        console.print(made)
        open_runs = [run for run in found if run.state in ("stopped", "killed", "failed")]
        for run in open_runs:
            if run.error:
                console.print(f"{run.path} failed: {run.error}", markup=False, soft_wrap=True)
        if open_runs:
            console.print("to go on:")
            for run in open_runs:
                console.print(f"  {next_command(run)}", markup=False, soft_wrap=True)


def as_record(run: RunFolder) -> dict[str, object]:
    """Returns a run as a JSON record of `whet runs --json`."""
    best = run.best(run.best_metric)
    return {
        "path": str(run.path),
        "trainer": run.command,
        "state": run.state,
        "step": run.step,
        "total_steps": run.total_steps,
        "best_metric": run.best_metric.removeprefix("-"),
        "best": best and best[0],
        "best_step": best and best[1],
        "error": run.error or None,
        "command": next_command(run),
    }


def runs_table(found: Sequence[RunFolder], named: Sequence[Mapping[str, str]]) -> RenderableType:
    """Builds a table of runs. `named` gives for each run the columns that distinguish it from the other runs."""
    shared = {run.best_metric for run in found if run.records}
    rows: list[list[str | Text]] = []
    for number, run in enumerate(found):
        best = run.best(run.best_metric)
        shown = ["", ""] if best is None else [_short(best[0]), str(best[1])]
        rows.append([*map(Text, named[number].values()), state_of(run), f"{run.step}/{run.total_steps or '?'}", *shown])
        if len(shared) != 1:
            rows[-1].append("" if best is None else run.best_metric.removeprefix("-"))
    keys = list(named[0])
    best_title = shared.pop().removeprefix("-") if len(shared) == 1 else "best"
    titles = [*keys, "state", "step", best_title, "at step", *(["metric"] if best_title == "best" else [])]
    return table(titles, rows, left=(*range(len(keys) + 1), len(keys) + 4))


def state_of(run: RunFolder) -> Text:
    """Formats the state of a run in its colour."""
    return Text(run.state, style=COLOURS.get(run.state, ""))


def next_command(run: RunFolder) -> str:
    """Returns the next command for a run: stop a running one, export a finished one, resume any other."""
    path = shlex.quote(str(run.path))
    if run.state == "running":
        return f"touch {path}/stop"
    if run.state in ("finished", "ended"):
        return f"{program()} export {path} {path}_model"
    data, trainer = run.config.get("data") or {}, run.config.get("trainer") or {}
    if not data.get("train_files"):
        return f"call whet.run({run.command!r}, ...) again: the data of {path} came from Python"
    words = ["trainer.resume=auto"] if trainer.get("resume") in ("never", "overwrite") else []
    default = Path("runs", str(trainer.get("project_name")), str(trainer.get("experiment_name")))
    if Path(trainer.get("run_dir") or default).absolute() != run.path.absolute():
        words.append(shlex.quote(path_override("trainer.run_dir", run.path)))
    return " ".join([program(), shlex.quote(run.command), f"{path}/config.yaml", *words])


def path_override(key: str, path: Path) -> str:
    """Returns the override that sets a key to a path. The path is quoted if Hydra's syntax requires it."""
    is_plain = re.fullmatch(r"[\w./+-]*/[\w./+-]*", str(path))
    quoted = str(path).replace('"', r"\"").replace("${", r"\${")
    return f"{key}={path}" if is_plain else f'{key}="{quoted}"'


def show_end(run: RunFolder) -> None:
    """Prints the main metrics of a run, its time and tokens, the paths of its files, and the next commands."""
    from whet.tracking.console import shared_console
    from whet.tracking.runs import main_metrics

    console = shared_console()
    steps = f"{run.step} of {run.total_steps} steps" if run.total_steps else f"{run.step} steps"
    console.print(Text.assemble(f"{run.path}  ", state_of(run), f", {steps}"), soft_wrap=True)
    if run.error:
        console.print(run.error, markup=False, soft_wrap=True)
    rows: list[list[str]] = []
    for signed in main_metrics([run]):
        _, values = run.curve(name := signed.lstrip("-~"))
        best = None if signed[0] == "~" else run.best(signed)
        ends = [_short(values[0]), _short(values[-1])] if values else ["", ""]
        rows.append([name, *ends, *(["", ""] if best is None else [_short(best[0]), str(best[1])])])
    if rows:
        console.print(table(["metric", "first", "last", "best", "at step"], rows))
    for title, line in _facts(run):
        console.print(f"{title:<12} {line}", markup=False, soft_wrap=True)


def _short(number: float) -> str:
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"


def _facts(run: RunFolder) -> Iterator[tuple[str, str]]:
    from whet.tracking.console import clock_time

    totals: dict[str, float] = {}
    for record in run.records:
        for name, value in record.items():
            if name.startswith("time/") or any(fnmatchcase(name, each) for each in TOKENS):
                totals[name.removeprefix("time/")] = totals.get(name.removeprefix("time/"), 0.0) + value
    seconds = totals.pop("step", 0.0) + totals.get("validation", 0.0)
    tokens = next((totals.pop(name) for each in TOKENS for name in list(totals) if fnmatchcase(name, each)), None)
    if seconds:
        parts = sorted(totals.items(), key=lambda each: -each[1])[:4]
        yield "time", clock_time(seconds) + "".join(f", {name} {clock_time(value)}" for name, value in parts)
    peaks = [
        max((sum(v for name, v in r.items() if fnmatchcase(name, f"system/*/{what}")) for r in run.records), default=0)
        for what in ("memory_gib", "cpu_cores", "accelerator_gib")
    ]
    if peaks[0]:
        accelerator = f", {peaks[2]:.1f} GiB of the accelerator" if peaks[2] else ""
        yield "at most", f"{peaks[0]:.1f} GiB of memory, {peaks[1]:.1f} CPU cores{accelerator}"
    if tokens:
        yield "tokens", f"{tokens:,.0f} trained on"
    checkpoints = sorted((run.path / "checkpoints").glob("global_step_*"), key=lambda path: path.stat().st_mtime)
    if checkpoints:
        yield "checkpoints", f"{checkpoints[-1]}" + (f" and {len(checkpoints) - 1} more" if checkpoints[1:] else "")
    if (run.path / "rollouts").is_dir():
        yield "rollouts", f"{run.path}/rollouts/; `{program()} show {shlex.quote(str(run.path))}` prints them"
    yield "curves", f"{program()} plot {shlex.quote(str(run.path))}"
    yield "next", next_command(run)


def show(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an evaluation, or a .jsonl file of rollouts")],
    step: Annotated[int | None, typer.Option(help="the step; unset: the last one that was written")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="the responses of a validation")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="the responses that algorithm.filter dropped")] = False,
    other: Annotated[Path | None, typer.Option(help="a second run, shown beside the first")] = None,
    other_step: Annotated[int | None, typer.Option(help="the step of the second run; unset: the same step")] = None,
    sort: Annotated[str | None, typer.Option(help="a field: reward, length, ...; -reward: largest first")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="a condition, several times: reward<1, 'prompt~12', failure, '!failure', parts.format=0"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="the number of responses shown at most")] = 10,
) -> None:
    """Print the prompts, responses and rewards of a step."""
    from whet.tracking.console import shared_console
    from whet.tracking.rollouts import beside, find_rollouts, read_rollouts, selected

    kind = "dropped" if dropped else "validation" if validation else None
    file = find_rollouts(run, step, kind=kind)
    every = read_rollouts(file)
    rows = selected(every, where or [], sort)
    if sort is None:
        rows = _spread(rows)
    console = shared_console()
    if other is None:
        console.print(f"{file}: {_count(len(rows), limit)}", markup=False, soft_wrap=True)
        for row in rows[:limit]:
            console.print()
            title = f"{row.get('uid', '')}  {row.get('data_source') or ''}".rstrip()
            for part in (Text(title, style="bold"), _prompt(row), *_answer(row)):
                console.print(part, soft_wrap=True)
        return
    number = step if other_step is None else other_step
    second = find_rollouts(other, number, kind=kind or file.stem.partition("_")[0])
    found = {id(row): each for row, each in beside(every, read_rollouts(second), str(file), str(second))}
    pairs = [(row, found[id(row)]) for row in rows if id(row) in found]
    console.print(f"{file} beside {second}: {_count(len(pairs), limit)}", markup=False, soft_wrap=True)
    for left, right in pairs[:limit]:
        console.print()
        console.print(_side_by_side(left, right))


def _spread(rows: Sequence[Record]) -> list[Record]:
    """Reorders the rows: the first response of every prompt, then the second responses, and so on."""
    seen: dict[str, list[Record]] = {}
    for row in rows:
        seen.setdefault(str(row.get("uid", "")).rpartition(":")[0], []).append(row)
    return [row for turn in zip_longest(*seen.values()) for row in turn if row is not None]


def _count(found: int, limit: int) -> str:
    more = f", the first {limit}; --limit shows more" if found > limit else ""
    return f"{found} response{'s' * (found != 1)}{more}"


def _side_by_side(left: Record, right: Record) -> RenderableType:
    """Shows the prompt above two columns, one for each response."""
    columns = Table.grid(expand=True, padding=(0, 2))
    for _ in range(2):
        columns.add_column(ratio=1, overflow="fold")
    columns.add_row(Group(*_answer(left)), Group(*_answer(right)))
    title = Text(f"{left.get('uid', '')}", style="bold")
    return Group(title, _prompt(left), columns)


def _prompt(row: Record) -> Text:
    """Formats the prompt. Repeated media tokens are shortened to one token and their count."""
    text = str(row.get("prompt") or "")
    if row.get("media"):
        text = re.sub(r"(<[^<>\s]+>)\1+", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)
    return _named("prompt", text)


def _answer(row: Record) -> Iterator[RenderableType]:
    """Yields the response with its turns and media, then the reward with its parts and reasons."""
    from whet.tracking.rollouts import reasons

    for each in row.get("media") or ():
        yield _named(str(each.get("kind")), f"{each.get('source') or 'in memory'} (digest {each.get('digest')})")
    steps: Sequence[Record] = row.get("steps") or ()
    for turn, each in enumerate(steps, start=1):
        for message in each.get("observation") or ():
            name = message.get("name") or message.get("role")
            if turn > 1 or str(message.get("content")) not in str(row.get("prompt")):
                yield _named(f"{name} (turn {turn})", message.get("content"), "magenta")
        who = each.get("agent") or each.get("player") or "response"
        paid = f", reward {each['reward']:g}" if each.get("reward") else ""
        yield _named(f"{who} (turn {turn}{paid})", each.get("action"), "cyan")
        for message in each.get("end") or ():
            yield _named(f"{message.get('name') or message.get('role')} (end)", message.get("content"), "magenta")
    if not steps:
        yield _named("response", row.get("response"), "cyan")
    yield _reward(row)
    if why := reasons(row):
        is_plain = _is_right(row) and not any(row.get(each) for each in ("failure", "dropped_by", "limit"))
        is_plain = is_plain and row.get("finish_reason") in (None, "stop")
        yield _named("verdict" if is_plain else "why", "; ".join(why), "" if is_plain else "yellow")


def _is_right(row: Record) -> bool:
    accuracy = row.get("accuracy")
    return (row.get("reward") or 0) > 0 if accuracy is None else bool(accuracy)


def _reward(row: Record) -> Text:
    reward = row.get("reward")
    style = "dim" if reward is None else "green" if _is_right(row) else "red"
    shown = "none" if reward is None else f"{reward:g}"
    parts = [f"{name} {value:g}" for name, value in (row.get("parts") or {}).items()]
    numbers = [f"{row['tokens']} tokens"] if row.get("tokens") is not None else []
    numbers += [f"{row['turns']} turns"] if row.get("turns", 1) > 1 else []
    numbers += [f"weights of step {row['policy_version']}"] if row.get("policy_version") is not None else []
    listed = f" ({', '.join(parts)})" if parts else ""
    return Text.assemble(("reward ", "bold"), (shown + listed, style), "  " + ", ".join(numbers))


def _named(name: str, value: object, style: str = "") -> Text:
    """Formats a text with its name: above the text, or beside a text of one line."""
    from whet.tracking.tracker import printable

    text = printable(value if isinstance(value, str) else "" if value is None else str(value))
    between = "\n" if "\n" in text.strip() else "  "
    return Text.assemble((name, "bold"), between, (text.strip("\n"), style))
