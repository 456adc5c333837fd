# SPDX-License-Identifier: Apache-2.0
"""The models of a run without torch are the models of the trainer's setup."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.generate import fits
from tests.raising import raises
from whet.config import load_config
from whet.config.commands import schema_of
from whet.config.schema import RunConfig
from whet.errors import ConfigError
from whet.plugins.planner.first import bytes_of, first_answer, shape_of
from whet.plugins.planner.models import frozen_models, trained_models
from whet.registry import TRAINERS, trainer_of
from whet.trainers import build

LORA = {"model.lora.rank": 8}
PRIME = {"algorithm.adv_estimator": "prime", "critic.value_loss": "implicit_reward"}
KL = {"algorithm.kl.where": "loss"}
TEACHERS = {"teacher.model_paths": {"*": "t", "code": "u"}, "algorithm.adv_estimator": "on_policy_distillation"}
TOY = f"{Path(__file__).parents[2] / 'trainers' / 'toy_trainer.py'}:train_toy"
REF, TEACHER, REWARD_MODEL = {"ref": "p"}, {"teacher:*": "t"}, {"reward_model": "r"}


def config_of(command: str, **changes: object) -> Any:
    sampled = {"rollout.dtype": "float32"} if command == "train" else {}
    values = {"model.path": "p", "model.dtype": "float32", **sampled, **changes}
    return load_config(schema_of(command), None, values, given={"data"}, checked=False).config


@pytest.mark.parametrize(
    ("command", "changes", "frozen"),
    [
        ("sft", {}, {}),
        ("train-reward", {}, {}),
        ("distill", {"teachers": {"*": "t", "code": "http://127.0.0.1/v1"}}, TEACHER),
        ("preference", {}, REF),
        ("preference", {"reference.model_path": "r"}, {"ref": "r"}),
        ("preference", {"loss": "simpo"}, {}),
        ("preference", {"reference.mode": "none"}, {}),
        ("preference", {"reference.mode": "cached"}, {}),
        ("preference", {"reference.mode": "cached", "reference.model_path": "r"}, {"ref": "r"}),
        ("preference", LORA, {}),
        ("preference", {**LORA, "reference.model_path": "r"}, {"ref": "r"}),
        ("train", {}, {}),
        ("train", KL, REF),
        ("train", {"algorithm.kl.where": "reward", "ref.model_path": "r"}, {"ref": "r"}),
        ("train", {**KL, **LORA}, {}),
        ("train", {**KL, **LORA, "ref.model_path": "r"}, {"ref": "r"}),
        ("train", {"algorithm.policy_loss": "dpo", "algorithm.adv_estimator": "best_worst"}, REF),
        ("train", {"algorithm.adv_estimator": "gae", "critic.model_path": "c"}, {}),
        ("train", PRIME, REF),  # log-probs of the critic minus those of the reference
        ("train", {"reward_model.model_path": "r"}, REWARD_MODEL),
        ("train", {"reward_model.model_path": "r", "reward_model.rubric": "accuracy"}, REWARD_MODEL),
        ("train", {"reward_model.rubric": "accuracy"}, {}),
        ("train", TEACHERS, {**TEACHER, "teacher:code": "u"}),
        ("train", {"teacher.model_paths": {"*": "t"}}, {}),  # that no function reads
        (TOY, {}, {}),
        (TOY, {"anchor_path": "r"}, {"anchor": "r"}),
        (TOY, {**LORA, "anchor_path": "r"}, {"anchor": "r"}),
    ],
)
def test_the_models_are_those_of_the_setup(
    command: str, changes: dict[str, Any], frozen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "chosen_engine", lambda rollout, model: rollout)  # without the judge's config.json
    config = config_of(command, **changes)
    assert frozen_models(config) == frozen
    setup = trainer_of(command).marked("setup")(config)
    assert {**trained_models(config), **frozen} == {role: str(each.model_path) for role, each in setup.roles.items()}
    assert {*trained_models(config)} == {*setup.objectives}


WITHOUT_TORCH = """
import sys
from whet.config import load_config
from whet.config.commands import schema_of
from whet.plugins.planner.models import frozen_models, trained_models
from whet.registry import TRAINERS
for command in TRAINERS.shipped:
    sampled = {"rollout.dtype": "float32"} if command == "train" else {}
    values = {"model.path": "p", "model.dtype": "float32", **sampled}
    config = load_config(schema_of(command), None, values, given={"data"}, checked=False).config
    print(command, {**trained_models(config), **frozen_models(config)}, "torch" in sys.modules)
"""


def test_the_models_of_shipped_trainers_are_found_without_torch() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True).stdout
    both = "{'actor': 'p', 'ref': 'p'}"
    expected = {each: both if each == "preference" else "{'actor': 'p'}" for each in TRAINERS.shipped}
    assert found.splitlines() == [f"{command} {models} False" for command, models in expected.items()]


def model(folder: Path, size: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fits.shape(size)))
    return str(folder)


def gib(config: RunConfig, policy: str) -> float:
    shape = shape_of(policy)
    assert shape is not None
    return bytes_of(config, shape, False) / 2**30


def test_a_frozen_model_counts_with_its_own_size(tmp_path: Path) -> None:
    small, large = model(tmp_path / "small", "0.6B"), model(tmp_path / "large", "8B")
    weights = shape_of(large)
    assert weights is not None
    of_large = weights["weights"] * 4 / 2**30
    plain = {"model.path": small}
    alone = gib(config_of("sft", **plain), small)
    distilled = config_of("distill", **plain, teachers={"*": large})
    assert gib(distilled, small) == pytest.approx(alone + 1.05 * of_large, rel=0.02)
    anchored = gib(config_of(TOY, **plain, anchor_path=large), small)
    assert anchored == pytest.approx(gib(config_of(TOY, **plain), small) + 1.05 * of_large, rel=0.02)
    assert frozen_models(config_of(TOY, **plain, **{"model.dtype": "auto", "anchor_path": large})) == {"anchor": large}
    rewarded = config_of("train", **plain, **{"reward_model.model_path": large})
    assert gib(rewarded, small) == pytest.approx(gib(config_of("train", **plain), small) + 1.25 * of_large, rel=0.02)
    critic = {**plain, "algorithm.adv_estimator": "gae"}
    bigger = gib(config_of("train", **critic, **{"critic.model_path": large}), small)
    assert bigger > gib(config_of("train", **critic), small) + 4 * of_large  # weights, gradients, two moments
    sampling = {"a": {"processes": 1, "roles": ["actor"]}, "b": {"processes": 1, "roles": ["rollout"]}}
    apart = {**critic, "critic.model_path": large, "cluster.placement": sampling}
    assert gib(config_of("train", **apart), small) == pytest.approx(bigger, rel=0.2)
    first, *_ = first_answer(distilled, 80.0, None)
    assert "20 %" in first
    first, *_ = first_answer(config_of("distill", **plain, teachers={"*": "nowhere"}), 80.0, None)
    assert "20 %" not in first and "teacher:*" in first


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_an_unknown_option_of_an_engine_is_named_by_its_key(role: str, tmp_path: Path) -> None:
    policy = model(tmp_path / "small", "0.6B")
    key = f"{role}.engine.options"
    with raises(ConfigError, f"{key}.no_such"):
        gib(config_of("train", **{"model.path": policy, key: {"no_such": 1}}), policy)
