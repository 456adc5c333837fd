# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's policy as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

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
    folder = source if (source / checkpoint.MANIFEST).exists() else checkpoint.find(source, "auto")
    if folder is None:
        raise CheckpointError(
            f"{source} is no checkpoint and no run with one; expected a folder with {checkpoint.MANIFEST}"
        )
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
