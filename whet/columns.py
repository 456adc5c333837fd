# SPDX-License-Identifier: Apache-2.0
"""The table of columns: the named arrays of a batch, with their shapes, meanings, providers, and when they are added.

B rows, P prompt tokens, R response tokens, L = P + R, V tokens of the vocabulary, K parts of the reward. Columns
[B, R] are 0 on tokens that were not sampled.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

When = Literal["rollout", "score", "shaping", "unscored", "scored", "update"]
Reader = Literal["estimator", "correction", "actor", "critic"]  # in the order of a step


@dataclass(frozen=True)
class Column:
    """A named array of the batch. If a batch has a column only because a function reads it, a provider computes it."""

    name: str
    shape: str
    when: When
    meaning: str
    roles: tuple[str, ...] = ()  # roles whose models the provider needs
    output: str | None = None  # output of the first role's forward pass; None: a registered function is the provider
    reads: tuple[str, ...] = ()  # columns that the provider reads, besides the columns of every batch
    phase: str = "columns"  # the provider's time is logged as time/<phase>
    given_to: tuple[Reader, ...] = ()  # functions to which the loop passes the column itself
    section: str | None = None  # section of the config whose keys configure the provider

    @property
    def has_provider(self) -> bool:
        """Tells whether a provider computes the column."""
        return self.when in ("unscored", "scored")

    @property
    def is_in_every_batch(self) -> bool:
        """Tells whether every batch has the column, so that any function may read it."""
        is_optional = "object" in self.shape or "layers" in self.shape
        return self.when in ("rollout", "score", "shaping") and not is_optional


def _read() -> Iterator[Column]:
    """Yields the columns of columns.csv. Fields left empty there have their defaults."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given: dict[str, Any] = {name: text for name, text in row.items() if text}
            yield Column(**given | {name: tuple(given[name].split()) for name in LISTS & given.keys()})


LISTS = {"roles", "reads", "given_to"}  # fields with names that are separated by spaces
TABLE = tuple(_read())
COLUMNS: dict[str, Column] = {column.name: column for column in TABLE}  # providers of users add more
POLICY_OUTPUTS, VALUE_OUTPUTS, SCORE_OUTPUTS = (
    frozenset(column.output for column in TABLE if column.output and column.roles[0] in roles)
    for roles in (("actor", "ref"), ("critic",), ("reward_model",))
)
# The column with the scores of the role `reward_model`, by the config key that selects their source.
SCORED_BY = {"model_path": "rm_scores", "rubric": "judge_scores"}
ROW_COLUMNS = frozenset(column.name for column in TABLE if column.shape == "B, K")  # no padding, even where K is R
