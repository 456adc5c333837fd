# SPDX-License-Identifier: Apache-2.0
"""Preference losses on groups of sampled responses: pairs by hand, the offline loss of the same pairs, the expected
gradient by enumeration, and runs that any split, a resume and a judge leave the same."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import estimate
from tests.raising import raises
from tests.rewards.judge_server import Reply, judging
from tests.trainers.test_objectives import of
from whet import serialization
from whet.batch import Batch
from whet.config import TrainConfig, load_config
from whet.errors import ConfigError
from whet.plugins.proofs.certify import CertifiedStep, World, plain
from whet.registry import ADV_ESTIMATORS, PREFERENCE_LOSSES
from whet.trainers.build import build, build_scorer, train
from whet.trainers.objectives import ComparisonObjective, GroupObjective
from whet.trainers.rl import fit
from whet.trainers.run import Run

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
ONLINE = {"algorithm.adv_estimator": "best_worst", "algorithm.policy_loss": "dpo"}
PAIRS = [entry.name for entry in PREFERENCE_LOSSES if entry.marks["of"] == "pair"]


def sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def length(solution_str: str) -> float:
    return float(len(solution_str))


# -- the pairs


def orders(name: str, scores: list[float], uid: list[int], masked: int = -1) -> tuple[list[float], float]:
    mask = torch.ones(len(scores), 2)
    mask[masked] *= masked < 0
    rewards = torch.stack([torch.tensor(scores), torch.zeros(len(scores))], 1)
    batch = {"token_level_rewards": rewards, "response_mask": mask, "uid": torch.tensor(uid)}
    found = estimate(ADV_ESTIMATORS[name], batch, {})
    return found.advantages[:, 0].tolist(), found.metrics["preference/tied_groups"].item()


def test_estimators_choose_pairs() -> None:
    """Of the scores 2, 3, 3, 1 rows 1 and 3 are the ends; a group of equal scores, of one, or of failures has none."""
    scores, uid = [2.0, 3.0, 3.0, 1.0, 0.3, 0.1 + 0.2, 5.0], [4, 4, 4, 4, 2, 2, 7]
    assert orders("best_worst", scores, uid) == ([0, 1, 0, -1, 0, 0, 0], 2.0)
    assert orders("all_pairs", scores, uid) == ([2, 3, 3, 1, 0, 0, 0], 2.0)
    assert orders("best_worst", scores, uid, masked=3) == ([-1, 1, 0, 0, 0, 0, 0], 2.0)
    assert orders("all_pairs", scores, uid, masked=6) == ([2, 3, 3, 1, 0, 0, 0], 1.0)


# -- the loss: l - b sums to 1, 0, -1 in group 0 and to 0, -1 in group 1, whose second is the better

MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1], [1, 1]])
BATCH = {
    "response_mask": MASK,
    "ref_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, -1.0], [-1.0, -1.0]]),
    "uid": torch.tensor([0, 0, 0, 1, 1]),
    "attention_mask": MASK,
}
OUTPUTS = {
    "log_probs": torch.tensor([[-0.5, -0.5], [-1.0, 0.0], [-2.0, 0.0], [-1.0, -1.0], [-1.5, -1.5]]),
    "entropy": MASK * 0.5,
}
SPLITS = [[[0, 1, 2, 3, 4]], [[0, 1, 2], [3, 4]], [[4, 3], [2, 0, 1]]]


def log_sigma(x: float) -> float:
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize("rows", SPLITS, ids=str)
def test_dpo_by_hand(rows: list[list[int]]) -> None:
    """h is 0.1 (1 + 1) and 0.1 (-1 - 0); of all pairs group 0 has 0.1 twice more."""
    objective = GroupObjective("dpo")
    ends = {**BATCH, "advantages": torch.tensor([1.0, 0.0, -1.0, -1.0, 1.0])[:, None] * MASK}
    loss, metrics = of(objective, OUTPUTS, ends, *rows)
    assert loss == pytest.approx(-(log_sigma(0.2) + log_sigma(-0.1)) / 2)
    assert (
        metrics["actor/pg_loss"] == pytest.approx(loss) == metrics["preference/loss"]
        and metrics["preference/accuracy"] == 0.5
    )
    assert metrics["preference/margin"] == pytest.approx(0.05) and metrics["preference/chosen_moved"] == 0.0
    every = {**BATCH, "advantages": torch.tensor([3.0, 2.0, 1.0, 1.0, 2.0])[:, None] * MASK}
    loss, metrics = of(objective, OUTPUTS, every, *rows)
    assert loss == pytest.approx(-(log_sigma(0.2) + 2 * log_sigma(0.1) + log_sigma(-0.1)) / 4)
    assert metrics["preference/loss"] == pytest.approx(loss) and metrics["preference/accuracy"] == 0.75


def test_rows_of_no_pair_are_not_computed() -> None:
    columns = {**BATCH, "advantages": torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0])[:, None] * MASK}
    shown = GroupObjective("dpo").narrowed(Batch.of(columns))
    assert shown["response_mask"].any(1).tolist() == [True, False, True, False, False]
    columns["loss_mask"] = MASK * torch.tensor([[1], [1], [0], [1], [1]])  # the worst is rejected
    shown = GroupObjective("dpo").narrowed(Batch.of(columns))
    assert GroupObjective("dpo").counts(shown.tensors())["num_pairs"] == 0


def test_the_rows_of_a_trajectory_are_one_response() -> None:
    """Rows 0 and 1 are one trajectory, whose l - b is 1 + 0, against row 2: h = 0.2; group 1 has h = -0.1."""
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])[:, None] * MASK
    columns = {**BATCH, "advantages": advantages, "trajectory_uid": torch.tensor([0, 0, 1, 2, 3])}
    loss, metrics = of(GroupObjective("dpo"), OUTPUTS, columns, [0, 1, 2, 3, 4])
    assert loss == pytest.approx(-(log_sigma(0.2) + log_sigma(-0.1)) / 2)
    assert metrics["preference/chosen_length"] == 2.5
    simpo, _ = of(GroupObjective("simpo"), OUTPUTS, columns, [0, 1, 2, 3, 4])  # means of 3, 1, 2 and 2 tokens
    assert simpo == pytest.approx(-(log_sigma(2 * (-2 / 3 + 2) - 1) + log_sigma(2 * (-1.5 + 1) - 1)) / 2)


@pytest.mark.parametrize("name", PAIRS)
def test_every_loss_is_the_offline_one_on_the_same_pair(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    log_probs, ref, squared = (-torch.rand(2, 4, generator=draw).double() - 0.05 for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]])
    shared = {"response_mask": mask, "ref_log_probs": ref * mask, "attention_mask": mask}
    found = []
    for order in ([1, 0], [0, 1]):  # online the worse comes first
        l_own = (log_probs * mask)[order].requires_grad_()
        outputs = {"log_probs": l_own, "sum_pi_squared": -squared[order] * mask[order], "entropy": l_own.detach()}
        batch = {key: column[order] for key, column in shared.items()}
        batch |= {"label": torch.tensor([1.0, 0.0]), "uid": torch.zeros(2).long()}
        objective: Any = ComparisonObjective(name) if order == [0, 1] else GroupObjective(name)
        batch["advantages"] = torch.tensor([-1.0, 1.0])[:, None] * mask[order]
        loss, _ = objective.loss(outputs, batch, objective.counts(batch))
        found.append((loss.item(), torch.autograd.grad(loss, l_own)[0][[order.index(row) for row in (0, 1)]]))
    (online, slope), (offline, theirs) = found
    assert online == pytest.approx(offline, rel=1e-12) and slope.abs().max() > 0
    torch.testing.assert_close(slope, theirs)


def test_the_expected_step_is_the_gradient_over_all_pairs() -> None:
    """E over two responses of the policy of -log sigma(beta (their log ratios)), the better first, by autograd."""
    world = World(length=2)
    step = CertifiedStep.of(
        plain(**{k.rpartition(".")[2]: v for k, v in ONLINE.items()}, loss_options={"beta": 0.5}), world
    )
    mean, _ = step.expected_gradient(2, 0.0, 0.0)
    logits = world.table(1).requires_grad_()
    log_pi, log_ref = world.log_probs(logits).sum(-1), world.log_probs(world.table(4)).sum(-1)
    h = 0.5 * ((log_pi - log_ref)[:, None] - (log_pi - log_ref))
    better = world.scores[:, None] > world.scores
    both = 2 * (log_pi[:, None] + log_pi).exp().detach() * better
    loss = -(both * torch.nn.functional.logsigmoid(h)).sum()
    torch.testing.assert_close(mean, -torch.autograd.grad(loss, logits)[0].flatten(), rtol=1e-8, atol=1e-10)


# -- configs


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.policy_loss", "kto"),
        ("algorithm.adv_estimator", "reinforce_plus_plus"),
        ("algorithm.shaping.whiten_advantages", True),
        ("algorithm.shaping.advantage_clip", 1.0),
        ("algorithm.correction.weight", "importance"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(key: str, value: Any, train_config: MakeConfig) -> None:
    with raises(ConfigError, key):
        train_config({**ONLINE, key: value})


def test_pairs_of_older_weights_need_no_correction(train_config: MakeConfig) -> None:
    pools = {"train": {"roles": ["actor", "ref"]}, "sample": {"roles": ["rollout"]}}
    train_config({**ONLINE, "rollout.max_staleness": 1, "cluster.placement": pools})
    with raises(ConfigError, "rollout.max_staleness"):
        train_config({"rollout.max_staleness": 1, "cluster.placement": pools})


# -- runs


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["best_worst", "all_pairs"])
def test_a_run_learns_its_reward(estimator: str, train_config: MakeConfig, additions: Rows) -> None:
    size = {"data.train_batch_size": 8, "rollout.n": 8, "trainer.total_steps": 8, "actor.optim.lr": 3e-3}
    history = train(
        train_config({**ONLINE, **size, "algorithm.adv_estimator": estimator}), reward=sevens, data=additions
    ).history
    assert history[-1]["critic/score/mean"] > 1.0 > 0.5 > history[0]["critic/score/mean"]
    assert history[0]["preference/tied_groups"] > 0 and history[-1]["preference/accuracy"] > 0.9


@pytest.mark.slow
def test_a_loss_of_ones_own(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """Without a reference; registered by its decorator, in two mini-batches of a step."""
    (tmp_path / "mine.py").write_text(
        "from whet import register_preference_loss\n\n\n"
        '@register_preference_loss("squared_margin", of="pair")\n'
        "def squared(log_probs, response_mask, *, margin=2.0):\n"
        "    sums = (log_probs * response_mask).sum(1)\n"
        "    return (sums[::2] - sums[1::2] - margin).square(), sums\n"
    )
    own = {"algorithm.policy_loss": f"{tmp_path}/mine.py:squared", "algorithm.loss_options": {"margin": 3.0}}
    run = train(train_config({**ONLINE, **own, "actor.mini_batch_size": 2}), reward=sevens, data=additions)
    assert "ref" not in run.roles and run.history[-1]["actor/grad_norm"] > 0
    assert "preference/chosen_moved" not in run.history[-1]


def weights(folder: Path, step: int) -> Tensor:
    state = serialization.load(folder / "checkpoints" / f"global_step_{step}" / "actor.state")
    return torch.cat([weight.flatten() for weight in state["model"].values()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"actor.engine.packing": False, "actor.max_tokens_per_micro_batch": 22},
        {"actor.max_tokens_per_micro_batch": 40},
        {"actor.engine.name": "fsdp"},
        {"cluster.processes": 2},
    ],
    ids=str,
)
def test_any_split_of_a_batch_takes_the_same_step(
    changes: dict[str, Any], train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    both: dict[str, Any] = {**ONLINE, "algorithm.adv_estimator": "all_pairs", "trainer.total_steps": 1}
    both |= {"actor.optim.eps": 1.0, "actor.optim.lr": 0.1, "actor.optim.weight_decay": 0.0}
    one = train(train_config(both), reward=length, data=additions)
    there = {**changes, "trainer.run_dir": str(tmp_path / "other")}
    other = train(train_config(both | there), reward=length, data=additions)
    for name in (
        "preference/loss",
        "preference/margin",
        "preference/chosen_length",
        "actor/grad_norm",
        "actor/pg_loss",
    ):
        assert one.history[0][name] == pytest.approx(other.history[0][name], rel=2e-5, abs=2e-6)


class Killed(BaseException):
    """Nobody catches it."""


def test_the_recipe_leaves_options_to_the_loss(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    words = [f"model.path={model_folder}", f"data.train_files={tmp_path}/rows.jsonl", "trainer.val_freq=0"]
    for loss in ("dpo", "simpo"):
        config = load_config(TrainConfig, "online_dpo", [*words, f"algorithm.policy_loss={loss}"]).config
        assert config.algorithm.loss_options == {}
    assert PREFERENCE_LOSSES["dpo"].resolve_options({}, "loss_options")["beta"] == 0.1


def kill_at_three(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    if step == 3:
        raise Killed


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    both = {**ONLINE, "trainer.save_freq": 1, "trainer.total_steps": 4}
    straight = {**both, "trainer.run_dir": str(tmp_path / "straight")}
    train(train_config(straight), reward=length, data=additions)
    run = build(train_config(both), build_scorer(train_config(both).reward, length), additions)
    run.callbacks = [*run.callbacks, kill_at_three]
    with pytest.raises(Killed):
        fit(run)
    run.close()
    resumed = train(train_config(both), reward=length, data=additions)
    assert resumed.opened.found == tmp_path / "run" / "checkpoints" / "global_step_2"
    assert torch.equal(weights(tmp_path / "run", 4), weights(tmp_path / "straight", 4))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "straight/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_judge_orders_the_responses(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    """The judge compares each response with the ground truth, and prefers even lengths."""

    def reply(body: dict[str, Any]) -> Reply:
        return Reply("Better: A" if len(str(body["messages"])) % 2 else "Better: B")

    with judging(reply) as judge:
        asked = {"endpoint": judge.address, "model": "m", "rubric": "pairwise"}
        own = {"reward.function": "llm_judge", "reward.kwargs": asked, "trainer.total_steps": 1}
        [record] = train(train_config({**ONLINE, **own}), data=additions).history
    groups: dict[int, list[float]] = defaultdict(list)
    for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups[row["index"]].append(row["reward"])
    tied = sum(len(set(each)) == 1 for each in groups.values())
    assert {score for each in groups.values() for score in each} == {0.0, 1.0} and 0 <= tied < 4
    assert record["preference/tied_groups"] == tied and record["actor/grad_norm"] > 0
