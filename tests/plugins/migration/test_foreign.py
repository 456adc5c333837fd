# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.first import first
from tests.raising import check_fields, raises
from whet.config import EvalConfig, SFTConfig, TrainConfig, load_config
from whet.config.section import is_known
from whet.errors import ConfigError
from whet.plugins.migration.convert import convert
from whet.plugins.migration.foreign import foreign_key, foreign_keys
from whet.plugins.migration.foreign_files import Written


@pytest.mark.parametrize(
    ("pasted", "answer"),
    first(
        5,
        [
            ("rollout_batch_size=32", "a key of ROLL; write data.train_batch_size (prompts)"),
            ("data.rollout_batch_size=32", "a key of EasyR1; write data.train_batch_size (prompts a step)"),
            ("max_steps=10", "a key of ROLL; write trainer.total_steps"),
            ("algorithm.cpo_lambda=2", "a key of verl; write algorithm.adv_options.cpo_lambda"),
            ("actor_rollout_ref.actor.strategy=fsdp2", "a key of verl; write actor.engine.name (`fsdp` shards"),
            ("actor_rollout_ref.actor.use_kl_loss=True", "a key of verl; write algorithm.kl.where=loss"),
            (
                "actor_rollout_ref.actor.clip_ratio=0.2",
                "write algorithm.loss_options.clip_ratio_low and algorithm.loss_options.clip_ratio_high (both; in verl",
            ),
            ("worker.rollout.val_override_config.temperature=0.5", "a key of EasyR1; write trainer.validation"),
            ("rewards.llm_judge.worker_cls=a.B", "write reward.function (a function instead of a worker class)"),
            (
                "reward_model.enable=False",
                "a key of verl; write reward_model.model_path (there is a reward model where this is set",
            ),
            ("worker.actor.strategy=fsdp", "a key of EasyR1; write actor.engine.name (`fsdp` shards"),
            ("worker.ref.strategy=fsdp", "a key of EasyR1; write ref.engine.name"),
            ("beta=0.04", "a key of TRL; write algorithm.kl.where=loss and algorithm.kl.coef (both; 0 there is"),
            ("num_generations=8", "a key of TRL; write rollout.n"),
            (
                "scale_rewards=none",
                "a key of TRL; write algorithm.adv_estimator (`group` is grpo, `none` dr_grpo, `batch`",
            ),
            ("actor_rollout_ref.rollout.no_such=1", "a key of verl; docs/migrating.md has those of its keys"),
        ],
        others=pytest.mark.slow,
    ),
)
def test_a_pasted_override_is_answered_with_our_key(pasted: str, answer: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, "gsm8k", [pasted], checked=False)
    key = pasted.partition("=")[0]
    check_fields(raised.value, key, found=re.compile(r"\(command line\)$"), change=re.compile(re.escape(answer)))
    assert "extra" not in str(raised.value)


def test_a_pasted_file_is_answered_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text("exp_name: x\nactor_train:\n  training_args: {learning_rate: 1.0e-6}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, file)
    check_fields(raised.value, "exp_name", found=re.compile(r"\(.*roll\.yaml:1\)$"))
    assert raised.value.change == "a key of ROLL; write trainer.experiment_name"
    [other] = raised.value.others
    check_fields(other, "actor_train.training_args.learning_rate", found=re.compile(r"\(.*roll\.yaml:3\)$"))
    assert other.change == "a key of ROLL; write actor.optim.lr"


@pytest.mark.parametrize("cause", ["defaults: [../config/deepspeed_zero]", "extra: ${deepspeed_zero2}"])
def test_a_file_that_builds_on_what_is_not_here_is_answered_too(tmp_path: Path, cause: str) -> None:
    file = tmp_path / "roll.yaml"
    file.write_text(f"max_steps: 3\n{cause}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, file)
    check_fields(raised.value, "max_steps", change=re.compile(r"ROLL.*trainer\.total_steps$"))
    [second] = raised.value.others
    assert "deepspeed_zero" in str(second)


def test_a_key_that_another_command_has_not_is_not_offered_there() -> None:
    assert foreign_key(SFTConfig, "actor_rollout_ref.rollout.n") != foreign_key(TrainConfig, "worker.rollout.n")
    assert foreign_key(SFTConfig, "actor_rollout_ref.model.path") == "a key of verl; write model.path"
    assert foreign_key(TrainConfig, "rollout.temprature") is None


def test_a_key_of_another_command_of_ours_is_no_key_of_another_framework() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(EvalConfig, "gsm8k_eval", ["actor.optim.lr=1", "trainer.total_steps=3"], checked=False)
    for error, key in zip([raised.value, *raised.value.others], ["actor.optim.lr", "trainer.total_steps"], strict=True):
        check_fields(error, key, change=re.compile("`whet train`, .*`whet eval`"))


def test_a_variable_that_is_not_set_makes_no_known_key_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHET_NO_SUCH_VARIABLE", raising=False)
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  train_files: ${oc.env:WHET_NO_SUCH_VARIABLE}/a.jsonl\nalgorithm: {adv_estimator: grpo}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, file, checked=False)
    check_fields(raised.value, "data.train_files", found=re.compile("WHET_NO_SUCH_VARIABLE"))
    assert not raised.value.others


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_asynchronous_name_of_an_engine_is_answered_with_its_name(name: str) -> None:
    overrides = [f"rollout.engine.name={name}_async", "model.path=m", "data.train_files=a.jsonl"]
    with raises(ConfigError, "rollout.engine.name", found=f"{name}_async", change=re.compile(f"'{name}'")):
        load_config(TrainConfig, "gsm8k", overrides)
    assert (
        convert(Written({"actor_rollout_ref.rollout.name": f"{name}_async"}), "verl").values["rollout.engine.name"]
        == name
    )


def test_every_counterpart_is_a_key() -> None:
    assert len(foreign_keys()) > 300
    ours = {each for _, _, counterparts, _ in foreign_keys() for each in counterparts}
    assert not [each for each in ours if not is_known(TrainConfig, each.split("=")[0])]


def test_no_key_of_another_framework_is_ours_with_another_meaning() -> None:
    """Equal names are taken without a word, so the tables must map them to themselves."""
    same = [(key, ours) for _, key, ours, _ in foreign_keys() if is_known(TrainConfig, key)]
    assert not [key for key, ours in same if key not in [each.partition("=")[0] for each in ours]]
