# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.errors import ConfigError

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"engine.options.shard_size": 2},
            r"actor\.engine\.options: training engine 'single' has no option 'shard_size'; its options are compile",
        ),
        (
            {"engine.name": "fsdp", "engine.options.shard_sice": 2},
            r"actor\.engine\.options: training engine 'fsdp' has no option 'shard_sice'; did you mean 'shard_size'\?",
        ),
        (
            {"engine.name": "fsdp", "engine.options.shard_size": "two"},
            r"actor\.engine\.options\.shard_size='two'; expected a whole number > 0 or null",
        ),
        (
            {"engine.name": "fdsp"},
            r"actor\.engine\.name: no training engine is called 'fdsp'; did you mean 'fsdp'\?",
        ),
        (
            {"engine": {"name": "fsdp", "options": {"sequence_parallel_size": 2, "tensor_parallel_size": 2}}},
            "both share out the heads; set one of them to 1",
        ),
        (
            {"engine.name": "fsdp", "engine.options.sequence_parallel_size": 2, "engine.packing": False},
            r"shares out packed rows; unset actor\.engine\.packing",
        ),
        (
            {"engine.name": "fsdp", "engine.options.sequence_parallel_size": 3},
            r"sequence_parallel_size=3 must divide cluster\.processes=4; try 2 or 4",
        ),
        (
            {"engine.name": "fsdp", "engine.options.tensor_parallel_size": 2, "engine.options.shard_size": 4},
            r"shard_size=4 must divide the 2 processes that hold shards; try 2",
        ),
        (
            {"optim.weight_rounding": "kahan"},
            r"keeps weights in bfloat16, but model\.dtype is float32 .*; set model\.dtype=bfloat16",
        ),
        ({"optim.weight_rounding": "kahan", "optim.name": "muon"}, r"weight_rounding=kahan is an option of adamw"),
        (
            {"engine.name": "fsdp", "engine.options.tensor_parallel_size": 2, "optim.state_dtype": "int8"},
            r"blocks along rows that actor\.engine\.options\.tensor_parallel_size=2 cuts; set bfloat16",
        ),
    ],
)
def test_what_does_not_go_together(overrides: dict[str, Any], message: str, train_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        both = {"cluster.processes": 4, "model.gradient_checkpointing": True}
        train_config({**both, **{f"actor.{key}": value for key, value in overrides.items()}})


def test_what_does(train_config: MakeConfig) -> None:
    engine = {"name": "fsdp", "options": {"tensor_parallel_size": 2, "shard_size": 2}}
    config = train_config({"cluster.processes": 4, "actor.engine": engine, "model.dtype": "bfloat16"})
    assert config.actor.engine.name == "fsdp" and config.ref.engine.name == "single"
