# SPDX-License-Identifier: Apache-2.0
"""What tests of several folders need."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets that lies beside the repository, where there is one."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the folder shared/data beside the repository is not there: public data sets as published")
    return SHARED_DATA.resolve()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 model of two layers that reads and writes characters."""
    from whet.models.init import init_model

    folder = tmp_path_factory.mktemp("models") / "qwen3"
    return init_model(
        folder, "qwen3", "nano", alphabet="0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>", num_layers=2, max_position_embeddings=512
    )


@pytest.fixture(scope="session")
def qwen25_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2.5 model (biases, untied kv heads) with a byte-level tokenizer."""
    from whet.models.init import init_model

    return init_model(tmp_path_factory.mktemp("models") / "qwen25", "qwen2.5", "nano", num_layers=2, max_position_embeddings=512)
