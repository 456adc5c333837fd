# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters by peft, inside a model whose other parts keep their names: W x + alpha / rank B A x.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. B starts at 0, so that the model with a new adapter, and that
with its adapter off, is the model that it was put into.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from whet.errors import ModelError, pip_install
from whet.keyed import key
from whet.models.folder import check_weights, reading

ADAPTER = "default"  # peft's name for the one adapter of a model
TRAINED_PARTS = ("lora_A", "lora_B")


class LoraSettings(Protocol):
    """The part of the config that an adapter is made from; see `LoraConfig`."""

    @property
    def rank(self) -> int | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def target_modules(self) -> list[str]: ...


def add_adapter(model: PreTrainedModel, settings: LoraSettings, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Puts a new adapter into `model` and freezes all else; `dtype` is that of the adapted layers' own weights.

    Raises: ModelError for a target that no layer has.
    """
    config = peft_config(model, settings)
    with torch.random.fork_rng(devices=[]):  # its draws are replaced below
        _peft().inject_adapter_in_model(config, model, ADAPTER)
    for name, layer in adapted_layers(model).items():
        layer.base_layer.to(dtype)
        first = layer.lora_A[ADAPTER].weight
        if not first.is_meta:
            with torch.no_grad():
                first.copy_(new_adapter(name, first.shape, seed))


def new_adapter(layer: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A of a new adapter at a layer: uniform and as large as torch starts a linear layer. The same however the model is
    spread, as each layer has its own key."""
    draw = torch.Generator().manual_seed(key(seed, "lora", layer))
    weight = torch.empty(*shape, device="cpu")
    return nn.init.kaiming_uniform_(weight, a=5**0.5, generator=draw)


def peft_config(model: PreTrainedModel, settings: LoraSettings) -> Any:
    """The settings as peft has them; targets are names of linear layers, by default all but the head's."""
    head = model.get_output_embeddings()
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    names = sorted({name.rpartition(".")[2] for name in linear})
    for target in settings.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ModelError(
                f"model.lora.target_modules names {target!r}, which no linear layer of {type(model).__name__} is "
                f"called; it has {', '.join(names)}"
            )
    assert settings.rank is not None
    alpha = 2.0 * settings.rank if settings.alpha is None else settings.alpha
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        target_modules=sorted(settings.target_modules) or names,
        task_type="CAUSAL_LM",
    )


def fingerprint(model: nn.Module) -> str:
    """Tells one model's weights from another's, apart from an adapter: by names, shapes and some 64 numbers of each,
    as bfloat16 has them. On every rank where they are sharded."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if any(f".{part}." in name for part in TRAINED_PARTS):
            continue
        digest.update(f"{name.replace('.base_layer.', '.')} {tuple(weight.shape)}".encode())
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        some = whole.detach().flatten()[:: max(1, weight.numel() // 64)]
        digest.update(some.bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def merge_adapter(model: PreTrainedModel, path: str | Path, *, allow_pickle: bool = False) -> PreTrainedModel:
    """The model with the adapter in the folder `path` added into its weights.  Raises: ModelError."""
    check_weights(path, "adapter_model", allow_pickle=allow_pickle)
    with reading(path, f"holds an adapter that does not fit {type(model).__name__}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers has renamed
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        merged: PreTrainedModel = _peft().PeftModel.from_pretrained(model, str(path)).merge_and_unload()
    return merged.requires_grad_(True)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name; none without one. (By their parts: peft takes seconds to import.)"""
    return {
        name: each for name, each in model.named_modules() if hasattr(each, "lora_A") and hasattr(each, "base_layer")
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapter, for as long as the block lasts."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
        # peft freezes what it switches off, which a sharded model must not see.
        for part in TRAINED_PARTS:
            getattr(layer, part).requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights under their Hugging Face names, tied ones once, adapters added in."""
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters():
        owner, _, rest = name.rpartition(".base_layer.")
        if owner in layers and rest == "weight":
            delta = layers[owner].get_delta_weight(ADAPTER).detach()
            yield f"{owner}.weight", delta.add_(parameter.detach())
        elif owner in layers:
            yield f"{owner}.{rest}", parameter.detach()
        elif not any(f".{part}." in name for part in TRAINED_PARTS):
            yield name, parameter.detach()


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy without adapters."""
    memo: dict[int, Any] = {}
    for layer in adapted_layers(model).values():
        memo[id(layer)] = copy.deepcopy(layer.base_layer, memo)  # stands in for the layer in what is copied next
    return copy.deepcopy(model, memo)


def save_adapter(weights: dict[str, torch.Tensor], config: Any, out: Path) -> None:
    """Writes a folder that `peft.PeftModel.from_pretrained` loads; `weights` are named as in the model."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": weight for name, weight in weights.items()}
    save_file({name: weight.contiguous() for name, weight in named.items()}, out / "adapter_model.safetensors")
    config.save_pretrained(out)
    written = out / "adapter_config.json"
    fields = json.loads(written.read_text())
    fields["target_modules"].sort()  # from a set: equal runs write equal bytes
    written.write_text(json.dumps(fields, indent=2) + "\n")


def _peft() -> Any:
    """The library, which takes seconds to import: only where there is an adapter.  Raises: ModelError without it."""
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            f"adapters are made by peft, which cannot be imported ({error}); run {pip_install('peft')}"
        ) from error
    return peft
