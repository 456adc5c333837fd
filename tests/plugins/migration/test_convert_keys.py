# SPDX-License-Identifier: Apache-2.0
"""Keys of other frameworks whose counterpart depends on their value or on other keys, and whole files of keys."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.first import first
from tests.peers.peer import interpreter
from tests.raising import check_fields
from whet.cli.app import app, main
from whet.errors import ConfigError
from whet.plugins.migration.convert import Converted, convert
from whet.plugins.migration.foreign import tables
from whet.plugins.migration.foreign_files import Written, read

CORRECTION = "algorithm.correction."


def of(system: str, **keys: Any) -> Converted:
    """The recipe of keys, in which two underscores stand for a dot."""
    return convert(Written({key.replace("__", "."): value for key, value in keys.items()}), system)


def verl(**keys: Any) -> Converted:
    return convert(Written({"algorithm.adv_estimator": "grpo", **keys}), "verl")


def correction(found: Converted) -> dict[str, Any]:
    """The keys below algorithm.correction, without that prefix and `_options`."""
    return {
        key.removeprefix(CORRECTION).replace("_options", ""): value
        for key, value in found.values.items()
        if key.startswith(CORRECTION)
    }


def test_a_fixed_setting_is_for_one_value_of_their_key() -> None:
    """`bypass_mode` without a value once wrote its setting for False too."""
    rows = [row for table in tables() for row in table.rows if row.kind is None and row.unit is None]
    fixed = [(key, ours) for row in rows for key, ours in row.pairs() if ours and all("=" in each for each in ours)]
    assert len(fixed) > 15 and [key for key, _ in fixed if "=" not in key] == []


CORRECTIONS = {
    "bypass_mode=False": {},
    "bypass_mode=True": {"old_log_probs": "rollout"},
    "rollout_is_threshold=5": {},
    "rollout_is=token": {"weight": "importance", "weight.level": "token", "weight.cap": 2.0},
    "rollout_is=sequence rollout_is_threshold=5": {
        "weight": "importance",
        "weight.level": "sequence",
        "weight.cap": 5.0,
    },
    "rollout_is=token rollout_is_threshold=0.5_5.0": {
        "weight": "icepop",
        "weight.level": "token",
        "weight.low": 0.5,
        "weight.high": 5.0,
    },
    "rollout_is=token rollout_is_batch_normalize=True": {
        "weight": "importance",
        "weight.level": "token",
        "weight.cap": 2.0,
        "weight.normalise": True,
    },
    "rollout_rs=token_k2 rollout_rs_threshold=0.1": {
        "rejection": "divergence",
        "rejection.form": "k2",
        "rejection.level": "token",
        "rejection.high": 0.1,
    },
    "rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_2.0": {
        "rejection": "divergence",
        "rejection.form": "k1",
        "rejection.level": "sequence_mean",
        "rejection.low": math.log(0.5),
        "rejection.high": math.log(2.0),
    },
    "rollout_rs=seq_sum_k1 rollout_rs_threshold=4": {
        "rejection": "divergence",
        "rejection.form": "k1",
        "rejection.level": "sequence_sum",
        "rejection.low": -math.log(4),
        "rejection.high": math.log(4),
    },
    "bypass_mode=True rollout_is=token": {"old_log_probs": "rollout"},
}


@pytest.mark.parametrize("keys", CORRECTIONS)
def test_the_rollout_correction_of_verl(keys: str) -> None:
    """Levels and bounds of verl/trainer/ppo/rollout_corr_helper.py: the bounds of k1 are bounds of the ratio."""
    words = " ".join(f"algorithm.rollout_correction.{word}" for word in keys.split())
    found = convert(read(f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {words}", "verl"), "verl")
    assert correction(found) == pytest.approx(CORRECTIONS[keys])
    assert not [line for line in found.check if "weight" in line or "rejection" in line]
    asked = [line for line in found.check if line.startswith("algorithm.rollout_correction.rollout_is=token: set")]
    assert len(asked) == (keys == "bypass_mode=True rollout_is=token")


@pytest.mark.parametrize(
    "bounds", ["rollout_is=token rollout_is_threshold=x", "rollout_rs=token_k1 rollout_rs_threshold=0"]
)
def test_bounds_of_verl_that_are_no_numbers_are_asked_for(bounds: str) -> None:
    words = " ".join(f"algorithm.rollout_correction.{word}" for word in bounds.split())
    found = convert(read(f"python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {words}", "verl"), "verl")
    assert correction(found) == {}
    assert [line for line in found.check if line.startswith("algorithm.rollout_correction.rollout_")]


def test_several_rejections_of_verl_are_asked_for() -> None:
    prefix = "algorithm.rollout_correction."
    found = verl(**{f"{prefix}rollout_rs": "token_k1,seq_max_k3", f"{prefix}rollout_rs_threshold": 2.0})
    assert correction(found) == {}
    assert any(line.startswith(f"{prefix}rollout_rs=token_k1,seq_max_k3: set {CORRECTION}") for line in found.check)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("agent.default_agent_loop=tool_agent", "set environment.name (`tool_agent`: `environment.tools`"),
        ("agent.agent_loop_config_path=a.yaml", "set environment.name ("),
        ("ignore_eos=True", "responses end at the end-of-text token here"),
    ],
)
def test_keys_that_change_what_is_sampled_are_checked_by_hand(key: str, told: str) -> None:
    name, _, value = f"actor_rollout_ref.rollout.{key}".partition("=")
    found = verl(**{name: True if value == "True" else value})
    assert any(line.startswith(f"{name}={value}: {told}") for line in found.check)
    assert not [line for line in found.ignored if name in line]
    assert not [line for line in verl(**{name: False}).check if name in line]


def test_optimizer_keys_of_verl() -> None:
    """The engines of verl 0.9.1 clip by optim.clip_grad; 8 prompts a step are two updates of a critic that reads 4."""
    keys = {"critic.optim.weight_decay": 0.1, "critic.optim.lr_warmup_steps": 20, "critic.optim.betas": [0.9, 0.95]}
    keys |= {"critic.optim.lr_scheduler_type": "cosine", "critic.optim.clip_grad": 0.3, "data.train_batch_size": 8}
    keys |= {"actor_rollout_ref.actor.optim.clip_grad": 0.5, "critic.ppo_mini_batch_size": 4}
    keys |= {"actor_rollout_ref.actor.freeze_vision_tower": True, "algorithm.adv_estimator": "gae"}
    found = verl(**keys)
    expected = {
        "critic.optim.weight_decay": 0.1,
        "critic.optim.warmup_steps": 40,
        "critic.optim.betas": [0.9, 0.95],
        "critic.optim.schedule": "cosine",
        "critic.grad_clip": 0.3,
        "actor.grad_clip": 0.5,
        "model.freeze": "vision",
    }
    assert {key: found.values.get(key) for key in expected} == expected and found.without == []
    older = verl(**{"actor_rollout_ref.actor.grad_clip": 0.7})
    assert older.values["actor.grad_clip"] == 0.7 and not [line for line in older.check if "clip" in line]


def test_a_function_that_whet_does_not_have_is_asked_for() -> None:
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    found = verl(**{"algorithm.adv_estimator": "my_est", "algorithm.lam": 0.9, loss: "bypass_mode"})
    own = {each.partition(": ")[0]: each.partition(": ")[2] for each in found.check}
    estimator, policy = own["algorithm.adv_estimator=my_est"], own[f"{loss}=bypass_mode"]
    assert "algorithm.adv_estimator as " in estimator and "algorithm.adv_options to its algorithm.lam" in estimator
    assert "algorithm.policy_loss as " in policy
    assert not [key for key in found.values if "adv_" in key or "policy_loss" in key or "loss_options" in key]
    drpo = of("easyr1", algorithm__adv_estimator="drpo").check
    assert [each for each in drpo if each.startswith("algorithm.adv_estimator=drpo: ")]


def test_the_whole_file_of_verl_converts() -> None:
    """All 727 keys have their defaults: the report lists only required keys, and no two keys conflict."""
    python = interpreter("WHET_PEERS_VENV", ".venv-peers")
    (file,) = python.parents[1].glob("lib/*/site-packages/verl/trainer/config/_generated_ppo_trainer.yaml")
    found = convert(read(str(file), "verl"), "verl")
    lacking = re.compile(r"^whet train: (data\.\w+|model\.path): .+")  # files, and the folder of the model
    assert all(map(lacking.match, found.check))
    assert [found.without, found.parallel, found.ignored] == [[], [], []]
    assert len(set(found.speed)) > 500
    expected = {"critic.mini_batch_size": 256, "critic.epochs": 1, "data.max_response_length": 512, "rollout.n": 1}
    expected |= {"model.dtype": "bfloat16", "trainer.run_dir": "checkpoints/verl_examples/gsm8k"}
    assert {key: found.values[key] for key in expected} == expected
    assert not [key for key in found.values if key.startswith((CORRECTION, "environment"))]


HYDRA = """
data:
  n: 3
  name: ???
  batch: ${oc.select:data.n,7}
  other: ${oc.select:data.missing, 7}
  none: ${oc.select:data.missing,null}
  nested: ${oc.select:data.missing,${oc.select:data.n,8}}
  beside: ${.n}
  deeper: {up: "${..n}", text: "x/${data.n}/y"}
  named: ${oc.select:data.name,default}
  home: ${oc.env:WHET_NO_SUCH_VARIABLE,/models}
  key: ${oc.env:HOME}
