# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.raising import raises
from whet import serialization
from whet.config import TrainConfig
from whet.errors import ModelError
from whet.models.freeze import freeze
from whet.models.load import load_policy
from whet.trainers.build import train


def trained(folder: Path, *patterns: str) -> set[str]:
    model = load_policy(folder)
    freeze(model, patterns)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_names_match_as_in_a_shell(model_folder: Path) -> None:
    everything = trained(model_folder)
    assert trained(model_folder, "model.layers.[0-3].*") == {"model.embed_tokens.weight", "model.norm.weight"}
    assert trained(model_folder, "*.mlp.*", "*norm.weight") == {
        name for name in everything if ".mlp." not in name and not name.endswith("norm.weight")
    }
    assert trained(model_folder, "model.norm.weight") == everything - {"model.norm.weight"}


def test_a_tied_weight_has_two_names(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "whet"):
        assert "model.embed_tokens.weight" not in trained(model_folder, "lm_head.*")
    assert ("lm_head.weight", "model.embed_tokens.weight") in [record.args for record in caplog.records]


def test_a_pattern_that_matches_nothing_is_refused(model_folder: Path) -> None:
    found = re.compile(r"Qwen3ForCausalLM .* 'model\.embed_token\.weight'")
    with raises(ModelError, "model.freeze", found=found, expected=re.compile(r" model\.embed_tokens\.weight")):
        trained(model_folder, "model.norm.*", "model.embed_token.weight")
    with raises(ModelError, "model.freeze", found=["model.*"]):
        trained(model_folder, "model.*")


def test_frozen_weights_stay_and_have_no_state(
    model_folder: Path, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    patterns = ["model.embed_tokens.*", "model.layers.0.*"]
    config = train_config({"model.freeze": patterns, "model.gradient_checkpointing": True})
    train(config, reward=lambda solution_str: float(len(solution_str)), data=additions)
    state = serialization.load(tmp_path / "run/checkpoints/global_step_2/actor.state")
    start = dict(load_policy(model_folder).named_parameters())
    moved = {name for name, weight in state["model"].items() if not torch.equal(weight, start[name])}
    assert moved == {name for name in start if name.startswith(("model.layers.1.", "model.norm."))}
    assert len(state["optimizer"]["state"]) == len(moved)
