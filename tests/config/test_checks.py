# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.raising import check_fields, raises
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
Refusal = tuple[str, str, object, str]  # sections; key, value found, a pattern of what was expected and what to change
SECTIONS_AND_REFUSALS: list[Refusal] = [
    ("environment: {agents: {helper: {name: nosuch}}}", "environment.agents.helper.name", "nosuch", "single_turn"),
    (
        "environment: {agents: {helper: {name: calculator, options: {roel: user}}}}",
        "environment.agents.helper.options.roel",
        "user",
        "'calculator'.*'role'",
    ),
    (
        "environment: {agents: {helper: {tools: [nosuch]}}}",
        "environment.agents.helper.tools[0]",
        "nosuch",
        "calculator, python",
    ),
    (
        "environment: {agents: {helper: {tool_parser: hermes}}}",
        "environment.agents.helper.tool_parser",
        "hermes",
        "environment.agents.helper.tools ",
    ),
    (
        "{rollout: {max_staleness: 1}, algorithm: {correction: {weight: importance}, filter: {name: dapo, "
        "options: {extra: 0.5}}}, cluster: {placement: {a: {}, b: {roles: [rollout]}}}}",
        "algorithm.filter.options.extra",
        0.5,
        r"rollout.max_staleness=1\b",
    ),
    (
        "reward: {domains: {maths: {function: gsm8k, filter: {name: first_finished}}}}",
        "reward.domains.maths.filter.options.extra",
        0.25,
        r"\bdomain\b",
    ),
    ("model: {path: null}", "model.path", None, ""),
    ("model: {path: ./nowhere}", "model.path", re.compile(r"^\./nowhere "), ""),
    ("model: {path: train.jsonl}", "model.path", re.compile(r"^train\.jsonl "), ""),
    ("model: {path: .}", "model.path", re.compile(r"^\. "), ""),
    ("data: {train_files: []}", "data.train_files", [], ""),
    ("data: {train_files: [nowhere.jsonl]}", "data.train_files", re.compile(r"^nowhere\.jsonl "), ""),
    ("data: {train_files: [mine.py]}", "data.train_files", re.compile(r"^mine\.py "), r"\.jsonl, \.json, \.parquet"),
    ("data: {min_pixels: 9, max_pixels: 8}", "data.min_pixels", 9, "data.max_pixels=8"),
    ("data: {val_files: [nowhere.jsonl]}", "data.val_files", re.compile(r"^nowhere\.jsonl "), ""),
    ("trainer: {val_freq: 5}", "trainer.val_freq", 5, "data.val_files is empty"),
    ("trainer: {resume: nowhere}", "trainer.resume", re.compile("nowhere"), "auto, never, overwrite"),
    ("trainer: {loop: my_loop}", "trainer.loop", "my_loop", "package.module:function"),
    ("trainer: {callbacks: ['nowhere.py:f']}", "trainer.callbacks", re.compile(r"^nowhere\.py "), ""),
    ("reward: {function: null}", "reward.function", None, "gsm8k"),
    ("reward: {function: gms8k}", "reward.function", "gms8k", "'gsm8k'"),
    ("reward: {kwargs: {format_score: 2}}", "reward.kwargs.format_score", 2, "number >= 0 and <= 1"),
    ("reward: {function: 'nowhere.py:f'}", "reward.function", re.compile(r"^nowhere\.py "), ""),
    ("reward: {weights: [1, 2]}", "reward.weights", [1.0, 2.0], "length 1"),
    ("environment: {name: nothing}", "environment.name", "nothing", "single_turn"),
    ("environment: {options: {depth: 3}}", "environment.options.depth", 3, "'single_turn'"),
    ("rollout: {temperature: 0}", "rollout.temperature", 0.0, "all 8 .*rollout.n=1"),
    ("trainer: {validation: {min_p: 0.1}}", "trainer.validation.min_p", 0.1, "trainer.validation.temperature=0"),
    ("rollout: {allowed_token_ids: []}", "rollout.allowed_token_ids", [], ""),
    ("rollout: {stop: ['</a>', '']}", "rollout.stop", ["</a>", ""], ""),
    ("trainer: {validation: {bad_words: ''}}", "trainer.validation.bad_words", [""], ""),
    ("rollout: {temperature: 1e-9}", "rollout.temperature", 1e-09, "all 8 "),
    ("rollout: {top_k: 1}", "rollout.top_k", 1, "all 8 "),
    ("rollout: {top_p: 1e-9}", "rollout.top_p", 1e-09, "all 8 "),
    ("rollout: {min_p: 1}", "rollout.min_p", 1.0, "all 8 "),
    ("trainer: {validation: {n: 4}}", "trainer.validation.temperature", 0.0, "all 4 .*trainer.validation.n=1"),
    ("algorithm: {adv_estimator: grpoo}", "algorithm.adv_estimator", "grpoo", "'grpo'"),
    ("algorithm: {adv_options: {std_nrm: false}}", "algorithm.adv_options.std_nrm", False, "'grpo'.*'std_norm'"),
    (
        "{algorithm: {adv_estimator: cpo, adv_options: {wrap_method: tok_k}}, teacher: {hint: peer}}",
        "algorithm.adv_options.wrap_method",
        "tok_k",
        "'tok_kl'",
    ),
    (
        "algorithm: {policy_loss: cispo, loss_options: {bounds: capped}}",
        "algorithm.loss_options.bounds",
        "capped",
        "relative, cap, absolute",
    ),
    (
        "algorithm: {correction: {rejection: divergence, rejection_options: {form: k3, high: -1}}}",
        "algorithm.correction.rejection_options.high",
        -1,
        "> 0 or null",
    ),
    (
        "algorithm: {filter: {name: mean_window, options: {low: 0.9, high: 0.1}}}",
        "algorithm.filter.options.low",
        0.9,
        "algorithm.filter.options.high=0.1",
    ),
    ("algorithm: {loss_agg_mode: token-maen}", "algorithm.loss_agg_mode", "token-maen", "'token-mean'"),
    (
        "algorithm: {loss_agg_mode: 'mine.py:with_options'}",
        "algorithm.loss_agg_mode",
        "mine.py:with_options",
        "'token_level_rewards'",
    ),
    ("algorithm: {adv_options: {std_norm: high}}", "algorithm.adv_options.std_norm", "high", "true or false"),
    ("algorithm: {loss_options: {clip: 0.1}}", "algorithm.loss_options.clip", 0.1, "'ppo_clip'"),
    ("algorithm: {kl: {form: k4}}", "algorithm.kl.form", "k4", "k1_ratio"),
    ("algorithm: {filter: {name: dap}}", "algorithm.filter.name", "dap", "'dapo'"),
    ("rollout: {n: 1}", "rollout.n", 1, "at least 2 .*'grpo'"),
    (
        "{rollout: {n: 1}, algorithm: {adv_estimator: gae, filter: {name: dapo}}}",
        "rollout.n",
        1,
        "at least 2 .*algorithm.filter.name=dapo",
    ),
    (
        "{algorithm: {policy_loss: gspo, loss_agg_mode: token-mean}}",
        "algorithm.loss_agg_mode",
        "token-mean",
        "seq-mean-token-mean, .*'gspo'",
    ),
    (
        "{algorithm: {adv_estimator: dr_grpo, loss_agg_mode: token-mean}}",
        "algorithm.loss_agg_mode",
        "token-mean",
        "seq-mean-token-sum-norm, .*'dr_grpo'",
    ),
    (
        "{algorithm: {adv_estimator: dr_grpo, policy_loss: gspo}}",
        "aggregation of policy loss 'gspo'",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm, .*'dr_grpo'",
    ),
    (
        "{algorithm: {overlong: {penalty: 1, buffer_length: 512}}}",
        "algorithm.overlong.buffer_length",
        512,
        "data.max_response_length=512.*128",
    ),
    ("actor: {mini_batch_size: 6}", "actor.mini_batch_size", 6, "data.train_batch_size=32 .*4 or 8"),
    ("actor: {mini_batch_size: 64}", "actor.mini_batch_size", 64, "32$"),
    ("actor: {max_tokens_per_micro_batch: 1000}", "actor.max_tokens_per_micro_batch", 1000, "at least 1024,"),
    ("critic: {warmup_steps: 3}", "critic.warmup_steps", 3, "'grpo' .*'ppo_clip'"),
    (
        "{algorithm: {adv_estimator: gae}, critic: {mini_batch_size: 5}}",
        "critic.mini_batch_size",
        5,
        "data.train_batch_size=32 .*4 or 8",
    ),
    ("{algorithm: {adv_estimator: gae}, critic: {value_loss: clip}}", "critic.value_loss", "clip", "mse"),
    (
        "{algorithm: {adv_estimator: gae}, critic: {warmup_steps: 9}, trainer: {total_steps: 9}}",
        "critic.warmup_steps",
        9,
        "trainer.total_steps=9",
    ),
    ("{actor: {mini_batch_size: 1}, rollout: {n: 2}, cluster: {processes: 3}}", "cluster.processes", 3, "at most 2,"),
    (
        "{actor: {mini_batch_size: 1, engine: {name: fsdp, options: {mesh: {tensor: 2}}}}, rollout: {n: 2}, "
        "cluster: {processes: 6}}",
        "cluster.processes",
        6,
        "at most 4,",
    ),
    (
        "rollout: {engine: {name: hf, options: {compile: true}}}",
        "rollout.engine.options.compile",
        True,
        "'hf': on_new_weights",
    ),
    (
        "rollout: {engine: {options: {kv_cache_byte: 1}}}",
        "rollout.engine.options.kv_cache_byte",
        1,
        "'native'.*'kv_cache_bytes'",
    ),
    (
        "{rollout: {max_staleness: 1}, algorithm: {correction: {weight: importance}}}",
        "rollout.max_staleness",
        1.0,
        "sampler: ",
    ),
    (
        f"{{rollout: {{max_staleness: 0.5}}, {APART}}}",
        "rollout.max_staleness",
        0.5,
        "algorithm.correction.weight=importance",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: {{correction: {{weight: top_entropy}}}}}}",
        "rollout.max_staleness",
        1.0,
        "algorithm.correction.weight=importance",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
        "{correction: {weight: importance, weight_options: {cap: .inf}}}}",
        "algorithm.correction.weight_options.cap",
        math.inf,
        "rollout.max_staleness=1,.*cap",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
        "{correction: {weight: icepop, weight_options: {high: .inf}}}}",
        "algorithm.correction.weight_options.high",
        math.inf,
        "rollout.max_staleness=1,.*high",
    ),
    *(
        (
            f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: "
            f"{{correction: {{rejection: divergence, rejection_options: {options}}}}}}}",
            "algorithm.correction.rejection",
            "divergence",
            "high",
        )
        for options in ("{}", "{high: .inf}", "{form: k2, low: -1}", "{form: k1, low: -.inf}")
    ),
    (
        f"{{rollout: {{max_staleness: 0.03}}, {APART}, algorithm: {{correction: {{weight: importance}}}}}}",
        "rollout.max_staleness",
        0.03,
        "data.train_batch_size=32.*0.0313",
    ),
    (
        "algorithm: {correction: {old_log_probs: interpolated, weight: importance}}",
        "algorithm.correction.weight",
        "importance",
        "algorithm.correction.old_log_probs=interpolated .*loss alone",
    ),
    (
        "algorithm: {correction: {old_log_probs: interpolated}, kl: {where: reward}}",
        "algorithm.kl.where",
        "reward",
        "algorithm.correction.old_log_probs=interpolated",
    ),
    (
        f"{{rollout: {{max_staleness: 1}}, {APART}, algorithm: {{correction: {{old_log_probs: interpolated}}}}}}",
        "rollout.max_staleness",
        1.0,
        "algorithm.correction.weight=importance",
    ),
    (
        f"{{rollout: {{max_staleness: 1, free_cache_engine: true}}, {APART}, algorithm: "
        "{correction: {old_log_probs: rollout}}}",
        "rollout.free_cache_engine",
        True,
        "rollout.max_staleness=1:",
    ),
    (
        "algorithm: {kl: {controller: adaptive, where: loss}}",
        "algorithm.kl.controller",
        "adaptive",
        "algorithm.kl.where=loss",
    ),
]


