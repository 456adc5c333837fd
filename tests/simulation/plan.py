# SPDX-License-Identifier: Apache-2.0
"""A schedule to simulate: sizes, faults and their times, all drawn from a seed, and smaller schedules of its kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

KINDS = (
    "die",
    "hang",
    "slow",
    "cut",
    "leave",
    "join",
    "load_fails",
    "all_die",
    "kill",
    "save",
    "save",
    "crash",
    "crash",
)


PLACED = ("environments", "rewards")  # kinds of ranks that die for good


@dataclass(frozen=True)
class Fault:
    """An event from outside: the kind, the virtual time and the replica."""

    at: float
    kind: str
    replica: int
    seconds: float  # that it lasts


@dataclass(frozen=True)
class Plan:
    """A schedule. The seed also draws every delay."""

    seed: int
    staleness: float
    batch_size: int
    n: int
    steps: int
    replicas: int
    most: int  # requests of a replica
    capacity: int  # requests that the engine takes before it is full
    max_new_tokens: int
    max_turns: int
    filters: bool
    episode_seconds: float
    aborts: bool  # replicas end what runs when they pause or load, with the tokens so far
    twice: float = 0.08  # share of messages that are heard twice
    stalls: float = 0.03  # share of messages that take seconds
    environment_ranks: int = 1
    reward_ranks: int = 1
    extra: float = 0.0  # groups that a step begins beside its batch, as a share of it
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, seed: int, *, faults: bool = True, staleness: float | None = None) -> Plan:
        """The schedule of a seed."""
        draw = random.Random(f"plan {seed}")
        k = draw.choice([0, 0.5, 1, 1, 1.5, 2, 4]) if staleness is None else staleness
        replicas = draw.randint(1, 4)
        drawn = [
            Fault(draw.uniform(0, 60), draw.choice(KINDS), draw.randrange(replicas), draw.uniform(0, 40))
            for _ in range(draw.randint(0, 8) if faults else 0)
        ]
        plain = cls(
            seed=seed,
            staleness=k,
            batch_size=draw.randint(1, 3),
            n=draw.randint(1, 3),
            steps=draw.randint(2, 6),
            replicas=replicas,
            most=draw.randint(1, 6),
            capacity=draw.choice([3, 8, 1000]),
            max_new_tokens=draw.choice([6, 12]),
            max_turns=draw.randint(1, 3),
            filters=draw.random() < 0.3,
            episode_seconds=1e9 if k == 0 or draw.random() < 0.7 else 60.0,
            aborts=draw.random() < 0.3,
            environment_ranks=draw.randint(1, 3),
            reward_ranks=draw.randint(1, 3),
            faults=tuple(sorted([*drawn, *_placed(draw, faults=faults)], key=lambda fault: fault.at)),
            extra=draw.choice([0.0, 0.5, 1.0]) if k == 0 else 0.0,
        )
        return plain if faults else replace(plain, twice=0.0, stalls=0.0)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        """The schedule that `asdict` wrote."""
        return cls(**{**raw, "faults": tuple(Fault(**fault) for fault in raw["faults"])})

    def to_json(self) -> dict[str, Any]:
        """The schedule as JSON values."""
        return asdict(self)

    def smaller(self) -> Iterator[Plan]:
        """Schedules with one thing less, the largest cuts first."""
        half = len(self.faults) // 2
        if half > 1:
            yield replace(self, faults=self.faults[:half])
            yield replace(self, faults=self.faults[half:])
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        for name, floor in (
            ("twice", 0.0),
            ("stalls", 0.0),
            ("filters", False),
            ("extra", 0.0),
            ("aborts", False),
            ("capacity", 1000),
        ):
            if getattr(self, name) != floor:
                yield replace(self, **{name: floor})
        for name in (
            "environment_ranks",
            "reward_ranks",
            "steps",
            "replicas",
            "batch_size",
            "n",
            "max_turns",
            "max_new_tokens",
        ):
            value = getattr(self, name)
            for less in {value // 2, value - 1} - {value, 0}:
                yield replace(self, **{name: less})


def _placed(draw: random.Random, *, faults: bool) -> list[Fault]:
    """The deaths of ranks of environments and rewards."""
    count = draw.randint(0, 3) if faults else 0
    return [Fault(draw.uniform(0, 60), draw.choice(PLACED), draw.randrange(3), 0.0) for _ in range(count)]
