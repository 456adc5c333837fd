# SPDX-License-Identifier: Apache-2.0
"""Checks of a model folder before it is loaded: adapters and their base, and weight files."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import safetensors
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from whet.errors import ModelError

log = logging.getLogger(__name__)
ADAPTER_CONFIG = "adapter_config.json"
HUB_SECONDS = 10.0  # the longest wait for the hub's reply
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@functools.cache
def require_model(path: str | Path) -> None:
    """Asks the hub once whether it has the model, if `path` is neither a local folder nor cached. (The hub's client
    would retry for minutes.)  Raises: ModelError."""
    name, why = str(path), ""
    if Path(name).is_dir() or constants.HF_HUB_OFFLINE:
        return
    if Path(name).exists():
        raise ModelError(name, "is a file", "a folder", "name the folder that it is in")
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        why = ", and the hub has no model of that name that you may see"
    except HfHubHTTPError:  # transformers will explain the failure
        return
    except ValueError:  # an invalid name of a model
        pass
    except Exception as error:  # no network
        why = f", and the hub cannot be reached ({' '.join(str(error).split())})"
    else:
        return
    expected = "a folder with a config.json and the weights, or the name of a model on the hub"
    raise ModelError(name, f"is no folder here{why}", expected, "correct it")


@contextmanager
def reading(path: str | Path, fault: str) -> Iterator[None]:
    """Converts any error of transformers in the block to a ModelError, which names the folder and its `fault`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            change = "read it, and set model.trust_remote_code=true if you trust its author, or name another model"
            found = "brings code of its own, which would run on this machine"
            raise ModelError(f"{path}", found, "a model that transformers knows", change) from error
        hint = "" if Path(path).exists() else " (no such folder exists, and no model of that name could be fetched)"
        reason = " ".join(str(error).split())[:1000] or type(error).__name__
        change = "correct the file, or fetch the folder again"
        raise ModelError(f"{path}", f"{fault}{hint}: {reason}", "", change) from error


def split_adapters(path: str | Path) -> tuple[str, list[str]]:
    """Finds the base model of an adapter folder, which may itself be an adapter folder.  Returns the path of the base
    model, and the adapter folders in the order in which they are merged.  Raises: ModelError.
    """
    base, adapters = str(path), list[str]()
    while (config := Path(base, ADAPTER_CONFIG)).is_file():
        if (Path(base) / "config.json").is_file():
            change = "move the adapter to a folder of its own and name that as model.lora.path"
            raise ModelError(base, f"holds a whole model and an adapter ({ADAPTER_CONFIG})", "", change)
        if base in adapters:
            key = f"{base}: base_model_name_or_path"
            raise ModelError(key, "names this folder itself", "the folder of its base", "correct it")
        adapters.insert(0, base)
        try:
            base = json.loads(config.read_text())["base_model_name_or_path"] or ""
            if not isinstance(base, str):
                raise TypeError(f"it is {base!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            found = f"is damaged or names no base_model_name_or_path: {error!r}"
            raise ModelError(f"{config}", found, "", "correct it, or fetch it again") from error
        if not base:
            change = "set model.path to the base model, and model.lora.path to this folder"
            raise ModelError(f"{config}: base_model_name_or_path", None, "the base model", change)
    return base, adapters


def check_weights(path: str | Path, name: str = "model", *, allow_pickle: bool = False) -> None:
    """Checks the weight files of a local folder (not of a hub name).  Raises: ModelError for missing, truncated or
    pickled weights."""
    folder = Path(path)
    if not folder.is_dir():
        return
    index = folder / f"{name}.safetensors.index.json"
    if index.is_file():
        files = _indexed(index)
    elif (folder / f"{name}.safetensors").is_file():
        files = [f"{name}.safetensors"]
    else:
        _check_pickles(folder, name, allow_pickle)
        return
    if missing := [file for file in files if not (folder / file).is_file()]:
        found = f"is incomplete: {index.name} names {len(files)} files, and {len(missing)} of them are missing "
        change = "finish the download, or fetch the folder again"
        raise ModelError(f"{folder}", f"{found}({_few(missing)})", "", change)
    for file in files:
        try:
            with safetensors.safe_open(folder / file, framework="pt"):  # compares the header with the file's size
                pass
        except (safetensors.SafetensorError, OSError) as error:
            size = (folder / file).stat().st_size
            found = f"is damaged or was cut short at {size:,} bytes ({error})"
            raise ModelError(f"{folder / file}", found, "", "fetch it again") from error


def weight_files(folder: str | Path, name: str = "model", *, allow_pickle: bool = False) -> list[Path]:
    """Lists the weight files of a folder that has passed `check_weights`."""
    kinds = [(name, ".safetensors"), *([("pytorch_model", ".bin")] if allow_pickle else [])]
    for stem, suffix in kinds:
        index = Path(folder, f"{stem}{suffix}.index.json")
        if index.is_file():
            return [Path(folder, file) for file in _indexed(index)]
        if (whole := Path(folder, f"{stem}{suffix}")).is_file():
            return [whole]
    raise ModelError(f"{folder}", "has no weights", f"{name}.safetensors")


def _indexed(index: Path) -> list[str]:
    try:
        named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}", f"is damaged: {error!r}", "", "fetch it again") from error
    if outside := [name for name in named if Path(name).name != name]:
        raise ModelError(f"{index}", f"names {outside[0]}, which is no file of its folder", "", "fetch it again")
    return named


def _check_pickles(folder: Path, name: str, allow_pickle: bool) -> None:
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if not pickles:
        found = f"has no weights; it has {_few(sorted(file.name for file in folder.iterdir())) or 'no files'}"
        raise ModelError(f"{folder}", found, f"{name}.safetensors")
    if not allow_pickle:
        found = f"has its weights as pickles only ({_few(pickles)}), and a pickle can run code when it is loaded"
        change = "ask its author for safetensors, or set model.allow_pickle=true if you trust it"
        raise ModelError(f"{folder}", found, "", change)
    log.warning("%s: weights come from pickles (%s), as model.allow_pickle=true asks", folder, _few(pickles))


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])
