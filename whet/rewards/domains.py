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
class Combined:
    """A pending result that is made of the outcomes of several pools."""

    pending: Sequence[Outcomes]  # by pool
    combine: Callable[[Sequence[list[Outcome]]], list[Outcome]]

    def result(self) -> list[Outcome]:
        return self.combine([each.result() for each in self.pending])

    def done(self) -> bool:
        return all(each.done() for each in self.pending)


class DomainRewards:
    """Scores each item with the function of its domain.

    The parts of a result are named `<domain>/<part>`, with `<domain>/reward` and `<domain>/accuracy` beside them.
    """

    def __init__(self, of: Callable[[RewardItem], str], domains: Mapping[str, Domain]) -> None:
        self._of, self._domains = of, domains
        self.scores_alone = all(domain.pool.scores_alone for domain in domains.values())

    def submit_batch(self, items: Sequence[RewardItem]) -> Combined:
        """Starts all domains on their items.  Raises: DataError for an item of no domain."""
        own = [(self._of(item), item) for item in items]
        names = dict.fromkeys(name for name, _ in own)

        def combine(found: Sequence[list[Outcome]]) -> list[Outcome]:
            outcomes = {name: iter(each) for name, each in zip(names, found, strict=True)}
            return [self._weigh(name, next(outcomes[name])) for name, _ in own]

        asked = {name: [item for of, item in own if of == name] for name in names}
        return Combined([self._domains[name].pool.submit_batch(each) for name, each in asked.items()], combine)

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
