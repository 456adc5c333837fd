# SPDX-License-Identifier: Apache-2.0
"""Published scripts become recipes with the framework's numbers; convert/*.yaml has their keys and values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.first import first
from tests.peers.peer import ask, interpreter
from tests.plugins.migration.frameworks import STEPS
from tests.plugins.migration.published import (
    FACTS,
    SCRIPTS,
    batch_of,
    close,
    converted,
    formulas,
    keys_of,
    numbers,
    recipe,
    written,
)
from tests.raising import raises
from whet.algorithms.calls import Bound
from whet.config import TrainConfig, load_config
from whet.config.algorithm_checks import aggregation
from whet.config.compose import flatten
from whet.errors import ConfigError
from whet.plugins.migration.convert import convert
from whet.plugins.migration.foreign_files import Written, read
from whet.trainers.build import train
from whet.trainers.shape import estimator

PEERS = Path(__file__).parents[2] / "peers"


def test_there_are_at_least_twenty_scripts_with_their_addresses() -> None:
    assert len(SCRIPTS) >= 20
    assert {FACTS[name]["from"] for name in SCRIPTS} == set(STEPS)
    assert all(FACTS[name]["source"].startswith("https://github.com/") for name in SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_form_is_read(name: str, tmp_path: Path) -> None:
    """Scripts, commands with flags, YAML with references, Python: the same keys and values."""
    found = dict(flatten(read(str(written(name, tmp_path)), FACTS[name]["from"]).values))
    known = {key: value for key, value in keys_of(name).items() if value is not None}
    home = str(Path.home())
    expected = dict(flatten(json.loads(json.dumps(known).replace("$HOME", home))))
    differ = {key: (found.get(key), value) for key, value in expected.items() if found.get(key) != value}
    assert {key: pair for key, pair in differ.items() if "${" not in str(pair)} == {}


MISSING = re.compile(
    r"(data\.\w+|reward\.function|model\.path): \S+ (does|is) not |data\.train_files=\[\]|reward\.function is not"
    r"|trainer\.val_freq=\d+|trainer\.logger: \w+ is not"
)


@pytest.mark.parametrize("name", first(4, SCRIPTS, others=pytest.mark.slow))
def test_a_recipe_lacks_only_files_models_and_packages(name: str, tmp_path: Path) -> None:
    """The dry run below replaces many keys of a recipe, so the problems of the recipe itself are looked at here."""
    problems = [line for line in converted(name, tmp_path).check if line.startswith("whet train: ")]
    assert [line for line in problems if not MISSING.match(line.removeprefix("whet train: "))] == []


QUICK = ("easyr1_cispo", "roll_grpo_vl", "trl_gspo", "verl_dapo_7b", "verl_ppo")  # one of each framework, and a critic
DRY_RUNS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_recipe_passes_a_dry_run(
    name: str, tmp_path: Path, model_folder: Path, additions: list[dict[str, str]]
) -> None:
    rows = tmp_path / "rows.jsonl"
    field = converted(name, tmp_path).values.get("data.prompt_key", "prompt")
    lines = [json.dumps({**row, field: row["prompt"], "data_source": "sums"}) for row in additions]
    rows.write_text("\n".join(lines))
    overrides = {
        "model.path": str(model_folder),
        "critic.model_path": None,
        "data.train_files": [str(rows)],
        "data.val_files": [str(rows)],
        "data.format_prompt": None,
        "data.apply_chat_template": False,
        "rollout.engine.name": "native",
        "reward.function": "exact_match",
        "reward.manager": None,
        "model.freeze": [],
        "trainer.logger": ["console"],
        "trainer.run_dir": str(tmp_path / "run"),
        # the model here reads 512 tokens, the data are 20 rows
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "algorithm.overlong.buffer_length": 16,
        "data.train_batch_size": 4,
        "actor.mini_batch_size": 4,
        "critic.mini_batch_size": 4,
    }
    config = recipe(name, tmp_path, overrides)
    train(load_config(TrainConfig, tmp_path / "recipe.yaml", overrides).config, dry_run=True)
    assert config.rollout.n == converted(name, tmp_path).values["rollout.n"]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_has_the_numbers_of_the_framework(name: str, tmp_path: Path, model_folder: Path) -> None:
    """Advantages, loss and gradient of one batch, by the loop's own parts and by the framework's formulas."""
    config = recipe(name, tmp_path, {"model.path": str(model_folder)})
    keys = {**FACTS[name].get("defaults", {}), **keys_of(name)}
    columns = batch_of(min(config.rollout.n, 5) if config.rollout.n > 1 else 3)
    if config.algorithm.overlong.penalty:  # lengths near the limit of this batch
        keys = {**keys, "data.max_response_length": 9, "custom_reward_function.overlong_buffer.len": 4}
        config = recipe(name, tmp_path, {"data.max_response_length": 9, "algorithm.overlong.buffer_length": 4})
    close(numbers(config, columns), formulas(FACTS[name]["from"], keys, columns), rtol=1e-9, atol=1e-9)
    assert isinstance(estimator(config.algorithm), Bound)


SCRIPT = """#!/usr/bin/env bash
set -x
project='DAPO'
a=2
length=$((1024 * a))
total=$(((length + 8) * 2))
MODEL=${MODEL_PATH_OF_NOBODY:-"models/Qwen"}   # a comment
files="['/x.parquet', '/y.parquet']"
ARGS=(
  data.train_batch_size=64   # prompts
  data.max_prompt_length=$length
)
MORE="
    actor_rollout_ref.rollout.n=$a \\
    actor_rollout_ref.rollout.top_k=-1"
