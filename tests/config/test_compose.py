# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose, initialize_config_dir

from tests.first import first
from tests.raising import raises
from whet.config.compose import compose, find_recipe, flatten, key_lines, shipped_recipes
from whet.config.load import load_config
from whet.config.schema import EvalConfig, TrainConfig
from whet.errors import ConfigError

RECIPE = """\
# a comment
defaults:
  - gsm8k
  - _self_
rollout:
  n: 4
  temperature: 0.5

critic:
  # epochs: 2
algorithm:
  loss_options: {clip_ratio_high: 0.3}
data:
  max_response_length: ${data.max_prompt_length}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def values_of(recipe: str | Path | None, *overrides: str) -> dict[str, Any]:
    return dict(flatten(compose(TrainConfig, recipe, overrides)[0]))


def test_defaults_recipe_and_command_line_lie_over_each_other_in_this_order(recipe: Path) -> None:
    values = values_of(recipe, "rollout.temperature=0.25")
    assert values["rollout.top_p"] == 1.0  # the schema's
    assert values["reward.function"] == "gsm8k"  # the shipped recipe's, named in defaults
    assert values["rollout.n"] == 4  # 8 there, 4 in the recipe itself
    assert values["rollout.temperature"] == 0.25  # 0.5 in the recipe, then the command line


def test_every_value_knows_its_source(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    _, sources = compose(TrainConfig, "mine.yaml", ["rollout.temperature=0.25", "actor.optim={eps: 1e-6}"])
    assert sources["rollout.n"] == "mine.yaml:6"
    assert sources["reward.function"].startswith("recipes/gsm8k.yaml:") or "whet/recipes" in sources["reward.function"]
    assert sources["data.prompt_key"].endswith("recipes/data/gsm8k.yaml:2")
    assert sources["algorithm.loss_options.clip_ratio_high"] == "mine.yaml:12"
    assert sources["rollout.temperature"] == sources["actor.optim.eps"] == "command line"
    assert "rollout.top_p" not in sources


@pytest.mark.parametrize("prefix", first(1, ["", "+", "++"], others=pytest.mark.slow))
def test_a_value_is_set_with_and_without_plus(prefix: str) -> None:
    assert values_of("gsm8k", f"{prefix}rollout.n=5")["rollout.n"] == 5  # in the recipe
    assert values_of("gsm8k", f"{prefix}rollout.top_k=5")["rollout.top_k"] == 5  # not in it
    assert values_of("gsm8k", f"{prefix}extra.mine.deep=5")["extra.mine.deep"] == 5


def test_tilde_takes_the_recipes_value_away_and_leaves_the_default(recipe: Path) -> None:
    values, sources = compose(TrainConfig, recipe, ["~rollout.temperature", "~algorithm.loss_options.clip_ratio_high"])
    assert values["rollout"]["temperature"] == 1.0
    assert values["algorithm"]["loss_options"] == {}
    assert "rollout.temperature" not in sources
    with raises(ConfigError, "rollout.temprature", change=re.compile(r"rollout\.temperature")):
        compose(TrainConfig, recipe, ["~rollout.temprature"])


def test_a_removed_section_leaves_no_sources(recipe: Path) -> None:
    _, sources = compose(TrainConfig, recipe, ["rollout.seed=3", "~rollout", "rollout.n=2"])
    assert {key: each for key, each in sources.items() if key.startswith("rollout")} == {"rollout.n": "command line"}
    assert load_config(TrainConfig, recipe, ["~rollout"], checked=False).source("rollout.n") == "default"


def test_a_merged_mapping_has_the_lines_of_its_values(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    lines = ["x: &one {n: 4, top_k: 3, engine: {name: hf}}", "y: &two {top_k: 7}", "rollout:", "  n: 5"]
    recipe.write_text("\n".join([*lines, "  <<: [*two, *one]", "  engine: {options: {}}"]))
    found = {key: line for key, line in key_lines(recipe) if key.startswith("rollout")}
    assert found == {"rollout.n": 4, "rollout.top_k": 2, "rollout.engine.options": 6}


def test_values_are_read_as_hydra_reads_them(tmp_path: Path) -> None:
    """The same overrides through Hydra's own `+key=value` on an empty config."""
    overrides = [
        "extra.a=1e-3",
        "extra.b=null",
        "extra.c=[1, two, 'th,ree']",
        "extra.d={x: 1, y: [true]}",
        "extra.e='a, b'",
        "extra.f=/some/path-1_2.x:name",
        "extra.g=",
        "extra.h=${extra.a}",
    ]
    (tmp_path / "empty.yaml").write_text("{}\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        theirs = hydra_compose("empty", [f"+{override}" for override in overrides])
    ours = compose(TrainConfig, None, overrides)[0]["extra"]
    assert ours == theirs["extra"]
    assert ours["h"] == 0.001 and ours["e"] == "a, b"


def test_interpolation_reads_defaults_that_nobody_has_set(recipe: Path) -> None:
    assert values_of(recipe, "data.max_prompt_length=77")["data.max_response_length"] == 77
    assert values_of(None, "actor.mini_batch_size=${data.train_batch_size}")["actor.mini_batch_size"] == 32


def test_a_section_without_a_line_means_that_nothing_is_set(recipe: Path) -> None:
    values = values_of(recipe)
    assert values["critic.epochs"] == 1
    assert values["critic.optim.lr"] == 1e-5  # the critic's own default, not that of any optimizer


def test_a_group_is_chosen_from_beside_the_recipe_or_from_the_shipped_ones(recipe: Path) -> None:
    (recipe.parent / "rollout").mkdir()
    (recipe.parent / "rollout" / "greedy.yaml").write_text("temperature: 0.0\nn: 1\n")
    recipe.write_text("defaults:\n  - rollout: greedy\n  - _self_\nrollout:\n  top_k: 3\n")
    values = values_of(recipe)
    assert (values["rollout.temperature"], values["rollout.n"], values["rollout.top_k"]) == (0.0, 1, 3)
    (recipe.parent / "rollout" / "hot.yaml").write_text("temperature: 2.0\n")
    assert values_of(recipe, "rollout=hot")["rollout.temperature"] == 2.0
    assert values_of(recipe, "+data=gsm8k")["data.prompt_key"] == "question"


def test_a_folder_with_the_name_of_a_value_is_no_group(recipe: Path) -> None:
    for name in ("output", "source"):
        (recipe.parent / name).mkdir()
    recipe.write_text("output: old\n")
    for word in ("output=new", "++output=new"):
        assert compose(EvalConfig, recipe, [word])[0]["output"] == "new"
    assert compose(EvalConfig, recipe, ["output=null"])[0]["output"] is None
    assert compose(EvalConfig, recipe, ["~output"]) == compose(EvalConfig, None, [])


def test_a_mapping_of_overrides_takes_plain_python_values(recipe: Path) -> None:
    values, sources = compose(
        TrainConfig,
        recipe,
        {"rollout.n": 8, "model.path": Path("a/b"), "actor.optim": {"betas": (0.8, 0.9)}, "rollout": {"top_k": 2}},
    )
    assert values["rollout"]["n"] == 8 and values["rollout"]["top_k"] == 2
    assert values["rollout"]["temperature"] == 0.5  # merged into the section, not put in its place
    assert values["model"]["path"] == "a/b"
    assert values["actor"]["optim"]["betas"] == [0.8, 0.9]
    assert sources["rollout.n"] == sources["actor.optim.betas"] == "argument"
    with raises(ConfigError, "reward.function", found=repr(print), change=re.compile("reward=")):
        compose(TrainConfig, None, {"reward.function": print})
    for several in (torch.ones(2), np.ones(2)):
        with raises(ConfigError, "rollout.n", found=repr(several), change=re.compile("^[^=]*$")):
            compose(TrainConfig, None, {"rollout.n": several})
    values, _ = compose(TrainConfig, recipe, {"rollout.n": np.int64(8), "actor.optim": {"lr": torch.tensor(0.5)}})
    assert (values["rollout"]["n"], values["actor"]["optim"]["lr"]) == (8, 0.5)


def test_composing_leaves_a_hydra_that_is_in_use_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("key: value\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        compose(TrainConfig, "gsm8k", ["rollout.n=2"])
        assert hydra_compose("theirs") == {"key": "value"}


@pytest.mark.parametrize(
    ("override", "key", "facts"),
    [
        ("foo", "foo", "key=value"),
        ("rollout.n=4,8", "rollout.n", r"4,8 .*rollout\.n=\[4,8\].* -m "),
        ("data.format_prompt={{ content }}", "data.format_prompt={{ content }}", "'data.format_prompt="),
        ("data.prompt_key=${nope}", "data.prompt_key", "'nope'"),
        ("~trainer.seed", "overrides", "'trainer.seed'"),
    ],
)
def test_an_override_that_cannot_be_used_is_answered_in_one_line(override: str, key: str, facts: str) -> None:
    with raises(ConfigError, key) as raised:
        compose(TrainConfig, None, [override])
    assert re.search(facts, str(raised.value)) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "key", "facts"),
    [
        ("rollout: [", r"mine\.yaml$", "line 1"),
        ("rollout:\n  n: 1\n  n: 2\n", r"mine\.yaml", "duplicate key n"),
        ("defaults:\n  - nowhere\n", r"mine\.yaml", "'nowhere'"),
        ("extra:\n  mine: ???\n", r"^extra\.mine$", ""),
    ],
)
def test_a_broken_recipe_is_answered_in_one_line(recipe: Path, text: str, key: str, facts: str) -> None:
    recipe.write_text(text)
    with raises(ConfigError, re.compile(key), found=re.compile(facts)) as raised:
        compose(TrainConfig, recipe, [])
    assert "\n" not in str(raised.value)


