# SPDX-License-Identifier: Apache-2.0
"""Every mesh that a number of processes can form, and its comparison with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import engine_conformance as suite
import torch

from whet.config.schema import EngineConfig
from whet.controller.worker_group import WorkerGroup
from whet.engines.mesh import FACTORS

BOUND = 2e-5  # of the gradient of a parameter, relative by norm, float32
ROUNDING = 1e-4  # of the norm of the whole gradient: below it a parameter's gradient is compared with this part of it
Sizes = dict[str, int]
GroupOf = Callable[..., WorkerGroup]
Reference = tuple[dict[str, torch.Tensor], suite.Record]


def meshes_of(processes: int) -> list[Sizes]:
    """The sizes above 1 of every mesh: factors whose product is the number, and every divisor of shard x context."""
    divisors = [each for each in range(1, processes + 1) if processes % each == 0]
    grids = [dict(zip(FACTORS, sizes, strict=True)) for sizes in product(divisors, repeat=len(FACTORS))]
    return [
        {name: size for name, size in {**grid, "expert": expert}.items() if size > 1}
        for grid in grids
        if prod(grid.values()) == processes
        for expert in divisors
        if grid["shard"] * grid["context"] % expert == 0
    ]


def some(processes: int, has: str = "", lacks: str = "") -> list[Sizes]:
    """Meshes that have every dimension of `has`, and no dimension of `lacks`."""
    wanted, unwanted = {*has.split()}, {*lacks.split()}
    return [sizes for sizes in meshes_of(processes) if wanted <= sizes.keys() and not unwanted & sizes.keys()]


def named(sizes: Sizes) -> str:
    """The name of a case."""
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "shard"


def fsdp(sizes: Sizes, **options: Any) -> EngineConfig:
    """The engine with a mesh. `stages_per_rank` may be among the sizes."""
    mesh = {name: size for name, size in sizes.items() if name != "stages_per_rank"}
    per_rank = {name: size for name, size in sizes.items() if name == "stages_per_rank"}
    return EngineConfig(name="fsdp", logits_chunk_tokens=16, options={"mesh": mesh, **per_rank, **options})


def without_routers(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a step with a pipeline, whose stages measure no routers."""
    return {name: value for name, value in metrics.items() if "router" not in name}


def gradients_and_steps(group: WorkerGroup) -> Reference:
    """Gradients of a mini-batch after one step, as a new adapter has no gradient in A; and a record of three more."""
    group.update(suite.batch_of(0, 12), suite.OBJECTIVES[0])
    return group.gradients(suite.batch_of(1, 12))[0], suite.drive(group, steps=range(3))


def check_same(expected: Reference, got: Reference, sizes: Sizes, untrained: str = "") -> None:
    """Compares gradients by parameter, then the records. Parameters with the ending `untrained` may have none."""
    (gradients, record), (own, own_record) = expected, got
    assert own.keys() == gradients.keys()
    least = ROUNDING * float(torch.stack([each.norm() for each in gradients.values()]).norm())
    for name, gradient in gradients.items():
        assert gradient.norm() > 0 or (untrained and name.endswith(untrained)), name
        assert (own[name] - gradient).norm() <= BOUND * max(float(gradient.norm()), least), name
    if "pipeline" in sizes:
        record = replace(record, metrics=[without_routers(each) for each in record.metrics])
    suite.check_records(record, own_record)
