# SPDX-License-Identifier: Apache-2.0
"""Makes `scripted` importable here, and a tokenizer of single characters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parent))
SHIPPED: dict[str, tuple[str, int, dict[str, Any]]] = {  # name, most sequences together, options
    "native": ("native", 256, {}),
    # room for three sequences at a time, and a cache that holds few of them
    "native, short of everything": ("native", 3, {"kv_cache_bytes": 2 * 2 * 2 * 16 * 32 * 4 * 24}),
    "hf": ("hf", 256, {}),
}
SLOW = {"native, short of everything"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests with an argument `rollout_engine` run with each engine."""
    if "rollout_engine" in metafunc.fixturenames:
        shipped = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SHIPPED]
        metafunc.parametrize("rollout_engine", metafunc.config.getoption("--rollout-engine") or shipped)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --rollout-engine only tests that take any engine run."""
    if config.getoption("--rollout-engine"):
        left_out = [item for item in items if "rollout_engine" not in getattr(item, "fixturenames", ())]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    """One token a character; its chat template only appends."""
    from whet.models.load import load_tokenizer

    return load_tokenizer(model_folder)
