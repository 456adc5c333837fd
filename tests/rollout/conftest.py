# SPDX-License-Identifier: Apache-2.0
"""Makes `scripted` importable here, and a tokenizer of single characters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    """One token a character; its chat template only appends."""
    from whet.models.load import load_tokenizer

    return load_tokenizer(model_folder)