if [ "$a" = 1 ]; then
  echo data.shuffle=False
fi
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="$files" \\
    data.max_response_length=${total} \\
    +actor_rollout_ref.model.path="${MODEL}" \\
    trainer.logger=['console','wandb'] \\
    trainer.project_name="${project}" \\
    trainer.experiment_name=${UNKNOWN_TO_ALL} \\
    "${ARGS[@]}" $MORE $@
"""


def test_a_shell_script_is_read_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    found = read(str(file), "verl")
    assert found.values == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["/x.parquet", "/y.parquet"],
        "data.max_response_length": 4112,
        "actor_rollout_ref.model.path": "models/Qwen",
        "trainer.logger": ["console", "wandb"],
        "trainer.project_name": "DAPO",
        "data.train_batch_size": 64,
        "data.max_prompt_length": 2048,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.top_k": -1,
    }
    assert found.unread == [
        "trainer.experiment_name=${UNKNOWN_TO_ALL}: variable UNKNOWN_TO_ALL is not set in the script",
    ]


def test_keys_of_something_else_are_refused() -> None:
    with raises(ConfigError, "EasyR1", found=re.compile(r" a, b\.c, d, \.\.\.$")):
        convert(Written({"a": 1, "b.c": 2, "d": 3, "e": 4}), "easyr1")


def test_what_is_not_in_the_recipe_is_told_with_its_reason() -> None:
    keys = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "algorithm.lam": 0.9,
        "actor_rollout_ref.actor.kl_loss_coef": 0.1,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
        "actor_rollout_ref.model.external_lib": "mine",
        "trainer.n_gpus_per_node": 8,
        "no.such.key": 1,
        "rollout.n": 3,
    }
    found = convert(Written(keys), "verl")
    assert found.without == [
        "actor_rollout_ref.model.external_lib=mine (transformers loads the model as its config.json describes it)",
        "no.such.key=1 (no key that whet knows)",
        "rollout.n=3 (no key that whet knows)",
    ]
    assert "algorithm.lam: advantage estimator grpo does not read it" in found.ignored
    coef, use = (f"actor_rollout_ref.actor.{name}" for name in ("kl_loss_coef", "use_kl_loss"))
    assert f"{coef}=0.1: without effect, since {use} is not set" in found.ignored
    width = "actor_rollout_ref.rollout.tensor_model_parallel_size=4: each process samples with the whole model"
    assert [line[: len(width)] for line in found.parallel] == [width]
    assert (found.values["cluster.n_gpus_per_node"], found.values["actor.engine.name"]) == (8, "fsdp")
    # 1024 prompts a step, 256 an update: a step of theirs is four updates
    assert found.values["actor.optim.warmup_steps"] == 12
    assert found.values["algorithm.loss_options.clip_ratio_c"] == 3.0
    origin = found.origins["algorithm.loss_options.clip_ratio_c"]
    assert origin == "default of verl: actor_rollout_ref.actor.clip_ratio_c"
    assert found.values["rollout.n"] == 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"scale_rewards": "none", "loss_type": "dr_grpo"}, ("grpo", {"std_norm": False}, "seq-mean-token-sum-norm")),
        ({"scale_rewards": "batch"}, ("lite_ppo", {"eps": 1e-4}, "token-mean")),
        ({"loss_type": "bnpo"}, ("grpo", {"eps": 1e-4}, "token-mean")),
        ({"loss_type": "sapo"}, ("grpo", {"eps": 1e-4}, "seq-mean-token-mean")),
    ],
)
def test_the_scale_and_the_loss_of_trl(keys: dict[str, Any], expected: tuple[str, dict[str, Any], str]) -> None:
    values = convert(Written({"num_processes": 4, "beta": 0.04, **keys}), "trl").values
    algorithm = load_config(TrainConfig, None, values, checked=False).config.algorithm
    assert (algorithm.adv_estimator, algorithm.adv_options, aggregation(algorithm)) == expected
    assert (algorithm.kl.where, algorithm.kl.coef, algorithm.kl.form) == ("loss", 0.04, "k3_ratio")
    assert (values["data.train_batch_size"], values["actor.mini_batch_size"]) == (4, 4)  # 4 x 8 responses, 8 a prompt


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pg_variant": "cispo"}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ({"pg_variant": "cispo", "cispo_epsilon_high": 0.3}, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
        ({"pg_variant": "kimi15"}, {"beta": 0.1}),
        ({"pg_variant": "topr", "topr_positive_weight": 0.5}, {"level": "token", "right_weight": 0.5}),
        ({"pg_variant": "ppo", "cispo_epsilon_low": 0.3}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    ],
)
def test_options_of_the_losses_of_roll(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    """Its `pg_clip` is of PPO alone, the other variants have options and defaults of their own."""
    found = convert(Written({"pg_clip": 0.2, **{f"actor_train.{key}": value for key, value in keys.items()}}), "roll")
    options = {key.rpartition(".")[2]: value for key, value in found.values.items() if ".loss_options." in key}
    assert options.pop("cliprange_value") is None  # of the critic
    assert options == expected


def test_groups_that_roll_masks_are_dropped_and_not_sampled_again() -> None:
    values = convert(Written({"difficulty_mask": True, "rollout_batch_size": 8}), "roll").values
    chosen = load_config(TrainConfig, None, values, checked=False).config.algorithm.filter
    assert (chosen.name, chosen.metric, chosen.max_refills) == ("mean_window", "reward", 0)
    assert chosen.options == {"low": 0.0, "high": 1.0}


def test_the_critic_and_the_kl_controller_of_roll() -> None:
    given = {"adv_estimator": "gae", "add_token_level_kl": True, "init_kl_coef": 0.2}
    values = convert(Written(given), "roll").values
    assert values["critic.loss_options.cliprange_value"] is None and "algorithm.kl.controller" not in values
    values = convert(Written({**given, "value_clip": 0.2, "target_kl": 0.1, "kl_horizon": 500}), "roll").values
    assert values["critic.loss_options.cliprange_value"] == 0.2
    kl = load_config(TrainConfig, None, values, checked=False).config.algorithm.kl
    assert (kl.controller, kl.coef, kl.target, kl.horizon) == ("adaptive", 0.2, 0.1, 500)


@pytest.mark.parametrize(
    ("system", "filtered", "key", "value", "refills"),
    [
        ("verl", "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches", 10, 9),
        ("verl", "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches", 0, None),
        ("verl", "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches", None, None),
        ("easyr1", "algorithm.online_filtering", "trainer.max_try_make_batch", 10, 9),
        ("easyr1", "algorithm.online_filtering", "trainer.max_try_make_batch", None, 19),
        ("easyr1", "algorithm.online_filtering", "trainer.max_try_make_batch", -1, None),
    ],
)
def test_the_first_batch_of_a_step_is_no_refill(
    system: str, filtered: str, key: str, value: int | None, refills: int | None
) -> None:
    found = convert(Written({filtered: True, key: value}), system)
    assert found.values.get("algorithm.filter.max_refills") == refills
    told = [line for line in found.check if line.startswith(f"{key}={value or 0}: no limit there")]
    assert len(told) == (refills is None)


def test_the_steps_of_trl_are_updates() -> None:
    """16 batches of 8 responses a step, read 4 times in updates of 8 batches: 8 updates a step."""
    given = {"num_processes": 1, "steps_per_generation": 16, "gradient_accumulation_steps": 8, "num_iterations": 4}
    found = convert(Written({**given, "max_steps": 1000, "save_steps": 80, "warmup_ratio": 0.1}), "trl")
    chosen = ("trainer.total_steps", "trainer.save_freq", "actor.optim.warmup_steps", "trainer.val_freq")
    assert [found.values.get(key) for key in chosen] == [125, 10, 100, None]
    assert not any("counts updates" in line for line in found.check)
    found = convert(Written({**given, "max_steps": -1, "save_steps": 0.5, "eval_steps": 100}), "trl")
    assert [found.values.get(key) for key in chosen] == [None, None, None, 13]
    rest = "there it counts updates, and a step has 8 here"
    assert f"save_steps=0.5: set trainer.save_freq; {rest}" in found.check
    assert f"eval_steps=100: set trainer.val_freq; {rest}" in found.check


@pytest.mark.parametrize(
    ("system", "key", "value", "expected"),
    [
        ("verl", "trainer.logger", ["console", "wandb"], ["console", "wandb", "jsonl"]),
        ("easyr1", "trainer.logger", ["file", "wandb"], ["jsonl", "wandb", "console"]),
        ("roll", "track_with", "tensorboard", ["tensorboard", "console", "jsonl"]),
        ("trl", "report_to", ["wandb"], ["wandb", "console", "jsonl"]),
        ("trl", "report_to", "none", ["console", "jsonl"]),
    ],
)
def test_every_recipe_writes_what_the_commands_read(system: str, key: str, value: Any, expected: Any) -> None:
    assert convert(Written({key: value}), system).values.get("trainer.logger") == expected


def test_values_of_several_lines_stay_comments() -> None:
    text = "Think.\n...\nThen answer."
    lines = convert(Written({"system_prompt": text, "num_processes": 1, "beta": 0.1}), "trl").to_yaml().splitlines()
    told = [line for line in lines if "system_prompt" in line]
    assert len(told) == 1 and told[0].startswith("#   system_prompt=Think.\\n...\\nThen answer.")
    assert yaml.safe_load("\n".join(lines))["algorithm"]["kl"]["coef"] == 0.1


@pytest.mark.parametrize(("source", "found"), [("no_such_file.sh", ""), ("echo nothing here", "verl")])
def test_what_sets_nothing_is_an_error(source: str, found: str) -> None:
    with raises(ConfigError, source, found=re.compile(found)):
        read(source, "verl")
    with raises(ConfigError, "--from", found="nemo", expected=re.compile("verl, easyr1, roll, trl, openrlhf, slime")):
        convert(Written({"a": 1}), "nemo")


VERL = [name for name in SCRIPTS if FACTS[name]["from"] == "verl"]


@pytest.mark.slow
def test_the_formulas_are_verls_own_functions(tmp_path: Path) -> None:
    """Advantages and policy loss of each script by verl itself; the rewards after KL and penalty are given to both."""
    python, calls, expected = interpreter("WHET_PEERS_VENV", ".venv-peers"), [], []
    for name in VERL:
        keys, columns = keys_of(name), batch_of(4)
        keys = {key: value for key, value in keys.items() if not key.startswith("custom_reward_function")}
        keys["algorithm.use_kl_in_reward"] = keys["actor_rollout_ref.actor.use_kl_loss"] = False
        advantages, total = STEPS["verl"](keys, columns)
        actor = "actor_rollout_ref.actor."
        parts = torch.zeros(len(columns["uid"]), 2).double()
        batch = {**columns, "token_level_rewards": columns["token_level_scores"], "reward_parts": parts}
        options = {"gamma": keys.get("algorithm.gamma", 1.0), "lam": keys.get("algorithm.lam", 1.0)}
        calls.append(("estimate", keys.get("algorithm.adv_estimator", "gae"), batch, options))
        loss = "gpg" if keys.get(f"{actor}use_gpg_loss") else keys.get(f"{actor}policy_loss.loss_mode", "vanilla")
        clip = {f"clip_ratio_{side}": keys.get(f"{actor}clip_ratio_{side}", 0.2) for side in ("low", "high")}
        mode = {"loss_agg_mode": keys.get(f"{actor}loss_agg_mode", "token-mean"), "clip_ratio_c": 3.0}
        calls.append(("loss", loss, {**columns, "advantages": advantages}, {**clip, **mode}))
        expected += [advantages, total]
    found = ask(python, PEERS / "verl_worker.py", tmp_path, calls)
    for call, ours, theirs in zip(calls, expected, found, strict=True):
        value = theirs[0] if call[0] == "loss" else theirs * call[2]["response_mask"]
        torch.testing.assert_close(value.double(), ours, rtol=1e-5, atol=1e-6, msg=f"{call[:2]}")


@pytest.mark.slow
def test_the_formulas_are_trls_own_loss(tmp_path: Path) -> None:
    python, calls, expected = interpreter("WHET_TRL_VENV", ".venv-trl"), [], []
    names = ("importance_sampling_level", "loss_type", "beta", "max_completion_length")
    for name in (name for name in SCRIPTS if FACTS[name]["from"] == "trl"):
        keys, columns = {**keys_of(name), "use_vllm": False}, batch_of(4)
        advantages, total = STEPS["trl"](keys, columns)
        told = {key: keys[key] for key in names if key in keys}
        told |= {"loss_type": keys.get("loss_type", "dapo"), "epsilon_low": keys.get("epsilon", 0.2)}
        told["epsilon_high"] = keys.get("epsilon_high", told["epsilon_low"])
        rows = advantages.sum(1) / columns["response_mask"].sum(1)
        calls.append(("loss", {**columns, "row_advantages": rows}, told))
        expected.append(total)
    for ours, (theirs, _) in zip(expected, ask(python, PEERS / "trl_worker.py", tmp_path, calls), strict=True):
        torch.testing.assert_close(theirs.double(), ours, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "source",
    [
        "trl rloo --model_name_or_path m --reward_clip_range -5 5 --normalize_advantages true --epsilon 0.1",
        "accelerate launch examples/scripts/rloo.py --model_name_or_path m --normalize_advantages true --epsilon 0.1",
        "RLOOTrainer(model='m', args=RLOOConfig(normalize_advantages=True, epsilon=0.1))\n",
    ],
)
def test_rloo_of_trl_has_its_own_defaults(source: str, tmp_path: Path) -> None:
    file = tmp_path / f"script.{'py' if source.startswith('RLOO') else 'sh'}"
    file.write_text(source)
    values = convert(read(str(file), "trl"), "trl").values
    expected = {
        "model.path": "m",
        "rollout.n": 2,
        "data.train_batch_size": 4,
        "algorithm.adv_estimator": "rloo",
        "algorithm.policy_loss": "ppo_clip",
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
        "algorithm.shaping.whiten_advantages": True,
        "algorithm.loss_options.clip_ratio_low": 0.1,
        "algorithm.loss_options.clip_ratio_high": 0.1,
        "algorithm.kl.where": "reward",
        "algorithm.kl.coef": 0.05,
        "algorithm.kl.form": "k1",
    }
    assert {key: values.get(key) for key in expected} == expected
    assert not [key for key in values if key.startswith(("algorithm.adv_options", "algorithm.correction"))]
    check = convert(read(str(file), "trl"), "trl").check
    assert any("clips the ratio of a sequence" in line for line in check)
    assert any(line.startswith("reward_clip_range") for line in check) == ("reward_clip_range" in source)


def test_grpo_of_trl_is_not_rloo() -> None:
    values = convert(read("trl grpo --model_name_or_path m --run_name rloo-like --beta 0.1", "trl"), "trl").values
    assert (values["algorithm.adv_estimator"], values["algorithm.kl.where"], values["rollout.n"]) == ("grpo", "loss", 8)


BRANCHES = """
ENGINE={engine}
NGPU=4
if [ "$ENGINE" = "vllm" ]; then LR=1e-6; N=8
elif [[ $ENGINE == sglang ]]
then
    LR=2e-6
    if [ $NGPU -gt 8 ]; then N=16; else N=4; fi
