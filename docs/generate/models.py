# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/models.md: kinds of models and the way in which whet computes each."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.models.nano import NANO, config_of
from whet.errors import ModelError
from whet.models.encoders.load import UNREAD
from whet.models.load import outline
from whet.models.supported import Support, support_of
from whet.registry import ENCODERS, ROLLOUT_ENGINES

TABLE = re.compile("(?<=<!-- kinds -->\n).*?(?=<!-- end of kinds -->)", re.DOTALL)
SEES = re.compile("(?<=<!-- sees -->\n).*?(?=<!-- end of sees -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with the table as it is now."""
    rows = "\n".join(row(name, support_at(name)) for name in sorted(NANO))
    head = "| `model_type` | way | reason |\n|---|---|---|\n"
    text = TABLE.sub(lambda _: f"{head}{rows}\n", text)
    return SEES.sub(lambda _: sees(), text)


def sees() -> str:
    """The table of encoders, and the types of transformers' models that are refused by name."""
    kinds: dict[str, list[str]] = {}
    for name in ENCODERS.shipped:
        kinds.setdefault(name.rpartition("/")[0], []).append(name.rpartition("/")[2])
    rows = "".join(row_of_encoder(name, sorted(own)) for name, own in sorted(kinds.items()))
    refused = ", ".join(f"`{name}`" for name in sorted(UNREAD - kinds.keys()))
    head = "| `model_type` | kinds | media attend | rollouts that sample with media |\n|---|---|---|---|\n"
    return f"{head}{rows}\nRefused by name, as no encoder is registered: {refused}.\n"


def row_of_encoder(model_type: str, kinds: list[str]) -> str:
    """The row of a type of models that read media."""
    both_ways = ENCODERS[f"{model_type}/{kinds[0]}"].load().both_ways  # type: ignore[attr-defined]  # of a class
    servers = [name for name in ("vllm", "sglang") if model_type in ROLLOUT_ENGINES[name].load().sees]  # type: ignore[attr-defined]
    rollouts = ", ".join([*([] if both_ways else ["native"]), "hf", *servers])
    return f"| `{model_type}` | {', '.join(kinds)} | {'both ways' if both_ways else 'causally'} | {rollouts} |\n"


def row(model_type: str, support: Support | ModelError) -> str:
    """The row of a kind of models."""
    if isinstance(support, ModelError):
        return f"| `{model_type}` | refused | {support.found} |"
    return f"| `{model_type}` | {'own' if support.is_own else 'general'} | {support.lacks} |"


def support_at(model_type: str) -> Support | ModelError:
    """The way of a kind of models, or the error where it is refused."""
    with TemporaryDirectory() as folder, torch.device("meta"):
        config_of(model_type).save_pretrained(folder)
        try:
            return support_of(outline(Path(folder)))
        except ModelError as error:
            return error
