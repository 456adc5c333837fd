# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from whet.config import GenerateConfig, SFTConfig, TrainConfig, aggregation, load_config, uses_critic
from whet.config.commands import commands, schema_of
from whet.config.compose import find_recipe, shipped_recipes
from whet.config.distill import DistillConfig
from whet.config.preference import PreferenceConfig
from whet.config.sources import read_sources
from whet.data.load import _call


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """The values that every recipe leaves to its user: a model and files."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return [
        f"model.path={tmp_path}",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_used_as_it_is(name: str, given: list[str]) -> None:
    if "backend: ray" in find_recipe(name).read_text():
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    command = next((each for each in commands() if name.endswith(f"_{each}")), "train")
    if command == "generate":
        given += ["output=samples.jsonl"]
    if command == "distill":
        given += [f"teachers={{*: {given[0].removeprefix('model.path=')}}}"]
    loaded = load_config(schema_of(command), name, given)
    assert load_config(schema_of(command), name.removesuffix(f"_{command}"), given).config == loaded.config
    assert any(source.split(":")[0].endswith(f"recipes/{name}.yaml") for source in loaded.sources.values())


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_begins_with_what_it_is(name: str) -> None:
    assert find_recipe(name).read_text().startswith("# ")


def test_gsm8k_is_grpo_with_the_published_fields(given: list[str]) -> None:
    config = load_config(TrainConfig, "gsm8k", given).config
    assert (config.data.prompt_key, config.data.answer_key, config.reward.function) == ("question", "answer", "gsm8k")
    assert (config.algorithm.adv_estimator, config.rollout.n) == ("grpo", 8)
    assert config.data.format_prompt is not None
    assert "{{ content }}" in config.data.format_prompt and "####" in config.data.format_prompt


@pytest.mark.slow
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


def test_kto_and_expert_iteration_build_on_their_relatives(tmp_path: Path) -> None:
    dpo, kto = (load_config(PreferenceConfig, name, checked=False).config for name in ("dpo", "kto"))
    assert (dpo.loss, dpo.loss_options, kto.loss, kto.reads_mismatched) == ("dpo", {"beta": 0.1}, "kto", True)
    assert kto.loss_options == {"beta": 0.1, "good_weight": 1.0, "bad_weight": 1.0}
    assert kto.data == dpo.data and kto.optim.schedule == dpo.optim.schedule
    once, often = (
        load_config(SFTConfig, name, checked=False).config for name in ("expert_iteration", "rejection_sampling")
    )
    assert once.data == often.data and once.data.overlong == "drop" and once.optim == often.optim
    assert (once.trainer.total_epochs, often.trainer.total_epochs) == (1, 3)
    gkd = load_config(DistillConfig, "gkd", checked=False).config
    assert (gkd.loss, gkd.on_policy) == ("jsd", 0.5)
    assert load_config(GenerateConfig, "rejection_sampling", checked=False).config.rollout.n == 8


VISION = {"vlm_quickstart": ("images", 1), "two_images": ("images", 2), "video_flashes": ("videos", 1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION)
def test_a_recipe_with_pictures_draws_its_data(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config(TrainConfig, name, [f"model.path={tmp_path}"]).config
    field, count = VISION[name]
    for key, entries in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        [source] = read_sources(key, entries, config.data)
        rows = list(_call(source, {"split": key[5:-6], "seed": 0, "tokenizer": None}))
        assert len(rows) == (4096 if key == "data.train_files" else 256)
        for row in rows[:5]:
            assert len(row[field]) == row["prompt"].count(f"<{field[:-1]}>") == count
            assert len(row[config.data.answer_key]) < config.data.max_response_length


def test_geometry_has_the_settings_of_easyr1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    drawn = "whet.plugins.lessons.drawn.geometry:questions"
    given = [f"model.path={tmp_path}", f"data.train_files={drawn}", f"data.val_files={drawn}"]
    config = load_config(TrainConfig, "qwen2_5_vl_7b_geo3k_grpo", given).config
    assert (config.data.train_batch_size, config.rollout.n, config.actor.mini_batch_size) == (512, 5, 128)
    assert (config.data.min_pixels, config.data.max_pixels) == (262144, 4194304)
    kl = config.algorithm.kl
    assert (kl.where, kl.form, kl.coef, config.actor.optim.lr) == ("loss", "k3", 0.01, 1e-6)
    [source] = read_sources("data.train_files", config.data.train_files, config.data)
    row = next(iter(_call(source, {"split": "train", "seed": 0, "tokenizer": None})))
    assert {config.data.prompt_key, config.data.answer_key, "images"} == row.keys()
    assert config.data.format_prompt is not None and r"\boxed{}" in config.data.format_prompt
