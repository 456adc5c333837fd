# SPDX-License-Identifier: Apache-2.0
"""Writes docs/columns.md from the table of columns."""

from __future__ import annotations

from whet.columns import TABLE, Column, When
from whet.registry import ADV_ESTIMATORS, KL_FORMS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS

HEAD = """\
# Columns

Written by `make pages` from `whet/columns.csv`. A run reads the same table to decide which models to load, and which
forward passes to compute before an update.

A batch is a `Batch`: named arrays with one entry for each row. B is the number of rows, P of prompt tokens, R of
response tokens, L = P + R, V of tokens in the vocabulary, K of reward parts. Position t of a column [B, R] belongs to
`responses[:, t]`, and is 0 if the policy did not sample that token; `entropy` and `values` are those of the state in
which the token was chosen. Estimators, losses, weights and rejections cannot read columns of objects.

Parameters before `*` in a function's signature name the columns that it reads. A part of the reward is a column [B] if
`reward.columns` lists it; `examples/extending/provider.py` adds a column of your own.

"Model" is the role whose forward pass computes the column, and the name of the output. The loop itself passes some
columns to functions that it calls later: the estimator, corrections (weights, rejections), the loss of actor or critic.
"Read by" lists shipped functions.
"""
KINDS = (ADV_ESTIMATORS, WEIGHTS, REJECTIONS, POLICY_LOSSES, KL_FORMS, VALUE_LOSSES)
TITLES = ("column", "shape", "meaning", "model", "the loop passes it to", "read by")
SHOWN = 4
WHEN: dict[When, str] = {
    "rollout": "in every batch",
    "score": "in every batch, after scoring",
    "shaping": "in every batch, after shaping",
    "unscored": "if a function reads it, during scoring",
    "scored": "if a function reads it, after scoring",
    "update": "added by the loop after the estimator",
}


def page(_: str) -> str:
    """The whole page."""
    lines = [HEAD]
    for when, title in WHEN.items():
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| column | shape | meaning | model | the loop passes it to | read by |",
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
