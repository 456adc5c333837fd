# SPDX-License-Identifier: Apache-2.0
"""Export of a checkpoint's policy as a plain Hugging Face folder, or of its adapter alone."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from whet import serialization
from whet.checkpoints import checkpoint
from whet.checkpoints.checkpoint import disk_errors
from whet.checkpoints.ranks import MODEL, RankFiles, find_ranks
from whet.config.schema import LoraConfig
from whet.errors import CheckpointError, ModelError, WhetError
from whet.models.load import (
    body_of,
    is_classifier,
    kept_buffers,
    load_config,
    load_policy,
    load_reward_model,
    outline,
    stored_tensors,
    torch_dtype,
)
from whet.models.lora import ADAPTER, HEAD, add_adapter, fingerprint, merged_weights, save_adapter

log = logging.getLogger(__name__)
LOADED_WITH = ("adapter_path", "allow_pickle", "trust_remote_code")
MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
FILE_BYTES = 2**29  # size of a written file; its weights are in memory together
Named = tuple[str, torch.Tensor]
Weights = Mapping[str, torch.Tensor]
Origin = dict[str, Any]  # of an adapter: its base model, and how it was loaded


def export(
    source: Path,
    out: Path,
    *,
    adapter: bool = False,
    base: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Writes the policy of a checkpoint, or of a run's newest one, as a folder for plain transformers.  Returns `out`.
    `source` may also be a checkpoint of verl or EasyR1; `dtype` is then by default the dtype of its weights.

    Weights are written in `dtype`, by default the dtype of the run's rollout, or float32 if that is unknown. If this
    rounds them, the remaining share of the update is logged. A trained adapter is merged into the model that training
    started from, which is read from its original path or from `base`; with `adapter` only the adapter is written, as it
    was trained, in peft's format. `out` must be new or empty.  Raises: CheckpointError."""
    with disk_errors(out, "folder to write"), disk_errors(source, "checkpoint"):
        check_new(out)
        ranks = find_ranks(source)
        folder = ranks or find_checkpoint(source)
        try:
            if ranks is not None:
                return _export_ranks(ranks, out, adapter or base is not None, dtype, trust_remote_code)
            checkpoint.verify(folder)
            return _export(folder, out, adapter, base, dtype, trust_remote_code)
        except BaseException as error:
            shutil.rmtree(out, ignore_errors=True)  # it may hold half a model
            if isinstance(error, serialization.MALFORMED) and not isinstance(error, WhetError):
                change = "choose another checkpoint"
                raise CheckpointError(f"{folder}", f"cannot be read ({error!r})", "", change) from error
            raise


def check_new(out: Path) -> None:
    """Checks that `out` is a new or an empty folder.  Raises: CheckpointError."""
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}", "is not empty", "", "name a new folder, so that nothing is overwritten")


def from_weights(
    out: Path, model: Path, weights: Iterator[Named], *, dtype: str = "float32", trust_remote_code: bool = False
) -> Path:
    """Writes `weights` as a model folder, like `export`. The folder `model` has the config and tokenizer; the names of
    `weights` are the names of its parameters.  Returns `out`.  Raises: CheckpointError."""
    with disk_errors(out, "folder to write"):
        with torch.device("meta"):
            shapes = body_of(outline(model, trust_remote_code=trust_remote_code))
        write_weights(out, weights, shapes, torch_dtype(dtype), {})
        for each in model.iterdir():
            is_text = each.suffix in (".json", ".jinja", ".model", ".txt")
            if is_text and each.name != "metadata.json" and not each.name.endswith(".index.json"):
                shutil.copy(each, out)
        text = (out / "config.json").read_text()
        (out / "config.json").write_text(re.sub(r'("(?:torch_)?dtype": )"\w+"', rf'\1"{dtype}"', text))
    return out


