# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.registry import ENGINES

MakeConfig = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("overrides", "key", "found", "advice"),
    [
        ({"engine.options.shard_size": 2}, "actor.engine.options.shard_size", 2, "'single': compile"),
        ({"engine.name": "fsdp", "engine.options.mash": 2}, "actor.engine.options.mash", 2, "'fsdp'.*'mesh'"),
        (
            {"engine.name": "fsdp", "engine.options.mesh": {"shard": "two"}},
            "actor.engine.options.mesh",
            {"shard": "two"},
            "a mapping, each key one of replicate, .*, each value a whole number > 0 or null",
        ),
        (
            {"engine.name": "fsdp", "engine.options.mesh.tensors": 2},
            "actor.engine.options.mesh",
            {"tensors": 2},
            "tensor",
        ),
        ({"engine.name": "fdsp"}, "actor.engine.name", "fdsp", "'fsdp'"),
        (
            {"optim.weight_rounding": "kahan"},
            "actor.optim.weight_rounding",
            "kahan",
            "model.dtype=float32.*model.dtype=bfloat16",
        ),
        (
            {"optim.weight_rounding": "kahan", "optim.name": "muon"},
            "actor.optim.weight_rounding",
            "kahan",
            "actor.optim.name=muon",
        ),
    ],
)
def test_what_does_not_go_together(
    overrides: dict[str, Any], key: str, found: object, advice: str, train_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError) as caught:
        both = {"cluster.processes": 4, "model.gradient_checkpointing": True}
        train_config({**both, **{f"actor.{key}": value for key, value in overrides.items()}})
    errors = [each for each in (caught.value, *caught.value.others) if (each.key, each.found) == (key, found)]
    assert any(re.search(advice, f"{error.expected}; {error.change}") for error in errors)


@pytest.mark.parametrize(
    ("overrides", "facts"),  # of the checks that an engine registers
    [
        ({"engine.options.mesh.context": 2, "engine.packing": False}, ["actor.engine.packing"]),
        ({"engine.options.mesh.context": 3}, ["mesh.context", "3", "cluster.processes=4", "2 or 4"]),
        (
            {"engine.options.mesh": {"tensor": 2, "shard": 4}},
            ["mesh.shard", "4", "tensor=2", "try 2"],
        ),
        ({"engine.options.mesh": {"replicate": 1, "shard": 2}}, ["mesh.shard", "2", "expected 4"]),
        ({"engine.options.mesh": {"expert": 3}}, ["mesh.expert", "3", "= 4 x 1", "2 or 4"]),
        ({"engine.options.mesh": {"expert": 4, "tensor": 2}}, ["mesh.expert", "4", "= 2 x 1", "2"]),
        (
            {"engine.options": {"shard_size": 3, "sequence_parallel_size": 2}},
            ["shard_size", "3", "sequence_parallel_size=2"],
        ),
        (
            {"engine.options.mesh.tensor": 2, "optim.state_dtype": "int8"},
            ["actor.optim.state_dtype", "int8", "actor.engine.options.mesh.tensor=2", "bfloat16"],
        ),
    ],
)
def test_what_does_not_go_together_in_fsdp(
    overrides: dict[str, Any], facts: list[str], train_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError) as caught:
        both = {"cluster.processes": 4, "model.gradient_checkpointing": True, "actor.engine.name": "fsdp"}
        train_config({**both, **{f"actor.{key}": value for key, value in overrides.items()}})
    assert not [fact for fact in facts if fact not in str(caught.value)]


def test_what_does(train_config: MakeConfig) -> None:
    engine = {"name": "fsdp", "options": {"mesh": {"tensor": 2, "shard": 2}}}
    config = train_config({"cluster.processes": 4, "actor.engine": engine, "model.dtype": "bfloat16"})
    assert config.actor.engine.name == "fsdp" and config.ref.engine.name == "single"


@pytest.mark.parametrize(
    ("former", "mesh"),
    [
        ({"shard_size": 4}, {"shard": 4}),
        ({"shard_size": None, "sequence_parallel_size": 1, "tensor_parallel_size": 1}, {}),
        ({"tensor_parallel_size": 2, "shard_size": 2}, {"tensor": 2, "shard": 2}),
        ({"sequence_parallel_size": 2, "shard_size": 4}, {"context": 2, "shard": 2}),  # which counted both
        ({"sequence_parallel_size": 2, "mesh": {"context": 4}}, {"context": 4}),
    ],
)
def test_earlier_options_are_sizes_of_the_mesh(former: dict[str, Any], mesh: dict[str, int]) -> None:
    assert ENGINES["fsdp"].resolve_options(former, "actor.engine.options")["mesh"] == (mesh or None)
