# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: W x + alpha / rank B A x. peft adds them to the model in place, so other weights keep their names.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. B starts at 0, so a model with a new adapter, or with its adapter off,
equals the base model."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from whet.errors import ModelError, pip_install
from whet.kernels.linear import FastLinear
from whet.keyed import key
from whet.models.encoders.load import encoders_of
from whet.models.experts import expert_modules
from whet.models.folder import check_weights, reading
from whet.models.latent import LatentProjection

ADAPTER = "default"  # peft's name for the one adapter of a model
HEAD = "score.weight"  # of a reward model; trained whole beside its adapter
FUSED = ("dt_proj", "out_proj")  # of state spaces
ALL = "all-linear"  # the layers that get an adapter by default
TRAINED_PARTS = ("lora_A", "lora_B")
BASE = re.compile(r"\.base_layer(?=\.|$)")  # of peft, in the names of weights that it adapts


class LoraSettings(Protocol):
    """The settings of a new adapter; see `LoraConfig`."""

    @property
    def rank(self) -> int | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def target_modules(self) -> list[str]: ...


def add_adapter(
    model: PreTrainedModel,
    settings: LoraSettings,
    seed: int,
    dtype: torch.dtype = torch.float32,
    *,
    adapts_head: bool = False,
) -> None:
    """Adds a new adapter to `model` and freezes all other weights except a reward model's head. `dtype` is for the base
    weights of adapted layers. With `adapts_head` the output layer is adapted too; its own weight, which may be shared
    with the embedding, keeps its dtype.

    Raises: ModelError for a target that no layer has."""
    config, head = peft_config(model, settings, adapts_head=adapts_head), model.get_output_embeddings()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():  # peft's random values are replaced below
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # an adapted head is never merged
        _peft().inject_adapter_in_model(config, model, ADAPTER)
    for name, layer in adapted_layers(model).items():
        if layer.base_layer is not head:
            layer.get_base_layer().to(dtype)
        first = layer.lora_A[ADAPTER].weight
        if not first.is_meta:
            with torch.no_grad():
                first.copy_(new_adapter(name, first.shape, seed))
    for name, weight in model.named_parameters():
        if name == HEAD:
            weight.requires_grad_(True)


