# SPDX-License-Identifier: Apache-2.0
"""docs/columns.md, written from the table of columns."""

from __future__ import annotations

from whet.columns import TABLE, WHEN, Column
from whet.registry import ADV_ESTIMATORS, KL_FORMS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS

HEAD = """\
# Columns

Written by `make pages` from `whet/columns.py`, the table from which a run also takes which models to start, which of
them to call before an update, and what it says where a function reads a column that is not there.

A batch is a `DataProto`: named arrays with one entry a row. B is the number of rows, P of prompt tokens, R of response
tokens, L = P + R, V of tokens in the vocabulary, K of numbers that the reward reports. Every column [B, R] speaks about
`responses[:, t]` at position t and is 0 where the policy sampled nothing; `entropy` and `values` are of the state in
which that token was chosen. Columns of objects cannot be read by functions of the mathematics.

Parameters before `*` in a function's signature name the columns that it reads. A number that the reward returns is a
column [B] where `reward.columns` lists it; `examples/algorithms/provider.py` adds a column of your own.

"Model" is the role whose forward pass gives it, and as which output. Some of these the loop gives to functions that it
calls later without a pass of their own: to the estimator, to corrections (weights, rejections), to the loss of actor or
critic. "Read by" names what ships.
"""
KINDS = (ADV_ESTIMATORS, WEIGHTS, REJECTIONS, POLICY_LOSSES, KL_FORMS, VALUE_LOSSES)
TITLES = ("column", "shape", "meaning", "model", "the loop gives it to", "read by")
SHOWN = 4


def page(_: str) -> str:
    """The whole page."""
    lines = [HEAD]
    for when, title in WHEN.items():
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| column | shape | meaning | model | the loop gives it to | read by |",
        ]
        lines += ["|---|---|---|---|---|---|", *(_row(column) for column in TABLE if column.when == when), ""]
    return "\n".join(lines)


def _row(column: Column) -> str:
    models = [f"{role}: `{column.output}`" if column.output else role for role in column.roles]
    read = [entry.name for kind in KINDS for entry in kind if entry.alias_of is None and column.name in entry.columns]
    more = f" and {len(read) - SHOWN} more" if len(read) > SHOWN else ""
    given_to, read_by = ", ".join(column.given_to), ", ".join(read[:SHOWN]) + more
    cells = (f"`{column.name}`", f"[{column.shape}]", column.meaning, ", ".join(models), given_to, read_by)
    return f"| {' | '.join(cells)} |"
