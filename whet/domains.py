# SPDX-License-Identifier: Apache-2.0
"""Domains: kinds of rows, each with its own rewards, filter, statistics and share of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

from whet.config.schema import RewardConfig
from whet.errors import DataError
from whet.types import Prompt

FIELD = "domain"  # the field of a row that names its domain
OTHERS = "others"  # if there are domains: the domain of the rows that reward.function scores


class HasSource(Protocol):
    """A row with a data source and other fields: a prompt, or a response to score."""

    @property
    def data_source(self) -> str:
        """The data source of the row."""

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """The fields of the row other than the prompt."""


@dataclass(frozen=True)
class Domains:
    """The domains of `reward.domains`, with the data sources of each. In a source, `*` stands for any text."""

    sources: Mapping[str, Sequence[str]]

    @classmethod
    def of_config(cls, reward: RewardConfig, *, has_function: bool = False) -> Domains:
        """Returns the domains of a config. `has_function`: the caller passed a reward function for all other rows."""
        named = {name: [name] if each.sources is None else each.sources for name, each in reward.domains.items()}
        takes_others = bool(named) and (has_function or bool(reward.function))
        return cls({**named, OTHERS: ["*"]} if takes_others else named)

    def of(self, row: HasSource) -> str:
        """Returns the domain of a row: its field `domain`, else the first domain with a pattern that matches its data
        source; "" without domains.  Raises: DataError for a row without a domain."""
        if not self.sources:
            return ""
        named = row.extra_info.get(FIELD)
        if named is not None:
            if named in self.sources:
                return str(named)
            key, expected = f"domain (data source {row.data_source!r})", f"one of {', '.join(self.sources)}"
            raise DataError(key, named, expected, f"correct its field {FIELD!r}, or add reward.domains.{named}")
        for name, patterns in self.sources.items():
            if any(fnmatchcase(row.data_source, pattern) for pattern in patterns):
                return name
        of_domains = "; ".join(f"{name}: {', '.join(patterns)}" for name, patterns in self.sources.items())
        change = "add the source to a domain, or set reward.function for all other sources"
        raise DataError("data source", row.data_source, f"a source of a domain ({of_domains})", change)

    def assign(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Adds to each prompt its domain.  Raises: DataError naming the row."""
        if not self.sources:
            return tuple(prompts)
        found = []
        for prompt in prompts:
            try:
                found.append(replace(prompt, domain=self.of(prompt)))
            except DataError as error:
                raise error.at(f"row {prompt.index}") from error
        return tuple(found)

    def check_used(self, prompts: Sequence[Prompt]) -> None:
        """Checks that every domain but `others` has a row.  Raises: DataError naming the domains without rows."""
        counts = Counter(prompt.domain for prompt in prompts)
        rows = ", ".join(f"{name} ({count})" for name, count in counts.items()) or "no domain"
        unused = [
            DataError(
                f"reward.domains.{name}",
                f"it has no row; the rows are of {rows}",
                f"a row with the field {FIELD}={name}, or of data source {' or '.join(patterns)}",
                f"correct its sources or the rows, or leave the domain out (~reward.domains.{name})",
            )
            for name, patterns in self.sources.items()
            if name not in counts and name != OTHERS
        ]
        if unused:
            raise DataError.joined(unused)
