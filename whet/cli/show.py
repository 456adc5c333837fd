# SPDX-License-Identifier: Apache-2.0
"""`whet show`: the trajectories of a run as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]


def show(
    run: Annotated[Path, typer.Argument(help="the folder of a run or of an evaluation, or a .jsonl file of rollouts")],
    step: Annotated[int | None, typer.Option(help="the step; unset: the last one that was written")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="the responses of a validation")] = False,
    dropped: Annotated[bool, typer.Option("--dropped", help="the responses that algorithm.filter dropped")] = False,
    other: Annotated[Path | None, typer.Option(help="a second run, whose responses stand beside")] = None,
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
    """The rows with one response of each prompt before the second of any."""
    seen: dict[str, list[Record]] = {}
    for row in rows:
        seen.setdefault(str(row.get("uid", "")).rpartition(":")[0], []).append(row)
    return [row for turn in zip_longest(*seen.values()) for row in turn if row is not None]


def _count(found: int, limit: int) -> str:
    more = f", the first {limit}; --limit shows more" if found > limit else ""
    return f"{found} response{'s' * (found != 1)}{more}"


def _side_by_side(left: Record, right: Record) -> RenderableType:
    """The prompt above, and two columns of what was answered."""
    columns = Table.grid(expand=True, padding=(0, 2))
    for _ in range(2):
        columns.add_column(ratio=1, overflow="fold")
    columns.add_row(Group(*_answer(left)), Group(*_answer(right)))
    title = Text(f"{left.get('uid', '')}", style="bold")
    return Group(title, _prompt(left), columns)


def _prompt(row: Record) -> Text:
    """The prompt, with a run of an image's or video's tokens as one of them and their number."""
    text = str(row.get("prompt") or "")
    if row.get("media"):
        text = re.sub(r"(<[^<>\s]+>)\1+", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", text)
    return _named("prompt", text)


def _answer(row: Record) -> Iterator[RenderableType]:
    """The response with its turns and media, the reward with its parts, and why it is what it is."""
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


def _named(name: str, value: Any, style: str = "") -> Text:
    """A text below its name; a short one beside it."""
    from whet.tracking.tracker import printable

    text = printable(value if isinstance(value, str) else "" if value is None else str(value))
    between = "\n" if "\n" in text.strip() else "  "
    return Text.assemble((name, "bold"), between, (text.strip("\n"), style))
