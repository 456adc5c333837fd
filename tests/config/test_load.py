# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.first import first
from tests.raising import check_fields, raises
from whet.config import EvalConfig, SFTConfig, TrainConfig, load_config, to_yaml
from whet.errors import ConfigError


def load(*overrides: str, recipe: str | None = None) -> TrainConfig:
    return load_config(TrainConfig, recipe, overrides, checked=False).config


def refusals(*overrides: str) -> list[ConfigError]:
    with pytest.raises(ConfigError) as raised:
        load(*overrides)
    return [raised.value, *raised.value.others]


def test_the_config_reads_like_an_object_and_like_a_dict_and_is_frozen() -> None:
    config = load("actor.optim.lr=1e-5")
    assert config.actor.optim.lr == config["actor"]["optim"]["lr"] == config.actor.optim.get("lr") == 1e-5
    assert config.actor.get("nothing", 3) == 3 and "lr" in config.actor.optim and "n" not in config.actor.optim
    assert dict(config.model.lora) == {"rank": None, "alpha": None, "target_modules": [], "path": None}
    with pytest.raises(ValidationError, match="frozen"):
        config.actor.epochs = 2  # type: ignore[misc]


WHOLE = "a whole number > 0"
UNKNOWN = {  # the key that is wrong, and what is near to it
    "rollout.temprature=1": ("rollout.temprature", "rollout.temperature"),
    "+rollout.topp=1": ("rollout.topp", "rollout.top_p"),
    "rollot={n: 3}": ("rollot.n", "rollout.n"),
    "foo=1": ("foo", "`whet config`"),
}
REFUSED = {  # the key, the value found, what was expected
    "rollout.n=two": ("rollout.n", "two", WHOLE),
    "data.train_batch_size=8.5": ("data.train_batch_size", 8.5, WHOLE),
    "ref.max_tokens_per_micro_batch=0": ("ref.max_tokens_per_micro_batch", 0, f"{WHOLE} or null"),
    "actor.epochs=true": ("actor.epochs", True, WHOLE),
    "critic.epochs=null": ("critic.epochs", None, WHOLE),
    "data.shuffle=maybe": ("data.shuffle", "maybe", "true or false"),
    "model.dtype=fp8": ("model.dtype", "fp8", "one of auto, float32, bfloat16"),
    "actor.optim.betas=[0.9]": ("actor.optim.betas", [0.9], "a list of 2, each a number >= 0 and < 1"),
    "model.freeze=[[x],y]": ("model.freeze", [["x"], "y"], "a list, each text"),
    "trainer.logger=[console,{a: 1}]": ("trainer.logger", ["console", {"a": 1}], "a list, each text"),
    "cluster=3": (
        "cluster",
        3,
        "a section with backend, address, nnodes, n_gpus_per_node, processes, placement, deadline_seconds",
    ),
    "extra=3": ("extra", 3, "a mapping"),
    "reward.function={a: 1}": ("reward.function", {"a": 1}, "text or a list, each text or null"),  # refused once
}


def test_each_mistake_is_one_error_with_what_was_found_and_what_was_expected() -> None:
    errors = {each.key: each for each in refusals(*UNKNOWN, *REFUSED)}
    assert len(errors) == len(UNKNOWN) + len(REFUSED)
    for key, value, expected in REFUSED.values():
        check_fields(errors[key], found=value, expected=expected, change=re.compile("command line"))
    for key, near in UNKNOWN.values():
        check_fields(errors[key], found=re.compile("command line"), change=re.compile(re.escape(near)))


