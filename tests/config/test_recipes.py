# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from whet.config import EvalConfig, SFTConfig, TrainConfig, aggregation, load_config, uses_critic
from whet.config.compose import SHIPPED, shipped_recipes


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """What every recipe leaves to its user: a model and files."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return [
        f"model.path={tmp_path}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
    ]


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_used_as_it_is(name: str, given: list[str]) -> None:
    if "backend: ray" in (SHIPPED / f"{name}.yaml").read_text():
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    schema = EvalConfig if name.endswith("_eval") else SFTConfig if name.endswith("_sft") else TrainConfig
    loaded = load_config(schema, name, given)
    assert any(source.split(":")[0].endswith(f"recipes/{name}.yaml") for source in loaded.sources.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_begins_with_what_it_is(name: str) -> None:
    assert (SHIPPED / f"{name}.yaml").read_text().startswith("# ")


def test_gsm8k_is_grpo_with_the_published_fields(given: list[str]) -> None:
    config = load_config(TrainConfig, "gsm8k", given).config
    assert (config.data.prompt_key, config.data.answer_key, config.reward.function) == ("question", "answer", "gsm8k")
    assert (config.algorithm.adv_estimator, config.rollout.n) == ("grpo", 8)
    assert config.data.format_prompt is not None
    assert "{{ content }}" in config.data.format_prompt and "####" in config.data.format_prompt


def test_the_variants_keep_the_problem_and_change_the_algorithm(given: list[str]) -> None:
    base = load_config(TrainConfig, "gsm8k", given).config
    ppo = load_config(TrainConfig, "ppo_gsm8k", given).config
    dapo = load_config(TrainConfig, "dapo_gsm8k", given).config
    dr_grpo = load_config(TrainConfig, "dr_grpo_gsm8k", given).config
    for variant in (ppo, dapo, dr_grpo):
        assert variant.data.format_prompt == base.data.format_prompt and variant.reward == base.reward
    assert uses_critic(ppo.algorithm) and ppo.rollout.n == 1 and ppo.algorithm.kl.where == "reward"
    assert dapo.algorithm.filter.name == "dapo" and dapo.algorithm.loss_options == {"clip_ratio_high": 0.28}
    assert aggregation(dr_grpo.algorithm) == "seq-mean-token-sum-norm" and not uses_critic(dr_grpo.algorithm)
