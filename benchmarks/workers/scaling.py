# SPDX-License-Identifier: Apache-2.0
"""A rollout or an update by so many processes of one core each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.workers.packing import ragged_batch
from benchmarks.workers.pinned import PinnedActor
from benchmarks.workers.turns import Turns
from whet.config import TrainConfig, load_config
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.keyed import key
from whet.planning.dtypes import with_dtypes
from whet.rollout.protocol import Request, SamplingParams, generate
from whet.rollout.replicas import Replicas
from whet.trainers.build import plan, worker_specs
from whet.trainers.objectives import PolicyObjective

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None}


def main() -> None:
    """All requests once a turn, or one optimizer step."""
    turns = Turns()
    settings = turns.settings
    roles = launched(settings["model"], settings["processes"])
    phases = {"rollout": rollout, "update": update}
    work = phases[settings["phase"]](roles, [(prompt, length) for prompt, length in settings["requests"]])
    turns.ready()
    while True:
        turns.wait()
        turns.done(result=work())


def launched(model: str, processes: int) -> dict[str, WorkerGroup]:
    """Actor and rollout in the same processes, with whet's defaults in bfloat16."""
    overrides = {"model.path": model, "model.dtype": "bfloat16", "data.max_response_length": 512}
    config = with_dtypes(load_config(TrainConfig, None, overrides, given={"reward", "data"}).config)
    actor, *others = worker_specs(config, plan(config), 1)
    pinned = WorkerSpec("actor", PinnedActor, (replace(actor.args[0], total_steps=10**6),))
    roles = launch([pinned, *others], ResourcePool(processes), 600.0)
    roles["rollout"].sync(0)
    return roles


def rollout(roles: dict[str, WorkerGroup], requests: Sequence[tuple[list[int], int]]) -> Callable[[], Any]:
    """Answers of these lengths."""
    asked = [
        Request(str(index), tuple(prompt), SamplingParams(max_new_tokens=length), key(0, "scaling", index))
        for index, (prompt, length) in enumerate(requests)
    ]
    engine = Replicas(roles["rollout"], 256, gathers=roles["rollout"].world_size > 1)
    return lambda: sum(len(completion.token_ids) for completion in generate(engine, asked))


def update(roles: dict[str, WorkerGroup], requests: Sequence[tuple[list[int], int]]) -> Callable[[], Any]:
    """One step on rows of these lengths."""
    batch = ragged_batch([(list(prompt), length) for prompt, length in requests])
    objective = PolicyObjective("ppo_clip", CLIP)
    return lambda: roles["actor"].update(batch, objective).reduce()["actor/grad_norm"]


if __name__ == "__main__":
    main()