def _export(folder: Path, out: Path, adapter: bool, base: str | None, dtype: str | None, is_trusted: bool) -> Path:
    weights, origin = _state(folder / "actor.state")
    saved = checkpoint.saved(folder)
    name = dtype or saved.get("dtype") or "float32"
    if name not in ("float32", "bfloat16"):
        raise CheckpointError(f"{folder}: dtype of weights", name, "float32 or bfloat16", "set --dtype")
    if origin is None:
        _check_whole(folder, adapter or base is not None)
    else:
        model = _with_adapter(folder, origin | {"trust_remote_code": is_trusted}, weights, base)
        if adapter:
            return _write_adapter(model, origin, weights, folder, base, out)
        weights = {**dict(merged_weights(model)), **kept_buffers(model)}
    shapes = _outline(folder / "model", is_trusted)
    _check_names(names := stored_tensors(shapes), weights, folder)
    # In the model's order: a state sorted by name would not have the weights of a layer together.
    ordered = ((name, weights[name]) for name in names)
    return _write(out, folder / "model", ordered, shapes, name, _start_weights(base or saved.get("start")))


def _export_ranks(folder: Path, out: Path, is_adapter: bool, dtype: str | None, is_trusted: bool) -> Path:
    """Exports a checkpoint of verl or EasyR1, by default in the dtype of its weights."""
    _check_whole(folder, is_adapter)
    weights, shapes = RankFiles(folder), _outline(folder / MODEL, is_trusted)
    kinds = {weights.dtype(name) for name in weights}
    own = stored_tensors(shapes)
    # Another version of transformers may use the names of model files, for example with each expert by itself.
    expected = own if own.keys() <= weights.keys() else revert_weight_conversion(shapes, own)
    _check_names(expected, weights.keys() - shapes.all_tied_weights_keys.keys(), folder)
    for name, weight in expected.items():
        if weights.shape(name) != tuple(weight.shape):
            found, wanted = f"shape {weights.shape(name)}", f"{tuple(weight.shape)}, by {MODEL}/config.json"
            raise CheckpointError(f"{folder}: {name}", found, wanted, "choose another checkpoint")
    name = dtype or ("bfloat16" if kinds == {torch.bfloat16} else "float32")
    return _write(out, folder / MODEL, ((each, weights[each]) for each in expected), shapes, name, {})


def _check_whole(folder: Path, is_adapter: bool) -> None:
    if is_adapter:
        change = "export it without --adapter and --base"
        raise CheckpointError(f"{folder}", "holds a whole model and no adapter", "", change)


def _outline(folder: Path, is_trusted: bool) -> PreTrainedModel:
    """Builds the model of a folder on the meta device.  Raises: CheckpointError."""
    try:
        config = load_config(folder, trust_remote_code=is_trusted)
        with torch.device("meta"):
            options = {"is_reward_model": is_classifier(config), "trust_remote_code": is_trusted}
            return body_of(outline(folder, **options))
    except (ModelError, TypeError, RecursionError) as error:
        key, found = f"{folder.parent}: {folder.name}/config.json", f"is damaged ({error})"
        raise CheckpointError(key, found, "", checkpoint.RESTORE) from error


def _write(
    out: Path, folder: Path, weights: Iterator[Named], shapes: PreTrainedModel, name: str, start: Weights
) -> Path:
    """Writes the weights in the dtype `name`, and the other files of the model's `folder`."""
    left = write_weights(out, weights, shapes, torch_dtype(name), start)
    whole_model = shutil.ignore_patterns("*.safetensors*", "*.bin*")  # verl may also save the weights there
    shutil.copytree(folder, out, dirs_exist_ok=True, ignore=whole_model)
    text = (out / "config.json").read_text()
    (out / "config.json").write_text(re.sub(r'("(?:torch_)?dtype": )"\w+"', rf'\1"{name}"', text))
    if left is not None:
        share = "an unknown share" if math.isnan(left) else f"{100 * left:.1f} %"
        log.info("%s: rounded to %s, which leaves %s of the update; dtype float32 keeps all of it", out, name, share)
    return out


def _start_weights(path: str | None) -> Mapping[str, torch.Tensor]:
    """Returns the weights that training started from, by their names in the files; empty if this machine lacks them."""
    with suppress(Exception):  # the weights serve only for a comparison
        folder = Path(str(path))
        if not folder.is_dir():
            folder = Path(str(try_to_load_from_cache(str(path), "config.json"))).parent
        return MergedShards(folder, "")
    return {}


