# SPDX-License-Identifier: Apache-2.0
"""Configurations of DeepSpeed in JSON become fsdp, key by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.plugins.migration.convert import Converted, convert
from whet.plugins.migration.foreign_files import read


def converted(folder: Path, content: Any) -> Converted:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return convert(read(str(path), "deepspeed"), "deepspeed")


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        ({"stage": 0}, {"mesh.shard": 1}),
        ({"stage": 1}, {"reshard_after_forward": False}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"reshard_after_forward": False, "cpu_offload": True}),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, {"cpu_offload": True}),
        ({"stage": 3, "offload_param": {"device": "none"}, "zero_hpz_partition_size": 4}, {"mesh.shard": 4}),
    ],
)
def test_a_stage_is_a_form_of_fsdp(zero: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    found = converted(
        tmp_path, {"zero_optimization": {**zero, "overlap_comm": True}, "tensor_parallel": {"autotp_size": 1}}
    )
    start = "actor.engine.options."
    assert found.values["actor.engine.name"] == "fsdp"
    assert {key[len(start) :]: value for key, value in found.values.items() if key.startswith(start)} == options
    assert found.speed == ["zero_optimization.overlap_comm"] and not found.without


def test_optimizer_schedule_and_clipping(tmp_path: Path) -> None:
    content = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-6, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "cos_min_ratio": 0.1}},
        "train_batch_size": "auto",
        "activation_checkpointing": {"partition_activations": True},
    }
    values = converted(tmp_path, content).values
    assert values["model.dtype"] == "bfloat16" and values["actor.grad_clip"] == 0.5
    optim = {key.removeprefix("actor.optim."): value for key, value in values.items() if key.startswith("actor.optim.")}
    assert optim == {
        "name": "adamw",
        "lr": 3e-6,
        "betas": [0.9, 0.95],
        "eps": 1e-7,
        "schedule": "cosine",
        "warmup_steps": 10,
        "min_lr_ratio": 0.1,
    }


def test_numbers_that_would_change_are_named(tmp_path: Path) -> None:
    content = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}, "pipeline": {"stages": 2}, "mystery": 7}
    found = converted(tmp_path, content)
    assert {line.partition("=")[0] for line in found.check if not line.startswith("whet")} == {
        "fp16.enabled",
        "pipeline.stages",
    }
    assert [line.partition("=")[0] for line in found.without] == ["mystery"]
    assert found.values["actor.grad_clip"] is None  # there the default is no clipping
