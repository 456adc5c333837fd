# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from whet.config import aggregation, check, check_context, problems, uses_critic
from whet.config.algorithm_checks import nearest_divisors
from whet.config.schema import AlgorithmConfig, EvalConfig, GenerateConfig, SFTConfig, TrainConfig
from whet.errors import ConfigError, pip_install


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a data file and two files of the user's, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "mine.py").write_text(
        "def with_options(token_level_rewards, response_mask, *, strength=1.0):\n    return token_level_rewards\n"
        "def with_values(returns, values, gamma=1.0):\n    return returns - values, {}\n"
    )
    return tmp_path


def train_config(**sections: dict[str, Any]) -> TrainConfig:
    """A config in which nothing is wrong, with `sections` laid over it."""
    values: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"]},
        "reward": {"function": "gsm8k"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return TrainConfig.model_validate(values)


def test_a_config_without_mistakes_has_no_problems(folder: Path) -> None:
    assert problems(train_config()) == []
    check(train_config())


APART = "cluster: {placement: {a: {roles: [actor]}, b: {roles: [rollout]}}}"
SECTIONS_AND_REFUSALS = [
    (
        "environment: {agents: {helper: {name: nosuch}}}",
        "environment.agents.helper.name: no environment is called 'nosuch'",
    ),
    (
        "environment: {agents: {helper: {name: calculator, options: {roel: user}}}}",
        "environment.agents.helper.options: environment 'calculator' has no option 'roel'; did you mean 'role'?",
    ),
    (
        "environment: {agents: {helper: {tools: [nosuch]}}}",
        "environment.agents.helper.tools[0]: no tool is called 'nosuch'",
    ),
    (
        "environment: {agents: {helper: {tool_parser: hermes}}}",
        "environment.agents.helper.tool_parser is set, but environment.agents.helper.tools is empty",
    ),
    ("model: {path: null}", "model.path is not set; name a model folder"),
    ("model: {path: ./nowhere}", "model.path=./nowhere is not a folder"),
    ("model: {path: train.jsonl}", "model.path=train.jsonl is not a folder"),
    ("model: {path: .}", "model.path=. has no config.json"),
    ("data: {train_files: []}", "data.train_files is empty; name at least one file"),
    ("data: {train_files: [nowhere.jsonl]}", "data.train_files: nowhere.jsonl does not exist (seen from "),
    ("data: {train_files: [mine.py]}", "data.train_files: mine.py ends in .py; expected .jsonl, .json, .parquet"),
    ("data: {min_pixels: 9, max_pixels: 8}", "data.min_pixels=9 is over data.max_pixels=8; raise or unset one"),
    ("data: {val_files: [nowhere.jsonl]}", "data.val_files: nowhere.jsonl does not exist"),
    ("trainer: {val_freq: 5}", "trainer.val_freq=5, but data.val_files is empty"),
    ("trainer: {resume: nowhere}", "trainer.resume=nowhere is not a folder; expected auto, never"),
    ("trainer: {loop: my_loop}", "trainer.loop=my_loop is not a function path; expected package.module:function"),
    ("trainer: {callbacks: ['nowhere.py:f']}", "trainer.callbacks: nowhere.py does not exist"),
    ("reward: {function: null}", "reward.function is not set; name "),
    ("reward: {function: gms8k}", "reward.function: no reward is called 'gms8k'; did you mean 'gsm8k'?"),
    ("reward: {kwargs: {format_score: 2}}", "reward.kwargs.format_score=2; expected a number >= 0 and <= 1; change it"),
    ("reward: {function: 'nowhere.py:f'}", "reward.function: nowhere.py does not exist"),
    ("reward: {weights: [1, 2]}", "reward.weights has length 2 and reward.function length 1; set one weight for each"),
    ("environment: {name: nothing}", "environment.name: no environment is called 'nothing'"),
    ("environment: {options: {depth: 3}}", "environment.options: environment 'single_turn' has no option 'depth'"),
    ("rollout: {temperature: 0}", "rollout.temperature=0 is greedy: all 8 responses to a prompt would be the same"),
    (
        "trainer: {validation: {min_p: 0.1}}",
        "trainer.validation.min_p=0.1 has no effect with trainer.validation.temp",
    ),
    (
        "rollout: {allowed_token_ids: []}",
        "rollout.allowed_token_ids is empty, so no token could be sampled; list token ids",
    ),
    ("rollout: {stop: ['</a>', '']}", "rollout.stop has an empty string, which matches everywhere; remove it"),
    ("trainer: {validation: {bad_words: ''}}", "trainer.validation.bad_words has an empty string"),
    ("rollout: {temperature: 1e-9}", "rollout.temperature=1e-09 is greedy: all 8 responses to a prompt would"),
    ("rollout: {top_k: 1}", "rollout.top_k=1 is greedy: all 8 responses"),
    ("rollout: {top_p: 1e-9}", "rollout.top_p=1e-09 is greedy: all 8 responses"),
    ("rollout: {min_p: 1}", "rollout.min_p=1 is greedy: all 8 responses"),
    ("trainer: {validation: {n: 4}}", "trainer.validation.temperature=0 is greedy: all 4 responses"),
    ("algorithm: {adv_estimator: grpoo}", "algorithm.adv_estimator: no advantage estimator is called 'grpoo'; did you"),
    ("algorithm: {adv_options: {std_nrm: false}}", "'grpo' has no option 'std_nrm'; did you mean 'std_norm'?"),
    (
        "{algorithm: {adv_estimator: cpo, adv_options: {wrap_method: tok_k}}, teacher: {hint: peer}}",
        "algorithm.adv_options.wrap_method: no CPO wrapper is called 'tok_k'; did you mean 'tok_kl'?",
    ),
    (
        "algorithm: {policy_loss: cispo, loss_options: {bounds: capped}}",
        "algorithm.loss_options.bounds='capped'; expected one of relative, cap, absolute; change it, or leave",
    ),
    (
        "algorithm: {correction: {rejection: divergence, rejection_options: {form: k3, high: -1}}}",
        "algorithm.correction.rejection_options.high=-1; expected a number > 0 or null; change it",
    ),
    (
        "algorithm: {filter: {name: mean_window, options: {low: 0.9, high: 0.1}}}",
        "algorithm.filter.options.low=0.9 is not less than algorithm.filter.options.high=0.1; lower low",
    ),
    ("algorithm: {loss_agg_mode: token-maen}", "algorithm.loss_agg_mode: no aggregation is called 'token-maen'; did"),
    (
        "algorithm: {loss_agg_mode: 'mine.py:with_options'}",
        "algorithm.loss_agg_mode=mine.py:with_options has a parameter 'token_level_rewards'; an aggregation may have ",
    ),
    ("algorithm: {adv_options: {std_norm: high}}", "algorithm.adv_options.std_norm='high'; expected true or false"),
    ("algorithm: {loss_options: {clip: 0.1}}", "algorithm.loss_options: policy loss 'ppo_clip' has no option 'clip'"),
    ("algorithm: {kl: {form: k4}}", "algorithm.kl.form: no KL form is called 'k4'"),
    ("algorithm: {filter: {name: dap}}", "algorithm.filter.name: no filter is called 'dap'; did you mean 'dapo'?"),
    ("rollout: {n: 1}", "rollout.n=1, but 'grpo' compares the responses to one prompt; set rollout.n to 2 or more"),
    (
        "{rollout: {n: 1}, algorithm: {adv_estimator: gae, filter: {name: dapo}}}",
        "rollout.n=1, but algorithm.filter.name=dapo compares the responses",
    ),
    (
        "{algorithm: {policy_loss: gspo, loss_agg_mode: token-mean}}",
        "algorithm.loss_agg_mode is token-mean, but policy loss 'gspo' is defined with seq-mean-token-mean",
    ),
    (
        "{algorithm: {adv_estimator: dr_grpo, loss_agg_mode: token-mean}}",
        "algorithm.loss_agg_mode is token-mean, but advantage estimator 'dr_grpo' is defined with seq-mean-",
    ),
    (
        "{algorithm: {adv_estimator: dr_grpo, policy_loss: gspo}}",
        "the aggregation of policy loss 'gspo' is seq-mean-token-mean, but advantage estimator 'dr_grpo' is",
    ),
    (
        "{algorithm: {overlong: {penalty: 1, buffer_length: 512}}}",
        "algorithm.overlong.buffer_length=512 must be below data.max_response_length=512",
    ),
    (
        "actor: {mini_batch_size: 6}",
        "actor.mini_batch_size=6 must divide data.train_batch_size=32 (both in prompts); try 4 or 8",
    ),
    ("actor: {mini_batch_size: 64}", "try 32"),
    (
        "actor: {max_tokens_per_micro_batch: 1000}",
        "actor.max_tokens_per_micro_batch=1000 cannot hold one row of data.max_prompt_length + "
        "data.max_response_length = 1024 tokens",
    ),
    ("critic: {warmup_steps: 3}", "critic.warmup_steps=3, but no critic is trained: neither estimator 'grpo' nor"),
    (
        "{algorithm: {adv_estimator: gae}, critic: {mini_batch_size: 5}}",
        "critic.mini_batch_size=5 must divide data.train_batch_size=32 (both in prompts); try 4 or 8",
    ),
    (
        "{algorithm: {adv_estimator: gae}, critic: {value_loss: clip}}",
        "critic.value_loss: no value loss is called 'clip'",
    ),
    (
        "{algorithm: {adv_estimator: gae}, critic: {warmup_steps: 9}, trainer: {total_steps: 9}}",
        "critic.warmup_steps=9 must be below trainer.total_steps=9, or the policy is",
    ),
    (
        "{actor: {mini_batch_size: 1}, rollout: {n: 2}, cluster: {processes: 3}}",
        "cluster.processes=3 is more than the 2 rows of an optimizer step",
    ),
    (
        "rollout: {engine: {name: hf, options: {compile: true}}}",
        "rollout.engine.options: rollout engine 'hf' has no option 'compile'; its options are on_new_weights",
    ),
    (
        "rollout: {engine: {options: {kv_cache_byte: 1}}}",
        "rollout.engine.options: rollout engine 'native' has no option 'kv_cache_byte'; did you mean 'kv_cache_bytes'?",
    ),
    (
        "{rollout: {max_staleness: 1}, algorithm: {correction: {weight: importance}}}",
        "rollout.max_staleness=1 samples while models train, and rollout and actor share their processes",
    ),
    (
        f"{{rollout: {{max_staleness: 0.5}}, {APART}}}",
        "rollout.max_staleness=0.5 trains on tokens that older weights sampled, and nothing in algorithm.correction",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: {{correction: {{weight: top_entropy}}}}}}",
        "rollout.max_staleness=1 trains on tokens that older weights sampled, and nothing in algorithm.correction",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
        "{correction: {weight: importance, weight_options: {cap: .inf}}}}",
        "rollout.max_staleness=1 with algorithm.correction.weight_options.cap=inf weighs old tokens without a bound",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
        "{correction: {weight: icepop, weight_options: {high: .inf}}}}",
        "rollout.max_staleness=1 with algorithm.correction.weight_options.high=inf weighs old tokens without a bound",
    ),
    *(
        (
            f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
            f"{{correction: {{rejection: divergence, rejection_options: {options}}}}}}}",
            "algorithm.correction.rejection=divergence has no bound, so no token is rejected; set",
        )
        for options in ("{}", "{high: .inf}", "{form: k2, low: -1}", "{form: k1, low: -.inf}")
    ),
    (
        f"{{rollout: {{max_staleness: 0.03}}, {APART}, algorithm: {{correction: {{weight: importance}}}}}}",
        "rollout.max_staleness=0.03 is less than one prompt of data.train_batch_size=32, so nothing is sampled ahead; "
        "set rollout.max_staleness to 0.0313 or more",
    ),
    (
        "algorithm: {correction: {old_log_probs: interpolated, weight: importance}}",
        "algorithm.correction.weight=importance compares the trainer's log-probs with the rollout's, but "
        "algorithm.correction.old_log_probs=interpolated has the former in the loss alone; unset",
    ),
    (
        "algorithm: {correction: {old_log_probs: interpolated}, kl: {where: reward}}",
        "algorithm.kl.where=reward reads old log-probs before the loss",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: {{correction: {{old_log_probs: interpolated}}}}}}",
        "rollout.max_staleness=1 trains on tokens that older weights sampled, and nothing in algorithm.correction",
    ),
    (
        f"{{rollout: {{max_staleness: 1, free_cache_engine: true}}, {APART}, algorithm: "
        "{correction: {old_log_probs: rollout}}}",
        "rollout.max_staleness=1 samples all the time, so rollout.free_cache_engine=true frees nothing",
    ),
    (
        "algorithm: {kl: {controller: adaptive, where: loss}}",
        "algorithm.kl.controller=adaptive needs the KL in the reward, but algorithm.kl.where is loss",
    ),
]


