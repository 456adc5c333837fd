# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of verl and EasyR1. A file `model_world_size_W_rank_R.pt` has a rank's shard of each weight; the
folder `huggingface/` has the config and the tokenizer."""

from __future__ import annotations

import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

from whet.errors import CheckpointError

MODEL = "huggingface"
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_COPY = "copy the folder again, from all machines of the run"


def find_ranks(source: Path) -> Path | None:
    """Finds the folder of the policy's rank files: `source`, its newest `global_step_N`, or `actor` inside them."""
    steps = sorted(source.glob("global_step_*"), key=lambda path: (len(path.name), path.name), reverse=True)
    for folder in (place for step in (source, *steps) for place in (step, step / "actor")):
        if folder.is_dir() and any(_FILE.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    return None


class RankFiles(Mapping[str, torch.Tensor]):
    """The weights in a folder of rank files (`find_ranks`). They stay on disk; each access to a weight reads its shards
    and merges them.  Raises: CheckpointError naming a file."""

    def __init__(self, folder: Path) -> None:
        self._states = {path: _read(path) for path in _files(folder)}
        first, *others = self._states
        self._names = self._states[first].keys()
        for path in others:
            if differing := self._states[path].keys() ^ self._names:
                raise CheckpointError(f"{path}", f"only it or only {first.name} has {min(differing)}", "", _COPY)
        if any(".lora_" in name for name in self._names):
            change = "merge it with verl.model_merger or peft, and name that folder"
            raise CheckpointError(f"{first}", "holds an adapter", "the weights of a whole model", change)

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = [(path, state[name]) for path, state in self._states.items()]
        whole = torch.empty(self.shape(name), dtype=self.dtype(name))
        places = [_place(part) for _, part in parts]
        sizes = [1 + max(along) for along in zip(*(at for at, _ in places), strict=True)]
        filled = {}
        for (path, part), (at, dims) in zip(parts, places, strict=True):
            view, own = whole, getattr(part, "_local_tensor", part)
            for coordinate, size, dim in zip(at, sizes, dims, strict=True):
                if dim is not None:
                    chunks = view.chunk(size, dim)
                    view = chunks[coordinate] if coordinate < len(chunks) else view.narrow(dim, 0, 0)
            is_copy = view.storage_offset() in filled
            if own.shape != view.shape or (is_copy and not torch.equal(own, view)):
                found = f"a shard of shape {tuple(own.shape)} that does not fit the shards of the other ranks"
                raise CheckpointError(f"{path}: {name}", found, f"shape {tuple(view.shape)}", _COPY)
            if own.numel():
                filled[view.storage_offset()] = view.copy_(own).numel()
        if sum(filled.values()) != whole.numel():
            found = f"the files have {sum(filled.values()):,} of its {whole.numel():,} numbers"
            raise CheckpointError(f"{parts[0][0].parent}: {name}", found, "", _COPY)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight without reading the weight."""
        return tuple(next(iter(self._states.values()))[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a weight without reading the weight."""
        part = next(iter(self._states.values()))[name]
        found: torch.dtype = getattr(part, "_local_tensor", part).dtype
        return found


def _files(folder: Path) -> list[Path]:
    """Lists the files of all ranks by rank.  Raises: CheckpointError."""
    worlds = {at[1] for path in folder.iterdir() if (at := _FILE.fullmatch(path.name))}
    if len(worlds) > 1:
        found, change = f"files of runs with {', '.join(sorted(worlds))} ranks", "remove the files of the other run"
        raise CheckpointError(f"{folder}", found, "files of one run", change)
    (world,) = worlds
    files = [folder / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(int(world))]
    for path in files:
        if not path.exists():
            raise CheckpointError(f"{path}", "is missing", f"a file of each of the {world} ranks", _COPY)
    return files


def _place(part: Any) -> tuple[Sequence[int], Sequence[int | None]]:
    """Returns a rank's coordinates in the device mesh, and for each mesh dimension the tensor dimension it shards."""
    if isinstance(part, torch.Tensor):
        return (), ()
    return part._spec.mesh._coordinate_on_dim, [getattr(each, "dim", None) for each in part._spec.placements]


def _read(path: Path) -> dict[str, Any]:
    """Reads the state of a rank: tensors, and shards of tensors as `_Inert`. Tensor data stays on disk."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_READING)
        for name, each in state.items():
            placements = () if isinstance(each, torch.Tensor) else each._spec.placements
            if other := {type(placement).__name__ for placement in placements} - {"Shard", "Replicate"}:
                raise TypeError(f"{name} is sharded by {other}")
        return dict(state)
    except _RefusedGlobalError as error:
        expected, change = "tensors and how they are sharded", "fetch it from where it was trained"
        raise CheckpointError(f"{path}", f"would call {error}", expected, change) from error
    except Exception as error:  # damaged or hostile bytes raise nearly anything
        raise CheckpointError(f"{path}", f"cannot be read ({error!r})", "", _COPY) from error


class _RefusedGlobalError(Exception):
    """Raised for a pickle with a function or class that is not in `_PLAIN`."""


class _Inert:
    """Replaces any object of `torch.distributed`. Has the object's saved attributes, and runs none of its code."""

    def __init__(self, *_: Any) -> None:
        self.shape: Sequence[int] = ()


def _with_state(function: Any, kind: Any, arguments: Sequence[Any], state: Any) -> Any:
    """Returns the tensor that `function` builds. A shard of a tensor gets the attributes in `state`."""
    made = function(*arguments)
    if isinstance(made, _Inert):
        made.shape = arguments[2]
        for each in state:
            vars(made).update(each or {})
    return made


_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": str,
    "torch.Tensor": _Inert,
    "torch.nn.parameter.Parameter": _Inert,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._utils._rebuild_wrapper_subclass": _Inert,
    "torch._tensor._rebuild_from_type_v2": _with_state,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed."):
            return type(name, (_Inert,), {})
        if isinstance(getattr(torch, name, None), torch.dtype) and module == "torch":
            return getattr(torch, name)
        if f"{module}.{name}" not in _PLAIN:
            raise _RefusedGlobalError(f"{module}.{name}")
        return _PLAIN[f"{module}.{name}"]


_READING = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
