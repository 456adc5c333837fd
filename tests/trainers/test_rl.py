# SPDX-License-Identifier: Apache-2.0
"""The loop: it learns, follows the config and nothing else, and repeats every bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from tests.first import first
from tests.raising import raises
from whet import serialization
from whet.config import TrainConfig
from whet.errors import ConfigError, EnvError, RewardError, WhetError
from whet.metrics import Metrics
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES
from whet.rollout.batch import to_batch
from whet.rollout.native import scheduler
from whet.rollout.rollouts import SampledTrajectories
from whet.trainers.build import build, build_scorer, train
from whet.trainers.rl import add_advantages, estimate_advantages, fit, mini_batches, update
from whet.trainers.run import Run

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def sevens(solution_str: str) -> float:
    """The share of an answer that is the character 7."""
    return solution_str.count("7") / 6


def length(solution_str: str) -> float:
    return float(len(solution_str))


def weights(run_dir: Path, step: int, role: str = "actor") -> torch.Tensor:
    """All weights that a checkpoint holds of a role, end to end."""
    state = serialization.load(run_dir / "checkpoints" / f"global_step_{step}" / f"{role}.state")
    return torch.cat([weight.flatten() for _, weight in sorted(state["model"].items())])


def untouched(model_folder: Path) -> torch.Tensor:
    """The weights that training starts from, in the same order."""
    from whet.models.load import load_policy

    return torch.cat([weight.detach().flatten() for _, weight in sorted(load_policy(model_folder).named_parameters())])


# ---- it learns


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3}, id="ppo", marks=pytest.mark.slow),
    ],
)
def test_what_is_rewarded_is_said_more_often(
    algorithm: dict[str, Any], train_config: MakeConfig, additions: Rows
) -> None:
    overrides = {"rollout.n": 8, "trainer.total_steps": 25, "actor.optim.lr": 3e-3, **algorithm}
    run = train(train_config(overrides), reward=sevens, data=additions)
    scores = [record["critic/score/mean"] for record in run.history]
    assert scores[0] < 0.1 and sum(scores[-3:]) / 3 > 0.5, scores


@pytest.mark.slow
def test_the_same_from_python_with_a_lambda_in_a_process_of_its_own(
    model_folder: Path, additions: Rows, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model.path": model_folder,
        "data.apply_chat_template": False,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 6,
        "rollout": {"n": 4},
        "reward.num_workers": 1,
        "trainer.total_steps": 2,
        "trainer.logger": "jsonl",
        "trainer.run_dir": tmp_path / "run",
    }
    run = whet.train(
        reward=lambda solution_str: {"reward": solution_str.count("7") / 6, "length": len(solution_str)},
        data=additions,
        **settings,
    )
    assert [record["step"] for record in run.history] == [1, 2] and run.config.rollout.n == 4
    assert run.history[0]["reward/length"] > 0
    assert (tmp_path / "run" / "checkpoints" / "global_step_2" / "manifest.json").exists()


# ---- a step


@pytest.mark.slow
def test_short_of_memory_a_step_is_the_same_and_says_so(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HEADROOM_BLOCKS", 0)
    histories, answers = [], []
    for name, blocks in (("roomy", 1000), ("short", 9)):
        settings = {
            "data.max_response_length": 60,
            "rollout.engine.options.kv_cache_bytes": blocks * 16384,  # a block of this model
            "rollout.stop": ["2"],
            "rollout.repetition_penalty": 1.1,
            "rollout.bad_words": ["7"],
            "trainer.run_dir": str(tmp_path / name),
        }
        histories.append(train(train_config(settings), reward=length, data=additions).history)
        lines = (tmp_path / name / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        answers.append([json.loads(line) for line in lines])
    assert answers[0] == answers[1] and {"2", None} == {answer["stop"] for answer in answers[0]}
    assert not any("7" in answer["response"] for answer in answers[0])
    assert all(answer["response"].endswith("2") for answer in answers[0] if answer["stop"])
    preempted = [step.pop("rollout/preemptions", 0) for history in histories for step in history]
    assert preempted[:2] == [0, 0] and preempted[2] > 0
    assert histories[0] == histories[1]


def test_a_step_does_what_its_metrics_say(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    config = train_config({"algorithm.kl.where": "reward", "algorithm.kl.form": "k1", "algorithm.kl.coef": 0.1})
    run = train(config, reward=length, data=additions)
    first, second = run.history
    assert first["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference still
    assert second["actor/reward_kl_penalty"] > 1e-5
    assert second["actor/reward_kl_penalty_coeff"] == 0.1
    # summed over an answer: KL a token times tokens an answer
    kl = second["actor/reward_kl_penalty"] * second["response_length/mean"]
    assert second["critic/rewards/mean"] == pytest.approx(second["critic/score/mean"] - 0.1 * kl, abs=1e-5)
    for record in run.history:
        assert record["critic/score/min"] <= record["critic/score/mean"] <= record["critic/score/max"]
        assert record["actor/grad_norm"] > 0 and record["actor/lr"] == 1e-3
    timings = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    phases = {f"time/{name}" for name in ("rollout", "reward", "log_probs", "advantage", "update", "sync", "step")}
    assert all(phases <= record.keys() for record in timings)
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    assert len(answers) == 16
    assert sum(answer["reward"] for answer in answers) / 16 == pytest.approx(first["critic/score/mean"])


def test_kl_in_the_loss_is_zero_until_the_policy_moves(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"algorithm.kl.where": "loss", "algorithm.kl.coef": 0.05})
    first, second = train(config, reward=length, data=additions).history
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9) and second["actor/kl_loss"] > 1e-6


@pytest.mark.parametrize("where", first(1, ["loss", "reward"], others=pytest.mark.slow))
def test_the_kl_over_the_vocabulary(train_config: MakeConfig, additions: Rows, where: str) -> None:
    """The metric equals the expectation of k1 over the next token, from the distributions themselves."""
    config = train_config({"algorithm.kl.where": where, "algorithm.kl.form": "full", "algorithm.kl.coef": 0.05})
    first, second = train(config, reward=length, data=additions).history
    name = {"loss": "actor/kl_loss", "reward": "actor/reward_kl_penalty"}[where]
    assert first[name] == pytest.approx(0.0, abs=1e-6) and second[name] > 1e-6


@pytest.mark.slow
def test_the_adaptive_controller_is_fed_every_step(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config(
        {
            "algorithm.kl.where": "reward",
            "algorithm.kl.coef": 1.0,
            "algorithm.kl.controller": "adaptive",
            "algorithm.kl.horizon": 16,
        }
    )
    first, second = train(config, reward=length, data=additions).history
    # a KL of 0 is as far below the target as counts: 1 - 0.2 * 16 answers / 16
    assert first["actor/reward_kl_penalty_coeff"] == 1.0
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.8)


def test_long_answers_pay_on_their_last_sampled_token(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"algorithm.overlong.penalty": 1.0, "algorithm.overlong.buffer_length": 4})
    run = build(config, build_scorer(config.reward, lambda solution_str: 0.0), additions)
    before = to_batch(run.rollouts.start(4, step=1).result().groups, pad_token_id=run.pad_token_id)
    before["response_mask"][0] = 0  # one that failed
    metrics = Metrics()
    rewards = run.shaper.rewards(before, metrics)["token_level_rewards"]
    run.close()
    lengths = before["response_mask"].sum(1).tolist()
    for row, tokens in enumerate(lengths):
        # free up to 2 of 6 tokens, then a quarter for each
        expected = torch.zeros(rewards.shape[1])
        if tokens > 2:
            expected[tokens - 1] = -(tokens - 2) / 4
        torch.testing.assert_close(rewards[row], expected)
    assert len(set(lengths)) > 2
    assert metrics.reduce()["reward/overlong_penalty"] == pytest.approx(rewards.sum().item() / 15)


def test_mini_batches_are_whole_prompts_in_a_new_order_every_epoch(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"actor.mini_batch_size": 2, "actor.epochs": 3, "data.train_batch_size": 6})
    run = build(config, build_scorer(config.reward, length), additions)
    batch = to_batch(run.rollouts.start(6, step=1).result().groups, pad_token_id=run.pad_token_id)
    batch = batch.with_columns(row=torch.arange(len(batch)))
    parts = list(mini_batches(run, batch, config.actor, step=1))
    assert [len(part) for part in parts] == [8] * 9
    epochs = [torch.cat([part["row"] for part in parts[at : at + 3]]).tolist() for at in (0, 3, 6)]
    assert all(sorted(rows) == list(range(24)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    for part in parts:
        assert part["row"].tolist() == sorted(part["row"].tolist())  # row order is kept
        assert sorted(part["uid"].tolist()) == sorted([uid for uid in set(part["uid"].tolist()) for _ in range(4)])
    again = [part["row"].tolist() for part in mini_batches(run, batch, config.actor, step=1)]
    assert again == [part["row"].tolist() for part in parts]
    assert again != [part["row"].tolist() for part in mini_batches(run, batch, config.actor, step=2)]
    [whole] = mini_batches(run, batch, config.critic, step=1)
    assert whole["row"].tolist() == list(range(24))
    run.close()


def test_every_mini_batch_and_epoch_is_an_optimizer_step(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = train_config({"actor.mini_batch_size": 2, "actor.epochs": 3, "actor.optim.schedule": "linear"})
    run = train(config, reward=length, data=additions)
    state = serialization.load(tmp_path / "run" / "checkpoints" / "global_step_2" / "actor.state")
    assert state["steps_done"] == 2 * 2 * 3
    assert run.history[0]["actor/ppo_kl"] != 0.0  # from the second update on the policy is not the one that sampled
    # linear from 1e-3 to 0 over the 12 optimizer steps of the run: means of the first six and of the last
    lrs = [1e-3 * (1 - step / 11) for step in range(12)]
    assert run.history[0]["actor/lr"] == pytest.approx(sum(lrs[:6]) / 6)
    assert run.history[1]["actor/lr"] == pytest.approx(sum(lrs[6:]) / 6)


@pytest.mark.slow
def test_one_update_a_step_needs_no_old_log_probs_and_gives_the_same_step(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    """A KL term of weight 0 in the reward brings the column: log-probs of the policy before the update."""
    train(train_config({"trainer.total_steps": 1}), reward=length, data=additions)
    overrides = {"algorithm.kl.where": "reward", "algorithm.kl.coef": 0.0, "trainer.total_steps": 1}
    train(train_config({**overrides, "trainer.run_dir": str(tmp_path / "old")}), reward=length, data=additions)
    one, other = weights(tmp_path / "run", 1), weights(tmp_path / "old", 1)
    assert (one - other).norm() < 1e-5 * one.norm()


def test_critic_warm_up_leaves_the_actor_as_it_is(
    train_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    config = train_config(
        {
            "algorithm.adv_estimator": "gae",
            "critic.warmup_steps": 2,
            "critic.optim.lr": 1e-3,
            "trainer.total_steps": 3,
            "trainer.save_freq": 1,
            "trainer.save_limit": None,
        }
    )
    run = train(config, reward=length, data=additions)
    start = untouched(model_folder)
    assert torch.equal(weights(tmp_path / "run", 2), start)
    assert not torch.equal(weights(tmp_path / "run", 3), start)
    assert not torch.equal(weights(tmp_path / "run", 1, "critic"), weights(tmp_path / "run", 2, "critic"))
    assert ["actor/grad_norm" in record for record in run.history] == [False, False, True]
    assert all(record["critic/grad_norm"] > 0 for record in run.history)


def test_where_every_answer_of_a_step_fails_nothing_moves(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    judged = iter([1.0] * 15 + [0.0])

    def away(solution_str: str) -> float:
        for score in judged:
            return score
        raise RuntimeError("no judge today")

    saves = {"trainer.total_steps": 3, "trainer.save_freq": 1, "trainer.save_limit": None}
    run = train(train_config(saves), reward=away, data=additions)
    assert torch.equal(weights(tmp_path / "run", 1), weights(tmp_path / "run", 3))
    assert [record.get("failures/reward") for record in run.history] == [None, 16.0, 16.0]
    assert [record.get("actor/empty_updates") for record in run.history] == [None, 1.0, 1.0]


@pytest.mark.parametrize("validates", [True, False])
def test_a_run_in_which_every_answer_fails_ends_with_the_reason(
    validates: bool, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    def broken(solution_str: str) -> float:
        raise RuntimeError("no judge today")

    (tmp_path / "val.jsonl").write_text(json.dumps(additions[0]))
    validation = {"data.val_files": [str(tmp_path / "val.jsonl")], "trainer.val_freq": 0} if validates else {}
    found = re.compile("0:0.* reward: RuntimeError: no judge today")
    with raises(RewardError, key=re.compile(r"^all \d+ "), found=found):
        train(train_config({"data.shuffle": False, **validation}), reward=broken, data=additions)
    file = "validation_000000.jsonl" if validates else "step_000001.jsonl"
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / file).open()]
    assert all(a["reward"] is None and a["failure"]["source"] == "reward" for a in answers)
    assert all("no judge today" in a["failure"]["message"] for a in answers)


def test_a_validation_that_works_does_not_hide_steps_that_all_fail(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    def for_zero(solution_str: str, ground_truth: str) -> float:
        if ground_truth != "0":
            raise RuntimeError("it knows zero alone")
        return 1.0

    (tmp_path / "val.jsonl").write_text(json.dumps(additions[0]))
    validation = {"data.val_files": [str(tmp_path / "val.jsonl")], "trainer.val_freq": 1}
    with raises(RewardError, key=re.compile("^all 16 "), found=re.compile("reward: RuntimeError: it knows zero alone")):
        train(train_config({**validation, "trainer.total_steps": 9}), reward=for_zero, data=additions[1:])
    [record] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert (record["step"], record["val/reward"]) == (0, 1.0)


def test_failed_answers_teach_nothing(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """The step equals the step of the same batch without them."""

    def picky(solution_str: str) -> float:
        if len(solution_str) % 2:
            raise ValueError("odd")
        return float(len(solution_str))

    config = train_config({"trainer.total_steps": 1})
    run = build(config, build_scorer(config.reward, picky), additions)
    taken = run.rollouts.start(4, step=1, metrics=(metrics := Metrics())).result()
    without = [
        replace(group, trajectories=tuple(a for a in group.trajectories if a.failure is None)) for group in taken.groups
    ]
    run.close()
    assert metrics.reduce()["failures/reward"] > 0

    def after(groups: Any, folder: str) -> torch.Tensor:
        again = train_config({"trainer.total_steps": 1, "trainer.run_dir": str(tmp_path / folder)})
        fresh = build(again, build_scorer(again.reward, picky), additions)
        given = SampledTrajectories(groups, lambda: replace(taken, kept=groups))
        fresh.rollouts.start = lambda n, step, metrics: given  # type: ignore[method-assign]
        fit(fresh)
        fresh.close()
        return weights(tmp_path / folder, 1)

    one, other = after(taken.groups, "with"), after(without, "without")
    assert (one - other).norm() < 1e-6 * one.norm()


@pytest.mark.slow
def test_an_environment_alone_may_pay(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    path = tmp_path / "paying.py"
    path.write_text(
        "from whet.environments.protocol import Observation\n\n\n"
        "class Paying:\n"
        "    def __init__(self, prompt): pass\n"
        "    def step(self, answer): return Observation(done=True, reward=len(answer) / 6)\n"
    )
    config = train_config({"environment.name": f"{path}:Paying", "reward.correct_threshold": 0.5})
    first, _ = train(config, data=additions).history
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    assert first["critic/score/mean"] == pytest.approx(sum(answer["reward"] for answer in answers) / 16)
    assert first["reward/accuracy"] == pytest.approx(sum(answer["reward"] >= 0.5 for answer in answers) / 16)
    assert first["actor/grad_norm"] > 0


LOGGING = """
def shape(completions, log_extra, log_metric):
    log_extra("size", [f"{len(text)} characters" for text in completions])
    log_metric("mean_length", sum(map(len, completions)) / len(completions))
    return [float(len(text)) for text in completions]