@pytest.mark.parametrize(("sections", "said"), SECTIONS_AND_REFUSALS)
def test_values_that_do_not_go_together_are_refused_with_the_reason(folder: Path, sections: str, said: str) -> None:
    found = problems(train_config(**yaml.safe_load(sections)))
    assert len(found) == 1, found
    assert said in found[0]


@pytest.mark.parametrize(
    "sections",
    [
        "model: {path: owner/name}",
        "trainer: {val_freq: -1}",
        "{rollout: {n: 1}, algorithm: {adv_estimator: gae}, critic: {warmup_steps: 2}}",
        "{rollout: {n: 1, temperature: 0}, algorithm: {adv_estimator: reinforce_plus_plus}}",
        "{reward: {function: null}, environment: {name: calculator}}",
        "reward: {function: [gsm8k, 'mine.py:with_options'], weights: [1, 0.5]}",
        "{algorithm: {policy_loss: gspo, loss_agg_mode: seq-mean-token-mean}}",
        "{algorithm: {policy_loss: vanilla, loss_options: {clip_ratio_c: 4}, kl: {form: k3+, where: loss}}}",
        "{actor: {mini_batch_size: 1}, cluster: {processes: 8}}",
        "algorithm: {kl: {controller: adaptive, where: reward}}",
        "algorithm: {adv_estimator: 'mine.py:with_options', adv_options: {strength: 2}}",
    ],
)
def test_values_that_go_together_are_not_refused(folder: Path, sections: str) -> None:
    assert problems(train_config(**yaml.safe_load(sections))) == []