@pytest.mark.parametrize(("sections", "key", "value", "advice"), SECTIONS_AND_REFUSALS)
def test_values_that_do_not_go_together_are_refused_with_the_reason(
    folder: Path, sections: str, key: str, value: object, advice: str
) -> None:
    [error] = problems(train_config(**yaml.safe_load(sections)))
    check_fields(error, key, found=value)
    assert re.search(advice, f"{error.expected}; {error.change}")


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
    found = [(error.key, error.found) for error in (raised.value, *raised.value.others)]
    assert found == [("model.path", None), ("rollout.n", 1), ("actor.mini_batch_size", 5)]


def test_what_the_caller_hands_over_need_not_be_in_the_config(folder: Path) -> None:
    config = train_config(data={"train_files": []}, reward={"function": None})
    assert len(problems(config)) == 2
    assert problems(config, given={"data", "reward"}) == []


def test_a_function_of_the_users_decides_by_its_signature(folder: Path) -> None:
    assert uses_critic(AlgorithmConfig(adv_estimator="mine.py:with_values"))
    assert not uses_critic(AlgorithmConfig(adv_estimator="mine.py:with_options"))
    wrong = train_config(algorithm={"adv_estimator": "mine.py:with_options", "adv_options": {"strenght": 2}})
    [error] = problems(wrong)
    check_fields(error, "algorithm.adv_options.strenght", found=2, change=re.compile("'strength'"))


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
    for each in (config, train_config(trainer={"logger": ["jsonl", "trackio"]})):
        [error] = problems(each)
        name = each.trainer.logger[1]
        check_fields(error, "trainer.logger", found=re.compile(f"^{name} "))
        assert error.change.endswith(pip_install(name))