def _state(path: Path) -> tuple[Mapping[str, torch.Tensor], Origin | None]:
    """Returns the policy's weights in a checkpoint, by name, and the `Origin` of its adapter (None without adapter)."""
    if path.is_dir():
        return MergedShards(path), json.loads((path / "engine.json").read_text())["start"]
    state = serialization.load(path)
    if not all(map(torch.is_tensor, state["model"].values())):
        raise TypeError("not all weights of actor.state are tensors")
    return state["model"], state.get("start")


def _check_names(expected: Collection[str], weights: Collection[str], folder: Path) -> None:
    missing, unexpected = set(expected) - set(weights), set(weights) - set(expected)
    if missing or unexpected:
        found = f"they do not fit its config: missing {sorted(missing)}, unexpected {sorted(unexpected)}"
        raise CheckpointError(f"{folder}: weights", found, "", "choose another checkpoint")


def _with_adapter(folder: Path, origin: Origin, weights: Weights, base: str | None) -> PreTrainedModel:
    """Loads the model that training started from, with the trained adapter in it, not yet merged."""
    path, options = base or origin["model_path"], {name: origin[name] for name in LOADED_WITH}
    try:
        if HEAD in weights:
            del options["adapter_path"]  # a reward model has no merged adapter
            model = load_reward_model(path, new_head_seed=0, **options)  # its head is among the weights
        else:
            model = load_policy(path, **options)
    except ModelError as error:
        found = f"is an adapter for the model at {path}, which cannot be loaded: {error}"
        raise CheckpointError(f"{folder}", found, "", "give the model's folder with --base") from error
    if fingerprint(model) != origin["fingerprint"]:
        found = f"is an adapter for other weights than those at {path}"
        raise CheckpointError(f"{folder}", found, "", "give the folder of its own base model with --base")
    add_adapter(model, LoraConfig(**origin["lora"]), seed=0, dtype=torch_dtype(origin.get("dtype", "float32")))
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return model


def _write_adapter(
    model: PreTrainedModel, origin: Origin, weights: Weights, folder: Path, base: str | None, out: Path
) -> Path:
    if origin["adapter_path"] is not None:
        found = f"started from {origin['model_path']} with the adapter {origin['adapter_path']} merged into it, so its "
        change = "export the merged model, without --adapter"
        raise CheckpointError(f"{folder}", f"{found}own adapter fits no saved model", "", change)
    config: Any = model.peft_config[ADAPTER]
    config.base_model_name_or_path = base or origin["model_path"]
    if HEAD in weights:
        config.task_type, config.modules_to_save = "SEQ_CLS", [HEAD.rpartition(".")[0]]
    save_adapter(dict(weights), config, out)
    whole_model = shutil.ignore_patterns("config.json", "generation_config.json")  # not in an adapter's folder
    shutil.copytree(folder / "model", out, dirs_exist_ok=True, ignore=whole_model)
    return out


def find_checkpoint(source: Path, also: str = "") -> Path:
    """Returns `source` if it is a checkpoint, else the newest checkpoint of the run in `source`. `also` is added to the
    error: it names other valid sources.  Raises: CheckpointError."""
    folder = source if (source / checkpoint.MANIFEST).exists() else checkpoint.find(source, "auto")
    if folder is None:
        expected = f"a folder with {checkpoint.MANIFEST}{also}"
        raise CheckpointError(f"{source}", "is no checkpoint and no run with one", expected)
    return folder


def find_model(path: str) -> str:
    """Returns the newest checkpoint if `path` is a run; else `path` itself, a model folder or a name on the hub.
    Raises: CheckpointError."""
    folder = Path(path).expanduser()
    is_model = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return path if not folder.is_dir() or is_model else str(find_checkpoint(folder, ", or a model's with config.json"))


