# SPDX-License-Identifier: Apache-2.0
"""The planner that runs ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from whet.batch import Batch
from whet.config.schema import RunConfig
from whet.engines.role import RoleSettings
from whet.errors import WhetError
from whet.planning.doctor import Finding
from whet.planning.planner import Counts, Planner, Setup
from whet.planning.units import duration, size
from whet.plugins.planner.fit import check_fits
from whet.plugins.planner.forecast import forecast_of, introduce
from whet.plugins.planner.memory import cache_room, sized
from whet.plugins.planner.outline import Outline
from whet.plugins.planner.speed import training_flops
from whet.registry import register_planner
from whet.rollout.planned import CacheRoom

SLOW, HOPELESS = 300.0, 3600.0  # seconds of a step


@register_planner("memory")
class MemoryPlanner(Planner):
    """Plans from outlines of the models of a run, and formulas."""

    def check_fits(self, setup: Setup, run_dir: Path, replan: Callable[[Any], Setup], reclaimed_bytes: int = 0) -> int:
        return check_fits(setup, run_dir, replan, reclaimed_bytes)

    def introduce(self, setup: Setup, counts: Counts) -> None:
        introduce(setup, counts)

    def sized(self, settings: RoleSettings, setup: Setup, role: str) -> RoleSettings:
        return sized(settings, setup, role)

    def cache_room(self, setup: Setup) -> CacheRoom | None:
        return cache_room(setup)

    def update_flops(self, settings: RoleSettings) -> Callable[[Batch], float]:
        return partial(training_flops, Outline(settings))

    def findings(self, config: RunConfig) -> Iterator[Finding]:
        try:
            made = forecast_of(config)
        except WhetError as error:
            yield Finding("config", "refused", str(error), is_problem=True)
            return
        for room in made.rooms:
            if room.free is not None:
                found = f"about {size(room.needed)} needed, {size(room.free)} free"
                advice = "" if room.fits else "`whet plan` lists settings that reduce it"
                yield Finding("device" if room.on_device else "memory", found, advice, is_problem=True)
        free = size(made.free_disk_bytes or 0)
        found = f"about {size(made.disk_bytes)} for checkpoints, {free} free in {made.run_dir}"
        advice = "" if made.fits_on_disk else "lower trainer.save_limit, or free disk space"
        yield Finding("disk", found, advice, is_problem=True)
        step = made.step_seconds
        if step is None:
            yield Finding("time", "unknown: the speed of accelerators is not measured")
            return
        whole = "" if made.seconds is None else f", {duration(made.seconds)} in all"
        smaller = "a smaller model, fewer or shorter responses (data.max_response_length), or an accelerator"
        advice = smaller * (step > SLOW)
        yield Finding("time", f"about {duration(step)} a step{whole}", advice, is_problem=step > HOPELESS)