def letters(solution_str):
    return float(sum(map(str.isalpha, solution_str)))
"""


@pytest.mark.parametrize(
    ("functions", "prefix"), first(1, [(["shape"], ""), (["shape", "letters"], "shape/")], others=pytest.mark.slow)
)
def test_what_a_function_of_trl_logs_is_in_the_metrics_and_in_the_rollouts(
    functions: list[str], prefix: str, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LOGGING)
    overrides = {"reward.function": [f"{tmp_path}/mine.py:{name}" for name in functions], "reward.num_workers": 1}
    run = train(train_config({**overrides, "trainer.total_steps": 1}), data=additions)
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    logged = [answer["logged"] for answer in answers]
    lengths = [answer["parts"].get("shape", answer["reward"]) for answer in answers]
    assert [each[f"{prefix}size"] for each in logged] == [f"{length:.0f} characters" for length in lengths]
    mean = sum(each[f"{prefix}mean_length"] for each in logged) / len(logged)
    assert run.history[0][f"reward/{prefix}mean_length"] == pytest.approx(mean)
    assert f"reward/{prefix}size" not in run.history[0]


def test_a_trajectory_in_several_rows_counts_once(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"trainer.total_steps": 1})
    run = build(config, build_scorer(config.reward, length), additions)
    [group] = run.rollouts.start(1, step=1).result().groups
    first, second, third, _ = group.trajectories
    # the context of another turn is not the first one continued: the answer was rewritten to the prompt's last token
    last = second.prompt.token_ids[-1]
    again = replace(second.turns[0], context_ids=(*second.prompt.token_ids, last))
    answers = (
        replace(first, reward=1.0),
        replace(second, reward=0.0, turns=(*second.turns, again)),
        replace(third, reward=2.0),
    )
    groups = [replace(group, trajectories=answers)]
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    batch = estimate_advantages(run, run.shaper.rewards(batch, Metrics()), Metrics())
    # scores 1, 0, 2: mean 1, deviation 1, over three trajectories and not four rows
    expected = torch.tensor([0.0, -1.0, -1.0, 1.0])[:, None] * batch["response_mask"]
    torch.testing.assert_close(batch["advantages"], expected, atol=1e-5, rtol=0)
    metrics = Metrics()
    update(run, add_advantages(run, to_batch(groups, pad_token_id=run.pad_token_id), 1, metrics), 1, metrics)
    run.close()
    assert metrics.reduce()["actor/grad_norm"] > 0


def test_a_filter_leaves_smaller_steps(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    overrides = {"algorithm.filter.name": "dapo", "algorithm.filter.max_refills": 1, "actor.mini_batch_size": 2}
    config = train_config(overrides)
    run = train(config, reward=lambda solution_str: {"score": 1.0, "acc": "7" in solution_str}, data=additions)
    for step, record in enumerate(run.history, start=1):
        path = tmp_path / "run" / "rollouts" / f"step_{step:06}.jsonl"
        right: dict[int, list[float]] = {}
        for line in path.read_text().splitlines():
            answer = json.loads(line)
            right.setdefault(answer["index"], []).append(answer["accuracy"])
        assert all(len(set(each)) == 2 and len(each) == 4 for each in right.values())
        assert 0 < len(right) <= 4 and 0 < record["filter/kept_fraction"] < 1


# ---- functions that ship


ESTIMATORS = sorted(entry.name for entry in ADV_ESTIMATORS if entry.alias_of is None)
LOSSES = sorted(entry.name for entry in POLICY_LOSSES if entry.alias_of is None)
TEACHER = {"teacher.hint": "reference", "teacher.hint_template": "{{ content }}{{ hint }}"}


def take_steps(estimator: str, loss: str, train_config: MakeConfig, additions: Rows, run_dir: Path) -> None:
    """A step, or the reason why these two do not go together."""
    overrides: dict[str, Any] = {"algorithm.adv_estimator": estimator, "algorithm.policy_loss": loss}
    overrides |= {"trainer.total_steps": 1, "trainer.run_dir": str(run_dir)}
    columns = ADV_ESTIMATORS[estimator].columns
    overrides |= TEACHER if "teacher_log_probs" in columns else {}
    overrides |= {"critic.value_loss": "implicit_reward"} if "process_rewards" in columns else {}
    fixed = {entry.marks.get("aggregation") for entry in (ADV_ESTIMATORS[estimator], POLICY_LOSSES[loss])} - {None}
    if len(fixed) > 1:
        with raises(ConfigError, re.compile("aggregation|loss_agg_mode")):
            train_config(overrides)
        return

    def reward(solution_str: str) -> dict[str, float]:
        return {"reward": float(len(solution_str)), "odd": float(len(solution_str) % 2)}

    [record] = train(train_config(overrides), reward=reward, data=additions).history
    assert 0 < record["actor/grad_norm"] < 1e4


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_shipped_estimator_takes_steps(
    estimator: str, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    take_steps(estimator, "ppo_clip", train_config, additions, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_shipped_loss_takes_steps(loss: str, train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    take_steps("rloo", loss, train_config, additions, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_pair_takes_steps_or_says_why_not(
    estimator: str, train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    for loss in LOSSES:
        take_steps(estimator, loss, train_config, additions, tmp_path / loss)


# ---- what goes on around a step


def test_validation_before_every_n_and_at_the_end(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text(
        "".join(json.dumps({**row, "data_source": f"part{i % 2}"}) + "\n" for i, row in enumerate(additions))
    )
    overrides = {"trainer.total_steps": 5, "trainer.save_freq": 0}
    validated = {**overrides, "data.val_files": [str(rows)], "trainer.val_freq": 2, "data.val_max_prompts": 7}
    run = train(
        train_config(validated),
        reward=lambda solution_str: {"score": len(solution_str), "acc": "7" in solution_str},
        data=additions,
    )
    assert [record["step"] for record in run.history if "val/accuracy" in record] == [0, 2, 4, 5]
    first = run.history[0]
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "validation_000000.jsonl").open()]
    assert len(answers) == 7 and len({answer["uid"] for answer in answers}) == 7
    assert first["val/reward"] == pytest.approx(sum(answer["reward"] for answer in answers) / 7)
    of_part = [answer["reward"] for answer in answers if answer["data_source"] == "part1"]
    assert first["val/part1/reward"] == pytest.approx(sum(of_part) / len(of_part))
    assert first["val/response_length"] == pytest.approx(sum(answer["tokens"] for answer in answers) / 7)

    # it never disturbs training
    plain = train(
        train_config({**overrides, "trainer.run_dir": str(tmp_path / "plain")}),
        reward=lambda solution_str: {"score": len(solution_str), "acc": "7" in solution_str},
        data=additions,
    )
    assert [record["step"] for record in plain.history] == [1, 2, 3, 4, 5]
    trained = [{k: v for k, v in record.items() if not k.startswith("val/")} for record in run.history[1:]]
    assert trained == plain.history
    assert torch.equal(weights(tmp_path / "run", 5), weights(tmp_path / "plain", 5))


@pytest.mark.parametrize(
    ("overrides", "steps"),
    first(
        1,
        [
            ({"trainer.val_freq": -1}, []),
            ({"trainer.val_freq": 0}, [0, 2]),
            ({"trainer.val_freq": 0, "trainer.val_before_train": False}, [2]),
            ({"trainer.val_freq": 0, "data.val_files": []}, []),
        ],
        others=pytest.mark.slow,
    ),
    ids=str,
)
def test_when_there_is_no_validation(
    overrides: dict[str, Any], steps: list[int], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    rows = tmp_path / "held_out.jsonl"
    rows.write_text(json.dumps(additions[0]) + "\n")
    run = train(train_config({"data.val_files": [str(rows)], **overrides}), reward=length, data=additions)
    assert [record["step"] for record in run.history if "val/accuracy" in record] == steps
    assert sorted(path.name for path in (tmp_path / "run" / "rollouts").glob("validation*")) == [
        f"validation_00000{step}.jsonl" for step in steps
    ]
    assert [record["step"] for record in run.history] == sorted({*steps, 1, 2})


USER_FILE = """
from whet.trainers.rl import add_advantages, sample, update
from whet.metrics import Metrics