def test_all_reasons_are_given_at_once(folder: Path) -> None:
    config = train_config(rollout={"n": 1}, actor={"mini_batch_size": 5}, model={"path": None})
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert [line.split()[0] for line in str(raised.value).splitlines()] == [
        "model.path",
        "rollout.n=1,",
        "actor.mini_batch_size=5",
    ]


def test_what_the_caller_hands_over_need_not_be_in_the_config(folder: Path) -> None:
    config = train_config(data={"train_files": []}, reward={"function": None})
    assert len(problems(config)) == 2
    assert problems(config, given={"data", "reward"}) == []


def test_a_function_of_the_users_decides_by_its_signature(folder: Path) -> None:
    assert uses_critic(AlgorithmConfig(adv_estimator="mine.py:with_values"))
    assert not uses_critic(AlgorithmConfig(adv_estimator="mine.py:with_options"))
    wrong = train_config(algorithm={"adv_estimator": "mine.py:with_options", "adv_options": {"strenght": 2}})
    assert "did you mean 'strength'?" in problems(wrong)[0]


@pytest.mark.parametrize(
    ("estimator", "loss", "mode", "expected"),
    [
        ("grpo", "ppo_clip", None, "token-mean"),
        ("grpo", "ppo_clip", "seq-mean-token-sum", "seq-mean-token-sum"),
        ("grpo", "gspo", None, "seq-mean-token-mean"),
        ("dr_grpo", "ppo_clip", None, "seq-mean-token-sum-norm"),
        ("dr_grpo", "ppo_clip", "seq-mean-token-sum-norm", "seq-mean-token-sum-norm"),
    ],
)
def test_aggregation_is_what_is_fixed_else_chosen_else_the_token_mean(
    estimator: str, loss: str, mode: str | None, expected: str
) -> None:
    values = {"adv_estimator": estimator, "policy_loss": loss, "loss_agg_mode": mode}
    assert aggregation(AlgorithmConfig.model_validate(values)) == expected