def test_recipes_are_found_by_shipped_name_and_by_path(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    assert find_recipe("gsm8k").parts[-3:] == ("whet", "recipes", "gsm8k.yaml")
    assert find_recipe("gsm8k", "eval").name == find_recipe("gsm8k_eval", "eval").name == "gsm8k_eval.yaml"
    assert find_recipe("quickstart", "sft").name == "quickstart_sft.yaml"
    with raises(ConfigError, re.compile("xxx$"), found=re.compile(re.escape(str(recipe.parent)))):
        find_recipe("/" + "x" * 300)  # longer than a name may be
    assert find_recipe("mine.yaml") == find_recipe(recipe) == recipe
    (recipe.parent / "gsm8k").mkdir()  # a folder of that name does not hide the recipe
    assert find_recipe("gsm8k").name == "gsm8k.yaml"
    with raises(ConfigError, "recipe mine", change=re.compile(r"mine\.yaml\?$")):
        find_recipe("mine")
    with raises(ConfigError, "recipe gsm8kk", expected=re.compile("ppo_gsm8k"), change=re.compile(r"gsm8k\?$")):
        find_recipe("gsm8kk")
    (recipe.parent / "other.yml").write_text("")
    with raises(ConfigError, "recipe other.yml", found=re.compile(r"\.yaml"), change="rename it"):
        find_recipe("other.yml")


def test_shipped_recipes_are_those_a_user_can_name() -> None:
    assert {"quickstart", "gsm8k", "ppo_gsm8k", "dr_grpo_gsm8k", "dapo_gsm8k"} <= set(shipped_recipes())


def test_lines_of_keys_are_those_of_the_file(recipe: Path) -> None:
    lines = dict(key_lines(recipe))
    text = RECIPE.splitlines()
    assert lines["rollout.temperature"] == text.index("  temperature: 0.5") + 1
    assert dict(key_lines(recipe, "a.b"))["a.b.rollout.n"] == text.index("  n: 4") + 1


@pytest.mark.parametrize(
    ("name", "system", "recipe"),
    [
        ("ppo_trainer", "verl", "ppo_gsm8k"),
        ("ppo_megatron_trainer.yaml", "verl", "gsm8k_fsdp2"),
        ("sppo_config", "verl", "sppo_quickstart"),
        ("sppo_config", "ROLL", "rlvr_three_domains"),
        ("sft_trainer", "verl", "quickstart_sft"),
        ("rlvr_config", "ROLL", "rlvr_three_domains"),
        ("sokoban_ppo_config", "ROLL", "sokoban_ppo"),
    ],
)
def test_the_name_of_another_frameworks_config_is_answered_with_a_recipe(name: str, system: str, recipe: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_recipe(name)
    assert f"{system}: name the recipe {recipe}" in raised.value.change
    given = raised.value.change.partition(" convert SCRIPT --from ")[2].partition("`")[0]
    assert system.lower() in given.split("|")
    assert recipe in shipped_recipes()