SEEN = []


def remember(run, step, numbers):
    SEEN.append((step, run.step, numbers["critic/score/mean"]))


def fit(run):
    while run.step < run.total_steps:
        metrics = Metrics()
        batch = add_advantages(run, sample(run, run.step + 1, metrics), run.step + 1, metrics)
        update(run, batch, run.step + 1, metrics)
        run.step += 1
        metrics.mean("mine/steps", run.step)
        run.log(run.step, metrics)
"""


def test_callbacks_and_a_loop_from_a_users_file(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(USER_FILE)
    run = train(train_config({"trainer.callbacks": [f"{mine}:remember"]}), reward=length, data=additions)
    assert run.callbacks[0].__globals__["SEEN"] == [  # type: ignore[attr-defined]
        (1, 1, run.history[0]["critic/score/mean"]),
        (2, 2, run.history[1]["critic/score/mean"]),
    ]
    overrides = {"trainer.loop": f"{mine}:fit", "trainer.run_dir": str(tmp_path / "mine")}
    own = train(train_config(overrides), reward=length, data=additions)
    assert [record.pop("mine/steps") for record in own.history] == [1.0, 2.0]
    assert own.history == run.history
    assert not (tmp_path / "mine" / "checkpoints").exists()  # that loop saves nothing


def test_a_dry_run_builds_everything_and_writes_nothing(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = train_config({"algorithm.adv_estimator": "gae", "algorithm.kl.where": "loss"})
    run = train(config, reward=length, data=additions, dry_run=True)
    assert run.history == [] and not (tmp_path / "run").exists()
    assert "2 steps of 4 prompts x 4 responses; roles actor, critic, ref, rollout; " in caplog.text
    assert "4 to 4 prompt tokens" in caplog.text and "its ground truth: " in caplog.text


REFUSED = [
    ("whet_environments.sokoban:Sokoban", {"boxes": 20}, {"expected": re.compile("rows=4 x columns=4")}),
    ("gymnasium", {"env_id": "NoSuch-v0"}, {"found": re.compile("NoSuch")}),
    ("whet_environments.browser.environment:Browser", {"chromium": "/nowhere"}, {"found": "/nowhere"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "said"), REFUSED, ids=["sokoban", "gymnasium", "browser"])
def test_an_environment_that_refuses_its_options_is_named_before_a_model_is_loaded(
    train_config: MakeConfig,
    additions: Rows,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    said: dict[str, Any],
) -> None:
    pytest.importorskip("playwright" if "browser" in name else "gymnasium" if name == "gymnasium" else "json")
    monkeypatch.setattr("whet.trainers.build.launch_roles", None)
    [option] = options
    key = f"environment.name={name}, environment.options={options}: environment.options.{option}"
    for is_dry in (True, False):
        config = train_config({"environment.name": name, "environment.options": options})
        with raises(EnvError, key, **said):
            train(config, reward=length, data=additions, dry_run=is_dry)
    tools = {"tools": ["calculator"], "tool_parser": "hermes", "tool_role": "user"}
    agents = {"a": {"name": name, "options": options, **tools}}
    with pytest.raises(EnvError, match=r"environment\.agents\.a\.name="):
        train(train_config({"environment.agents": agents}), reward=length, data=additions)


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_leaves_the_earlier_run(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    pytest.importorskip("gymnasium")
    train(train_config({}), reward=length, data=additions)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")}
    assert kept
    tools = {"tools": ["calculator"]}  # the template shows no tools
    for environment, said in (
        ({"name": "gymnasium", "options": {"env_id": "Nope-v1"}}, r"environment\.options\.env_id: Nope-v1"),
        ({"agents": {"helper": tools}}, r"environment\.tool_parser is not set"),
    ):
        over = {f"environment.{key}": value for key, value in environment.items()}
        with pytest.raises(WhetError, match=said):
            train(train_config({"trainer.resume": "overwrite", **over}), reward=length, data=additions)
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.jsonl")} == kept


# ---- the same again


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_others(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    for folder, seed in (("one", 5), ("two", 5), ("other", 6)):
        config = train_config({"trainer.seed": seed, "trainer.run_dir": str(tmp_path / folder)})
        train(config, reward=length, data=additions)
    one, two, other = (tmp_path / folder for folder in ("one", "two", "other"))
    assert torch.equal(weights(one, 2), weights(two, 2)) and not torch.equal(weights(one, 2), weights(other, 2))
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert (one / "metrics.jsonl").read_bytes() != (other / "metrics.jsonl").read_bytes()
    for path in (one / "rollouts").iterdir():
        assert path.read_bytes() == (two / "rollouts" / path.name).read_bytes()


def steps_of(run: Run, folder: Path) -> tuple[torch.Tensor, list[list[str]]]:
    """Final weights, and the responses of each step."""
    sampled = [
        [json.loads(line)["response"] for line in path.read_text().splitlines()]
        for path in sorted((folder / "rollouts").iterdir())
    ]
    return weights(folder, run.total_steps), sampled


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"rollout.engine.name": "hf"},
        {"actor.engine.packing": False},
        {"actor.max_tokens_per_micro_batch": 22, "critic.max_tokens_per_micro_batch": 40},
        {"model.gradient_checkpointing": True},
        {"rollout.max_batch_size": 3, "rollout.engine.options.kv_cache_bytes": 2**20},
    ],
    ids=str,
)
def test_how_the_work_is_done_changes_nothing(
    other: dict[str, Any], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    base = {"algorithm.adv_estimator": "gae", "actor.mini_batch_size": 2}
    plain = train(train_config(base), reward=length, data=additions)
    overrides = {**base, **other, "trainer.run_dir": str(tmp_path / "other")}
    changed = train(train_config(overrides), reward=length, data=additions)
    (expected, sampled), (got, also_sampled) = steps_of(plain, tmp_path / "run"), steps_of(changed, tmp_path / "other")
    assert also_sampled == sampled
    assert (got - expected).norm() < 1e-4 * expected.norm()
    for record, reference in zip(changed.history, plain.history, strict=True):
        assert record["actor/grad_norm"] == pytest.approx(reference["actor/grad_norm"], rel=1e-4)
        assert record["critic/vf_loss"] == pytest.approx(reference["critic/vf_loss"], rel=1e-4)


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    overrides = {"actor.mini_batch_size": 2, "algorithm.kl.where": "loss", "actor.optim.eps": 1e-3}
    alone = train(train_config(overrides), reward=length, data=additions)
    overrides |= {"cluster.processes": 2, "trainer.run_dir": str(tmp_path / "two")}
    two = train(train_config(overrides), reward=length, data=additions)
    (expected, sampled), (got, also_sampled) = steps_of(alone, tmp_path / "run"), steps_of(two, tmp_path / "two")
    assert also_sampled == sampled
    assert (got - expected).norm() < 1e-5 * expected.norm()
    for record, reference in zip(two.history, alone.history, strict=True):
        assert record.keys() == reference.keys()
        for name, value in reference.items():
            assert record[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.slow
def test_rollouts_in_another_dtype_follow_the_weights(train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({"rollout.dtype": "bfloat16", "actor.optim.lr": 1e-2})
    run = build(config, build_scorer(config.reward, length), additions)
    gaps = []
    for step in (1, 2):
        batch = to_batch(run.rollouts.start(4, step=step).result().groups, pad_token_id=run.pad_token_id)
        mask = batch["response_mask"] == 1
        assert batch["policy_version"][mask].unique().tolist() == [step - 1]
        log_probs = run.roles["actor"].forward(batch, ("log_probs",))["log_probs"]
        gaps.append((log_probs - batch["rollout_log_probs"])[mask].abs().mean().item())
        run.roles["actor"].update(batch.with_columns(advantages=mask.float()), run.policy_objective)
        run.sync(step)
    run.close()
    assert all(0 < gap < 0.02 for gap in gaps), gaps
