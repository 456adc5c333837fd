# SPDX-License-Identifier: Apache-2.0
"""Plans of models that read images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.encoders.conftest import image_of, picture
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy
from whet.plugins.lessons.init_model import init_model
from whet.plugins.planner.outline import Outline, RowLength, TensorBytes

ROWS = [RowLength(prompt, 40, 10) for prompt in (1, 1, 2)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_vl", "qwen2.5_vl", "smolvlm")]


@pytest.fixture(scope="module", params=["qwen3_vl", *SLOW])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "seeing"
    return init_model(out, request.param, "nano", num_layers=3, patch_size=8)


def outline_of(folder: Path, media_share: float, **changed: Any) -> Outline:
    role = RoleSettings(str(folder), EngineConfig(), "float32", optim=OptimConfig())
    return Outline(replace(role, **changed), media_share=media_share)


@pytest.mark.slow
def test_the_towers_weights_and_saved_activations_are_near_those_of_a_pass(folder: Path) -> None:
    model = load_policy(folder)
    vision = encoders_of(model)
    assert vision is not None
    media = [vision.measured(image_of(picture(seed, 128, 128)), 128, 128) for seed in (1, 2)]
    tokens = sum(each.tokens.count for each in media if each.tokens is not None)
    for each in media:
        vision.prepared(each)
    counted = TensorBytes()
    with counted:
        kept = vision.features(model, media)
    real = counted.now.total()
    assert kept[0].hidden.requires_grad
    rows = [RowLength(number, each.tokens.count, 4) for number, each in enumerate(media) if each.tokens is not None]
    plan = outline_of(folder, media_share=1.0)
    assert plan.patches(rows) == tokens * vision.own[0].patches_per_token
    assert plan.vision_weights == sum(
        weight.numel() for name, weight in model.named_parameters() if name in set(vision.tower_weights(model))
    )
    assert 0.7 * real < plan.vision_bytes(rows) < 1.4 * real
    update = plan.update_bytes(ROWS, frozenset({"log_probs"}), accumulates=False)
    without = outline_of(folder, media_share=0.0).update_bytes(ROWS, frozenset({"log_probs"}), accumulates=False)
    assert update - without == {"vision activations": plan.vision_bytes(ROWS)}


def test_shared_prompts_count_once_and_a_frozen_tower_saves_nothing(folder: Path) -> None:
    plan = outline_of(folder, media_share=0.5)
    once = 0.5 * 80 * plan.patches_per_token
    assert plan.patches(ROWS) == once
    apart = outline_of(folder, media_share=0.5, engine=EngineConfig(packing=False))
    assert apart.patches(ROWS) == 0.5 * 120 * plan.patches_per_token
    assert outline_of(folder, media_share=0.5, freeze=("vision",)).vision_bytes(ROWS) == 0
    again = outline_of(folder, media_share=0.5, gradient_checkpointing=True)
    assert 0 < again.vision_bytes(ROWS) < plan.vision_bytes(ROWS)
    model = load_policy(folder)
    vision = encoders_of(model)
    assert vision is not None
    tower = set(vision.tower_weights(model))
    head = model.get_output_embeddings().weight
    linear = sum(weight.numel() for name, weight in model.named_parameters() if name not in tower and weight.dim() == 2)
    assert plan.layer_weights == linear - head.numel()
