# SPDX-License-Identifier: Apache-2.0
"""Loads sharded models: each process reads only its shards of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from whet.errors import ModelError
from whet.kernels.compact_adamw import own_part
from whet.models.folder import check_weights, split_adapters, weight_files
from whet.models.load import (
    TrainedModel,
    ValueModel,
    body_of,
    check_complete,
    check_finite,
    new_head,
    outline,
    without_weight_bars,
)
from whet.models.lora import ADAPTER, HEAD, adapted_layers, new_adapter


def empty_model(path: str | Path, device: torch.device, **options: bool) -> TrainedModel:
    """Builds the module of `outline` (with `options`). Its weights are on `meta`, its buffers, such as rotary
    frequencies, on `device`.  Raises: ModelError."""
    with torch.device("meta"):
        model = outline(path, **options)
    for weight in model.parameters():
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # then transformers does not initialise it
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    body_of(model).initialize_weights()
    return model


def fill(
    model: nn.Module,
    path: str | Path,
    device: torch.device,
    *,
    seed: int,
    has_new_head: bool = False,
    allow_pickle: bool = False,
) -> None:
    """Loads this rank's shards of the weights at `path` into a sharded `model` on `meta`. A value head starts at 0. A
    new adapter starts with `new_adapter`. With `has_new_head`, the head of a reward model starts with `new_head` if the
    files lack it.  Raises: ModelError."""
    body = body_of(model)
    layers = adapted_layers(body)
    with open_slices(path, allow_pickle) as files, without_weight_bars():
        conversions: Any = get_model_conversion_mapping(body)
        settings = LoadStateDictConfig(device_map={"": device}, weight_mapping=conversions, dtype=None)
        with _without_adapters(body, layers):  # so that weights have their names in the files
            report, _ = convert_and_load_state_dict_in_model(body, dict(files), settings)
            body.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    missing = set(report.missing_keys) - body.all_tied_weights_keys.keys()
    if has_new_head and HEAD in missing:
        missing.remove(HEAD)
        head: Any = body.get_submodule("score")
        _allocate(head, "weight", device)
        own_part(head.weight).copy_(part_of(new_head(head.weight.shape, seed), head.weight))
    check_complete(body, path, missing)
    if wrong := [*report.mismatched_keys, *report.conversion_errors.items(), *report.error_msgs]:
        found = f"{len(wrong)} weights cannot be read into {type(body).__name__}, first: {wrong[0]}"
        raise ModelError(f"{path}", found, "", "fetch the folder again, or name another one")
    if isinstance(model, ValueModel):
        for name, _ in list(model.value_head.named_parameters()):  # in a pipeline only the last stage has the head
            _allocate(model.value_head, name, device)
    for name, layer in layers.items():
        first, second = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        _allocate(first, "weight", device)
        _allocate(second, "weight", device)
        own_part(first.weight).copy_(part_of(new_adapter(name, first.weight.shape, seed), first.weight))
    check_finite(body, path)


def part_of(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of `whole`, sharded like `weight`; `whole` itself if `weight` is not sharded."""
    if not isinstance(weight, DTensor):
        return whole
    shape, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]


def _allocate(module: nn.Module, name: str, device: torch.device) -> None:
    """Replaces a sharded weight on `meta` by zeros on `device`."""
    weight = getattr(module, name)
    own = torch.zeros(weight.to_local().shape, dtype=weight.dtype, device=device)
    setattr(module, name, nn.Parameter(like(weight, own, weight.shape), requires_grad=weight.requires_grad))


def like(weight: DTensor, own: torch.Tensor, shape: torch.Size) -> DTensor:
    """Builds a tensor of the global `shape`, sharded like `weight`, from this rank's `own` part."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def open_slices(path: str | Path, allow_pickle: bool) -> Iterator[Iterator[tuple[str, Any]]]:
    """Opens a model's files. Yields names with slices, which read a weight from disk when they are indexed.
    Raises: ModelError."""
    base, adapters = split_adapters(path)
    if adapters:
        found = f"is an adapter for {base}, and sharded engines cannot merge an adapter while loading"
        raise ModelError(f"{path}", found, "", "export the merged model first, and name its folder")
    kinds = ["*.safetensors*", *(["*.bin*"] if allow_pickle else [])]
    folder = Path(base) if Path(base).is_dir() else Path(snapshot_download(base, allow_patterns=kinds))
    check_weights(folder, allow_pickle=allow_pickle)
    with ExitStack() as files:
        yield _read_slices(folder, files, allow_pickle)


def _read_slices(folder: Path, files: ExitStack, allow_pickle: bool) -> Iterator[tuple[str, Any]]:
    for path in weight_files(folder, allow_pickle=allow_pickle):
        if path.suffix != ".safetensors":
            yield from torch.load(path, map_location="cpu", mmap=True, weights_only=True).items()
            continue
        opened = files.enter_context(safe_open(path, framework="pt"))
        for name in opened.keys():  # noqa: SIM118  # no mapping
            yield name, opened.get_slice(name)


@contextmanager
def _without_adapters(model: nn.Module, layers: Mapping[str, Any]) -> Iterator[None]:
    """Puts the adapted `layers` themselves in the place of their adapters during the block."""
    outer = {name: layer for name, layer in layers.items() if not name.endswith(".base_layer")}
    for name, layer in outer.items():
        model.set_submodule(name, layer.get_base_layer())
    try:
        yield
    finally:
        for name, layer in outer.items():
            model.set_submodule(name, layer)
