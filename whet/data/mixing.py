# SPDX-License-Identifier: Apache-2.0
"""Batches with a share of each domain, as `data.mix` sets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.config.mix import MixShare, shares_at
from whet.data.loader import PromptLoader, found
from whet.errors import DataError
from whet.types import Group, Prompt


def by_kind(prompts: Sequence[Prompt], mix: Mapping[str, MixShare]) -> dict[str, list[Prompt]]:
    """The prompts of each kind that `mix` names: a domain, or a data source where there are no domains.

    Raises: DataError for a kind without rows, and for rows of a kind that is not named."""
    kinds: dict[str, list[Prompt]] = {name: [] for name in mix}
    for prompt in prompts:
        kinds.setdefault(prompt.domain or prompt.data_source, []).append(prompt)
    counts = ", ".join(f"{name} ({len(rows)} rows)" for name, rows in kinds.items() if rows)
    for name, rows in kinds.items():
        if not rows:
            raise DataError(f"data.mix.{name}: no row is of {name!r}; there are {counts}: take it out, or add rows")
        if name not in mix:
            problem = f"data.mix has no share for the rows of {name!r}, as row {rows[0].index}"
            raise DataError(f"{problem}; it names {', '.join(mix)}: add data.mix.{name}, 0 to leave them out")
    return kinds


class MixedLoader:
    """Draws each batch from several loaders by their shares, rounded by the largest remainder: what a batch owes a kind
    is carried to the next, so that a small share does not vanish.

    A step of the schedule is `batch_size` draws; those that replace what a filter dropped count too.
    """

    def __init__(self, loaders: Mapping[str, PromptLoader], mix: Mapping[str, MixShare], batch_size: int) -> None:
        self._loaders, self._mix, self._batch_size = dict(loaders), mix, batch_size
        self._owed = dict.fromkeys(self._loaders, 0.0)
        self._drawn = 0

    def take(self, n: int) -> list[Prompt]:
        """Draws the next n prompts, kinds interleaved."""
        shares = shares_at(self._mix, self._drawn / self._batch_size)
        owed = {name: self._owed[name] + shares[name] * n for name in self._loaders}
        turns: list[str] = []
        for _ in range(n):
            name = max((name for name in owed if shares[name] > 0), key=owed.__getitem__)
            owed[name] -= 1
            turns.append(name)
        drawn = {name: iter(loader.take(turns.count(name))) for name, loader in self._loaders.items()}
        self._owed, self._drawn = owed, self._drawn + n
        return [next(drawn[name]) for name in turns]

    def find(self, uid: str) -> Prompt:
        return found([prompt for loader in self._loaders.values() for prompt in loader.items], uid)

    def observe(self, groups: Sequence[Group]) -> None:
        """Does nothing: a fixed order does not depend on scores."""

    def state(self) -> dict[str, Any]:
        """The number of draws, what is owed to each kind, and the position of its loader."""
        kinds = {name: {"owed": self._owed[name], **loader.state()} for name, loader in self._loaders.items()}
        return {"drawn": self._drawn, "kinds": kinds}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state.  Raises: DataError where data.mix named other kinds."""
        kinds = state.get("kinds", {})
        if kinds.keys() != self._loaders.keys():
            raise DataError(
                f"the checkpoint draws from {', '.join(kinds) or 'one order of all rows'} and data.mix names "
                f"{', '.join(self._loaders)}; restore it, or set trainer.resume=never"
            )
        self._drawn = state["drawn"]
        for name, loader in self._loaders.items():
            self._owed[name] = kinds[name]["owed"]
            loader.load_state(kinds[name])
