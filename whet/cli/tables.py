# SPDX-License-Identifier: Apache-2.0
"""Builds the tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

Cell = str | Text


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: Sequence[int] = (0,)) -> Table:
    """Builds a table. Columns numbered in `left` are aligned left; the other columns hold numbers, aligned right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        made.add_column(title, justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def interval(value: str, low: str, high: str, between: str = " to ") -> Text:
    """Formats a number with its confidence interval on the line below."""
    return Text.assemble(value, (f"\n{low}{between}{high}", "dim"))