"""


def test_references_of_hydra_are_resolved_but_for_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(HYDRA)
    expected: dict[str, Any] = {"n": 3, "batch": 3, "other": 7, "none": None, "nested": 3, "beside": 3, "deeper.up": 3}
    expected |= {"deeper.text": "x/3/y", "named": "default", "home": "/models", "key": "${oc.env:HOME}"}
    assert read(str(file), "verl").values == {f"data.{key}": value for key, value in expected.items()}


def test_keys_at_their_default_or_switched_off_are_counted() -> None:
    keys = {"algorithm.filter_groups.enable": False, "algorithm.filter_groups.metric": "acc"}
    keys |= {"trainer.balance_batch": True, "actor_rollout_ref.actor.profiler.steps": [1], "trainer.device": "npu"}
    found = verl(**keys)
    assert found.ignored == [] and sorted(found.speed) == sorted({*keys} - {"algorithm.filter_groups.enable"})
    assert "# Speed, memory and logs: 4 keys not carried over" in found.to_yaml().splitlines()


@pytest.mark.parametrize(
    ("keys", "response", "turn"),
    [
        ({"actor_infer.generating_args.max_new_tokens": 8192}, 8192, None),
        ({"actor_infer.generating_args.max_new_tokens": 8192, "response_length": 4096}, 4096, None),
        ({"sequence_length": 3072, "response_length": 4096}, 2048, None),
        ({"sequence_length": 3072, "prompt_length": 2048}, 1024, None),
        ({"sequence_length": 3072, "actor_infer.generating_args.max_new_tokens": 256, "custom_envs.A.x": 1}, 2048, 256),
        (
            {
                "max_tokens_per_step": 64,
                "actor_infer.generating_args.max_new_tokens": 128,
                "train_env_manager.group_size": 2,
            },
            None,
            64,
        ),
    ],
)
def test_lengths_of_roll(keys: dict[str, Any], response: int | None, turn: int | None) -> None:
    """ROLL samples sequence_length - prompt_length tokens, 1,024 of which are the prompt by default."""
    values = convert(Written({"pretrain": "m", **keys}), "roll").values
    assert (values.get("data.max_response_length"), values.get("environment.max_turn_tokens")) == (response, turn)


@pytest.mark.parametrize(
    ("method", "norms"),
    [("mean_std", ("group", "group")), ("mean", ("group", "none")), ("identity", ("none", "none"))],
)
@pytest.mark.parametrize("estimator", ["grpo", "reinforce"])
def test_rewards_of_environments_are_normalised_as_their_key_says(
    method: str, norms: tuple[str, str], estimator: str
) -> None:
    keys = {"reward_normalization.method": method, "reward_normalization.grouping": "traj_group_id"}
    environment = {"train_env_manager.group_size": 8, "rollout_batch_size": 64, "adv_estimator": estimator}
    values = convert(Written({**environment, **keys}), "roll").values
    assert (values["algorithm.shaping.norm_mean"], values["algorithm.shaping.norm_std"]) == norms


def test_environments_of_roll() -> None:
    """rollout_batch_size counts trajectories: 32 of 8 a group are 4 prompts; an update reads 2 x 8 of them."""
    keys: dict[str, Any] = {"rollout_batch_size": 32, "train_env_manager.group_size": 8}
    keys |= {"train_env_manager.num_env_groups": 4, "adv_estimator": "step_reinforce"}
    keys |= {f"actor_train.training_args.{name}": 4 for name in ("per_device_train_batch_size",)}
    keys |= {"actor_train.training_args.gradient_accumulation_steps": 4}
    keys |= {"actor_infer.generating_args.stop_strings": ["</think>", "\n\n"]}
    keys |= {"actor_infer.strategy_args.strategy_name": "sglang"}
    found = convert(Written(keys), "roll")
    expected: dict[str, Any] = {"data.train_batch_size": 4, "actor.mini_batch_size": 2, "rollout.n": 8}
    expected |= {"algorithm.adv_options.gamma": 0.95, "rollout.stop": ["</think>", "\n\n"]}
    expected |= {"rollout.engine.name": "sglang"}
    assert {key: found.values.get(key) for key in expected} == expected
    assert yaml.safe_load(found.to_yaml())["rollout"]["stop"] == ["</think>", "\n\n"]
    gamma = convert(Written({**keys, "step_reward_gamma": 1.0, "gamma": 0.5}), "roll").values
    assert gamma["algorithm.adv_options.gamma"] == 1.0
    rlvr = {key: value for key, value in keys.items() if "env" not in key} | {"num_return_sequences_in_group": 8}
    assert convert(Written(rlvr), "roll").values["data.train_batch_size"] == 32


def test_a_single_word_is_no_pair_of_name_and_path() -> None:
    """`--eval-prompt-data aime $PATH` with a path that is not known: no letters of the name as files."""
    keys = {"rollout_batch_size": 8, "n_samples_per_prompt": 2}
    found = convert(Written({**keys, "eval_prompt_data": "aime"}), "slime")
    assert "data.val_files" not in found.values
    assert [line for line in found.check if line.startswith("eval_prompt_data=aime: set data.val_files")]
    pairs = convert(Written({**keys, "eval_prompt_data": ["aime", "a.jsonl", "amc", "b.jsonl"]}), "slime").values
    assert pairs["data.val_files"] == ["a.jsonl", "b.jsonl"]


IS = "vllm_importance_sampling_"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("icepop", {"level": "sequence", "low": 0.0, "high": 3.0})),
        ({"mode": "token_truncate", "cap": 2.0}, ("importance", {"level": "token", "cap": 2.0})),
        ({"mode": "token_mask", "clip_min": 0.5}, ("icepop", {"level": "token", "low": 0.5, "high": 3.0})),
        (
            {"mode": "sequence_truncate", "clip_max": 4.0, "clip_min": 0.5},
            ("importance", {"level": "sequence", "floor": 0.5, "cap": 4.0}),
        ),
        ({"clip_max": None}, ("icepop", {"level": "sequence", "low": 0.0, "high": math.inf})),
        ({"correction": False, "mode": "token_mask"}, (None, {})),
    ],
)
def test_the_sampling_weights_of_trl(keys: dict[str, Any], expected: tuple[str | None, dict[str, Any]]) -> None:
    named = {f"{IS}{name}": value for name, value in keys.items()}
    found = convert(Written({"num_processes": 1, "use_vllm": True, **named}), "trl")
    given = correction(found)
    weight = given.pop("weight", None)
    assert (weight, {key.removeprefix("weight."): value for key, value in given.items()}) == expected
    assert not [line for line in found.check if "already" in line]


def test_losses_of_trl_with_the_ratio_of_a_sequence_or_a_second_bound() -> None:
    def trl(**keys: Any) -> Converted:
        return of("trl", num_processes=1, **keys)

    level = "importance_sampling_level=sequence"
    for loss in ("cispo", "sapo"):
        found = trl(loss_type=loss, importance_sampling_level="sequence")
        assert any(line.startswith(f"{level}: set algorithm.policy_loss (cispo and sapo read") for line in found.check)
        assert found.values["algorithm.policy_loss"] == loss
        assert not [line for line in found.ignored if line.startswith(level)]
    found = trl(delta=4.0, importance_sampling_level="token")
    assert found.values["algorithm.policy_loss"] == "delta" and found.values["algorithm.loss_options.delta"] == 4.0
    assert not [line for line in found.ignored if "without effect" in line]
    found = trl(delta=4.0, importance_sampling_level="sequence")
    assert "delta=4.0: set algorithm.policy_loss (gspo has no such bound here)" in found.check
    assert found.values["algorithm.policy_loss"] == "gspo"


def test_options_of_trl() -> None:
    found = of("trl", num_processes=1, adam_beta2=0.95, top_entropy_quantile=0.2, shuffle_dataset=False)
    assert found.values["actor.optim.betas"] == [0.9, 0.95] and found.values["data.shuffle"] is False
    assert correction(found) == {"weight": "top_entropy", "weight.share": 0.2}
    both = of("trl", num_processes=1, top_entropy_quantile=0.2, use_vllm=True)
    assert correction(both)["weight"] == "icepop"
    assert any(line.startswith("top_entropy_quantile=0.2: set algorithm.correction.weight") for line in both.check)
    check = of("trl", num_processes=1, reward_funcs=["accuracy_reward"]).check
    assert "reward_funcs=accuracy_reward: reads trl.rewards, so install trl, or reward.function=math" in check


ASYNC = """
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
config = AsyncGRPOConfig(num_generations=4, max_staleness=5, weight_sync_steps=2)
AsyncGRPOTrainer(model="m", args=config)
"""


def test_the_asynchronous_trainer_of_trl_has_its_own_defaults(tmp_path: Path) -> None:
    """Its old log-probs are the sampler's; a token-mean of PPO's clip (compute_loss of TRL 1.16)."""
    file = tmp_path / "a.py"
    file.write_text(ASYNC)
    found = convert(read(str(file), "trl"), "trl")
    expected = {
        "rollout.max_staleness": 5,
        "rollout.engine.name": "vllm",
        "rollout.n": 4,
        "data.max_response_length": 2048,
        "actor.optim.schedule": "constant",
        "model.dtype": "float32",
        "algorithm.adv_estimator": "grpo",
        "algorithm.loss_agg_mode": "token-mean",
        "algorithm.correction.old_log_probs": "rollout",
    }
    assert {key: found.values.get(key) for key in expected} == expected and correction(found).keys() == {
        "old_log_probs"
    }
    assert any(line.startswith("weight_sync_steps=2: set rollout.max_staleness") for line in found.check)


FLAGS = """
import argparse
from trl import GRPOConfig
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=1e-5)
parser.add_argument("--epsilon", type=float, required=True)
args = parser.parse_args()
GRPOConfig(learning_rate=args.learning_rate, epsilon=args.epsilon, num_iterations=count(), num_generations=2)
"""


def test_the_default_of_a_flag_is_read_and_a_value_that_is_not_read_is_no_default(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(FLAGS)
    found = convert(read(str(file), "trl"), "trl")
    assert found.values["actor.optim.lr"] == 1e-5
    assert "learning_rate=args.learning_rate: 1e-05, the default of that flag" in found.check
    assert "epsilon=args.epsilon is not a literal: set it by hand" in found.check
    unread = "default of TRL: {}, whose value was not read"
    assert found.origins["algorithm.loss_options.clip_ratio_low"] == unread.format("epsilon")
    assert found.origins["actor.epochs"] == unread.format("num_iterations")


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    words = ["config", "convert", "trl grpo --beta 0.1 --num_processes 1", "--from", "trl", "-o", str(file)]
    result = CliRunner().invoke(app, words)
    assert file.read_text() == "mine" and result.exit_code
    assert isinstance(result.exception, ConfigError)
    check_fields(result.exception, "-o", found=re.compile(re.escape(str(file))))
    file.unlink()
    assert CliRunner().invoke(app, words).exit_code == 0 and "coef: 0.1" in file.read_text()


def test_a_choice_is_set_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text("if [ $(uname) = X ]; then n=2; else n=4; fi\npython3 -m verl.trainer.main_ppo "
                    "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$n $MORE\n")  # fmt: skip
    words = ["config", "convert", str(file), "--from", "verl"]
    asked = str(CliRunner().invoke(app, words).exception)
    assert "rollout.n=2" in asked and "rollout.n=4" in asked and "--set" in asked
    chosen = shlex.split(asked[asked.index("--set ") : asked.index(": rollout.n=2")])
    assert "  n: 2" in CliRunner().invoke(app, [*words, *chosen]).output
    refused = CliRunner().invoke(app, [*words, "--set", "DEVICE"]).exception
    assert isinstance(refused, ConfigError)
    check_fields(refused, "--set", found=re.compile("DEVICE"), expected=re.compile("NAME=VALUE"))


ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
FSDP = {"actor.engine.name": "fsdp"}
OFFLOADED = {"actor.engine.options.cpu_offload": True}
REF_OFFLOADED = {"ref.engine.name": "fsdp", "ref.engine.options.cpu_offload": True}
VLLM, SGLANG = {"rollout.engine.name": "vllm"}, {"rollout.engine.name": "sglang"}
STRATEGY = "actor_train.strategy_args.strategy_name"
CONFIG = "actor_train.strategy_args.strategy_config"
EIGHT = {"actor_train.device_mapping": "list(range(0,8))"}
LARGE: dict[str, dict[str, Any]] = {"slime": {"rollout_batch_size": 32, "n_samples_per_prompt": 8}}


@pytest.mark.parametrize(
    ("system", "keys", "expected"),
    first(
        6,
        [
            ("verl", {f"{ACTOR}.strategy": "megatron"}, FSDP),
            ("verl", {f"{ACTOR}.strategy": "fsdp2"}, FSDP),
            ("verl", {f"{ACTOR}.ppo_epochs": 1}, FSDP),  # by default of verl
            ("verl", {"trainer.n_gpus_per_node": 1, f"{ACTOR}.strategy": "fsdp2"}, {}),
            ("verl", {f"{ACTOR}.fsdp_config.offload_policy": True}, FSDP | OFFLOADED),
            ("verl", {f"{ACTOR}.fsdp_config.offload_policy": False, f"{ACTOR}.fsdp_config.fsdp_size": -1}, FSDP),
            ("verl", {f"{ACTOR}.fsdp_config.fsdp_size": 4}, FSDP | {"actor.engine.options.mesh.shard": 4}),
            ("verl", {f"{REF}.strategy": "fsdp"}, FSDP | {"ref.engine.name": "fsdp"}),
            ("verl", {f"{REF}.megatron.param_offload": True}, FSDP | REF_OFFLOADED),
            ("easyr1", {"worker.actor.strategy": "fsdp"}, FSDP | VLLM),
            ("easyr1", {"worker.actor.fsdp.enable_full_shard": True}, FSDP | VLLM),
            (
                "easyr1",
                {"worker.actor.fsdp.enable_full_shard": False},
                FSDP | VLLM | {"actor.engine.options.reshard_after_forward": False},
            ),
            ("easyr1", {"worker.actor.fsdp.enable_cpu_offload": True}, FSDP | VLLM | OFFLOADED),
            ("easyr1", {"worker.ref.fsdp.enable_cpu_offload": True}, FSDP | VLLM | REF_OFFLOADED),
            ("easyr1", {"worker.ref.offload.offload_params": True}, FSDP | VLLM | REF_OFFLOADED),
            ("roll", {STRATEGY: "megatron_train", "actor_train.device_mapping": "list(range(0,8))"}, FSDP),
            ("roll", {STRATEGY: "deepspeed_train", "actor_train.device_mapping": "list([0,1,4,5])"}, FSDP),
            ("roll", {STRATEGY: "deepspeed_train", "actor_train.device_mapping": "[0]"}, {}),
            ("openrlhf", {"ds.zero_stage": 3, "ref.offload": True}, FSDP | VLLM | REF_OFFLOADED),
            ("slime", {"tensor_model_parallel_size": 2}, FSDP | SGLANG | {"actor.engine.options.mesh.tensor": 2}),
        ],
        others=pytest.mark.slow,
    ),
)
def test_models_that_are_sharded_there_are_sharded_here(
    system: str, keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    values = convert(Written({**LARGE.get(system, {}), **keys}), system).values
    chosen = {key: value for key, value in values.items() if ".engine." in key and not key.startswith("critic.")}
    assert chosen == expected


@pytest.mark.parametrize(
    ("system", "key", "option", "devices"),
    first(
        1,
        [
            ("verl", f"{ACTOR}.megatron.tensor_model_parallel_size", "mesh.tensor", {}),
            ("verl", f"{ACTOR}.megatron.context_parallel_size", "mesh.context", {}),
            ("verl", f"{ACTOR}.ulysses_sequence_parallel_size", "mesh.context", {}),
            ("easyr1", "worker.actor.ulysses_size", "mesh.context", {}),
            ("roll", f"{CONFIG}.tensor_model_parallel_size", "mesh.tensor", EIGHT),
            ("roll", f"{CONFIG}.context_parallel_size", "mesh.context", EIGHT),
        ],
        others=pytest.mark.slow,
    ),
)
def test_parallel_sizes_are_written_where_they_divide_the_processes(
    system: str, key: str, option: str, devices: dict[str, Any]
) -> None:
    """There are 8 GPUs."""
    found = {size: convert(Written({key: size, **devices}), system) for size in (1, 4, 3)}
    values = {size: each.values.get(f"actor.engine.options.{option}") for size, each in found.items()}
    assert values == {1: None, 4: 4, 3: None}
    told = {size: [line for line in each.parallel if line.startswith(key)] for size, each in found.items()}
    assert told == {1: [], 4: [], 3: [f"{key}=3: does not divide the 8 processes; left out"]}


@pytest.mark.parametrize(
    ("system", "key"),
    [
        ("verl", f"{ACTOR}.megatron.pipeline_model_parallel_size"),
        ("verl", f"{ACTOR}.megatron.expert_model_parallel_size"),
        ("verl", "actor_rollout_ref.rollout.tensor_model_parallel_size"),
        ("easyr1", "worker.rollout.tensor_parallel_size"),
        ("roll", f"{CONFIG}.expert_model_parallel_size"),
        ("slime", "pipeline_model_parallel_size"),
    ],
)
def test_parallelism_that_whet_does_not_have_is_told_beside_the_numbers(system: str, key: str) -> None:
    found = convert(Written({key: 4}), system)
    assert len([line for line in found.parallel if line.startswith(f"{key}=4: ")]) == 1
    assert not [line for line in [*found.check, *found.without] if line.startswith(key)]
    assert not [line for line in convert(Written({key: 1}), system).parallel if line.startswith(key)]


@pytest.mark.parametrize(
    ("system", "key"),
    [
        ("verl", f"{ACTOR}.megatron.param_offload"),
        ("verl", f"{ACTOR}.fsdp_config.optimizer_offload"),
        ("easyr1", "worker.actor.offload.offload_params"),
    ],
)
def test_weights_that_are_moved_to_the_host_leave_the_device_to_the_rollout(system: str, key: str) -> None:
    assert convert(Written({key: True}), system).values["rollout.free_cache_engine"] is True
    switched_off = {"actor_rollout_ref.rollout.free_cache_engine": False} if system == "verl" else {}
    other = "worker.actor.offload.offload_optimizer"
    off = convert(Written({key: False, **switched_off, **({other: False} if system == "easyr1" else {})}), system)
    assert not off.values.get("rollout.free_cache_engine")


def test_megatron_by_the_name_of_its_config() -> None:
    command = "python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' a=1"
    values = convert(read(f"{command} {ACTOR}.optim.lr=1e-6", "verl"), "verl").values
    assert [values.get(f"{role}.engine.name") for role in ("actor", "ref", "critic")] == ["fsdp"] * 3


BUFFER = {f"reward_model.overlong_buffer.{name}": value for name, value in {"len": 512, "penalty_factor": 0.5}.items()}


@pytest.mark.parametrize("manager", [None, "naive", "prime"])
def test_only_the_manager_dapo_of_verl_reads_the_buffer(manager: str | None) -> None:
    """workers/reward_manager/dapo.py of verl 0.9 is the only one that does."""
    named = {} if manager is None else {"reward_model.reward_manager": manager}
    found = verl(**BUFFER, **named, **{"reward_model.overlong_buffer.enable": True})
    assert not [key for key in found.values if key.startswith("algorithm.overlong")]
    told = f"left out, as verl's manager {manager or 'naive'} does not read it (dapo does)"
    assert f"reward_model.overlong_buffer.len=512: {told}" in found.check
    found = verl(**BUFFER, **{"reward.reward_manager.name": "dapo"})
    assert found.values["algorithm.overlong.penalty"] == 0.5


@pytest.mark.parametrize(("length", "is_told"), [(8192, False), (4096, True)])
def test_another_length_that_the_penalty_counts_from_is_told(length: int, is_told: bool) -> None:
    keys = {"reward_model.reward_manager": "dapo", "data.max_response_length": 8192}
    found = verl(**keys, **{"reward_model.reward_kwargs.max_resp_len": length})
    told = f"max_resp_len={length}: "
    assert any(told in line and "data.max_response_length" in line for line in found.check) == is_told
    keys = {"reward_model.reward_manager": "dapo", "reward_model.reward_kwargs.max_resp_len": 512}
    assert not [line for line in verl(**keys).check if "max_resp_len" in line]  # verl's default for responses


def test_the_critic_of_verl_has_the_aggregation_of_the_actor() -> None:
    """In verl's critic.yaml, loss_agg_mode follows the actor's by default."""
    mode = {"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}
    found = {each: verl(**mode, **{"algorithm.adv_estimator": each}) for each in ("gae", "grpo")}
    told = {
        each: [line for line in one.check if "loss of a critic is a mean over tokens" in line]
        for each, one in found.items()
    }
    assert len(told["gae"]) == 1 and not told["grpo"]
    assert found["gae"].values["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    assert any("a mean over tokens" in line for line in verl(**{"critic.loss_agg_mode": "seq-mean-token-sum"}).check)


def test_the_folder_of_the_recipe_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for file, status in (("new/folder/mine.yaml", 0), ("file/mine.yaml", 2)):
        words = ["config", "convert", "trl grpo --beta 0.1", "--from", "trl", "-o", str(tmp_path / file)]
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert (ended.value.code or 0) == status
    assert (tmp_path / "new" / "folder" / "mine.yaml").is_file()
