# SPDX-License-Identifier: Apache-2.0
"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

Cell = str | Text


def table(titles: Sequence[str], rows: Iterable[Sequence[Cell]], *, left: Sequence[int] = (0,)) -> Table:
    """A table whose columns numbered in `left` are aligned left; other columns hold numbers and are aligned right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(titles):
        made.add_column(title, justify="left" if number in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def interval(value: str, low: str, high: str, between: str = " to ") -> Text:
    """A number with its interval on the line below."""
    return Text.assemble(value, (f"\n{low}{between}{high}", "dim"))
