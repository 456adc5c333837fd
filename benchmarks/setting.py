# SPDX-License-Identifier: Apache-2.0
"""How large the benchmarks are, and where they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.competitor import Entry, take_turns
from benchmarks.record import Record
from benchmarks.workload import Answers, Workload


@dataclass(frozen=True)
class Scale:
    """The sizes of everything."""

    size: str  # of the model, as `whet init-model` knows it
    num_layers: int
    rounds: int
    warm_up: int
    is_thorough: bool  # with whet compiled, all variants of TRL, both dtypes, all splits, the whole quickstart
    rollout: Mapping[str, Answers]
    step: Mapping[str, Answers]
    exactness: Answers
    quickstart_seeds: tuple[int, ...]
    quickstart_target: float  # held-out accuracy
    recipe_seeds: tuple[int, ...]
    estimator_shape: tuple[int, int]  # rows and positions
    gae_shape: tuple[int, int]
    loss_shape: tuple[int, int]
    transport_shape: tuple[int, int]
    gemm_size: int
    copy_bytes: int
    cold_starts: int

    @property
    def prompts(self) -> int:
        """How many different prompts are needed."""
        return max(each.prompts for each in (*self.rollout.values(), *self.step.values(), self.exactness))


FULL = Scale(
    size="tiny",
    num_layers=4,
    rounds=9,
    warm_up=2,
    is_thorough=True,
    rollout={
        "ragged": Answers(prompts=16, n=8, shortest=16, longest=512),
        "equal": Answers(prompts=8, n=8, shortest=128, longest=128),
    },
    step={
        "ragged": Answers(prompts=8, n=8, shortest=16, longest=256),
        "equal": Answers(prompts=8, n=8, shortest=64, longest=64),
    },
    exactness=Answers(prompts=17, n=8, shortest=16, longest=256),
    quickstart_seeds=(0, 1, 2),
    quickstart_target=0.84,
    recipe_seeds=(0,),
    estimator_shape=(65_536, 1024),
    gae_shape=(1024, 8192),
    loss_shape=(65_536, 1024),
    transport_shape=(8192, 2048),
    gemm_size=2048,
    copy_bytes=2**28,
    cold_starts=9,
)

QUICK = Scale(
    size="nano",
    num_layers=1,
    rounds=2,
    warm_up=1,
    is_thorough=False,
    rollout={"ragged": Answers(prompts=2, n=2, shortest=2, longest=8)},
    step={"ragged": Answers(prompts=2, n=2, shortest=2, longest=8)},
    exactness=Answers(prompts=4, n=2, shortest=2, longest=8),
    quickstart_seeds=(0,),
    quickstart_target=0.0,
    recipe_seeds=(0,),
    estimator_shape=(64, 16),
    gae_shape=(8, 64),
    loss_shape=(64, 16),
    transport_shape=(64, 16),
    gemm_size=256,
    copy_bytes=2**22,
    cold_starts=2,
)


@dataclass(frozen=True)
class Setting:
    """The arguments of a benchmark."""

    scale: Scale
    workload: Workload
    scratch: Path
    trl_python: Path | None  # absent: TRL takes no part
    verl_python: Path | None = None  # absent: verl takes no part

    def whet(self, module: str, **settings: object) -> Entry:
        """A competitor in this environment."""
        return Entry(Path(sys.executable), module, {"model": str(self.workload.model), **settings})

    def trl(self, module: str, **settings: object) -> Entry:
        """A competitor in TRL's environment."""
        assert self.trl_python is not None
        return Entry(self.trl_python, module, {"model": str(self.workload.model), **settings})

    def beside_verl(self, module: str, **settings: object) -> Entry:
        """A competitor in verl's environment, which whet's functions run in too."""
        assert self.verl_python is not None
        return Entry(self.verl_python, module, settings)

    def take_turns(self, entries: Mapping[str, Entry]) -> dict[str, Record]:
        """All rounds."""
        return take_turns(entries, rounds=self.scale.rounds, warm_up=self.scale.warm_up, scratch=self.scratch)
