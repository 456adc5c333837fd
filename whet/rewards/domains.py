# SPDX-License-Identifier: Apache-2.0
"""Rows of several domains, each scored by a function of its own, in its own processes and with its own deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from whet.errors import RewardError
from whet.types import Failure, Outcome, RewardItem

FIELD = "domain"  # of a row, which names its domain


class Pending(Protocol):
    """Outcomes that may not be there yet."""

    def result(self) -> list[Outcome]:
        """Waits for the outcomes, in order."""

    def done(self) -> bool:
        """Tells whether `result` returns at once."""


class Scores(Protocol):
    """A pool of a domain."""

    def submit_batch(self, items: Sequence[RewardItem]) -> Pending:
        """Starts to score the items."""

    def close(self) -> None:
        """Ends its processes."""


@dataclass(frozen=True)
class Domain:
    """A domain: the data sources that belong to it (`*` stands for any text), its pool, the weight of its rewards."""

    sources: Sequence[str]
    pool: Scores
    weight: float


@dataclass(frozen=True)
class Routed:
    """Pending outcomes of several domains."""

    count: int
    pending: Mapping[str, tuple[Sequence[int], Pending]]  # by domain, with the places of its items
    weigh: Callable[[str, Outcome], Outcome]

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order; waits for all domains."""
        outcomes: list[Outcome] = [Failure("reward", "not scored")] * self.count
        for name, (places, pending) in self.pending.items():
            for place, outcome in zip(places, pending.result(), strict=True):
                outcomes[place] = self.weigh(name, outcome)
        return outcomes

    def done(self) -> bool:
        """Tells whether `result` returns at once."""
        return all(pending.done() for _, pending in self.pending.values())


class DomainRewards:
    """Scores each item with the function of its domain: that in its field `domain`, else the first one with a pattern
    that its data source matches.

    The parts of a result are named `<domain>/<part>`, with `<domain>/reward` and `<domain>/accuracy` beside them.
    """

    def __init__(self, domains: Mapping[str, Domain]) -> None:
        self._domains = domains

    def submit_batch(self, items: Sequence[RewardItem]) -> Routed:
        """Starts all domains on their items.  Raises: RewardError for an item of no domain."""
        places: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(self.domain_of(item), []).append(place)
        pending = {
            name: (chosen, self._domains[name].pool.submit_batch([items[place] for place in chosen]))
            for name, chosen in places.items()
        }
        return Routed(len(items), pending, self._weigh)

    def domain_of(self, item: RewardItem) -> str:
        """The domain of an item.  Raises: RewardError."""
        named = item.extra_info.get(FIELD)
        if named is not None:
            if named in self._domains:
                return str(named)
            raise RewardError(
                f"a row (data source {item.data_source!r}) has the domain {named!r}; expected one of "
                f"{', '.join(self._domains)}: correct its field {FIELD!r}, or add reward.domains.{named}"
            )
        for name, domain in self._domains.items():
            if any(fnmatchcase(item.data_source, pattern) for pattern in domain.sources):
                return name
        raise RewardError(
            f"no domain takes rows of data source {item.data_source!r}; the domains are "
            + "; ".join(f"{name}: {', '.join(domain.sources)}" for name, domain in self._domains.items())
            + ": add the source to one, or set reward.function for all others"
        )

    def close(self) -> None:
        """Ends all processes."""
        for domain in self._domains.values():
            domain.pool.close()

    def _weigh(self, name: str, outcome: Outcome) -> Outcome:
        if isinstance(outcome, Failure):
            return replace(outcome, message=f"{name}: {outcome.message}")
        weight = self._domains[name].weight
        parts = {f"{name}/{part}": value for part, value in outcome.parts.items()}
        parts |= {f"{name}/reward": outcome.reward, f"{name}/accuracy": outcome.accuracy}
        tokens = outcome.token_rewards and tuple(weight * each for each in outcome.token_rewards)
        return replace(outcome, reward=weight * outcome.reward, parts=parts, token_rewards=tokens)
