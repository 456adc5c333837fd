# SPDX-License-Identifier: Apache-2.0
"""Processes and devices of a converted recipe: nodes, GPUs, pools, and the sizes that have to divide them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from whet.config.foreign import KeyRow
from whet.config.foreign_python import calculated

if TYPE_CHECKING:
    from whet.config.convert import Conversion

Unit = Iterator[tuple[str, Any]]
GPUS_OF_A_NODE = 8
_SAMPLE = "cluster.placement.sample"
_SIZES = ("tensor_parallel_size", "sequence_parallel_size", "shard_size")


def place(of: Conversion) -> None:
    """Completes `cluster`: Ray for several nodes, their number for pools; drops sizes that do not divide the processes,
    and the engine that shards where there is one process."""
    values, origins = of.result.values, of.result.origins
    nodes, gpus = values.get("cluster.nnodes", 1), values.get("cluster.n_gpus_per_node", 1)
    if not isinstance(nodes, int) or not isinstance(gpus, int):
        return  # refused by the check of all values
    training = max(1, nodes * gpus)
    own = values.get("cluster.placement.train.processes")
    if own:
        size = values.get(f"{_SAMPLE}.devices", 1)
        values[f"{_SAMPLE}.devices"] = devices = min(size, GPUS_OF_A_NODE)  # an engine stays on one node
        values[f"{_SAMPLE}.processes"] = values.get(f"{_SAMPLE}.processes", 1) * max(1, size // devices)
        training, total = own, own + values[f"{_SAMPLE}.processes"] * devices
        gpus = total if total <= GPUS_OF_A_NODE else GPUS_OF_A_NODE if total % GPUS_OF_A_NODE == 0 else gpus
        nodes = -(-total // gpus)
    elif (rows := _rows(of)) < training:
        of.result.parallel.append(f"{training} GPUs are more than the {rows} rows of an update; here {rows}")
        training, gpus, nodes = rows, rows, 1
    if own or "cluster.n_gpus_per_node" in values:
        values |= {"cluster.nnodes": nodes, "cluster.n_gpus_per_node": gpus}
        origins |= {
            f"cluster.{each}": origins.get(f"cluster.{each}", "pools") for each in ("nnodes", "n_gpus_per_node")
        }
    if nodes == 1:
        values.pop("cluster.nnodes", None)
    else:
        of.write("cluster.backend", "ray", "several nodes")
    for key in [key for key in values if re.match(r"(\w+\.)?engine\.(name$|options\.)", key) and "rollout" not in key]:
        role, _, option = key.rpartition("engine.")
        tensor = values.get(f"{role}engine.options.tensor_parallel_size", 1)
        if training == 1:
            left_out = "is for several processes, and there is one"
        elif option[8:] in _SIZES and training % values[key]:
            left_out = f"does not divide the {training} processes"
        elif option[8:] == "sequence_parallel_size" and tensor > 1:
            left_out = f"tensor_parallel_size={tensor} shares out the heads already"
        elif option[8:] == "tensor_parallel_size" and values.get("model.lora.rank"):
            left_out = "splits layers that an adapter changes"
        else:
            of.write(f"{role}engine.name", "fsdp", origins[key], over=False)
            continue
        if not origins[key].startswith("default"):
            of.result.parallel.append(f"{origins[key]}={values[key]}: {left_out}; left out")
        del values[key], origins[key]


def _rows(of: Conversion) -> int:
    """Rows of an update of the policy; of examples any number."""
    values = of.result.values
    prompts = values.get("actor.mini_batch_size") or values.get("data.train_batch_size") or 32
    return max(1, prompts * values.get("rollout.n", 8)) if of.result.command == "train" else 10**9


def devices_of(value: Any) -> list[int] | None:
    """The numbers of devices of `list(range(0,8))`, `[0, 1]` and sums of these; None for anything else."""
    if isinstance(value, list):
        return value
    try:
        found = calculated(str(value))
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(each, int) for each in found) else None


def roll_devices(of: Conversion, key: str, value: Any, row: KeyRow, ours: tuple[str, ...]) -> Unit:
    """Places roles in one pool, or in two where sampling has devices of its own; their number replaces nodes."""
    if key != row.theirs[0]:
        return
    training, sampling = (devices_of(of.given.get(each, [])) for each in row.theirs[:2])
    if training is None or sampling is None:
        of.result.parallel.append(f"{key}={value}: not read; set cluster.n_gpus_per_node and cluster.placement")
        return
    config = "actor_infer.strategy_args.strategy_config."
    size = of.given.get("actor_infer.num_gpus_per_worker") or of.given.get(f"{config}tensor_parallel_size") or 1
    if sampling and not {*training} & {*sampling}:
        size = size if len(sampling) % size == 0 else 1
        yield from {
            "cluster.placement.train.processes": len(training),
            "cluster.placement.train.roles": ["actor"],
            f"{_SAMPLE}.processes": len(sampling) // size,
            f"{_SAMPLE}.roles": ["rollout"],
            f"{_SAMPLE}.devices": size,
        }.items()
        return
    if sampling and {*training} != {*sampling}:
        told = f"{len(training)} train and {len(sampling)} sample, some of them both; here all {len(training)} do both"
        of.result.parallel.append(f"{row.theirs[1]}={of.given[row.theirs[1]]}: {told}")
    gpus = max(1, min(len(training), of.value("num_gpus_per_node") or GPUS_OF_A_NODE))
    gpus = gpus if len(training) % gpus == 0 else len(training)
    yield "cluster.n_gpus_per_node", gpus
    yield "cluster.nnodes", max(1, len(training) // gpus)
