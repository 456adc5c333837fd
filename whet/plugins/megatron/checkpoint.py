# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the engine: a state in a folder, which can be read with any mesh.

engine.json            steps
megatron/              weights and the optimizer's state in Megatron-Core's distributed form (`torch_dist`)
model-00001.safetensors ...    weights by their names in Hugging Face's modules, as other engines write them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from whet.errors import CheckpointError, EngineError
from whet.plugins.megatron.core import CheckpointingException, dist_checkpointing, parallel_state
from whet.plugins.megatron.model import MegatronStage

STATE = "engine.json"  # the steps
FILE_BYTES = 2**30  # of whole weights a file
FOLDER, FORM = "megatron", ("torch_dist", 1)
# Each weight's state is one tensor under the weight's name, whatever the mesh.
METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(path: Path, stages: Sequence[MegatronStage], optimizer: Any, progress: dict[str, Any]) -> None:
    """Writes the checkpoint without the Hugging Face weights; all ranks take part.  Raises: CheckpointError."""
    write(path / FOLDER, stages, optimizer, progress["steps_done"])
    if dist.get_rank() == 0:
        (path / STATE).write_text(json.dumps(progress))


def write(path: Path, stages: Sequence[MegatronStage], optimizer: Any = None, steps: int = 0) -> None:
    """Writes only the distributed form: the stages and the optimizer.  Raises: CheckpointError."""
    path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    try:
        state = _state(stages, optimizer, steps)
        dist_checkpointing.save(state, str(path), FORM, content_metadata=METADATA)
    except CheckpointingException as error:
        raise CheckpointError(f"{path}", str(error), "a writable folder") from error


def save_weights(path: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes the whole weights in Hugging Face's form from the first rank; all ranks take part."""
    kept, files = dict[str, torch.Tensor](), 1
    for name, weight in weights:
        if dist.get_rank():
            continue
        if sum(each.nbytes for each in kept.values()) > FILE_BYTES:
            save_file(kept, path / f"model-{files:05}.safetensors")
            kept, files = {}, files + 1
        kept[f"model.{name}"] = weight.to("cpu", copy=True)
    if kept:
        save_file(kept, path / f"model-{files:05}.safetensors")
    dist.barrier()


def load(path: Path, stages: Sequence[MegatronStage], optimizer: Any) -> dict[str, Any]:
    """Loads the state into stages and optimizer; all ranks take part.  Returns the `progress`.

    Raises: EngineError for the state of another model or engine; CheckpointError for one that cannot be read."""
    if not (path / FOLDER).is_dir():
        change = "set engine.name as in the run that wrote it"
        raise EngineError(f"{path}", f"has no folder {FOLDER}", "a folder that this engine writes", change)
    state = read(path / FOLDER, stages, optimizer)
    try:
        progress: dict[str, Any] = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE}", f"{error}", "a file of this engine") from error
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"], progress["steps_done"])
    return progress


def read(path: Path, stages: Sequence[MegatronStage], optimizer: Any = None) -> dict[str, Any]:
    """Loads the weights of a folder in the distributed form into stages.  Returns everything that was read.

    Raises: CheckpointError."""
    try:
        state: dict[str, Any] = dist_checkpointing.load(_state(stages, optimizer, None), str(path))
    except (OSError, ValueError, KeyError, CheckpointException, CheckpointingException) as error:
        found, change = f"{error}".partition("\n")[0][:200], "name a folder with metadata.json"
        raise CheckpointError(f"{path}", found, "a state of this model", change) from error
    for number, stage in enumerate(stages):
        stage.load_state_dict(state[f"model{number}"])
    return state


def _state(stages: Sequence[MegatronStage], optimizer: Any, steps: int | None) -> dict[str, Any]:
    """Returns this rank's parts with their positions in the whole state; `steps` is None for reading."""
    metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {f"model{number}": stage.sharded_state_dict(metadata=metadata) for number, stage in enumerate(stages)}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict(state, steps, metadata)
    return state
