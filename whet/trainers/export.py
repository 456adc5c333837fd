# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's policy as a plain Hugging Face folder, for good or for as long as it is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM

from whet import serialization
from whet.errors import CheckpointError
from whet.models.load import load_config, without_weight_bars
from whet.trainers import checkpoint


def export(source: Path, out: Path) -> Path:
    """Writes the policy of a checkpoint, or of a run's newest one, so that plain transformers loads it.  Returns `out`.

    Weights are written in the dtype of the model that training started from. `out` must not hold anything yet.
    Raises: CheckpointError.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; name a new folder, so that nothing is overwritten")
    folder = find_checkpoint(source)
    checkpoint.verify(folder)
    config = load_config(folder / "model")
    weights = serialization.load(folder / "actor.state")["model"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if name in dict(model.named_parameters())]  # tied weights are saved once
    if missing or unexpected:
        raise CheckpointError(
            f"{folder}: its weights do not fit its config: missing {missing}, unexpected {unexpected}"
        )
    model.to(config.dtype or torch.float32)
    with without_weight_bars():
        model.save_pretrained(out)
    shutil.copytree(folder / "model", out, dirs_exist_ok=True)  # over what was guessed from the config alone
    return out


def find_checkpoint(source: Path) -> Path:
    """`source` itself where it is a checkpoint, or the newest one of the run that it is.  Raises: CheckpointError."""
    folder = source if (source / checkpoint.MANIFEST).exists() else checkpoint.find(source, "auto")
    if folder is None:
        raise CheckpointError(
            f"{source} is no checkpoint and no run with one; expected a folder with {checkpoint.MANIFEST}"
        )
    return folder


def find_model(path: str) -> str:
    """What `path` means where a model is read: a Hugging Face folder or hub name as it is, for a run its newest
    checkpoint.  Raises: CheckpointError."""
    folder = Path(path).expanduser()
    return path if not folder.is_dir() or (folder / "config.json").exists() else str(find_checkpoint(folder))


@contextmanager
def model_folder(path: str) -> Iterator[str]:
    """`path` where transformers can load it; for a checkpoint or a run an export that lives as long as the block."""
    found = find_model(path)
    if not (Path(found) / checkpoint.MANIFEST).exists():
        yield found
        return
    with TemporaryDirectory(prefix="whet-model-") as folder:
        yield str(export(Path(found), Path(folder)))