def model_digest(path: str, trust_remote_code: bool) -> str:
    """Returns a digest of the files of a folder or checkpoint; for a model on the hub its name and commit."""
    folder = Path(find_model(path)).expanduser()
    if not folder.is_dir():
        return f"{path}@{load_config(path, trust_remote_code=trust_remote_code)._commit_hash}"
    manifest = folder / checkpoint.MANIFEST  # has the checksums of the other files
    files = [file for file in sorted(folder.iterdir()) if file.suffix in MODEL_SUFFIXES]
    whole = hashlib.blake2b(digest_size=16)
    for each in [manifest] if manifest.exists() else files:
        with each.open("rb") as file:
            whole.update(each.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return whole.hexdigest()


@contextmanager
def model_folder(path: str, *, trust_remote_code: bool = False) -> Iterator[str]:
    """Yields a path that transformers can load; for a checkpoint or a run a temporary export."""
    found = find_model(path)
    if not (Path(found) / checkpoint.MANIFEST).exists():
        yield found
        return
    with TemporaryDirectory(prefix="whet-model-") as folder:
        yield str(export(Path(found), Path(folder), trust_remote_code=trust_remote_code))


def write_weights(
    out: Path, weights: Iterator[Named], model: PreTrainedModel, dtype: torch.dtype, start: Mapping[str, torch.Tensor]
) -> float | None:
    """Writes `weights`, named as in `model` (which may be on meta), in `dtype` and under their Hugging Face names.

    Returns the share of the update since `start` that survives rounding: 1 - |rounded - trained|^2 / |trained -
    start|^2, NaN if unknown; None without rounding. It keeps the weights of one file and one layer in memory."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[list[str]] = []
    kept: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if kept:
            part = out / f"part-{len(written)}"
            part.touch()
            mode = part.stat().st_mode  # of the user's umask; safetensors would let only the owner read the file
            save_file(kept, part, metadata={"format": "pt"})
            part.chmod(mode)
            written.append(list(kept))
            kept.clear()

    buffers = kept_buffers(model)
    total, lost, moved, is_rounded = 0, 0.0, 0.0, False
    for _, group in groupby(weights, key=lambda named: _layer(named[0])):
        # The files may split a layer's weights differently, for example with each expert by itself.
        named = dict(group)
        stays = named.keys() <= buffers.keys()  # buffers come after all weights
        for name, trained in revert_weight_conversion(model, named).items():
            weight = trained if stays else _finite(name, trained.to(dtype))
            if weight.dtype.itemsize < trained.dtype.itemsize:
                is_rounded = True
                if name in start:
                    lost += float((weight.float() - trained).double().square().sum())
                    moved += float((trained - start[name].float()).double().square().sum())
            if sum(each.nbytes for each in kept.values()) + weight.nbytes > FILE_BYTES:
                flush()
            kept[name] = weight.contiguous()
            total += weight.nbytes
    flush()
    left = None if not is_rounded else max(0.0, 1 - lost / moved) if moved else math.nan
    if len(written) == 1:
        (out / "part-0").rename(out / "model.safetensors")
        return left
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, names in enumerate(written):
        file = f"model-{number + 1:05}-of-{len(written):05}.safetensors"
        (out / f"part-{number}").rename(out / file)
        index["weight_map"] |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return left


class MergedShards(Mapping[str, torch.Tensor]):
    """The full weights of a sharded checkpoint (or model folder, with another `prefix`), each merged on access."""

    def __init__(self, folder: Path, prefix: str = "model.") -> None:
        reader = HuggingFaceStorageReader(str(folder))
        self._found, self._prefix = reader.read_metadata(), prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        saved: Any = self._found.state_dict_metadata[f"{self._prefix}{name}"]
        whole = torch.empty(saved.size, dtype=saved.properties.dtype)
        for index, file in self._found.storage_data.items():
            if index.fqn == f"{self._prefix}{name}":
                at = tuple(slice(start, start + size) for start, size in zip(index.offset, file.shape, strict=True))
                with safe_open(file.relative_path, framework="pt") as opened:  # a closed file uses no memory
                    whole[at] = opened.get_tensor(index.fqn)
        return whole

    def __iter__(self) -> Iterator[str]:
        names = self._found.state_dict_metadata
        return (name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _finite(name: str, weight: torch.Tensor) -> torch.Tensor:
    if not weight.isfinite().all():
        found = f"holds NaN or infinite numbers in {weight.dtype}, so these weights are no usable model"
        raise CheckpointError(name, found, "", "choose a checkpoint of an earlier step")
    return weight


def _layer(name: str) -> str:
    """Returns the common prefix of the weights of a layer; the whole name for a weight outside the layers."""
    found = re.match(r".*?\.\d+\.", name)
    return found[0] if found else name