def test_all_mistakes_are_shown_at_once_with_their_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("rollout:\n  n: many\n  rollout.top_p: 0.9\nactr:\n  epochs: 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, "mine.yaml", ["model.dtype=half"])
    errors = {each.key: str(each) for each in raised.value.others} | {raised.value.key: str(raised.value)}
    places = {
        "model.dtype": ("(command line)", ""),
        "rollout.n": ("(mine.yaml:2)", ""),
        "actr.epochs": ("(mine.yaml:5)", "actor.epochs"),
        "rollout.rollout.top_p": ("(mine.yaml:3)", "rollout.top_p?"),
    }
    assert errors.keys() == places.keys()
    assert all(fact in errors[key] for key, facts in places.items() for fact in facts)


def test_a_dotted_name_in_a_recipe_is_answered_with_the_nested_form(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("rollout.n: 4\n")
    with raises(ConfigError, "rollout.n", found=re.compile(r"mine\.yaml:1"), expected="nested sections"):
        load_config(TrainConfig, tmp_path / "mine.yaml")


def test_one_string_is_a_list_of_one_where_a_list_is_expected() -> None:
    config = load("data.train_files=a.jsonl", "trainer.callbacks=my.py:f", "reward.function=gsm8k")
    assert config.data.train_files == ["a.jsonl"] and config.trainer.callbacks == ["my.py:f"]
    assert config.reward.function == "gsm8k"  # either is allowed there


def test_null_unsets_what_may_be_unset_and_numbers_may_be_names() -> None:
    config = load("actor.grad_clip=null", "trainer.save_limit=null", "trainer.experiment_name=42", "rollout.n=8.0")
    assert config.actor.grad_clip is None and config.trainer.save_limit is None
    assert config.trainer.experiment_name == "42" and config.rollout.n == 8


def test_options_and_extra_take_any_key_of_any_type() -> None:
    config = load("algorithm.adv_options.gamma=0.9", "extra.mine={a: [1, x], b: {c: null}}", "reward.kwargs.k=true")
    assert config.algorithm.adv_options == {"gamma": 0.9}
    assert config.extra == {"mine": {"a": [1, "x"], "b": {"c": None}}} and config.reward.kwargs == {"k": True}


def test_verls_name_of_a_reward_function_is_an_alias() -> None:
    loaded = load_config(
        TrainConfig,
        "gsm8k",
        ["custom_reward_function.path=my.py", "custom_reward_function.name=score"],
        checked=False,
    )
    assert loaded.config.reward.function == "my.py:score"
    assert loaded.source("reward.function") == "alias custom_reward_function (command line)"
    assert load("custom_reward_function.path=my.py").reward.function == "my.py:compute_score"  # verl's default
    assert load("custom_reward_function.path=null", "reward.function=gsm8k").reward.function == "gsm8k"


def test_the_alias_and_the_key_may_not_name_two_functions() -> None:
    [two] = refusals("custom_reward_function.path=my.py", "reward.function=gsm8k")
    check_fields(two, "reward.function", found="gsm8k", expected=re.compile(r"my\.py:compute_score"))
    assert load("custom_reward_function.path=a.py", "reward.function=a.py:compute_score").reward.function == (
        "a.py:compute_score"
    )
    for alias, found in (
        ("custom_reward_function.file=my.py", {"file": "my.py"}),
        ("custom_reward_function=my.py", "my.py"),
    ):
        check_fields(refusals(alias)[0], "custom_reward_function", found=found, expected=re.compile("path .*name"))
    with raises(ConfigError, "custom_reward_function.path", found=re.compile("command line")):
        load_config(SFTConfig, None, ["custom_reward_function.path=my.py"])


def test_what_the_command_line_says_wins_over_the_alias_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "from_verl.yaml"
    recipe.write_text("custom_reward_function:\n  path: my.py\n  name: score\n")
    assert load_config(TrainConfig, recipe, checked=False).config.reward.function == "my.py:score"
    overrides = ["reward.function=gsm8k"]
    assert load_config(TrainConfig, recipe, overrides, checked=False).config.reward.function == "gsm8k"


def test_sources_say_default_where_nothing_was_set() -> None:
    loaded = load_config(TrainConfig, "gsm8k", {"rollout.n": 4}, checked=False)
    assert loaded.source("rollout.n") == "argument"
    assert loaded.source("rollout.top_p") == "default"


def test_unchecked_values_that_do_not_go_together_are_refused_when_checked() -> None:
    with raises(ConfigError, "data.train_files", found=[]):
        load_config(TrainConfig, "gsm8k", ["model.path=owner/name"])


@pytest.mark.parametrize("schema", first(1, [TrainConfig, SFTConfig, EvalConfig], others=pytest.mark.slow))
def test_a_written_config_reads_back_equal(schema: type[TrainConfig], tmp_path: Path) -> None:
    overrides = [
        "model.path=a b/c",
        "extra={x: ['1', 1, 1.5, null, true], y_z: 'line # break: ', z: ['\\${a}', 'b\\\\\\${c}', 'd\\e']}",
        "model.dtype=bfloat16",
    ]
    config = load_config(schema, None, overrides, checked=False).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(schema, tmp_path / "config.yaml", checked=False).config == config


@pytest.mark.parametrize("key", ["reward.domains", "cluster.placement", "environment.agents"])
def test_a_name_with_a_dot_is_refused(key: str) -> None:
    with raises(ConfigError, f"{key}: a.b"):
        load_config(TrainConfig, None, {key: {"a.b": {"processes": "x"}}})


def test_small_learning_rates_survive_yaml(tmp_path: Path) -> None:
    config = load("actor.optim.lr=1e-6", "actor.optim.eps=1e-10")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    back = load_config(TrainConfig, tmp_path / "config.yaml", checked=False).config
    assert (back.actor.optim.lr, back.actor.optim.eps) == (1e-6, 1e-10)