def new_adapter(layer: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draws the initial matrix A of a layer's adapter, distributed like the weight of a new torch linear layer. Each
    layer has its own random key, so that values do not depend on the sharding."""
    draw = torch.Generator().manual_seed(key(seed, "lora", layer))
    weight = torch.empty(*shape, device="cpu")
    return nn.init.kaiming_uniform_(weight, a=5**0.5, generator=draw)


def peft_config(model: PreTrainedModel, settings: LoraSettings, *, adapts_head: bool = False) -> Any:
    """Converts the settings to peft's. Targets are names of linear layers: by default all layers of the language model
    except a reward model's head and, without `adapts_head`, the output layer; layers of a vision tower only if the
    language model has no layer of that name. `all-linear` names the default; `experts` and `experts.down_proj` name
    stacked weights of experts."""
    head = model.get_output_embeddings()
    kinds = nn.Linear, FastLinear, LatentProjection
    layers = {name: module for name, module in model.named_modules() if type(module) in kinds}
    mixers = {name: module for name, module in model.named_modules() if hasattr(module, "conv1d")}
    # The kernels of state spaces, which have a weight D, read weights without an adapter. Linear attention has no such
    # kernel: there the layer can be named, but by default it is left out, as in earlier checkpoints.
    fused = {f"{mixer}.{part}" for mixer, module in mixers.items() if hasattr(module, "D") for part in FUSED}
    chosen = (name for name, module in layers.items() if adapts_head or module is not head)
    linear = {name for name in chosen if name not in fused and f"{name}.weight" != HEAD}
    taken = layers_like_experts(model)
    linear = {name for name in linear if name.rpartition(".")[2] not in taken}
    tower = _tower(model)
    language = {name for name in linear if tower is None or not re.fullmatch(tower, name)}
    default = {name for name in language if not (name.endswith(".out_proj") and name.rpartition(".")[0] in mixers)}
    names = sorted({re.sub(r".*?([^.]+(\.\d+)*)$", r"\1", name) for name in default})
    mixtures = [(name, *own) for name, each in expert_modules(model) for own in each.named_parameters()]
    stacked = [f"{name}.{own}" for name, own, weight in mixtures if weight.dim() == 3]
    wanted = [name for each in settings.target_modules for name in (names if each == ALL else [each])]
    named = {target: _of_experts(stacked, target) for target in wanted}
    targets = sorted(target for target, weights in named.items() if not weights)
    for target in targets:
        if not _has(linear, target):
            found = f"names {target!r}, which no linear layer of {type(model).__name__} is called"
            if names_experts(target):
                found = f"names {target!r}, and {type(model).__name__} has no experts that can be adapted"
            elif _has(fused, target):
                found = f"names {target!r}, a layer whose kernel reads its weight without an adapter"
            elif _has((name for name in layers if name.rpartition(".")[2] in taken), target):
                found = f"names {target!r}, and in a mixture peft may adapt the experts in place of such a layer"
            names += ["experts"] if stacked else []
            raise ModelError("model.lora.target_modules", found, f"some of {', '.join(names)}")
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=_alpha(settings),
        target_modules=targets if settings.target_modules else names,
        target_parameters=[weight for weights in named.values() for weight in weights] or None,
        exclude_modules=tower if all(_has(language, target) for target in targets) else None,
        task_type="CAUSAL_LM",
    )


def _has(layers: Iterable[str], target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in layers)


def _of_experts(stacked: Iterable[str], target: str) -> list[str]:
    """Returns the weights of experts that a target names: as `experts`, or by their own names after it."""
    found = stacked if names_experts(target) else []
    return [name for name in found if _has([name, name.rpartition(".")[0]], target)]


def layers_like_experts(model: nn.Module) -> set[str]:
    """Returns names of linear layers that no adapter can have in this model: its experts are one tensor, but layers of
    these names in files, and peft would adapt the wrong ones."""
    has_experts = any(name.endswith(".experts.gate_up_proj") for name, _ in model.named_parameters())
    return {"gate_proj", "up_proj", "down_proj"} if has_experts else set()


def names_experts(target: str) -> bool:
    """Tells whether a target may name weights of experts. Names of linear layers, such as down_proj, do not."""
    return "experts" in target.split(".")


def _tower(model: PreTrainedModel) -> str | None:
    """Returns a regular expression for the names of modules in the model's vision tower; None without a tower."""
    encoders = encoders_of(model)
    return None if encoders is None else rf"(.*\.)?({'|'.join(encoders.towers)})\..*"


def fingerprint(model: nn.Module) -> str:
    """Returns a hash that identifies the base weights of an adapter: of names, shapes and about 64 numbers of each
    weight in bfloat16. With sharded weights all ranks must call it."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if name == HEAD or any(f".{part}." in name for part in TRAINED_PARTS):
            continue
        digest.update(f"{BASE.sub('', name)} {tuple(weight.shape)}".encode())
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        some = whole.detach().flatten()[:: max(1, weight.numel() // 64)]
        digest.update(some.bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def merge_adapter(model: PreTrainedModel, path: str | Path, *, allow_pickle: bool = False) -> PreTrainedModel:
    """Merges the adapter in the folder `path` into the model's weights.  Raises: ModelError."""
    check_weights(path, "adapter_model", allow_pickle=allow_pickle)
    with reading(path, f"holds an adapter that does not fit {type(model).__name__}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers has deprecated
        warnings.filterwarnings("error", message=".*missing adapter keys.*|.*target_parameters.*")
        merged: PreTrainedModel = _peft().PeftModel.from_pretrained(model, str(path)).merge_and_unload()
    return merged.requires_grad_(True)


def head_weight(head: Any) -> torch.Tensor:
    """Returns the weight of an output layer, merged with its adapter if the adapter is on; differentiable."""
    weight: torch.Tensor = head.weight
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return weight
    first, second = (getattr(head, part)[ADAPTER].weight for part in TRAINED_PARTS)
    return weight + head.scaling[ADAPTER] * (second @ first)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Returns the layers with an adapter, by name, found by attributes, because importing peft takes seconds."""
    return {
        name: each for name, each in model.named_modules() if hasattr(each, "lora_A") and hasattr(each, "base_layer")
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switches the adapter off during the block, so that the model is the base model."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
        # peft also freezes the adapter, but requires_grad of a sharded model must not change.
        for part in TRAINED_PARTS:
            getattr(layer, part).requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(
    model: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights by their Hugging Face names: tied weights once, adapters merged. `whole` gathers a sharded
    weight."""
    adapted = adapted_layers(model).items()
    layers = {f"{BASE.sub('', name)}.{getattr(each, 'parameter_name', 'weight')}": each for name, each in adapted}
    for name, parameter in model.named_parameters():
        if any(f".{part}." in name for part in TRAINED_PARTS):
            continue
        plain = BASE.sub("", name)
        if (layer := layers.get(plain)) is None:
            yield plain, whole(parameter)
            continue
        first, second = (whole(getattr(layer, part)[ADAPTER].weight) for part in TRAINED_PARTS)
        if parameter.dim() == 3:  # peft's form: A [E r, in], B [out, r E]
            first = first.unflatten(0, (layer.num_experts, -1))
            second = second.unflatten(1, (-1, layer.num_experts)).permute(2, 0, 1)
        delta = second @ first
        delta = delta.mT if getattr(layer.get_base_layer(), "is_transposed", False) else delta
        yield plain, (delta * layer.scaling[ADAPTER]).detach().add_(whole(parameter))


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of the model's adapter by their names in an adapter folder."""
    for name, weight in model.named_parameters():
        if any(f".{part}." in name for part in TRAINED_PARTS):
            yield _in_folder(name), weight.detach()


def adapter_config(names: Iterable[str], settings: LoraSettings) -> dict[str, Any]:
    """Returns the config for an adapter folder with weights of these names and with `settings`."""
    targets = sorted({name.split(".")[-3] for name in names})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": settings.rank}
    return config | {"lora_alpha": _alpha(settings), "target_modules": targets}


def _in_folder(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


def _alpha(settings: LoraSettings) -> float:
    assert settings.rank is not None
    return 2.0 * settings.rank if settings.alpha is None else settings.alpha


def plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copies the model without its adapter."""
    memo: dict[int, Any] = {}
    for layer in reversed(adapted_layers(model).values()):  # an adapter inside another one comes first
        memo[id(layer)] = copy.deepcopy(layer.base_layer, memo)  # deepcopy uses it in place of the layer
    return copy.deepcopy(model, memo)


def save_adapter(weights: dict[str, torch.Tensor], config: Any, out: Path) -> None:
    """Writes an adapter folder for `peft.PeftModel.from_pretrained`; `weights` have the names of the model."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    named = {_in_folder(name): weight.contiguous() for name, weight in weights.items()}
    save_file(named, out / "adapter_model.safetensors")
    config.save_pretrained(out)
    written = out / "adapter_config.json"
    fields = json.loads(written.read_text())
    for name in ("target_modules", "target_parameters"):  # from sets: equal runs write equal bytes
        if fields.get(name):
            fields[name].sort()
    written.write_text(json.dumps(fields, indent=2) + "\n")


def _peft() -> Any:
    """Imports peft, which takes seconds, only when an adapter needs it.  Raises: ModelError without peft."""
    try:
        import peft
    except ImportError as error:
        found = f"makes adapters, and cannot be imported ({error})"
        raise ModelError("peft", found, "", f"run {pip_install('peft')}") from error
    return peft
