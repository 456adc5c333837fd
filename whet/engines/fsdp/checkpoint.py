# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a sharded state in a folder: every rank writes its shards, and any number of ranks can read them.

    engine.json                                   numbers of steps, and the base model of an adapter
    shard-00001-model-00001-of-00002.safetensors  shards of the first rank, the first of two files

torch.distributed.checkpoint reads and writes the folder as safetensors, which load without running code. Tensors are
named `model.<weight>` and `optimizer.<weight>.<moment>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.engines.engine import check_same
from whet.engines.optim import Form, SavedTensor, check_form
from whet.errors import CheckpointError, EngineError
from whet.models.sharded import like

STATE, STEP = "engine.json", "step"  # a step is one number, the same on every rank
FILE_BYTES = 2**30  # whole weights in a file; its shards are in memory twice while it is written
Named = dict[str, torch.Tensor]
T = TypeVar("T")


def save(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, Named],
    progress: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> None:
    """Writes `weights`, the optimizer's `states` by weight, and `progress`.  Raises: CheckpointError on every rank."""
    tensors = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    for weight, state in states.items():
        tensors |= {f"optimizer.{weight}.{name}": _as_shard(value, weights[weight]) for name, value in state.items()}
    files, total = {}, 0
    for name, size in _everyones(
        {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}, group
    ).items():
        files[name] = 1 + total // FILE_BYTES
        total += size
    writer = HuggingFaceStorageWriter(str(path), fqn_to_index_mapping=files, save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)
        if dist.get_rank(group) == 0:
            (path / STATE).write_text(json.dumps(progress))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{path}", _first_line(error), "a writable folder") from error


def load(
    path: Path, weights: Mapping[str, torch.Tensor], states: Mapping[str, Named], form: Form, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Loads `weights`, and the optimizer's `states` by weight if the folder has them. `form` is the form of the run's
    states.  Returns the `progress`.

    Raises: EngineError for the state of another model or engine; CheckpointError for an unreadable state, and for one
    of another form."""
    if not path.is_dir():
        change = "set engine.name to the engine of the run that wrote the file"
        raise EngineError(f"{path}", "is a file", "a folder, which this engine writes", change)
    reader = HuggingFaceStorageReader(str(path))
    found: dict[str, Any] = reader.read_metadata().state_dict_metadata
    saved = {name.removeprefix("model."): each.size for name, each in found.items() if name.startswith("model.")}
    check_same(_everyones({name: weight.shape for name, weight in weights.items()}, group), saved)
    tensors = {f"model.{name}": weight.detach() for name, weight in weights.items()}
    for weight, state in states.items():
        prefix = f"optimizer.{weight}."
        for name, each in found.items():
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
                tensors[name] = made = _empty(each, own, weights[weight])
                state[own] = made.view(()) if own == STEP else made
    moments = {name: each for name, each in found.items() if name.startswith("optimizer.")}
    kept = [SavedTensor(name.rpartition(".")[2], each.properties.dtype, each.size) for name, each in moments.items()]
    dtypes = {each.properties.dtype for name, each in found.items() if name.startswith("model.")}
    try:
        progress: dict[str, Any] = json.loads((path / STATE).read_text())
        check_form(progress.get("optim"), form, kept, dtypes)
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except (OSError, ValueError, CheckpointException) as error:
        raise CheckpointError(f"{path}", _first_line(error), "a readable state of the fsdp engine") from error
    return progress


def _everyones(own: dict[str, T], group: dist.ProcessGroup) -> dict[str, T]:
    """Merges the mappings of all ranks by name. (In a pipeline, a rank has only the weights of its own stages.)"""
    everyone: list[Any] = [own] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    return {name: value for each in everyone for name, value in each.items()}


def _as_shard(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Converts a rank's part of optimizer state to a DTensor that is sharded like its weight."""
    if isinstance(value, DTensor):
        return value
    if value.dim() == 0:
        return value[None]
    assert isinstance(weight, DTensor)
    is_alike = value.shape == weight.to_local().shape
    shape = weight.shape if is_alike else (weight.shape[0], *value.shape[1:])  # else one or more numbers for each row
    return like(weight, value, torch.Size(shape))


def _empty(saved: TensorStorageMetadata, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Allocates memory for this rank's part of a saved state."""
    if name == STEP:
        return torch.zeros(saved.size, dtype=saved.properties.dtype)
    assert isinstance(weight, DTensor)
    shape, _ = compute_local_shape_and_global_offset(saved.size, weight.device_mesh, weight.placements)
    own = torch.zeros(shape, dtype=saved.properties.dtype, device=weight.to_local().device)
    return like(weight, own, saved.size)


def _first_line(error: BaseException) -> str:
    """Returns the text of an error. If it contains the errors of several ranks, the text is the first rank's."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {error}"
    return str(error)