@pytest.mark.parametrize(
    ("number", "wanted", "near"),
    [(32, 6, [4, 8]), (32, 64, [32]), (12, 5, [4, 6]), (7, 3, [1, 7]), (100, 30, [25, 50])],
)
def test_nearest_divisors(number: int, wanted: int, near: list[int]) -> None:
    assert nearest_divisors(number, wanted) == near


def test_a_tracker_whose_library_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "wandb").mkdir()  # what the library leaves in a working directory is not the library
    monkeypatch.setattr("sys.path", [str(folder)])
    for name in ("wandb", "trackio"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    config = train_config(trainer={"logger": ["console", "wandb", "wandb"]})
    assert problems(config) == [f"trainer.logger names wandb, which is not installed; run {pip_install('wandb')}"]
    assert problems(train_config(trainer={"logger": ["jsonl", "trackio"]})) == [
        f"trainer.logger names trackio, which is not installed; run {pip_install('trackio')}"
    ]


def test_lengths_are_held_against_the_models_positions(folder: Path) -> None:
    config = train_config(data={"max_prompt_length": 300, "max_response_length": 212})
    check_context(config, 512)
    with pytest.raises(
        ConfigError, match=r"make 512 tokens, and the model has 511 positions; try data.max_response_length=211"
    ):
        check_context(config, 511)
    with pytest.raises(ConfigError, match=r"try a smaller data\.max_prompt_length"):
        check_context(config, 300)
    check_context(EvalConfig(), 1024)
    with pytest.raises(ConfigError, match="the model has 1023 positions"):
        check_context(EvalConfig(), 1023)
    check_context(SFTConfig(), 1024)
    with pytest.raises(ConfigError, match=r"data\.max_length=1024 is more than the 1023 positions"):
        check_context(SFTConfig(), 1023)


def test_sft_and_eval_are_checked_too(folder: Path) -> None:
    sft = {"model": {"path": "model"}, "data": {"train_files": ["train.jsonl"]}}
    assert problems(SFTConfig.model_validate(sft)) == []
    assert [line.split()[0] for line in problems(SFTConfig())] == ["model.path", "data.train_files"]
    two_rows = {**sft, "data": {"train_files": ["train.jsonl"], "train_batch_size": 2}, "cluster": {"processes": 3}}
    assert "cluster.processes=3 is more than the 2 rows" in problems(SFTConfig.model_validate(two_rows))[0]
    evaluation = {"model": {"path": "model"}, "data": {"val_files": ["train.jsonl"]}, "reward": {"function": "gsm8k"}}
    assert problems(EvalConfig.model_validate(evaluation)) == []
    assert (
        "all 3 responses"
        in problems(EvalConfig.model_validate({**evaluation, "rollout": {"n": 3, "temperature": 0.0}}))[0]
    )
    stale = {**evaluation, "rollout": {"max_staleness": 0.5}}
    assert problems(EvalConfig.model_validate(stale))[0].startswith("rollout.max_staleness=0.5 has no effect")
    asked = {"model": {"path": "model"}, "input": "train.jsonl", "output": "answers.jsonl"}
    assert problems(GenerateConfig.model_validate(asked)) == []
    assert problems(GenerateConfig.model_validate({**asked, "input": [], "data": {"val_files": ["train.jsonl"]}})) == []
    same, folder_ = {**asked, "output": "./train.jsonl"}, {**asked, "output": "answers"}
    assert problems(GenerateConfig.model_validate(same)) == [
        "output=./train.jsonl is also an input file of prompts; set output to another path"
    ]
    assert "expected a path that ends in .jsonl" in problems(GenerateConfig.model_validate(folder_))[0]
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        GenerateConfig.model_validate({"rollout": {"presence_penalty": 2.5}})
    assert [line.split()[0] for line in problems(EvalConfig())] == ["model.path", "data.val_files", "reward.function"]


def test_a_divergence_with_a_bound_and_the_least_staleness_are_taken(folder: Path) -> None:
    for size in (1, 3, 32, 49, 1000):
        for options in ({"high": 0.3}, {"form": "k1", "low": -0.5}):
            config = train_config(
                rollout={"max_staleness": math.ceil(1e4 / size) / 1e4},
                data={"train_batch_size": size},
                algorithm={"correction": {"rejection": "divergence", "rejection_options": options}},
                **yaml.safe_load(f"{{{APART}}}"),
            )
            assert not problems(config)
