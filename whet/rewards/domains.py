# SPDX-License-Identifier: Apache-2.0
"""Rows of several domains, each scored by a function of its own, in its own processes and with its own deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from whet.types import Failure, Outcome, Outcomes, RewardItem, Scorer


@dataclass(frozen=True)
class Domain:
    """The pool of a domain, and the weight of its rewards."""

    pool: Scorer
    weight: float


@dataclass(frozen=True)
class Routed:
    """Pending outcomes of several domains."""

    count: int
    pending: Mapping[str, tuple[Sequence[int], Outcomes]]  # by domain, with the places of its items
    weigh: Callable[[str, Outcome], Outcome]

    def result(self) -> list[Outcome]:
        outcomes: list[Outcome] = [Failure("reward", "not scored")] * self.count
        for name, (places, pending) in self.pending.items():
            for place, outcome in zip(places, pending.result(), strict=True):
                outcomes[place] = self.weigh(name, outcome)
        return outcomes

    def done(self) -> bool:
        return all(pending.done() for _, pending in self.pending.values())


class DomainRewards:
    """Scores each item with the function of its domain.

    The parts of a result are named `<domain>/<part>`, with `<domain>/reward` and `<domain>/accuracy` beside them.
    """

    def __init__(self, of: Callable[[RewardItem], str], domains: Mapping[str, Domain]) -> None:
        self._of, self._domains = of, domains
        self.scores_alone = all(domain.pool.scores_alone for domain in domains.values())

    def submit_batch(self, items: Sequence[RewardItem]) -> Routed:
        """Starts all domains on their items.  Raises: DataError for an item of no domain."""
        places: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(self._of(item), []).append(place)
        pending = {
            name: (chosen, self._domains[name].pool.submit_batch([items[place] for place in chosen]))
            for name, chosen in places.items()
        }
        return Routed(len(items), pending, self._weigh)

    def close(self) -> None:
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
