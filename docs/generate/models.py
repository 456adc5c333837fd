# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/models.md: kinds of models and the way in which whet computes each."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.models.nano import NANO, config_of
from whet.errors import ModelError
from whet.models.load import outline
from whet.models.supported import Support, support_of

TABLE = re.compile("(?<=<!-- kinds -->\n).*?(?=<!-- end of kinds -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with the table as it is now."""
    rows = "\n".join(row(name, support_at(name)) for name in sorted(NANO))
    head = "| `model_type` | way | for |\n|---|---|---|\n"
    return TABLE.sub(lambda _: f"{head}{rows}\n", text)


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