def test_lengths_are_held_against_the_models_positions(folder: Path) -> None:
    config = train_config(data={"max_prompt_length": 300, "max_response_length": 212})
    check_context(config, 512)
    both = "data.max_prompt_length + data.max_response_length"
    with raises(ConfigError, both, found=512, expected=re.compile("511"), change=re.compile("212 to 211$")):
        check_context(config, 511)
    with raises(ConfigError, both, found=512, expected=re.compile("300"), change=re.compile("max_prompt_length=300$")):
        check_context(config, 300)
    check_context(EvalConfig(), 1024)
    with raises(ConfigError, both, found=1024, expected=re.compile("1023")):
        check_context(EvalConfig(), 1023)
    check_context(SFTConfig(), 1024)
    with raises(ConfigError, "data.max_length", found=1024, expected=re.compile("1023"), change=re.compile("1023$")):
        check_context(SFTConfig(), 1023)


def test_sft_and_eval_are_checked_too(folder: Path) -> None:
    sft = {"model": {"path": "model"}, "data": {"train_files": ["train.jsonl"]}}
    assert problems(SFTConfig.model_validate(sft)) == []
    assert [error.key for error in problems(SFTConfig())] == ["model.path", "data.train_files"]
    two_rows = {**sft, "data": {"train_files": ["train.jsonl"], "train_batch_size": 2}, "cluster": {"processes": 3}}
    check_fields(
        problems(SFTConfig.model_validate(two_rows))[0], "cluster.processes", found=3, expected=re.compile("2")
    )
    for mesh in ({"context": 2}, {"tensor": 4}, {"pipeline": 2}):  # shards of a batch count, not processes
        engine = {"name": "fsdp", "options": {"mesh": mesh}}
        shared = {**two_rows, "cluster": {"processes": 4}, "engine": engine}
        assert problems(SFTConfig.model_validate(shared)) == []
    evaluation = {"model": {"path": "model"}, "data": {"val_files": ["train.jsonl"]}, "reward": {"function": "gsm8k"}}
    assert problems(EvalConfig.model_validate(evaluation)) == []
    greedy = EvalConfig.model_validate({**evaluation, "rollout": {"n": 3, "temperature": 0.0}})
    check_fields(problems(greedy)[0], "rollout.temperature", found=0, expected=re.compile("3"))
    stale = {**evaluation, "rollout": {"max_staleness": 0.5}}
    check_fields(problems(EvalConfig.model_validate(stale))[0], "rollout.max_staleness", found=0.5)
    asked = {"model": {"path": "model"}, "input": "train.jsonl", "output": "answers.jsonl"}
    assert problems(GenerateConfig.model_validate(asked)) == []
    assert problems(GenerateConfig.model_validate({**asked, "input": [], "data": {"val_files": ["train.jsonl"]}})) == []
    [same] = problems(GenerateConfig.model_validate({**asked, "output": "./train.jsonl"}))
    check_fields(same, "output", found=re.compile(r"^\./train\.jsonl "))
    [folder_] = problems(GenerateConfig.model_validate({**asked, "output": "answers"}))
    check_fields(folder_, "output", found="answers", expected=re.compile(r"\.jsonl$"))
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        GenerateConfig.model_validate({"rollout": {"presence_penalty": 2.5}})
    assert [error.key for error in problems(EvalConfig())] == ["model.path", "data.val_files", "reward.function"]


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