else
    LR=3e-6; N=2
fi
if [ -z "$LR" ]; then LR=9; fi
if [ $NGPU -ne 4 ]; then
  python3 -m verl.trainer.main_ppo data.train_batch_size=1 a=1 b=2 c=3 d=4 e=5
else
  python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.rollout.n=$N
fi
"""


@pytest.mark.parametrize(
    ("engine", "rate", "n"), [("vllm", 1e-6, 8), ("sglang", 2e-6, 4), ("hf", 3e-6, 2), ("'vllm'", 1e-6, 8)]
)
def test_branches_of_a_script(engine: str, rate: float, n: int) -> None:
    found = read(BRANCHES.replace("{engine}", engine), "verl")
    assert found.values == {"actor_rollout_ref.actor.optim.lr": rate, "actor_rollout_ref.rollout.n": n}
    assert found.unread == []


def test_groups_of_a_size_that_is_not_read_are_no_groups_of_one() -> None:
    script = (
        "read -r N < n.txt\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n="
    )
    assert convert(read(f"{script}$N", "verl"), "verl").values["algorithm.adv_estimator"] == "grpo"
    assert convert(read(f"{script}1", "verl"), "verl").values["algorithm.adv_estimator"] == "reinforce_plus_plus"


def test_branches_that_depend_on_what_is_not_in_the_script_are_a_choice() -> None:
    command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$N x=1\n"
    script = 'N=2\nif [ "$1" = long ]; then\n  N=8\nfi\n' + command
    with pytest.raises(ConfigError) as raised:
        convert(read(script, "verl"), "verl")
    assert raised.value.change.splitlines()[1:] == [
        "  --set 1=: rollout.n=2",
        "  --set 1=long: rollout.n=8",
        "  --set 1=ANY: rollout.n=2",
    ]
    assert convert(read(script, "verl", {"1": "long"}), "verl").values["rollout.n"] == 8
    assert convert(read(script, "verl", {"1": "short"}), "verl").values["rollout.n"] == 2
