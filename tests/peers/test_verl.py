# SPDX-License-Identifier: Apache-2.0
"""whet's functions against verl 0.9.1's own, on a thousand random ragged batches.

Where the definitions agree the numbers do, to 1e-6. Where whet's differ on purpose the test shows both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import estimate, policy_loss, with_mini_batch_columns
from tests.peers.peer import ask, interpreter
from tests.plugins.migration.test_peers import scores
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.calls import call
from whet.algorithms.kl import kl_form
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS

Batch = dict[str, Tensor]
Call = tuple[str, str, Batch, dict[str, Any]]
WORKER = Path(__file__).parent / "verl_worker.py"
BATCHES = 1000  # for all functions together, each batch is one function's
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the environment that has verl."""
    return interpreter("WHET_PEERS_VENV", ".venv-peers")


def ragged(seed: int, tools: bool = True) -> Batch:
    """Groups of 2 to 5 answers, interleaved, with text of tools in the middle; float64."""
    draw = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(2, 6, (), generator=draw))
    uid = torch.arange(groups).repeat_interleave(torch.randint(2, 6, (groups,), generator=draw))
    uid = uid[torch.randperm(len(uid), generator=draw)]
    rows, width = len(uid), int(torch.randint(2, 12, (), generator=draw))

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, width + 1, (rows, 1), generator=draw)
    mask = (torch.arange(width) < lengths) & (torch.rand(rows, width, generator=draw) > 0.2 * tools)
    mask[:, 0] = True
    mask = mask.long()
    old = -normal().abs() - 0.2
    batch = {
        "token_level_rewards": normal(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "old_log_probs": old,
        "log_probs": (old + 0.4 * normal()).clamp(max=-0.01),
        "ref_log_probs": old + 0.4 * normal(),
        "rollout_log_probs": old + 0.4 * normal(),
        "advantages": normal(),
        "sum_pi_squared": torch.rand(rows, width, generator=draw, dtype=torch.float64),
    }
    columns = {name: column * mask for name, column in batch.items()}
    return {
        **columns,
        "response_mask": mask,
        "uid": uid,
        "reward_baselines": torch.randn(rows, generator=draw).double(),
        "reward_parts": torch.randint(-8, 9, (rows, 2), generator=draw).double() / 4,  # verl makes them float32
    }


# (verl's name, whet's name, whet's options, verl's options)
ESTIMATORS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("gae", "gae", {"gamma": 0.9, "lam": 0.8}, {"gamma": 0.9, "lam": 0.8}),
    ("grpo", "grpo", {}, {}),
    ("grpo", "dr_grpo", {}, {"norm_adv_by_std_in_grpo": False}),
    ("grpo_vectorized", "grpo", {}, {}),
    ("grpo_passk", "grpo_passk", {}, {"norm_adv_by_std_in_grpo": True}),
    ("rloo", "rloo", {}, {}),
    ("rloo_vectorized", "rloo", {}, {}),
    ("opo", "opo", {}, {}),
    ("remax", "remax", {}, {}),
    ("gpg", "gpg", {"count": "nonzero"}, {}),
    ("reinforce_plus_plus", "reinforce_plus_plus", {"gamma": 0.9}, {"gamma": 0.9}),
    ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}, {}),
    ("optimal_token_baseline", "optimal_token_baseline", {}, {}),
    ("tir_optimal_token_baseline", "tir_optimal_token_baseline", {}, {}),
    ("tir_optimal_token_baseline", "tir_optimal_token_baseline", {"cap": 1.2}, {"cap": 1.2}),
    (
        "gdpo",
        "gdpo",
        {"weights": [1.0, 0.5], "over": "tokens"},
        {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
    ),
]
# verl compares positions, whet numbers of sampled tokens: the same where no tool has written.
WITHOUT_TOOLS = {"optimal_token_baseline"}
LOSSES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("vanilla", "vanilla", {}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}),
    (
        "vanilla",
        "vanilla",
        {"clip_ratio_high": 0.3},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0},
    ),
    ("gspo", "gspo", {}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("sapo", "sapo", {}, {"tau_pos": 1.0, "tau_neg": 1.05}),
    ("gpg", "gpg", {}, {}),
    ("cispo", "cispo", {}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    ("geo_mean", "geo_mean", {}, {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("dppo_tv", "dppo_tv", {}, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 20.0}),
    (
        "dppo_kl",
        "dppo_kl",
        {"threshold": 0.02},
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.02, "clip_ratio_c": 20.0},
    ),
    (  # the ratio to the sampler, capped as a weight
        "bypass_mode",
        "cispo",
        {"bounds": "cap", "clip_ratio_high": 1.2},
        {
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "policy_loss": {
                "rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.2}
            },
        },
    ),
    ("dro", "dro", {"beta": 0.7}, {"clip_ratio_low": None, "clip_ratio_high": None, "policy_loss": {"dro_beta": 0.7}}),
]
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean", "token-sum"]


def compare(python: Path, folder: Path, calls: list[Call]) -> Iterator[tuple[Call, Any]]:
    """The calls with verl's results."""
    return zip(calls, ask(python, WORKER, folder, calls), strict=True)


def test_estimators(python: Path, tmp_path: Path) -> None:
    seeds = range(BATCHES // len(ESTIMATORS))
    cases = [(case, ragged(seed, case[0] not in WITHOUT_TOOLS)) for case in ESTIMATORS for seed in seeds]
    calls: list[Call] = [("estimate", theirs, batch, options) for (theirs, _, _, options), batch in cases]
    for ((_, name, options, _), batch), (_, theirs) in zip(cases, compare(python, tmp_path, calls), strict=True):
        ours = estimate(ADV_ESTIMATORS[name], batch, options).advantages
        torch.testing.assert_close(ours, (theirs * batch["response_mask"]).double(), rtol=1e-6, atol=1e-6, msg=name)


def our_loss(name: str, options: dict[str, Any], mode: str, batch: Batch) -> tuple[Tensor, Tensor]:
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss = policy_loss(POLICY_LOSSES[name], {**batch, "log_probs": log_probs}, options).per_token
    assert loss is not None
    mask = batch["response_mask"]
    total = aggregate(mode, loss, mask, **counts(mask), fixed_length=mask.shape[1])
    (gradient,) = torch.autograd.grad(total, log_probs)
    return total.detach(), gradient


def test_losses_and_their_gradients(python: Path, tmp_path: Path) -> None:
    cases = []
    for theirs, name, options, verls in LOSSES:
        fixed = POLICY_LOSSES[name].marks.get("aggregation")
        for seed in range(BATCHES // len(LOSSES)):
            mode = fixed or AGGREGATIONS[seed % 4]
            cases.append((theirs, name, options, {**verls, "loss_agg_mode": mode}, ragged(seed)))
    calls: list[Call] = [("loss", theirs, batch, verls) for theirs, _, _, verls, batch in cases]
    for (_, name, options, verls, batch), (_, (value, gradient)) in zip(
        cases, compare(python, tmp_path, calls), strict=True
    ):
        total, ours = our_loss(name, options, verls["loss_agg_mode"], batch)
        torch.testing.assert_close(total, value.double(), rtol=1e-6, atol=1e-6, msg=f"{name} {verls}")
        torch.testing.assert_close(ours, gradient, rtol=1e-6, atol=1e-6, msg=f"gradient of {name} {verls}")


def test_kl_forms_and_value_loss(python: Path, tmp_path: Path) -> None:
    batches = [ragged(seed) for seed in range(40)]
    forms = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs", "k1+": "k1+", "k3+": "k3+"}
    calls: list[Call] = [("kl", verls, batch, {}) for verls in forms for batch in batches]
    options = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean"}
    calls += [("value", "", batch, options) for batch in batches]
    for (kind, name, batch, _), theirs in compare(python, tmp_path, calls):
        mask = batch["response_mask"]
        if kind == "kl":
            ours = kl_form(forms[name])(batch)
            torch.testing.assert_close(ours * mask, theirs.double() * mask, rtol=1e-6, atol=1e-6, msg=name)
            continue
        loss, _ = call(VALUE_LOSSES["clipped"], batch, {})
        total = aggregate("token-mean", loss, mask, **counts(mask), fixed_length=1)
        torch.testing.assert_close(total, theirs.double(), rtol=1e-6, atol=1e-6)


def test_where_whet_differs_on_purpose(python: Path, tmp_path: Path) -> None:
    """A group of one: verl gives the raw score as advantage, whet 0, as there is nothing to compare with."""
    batch = ragged(0)
    batch = {**batch, "uid": torch.arange(len(batch["uid"]))}
    [(_, theirs)] = compare(python, tmp_path, [("estimate", "grpo", batch, {})])
    scores = batch["token_level_rewards"].sum(-1, keepdim=True) * batch["response_mask"]
    torch.testing.assert_close(theirs, scores, rtol=1e-5, atol=1e-5)
    assert not estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages.any()


# (verl's level, its options, whet's weight, its options)
WEIGHED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("token", {"rollout_is_threshold": 1.3}, "importance", {"cap": 1.3}),
    ("sequence", {"rollout_is_threshold": 1.3}, "importance", {"cap": 1.3, "level": "sequence"}),
    ("token", {"rollout_is_batch_normalize": True}, "importance", {"normalise": True}),
    ("sequence", {"rollout_is_batch_normalize": True}, "importance", {"normalise": True, "level": "sequence"}),
    ("token", {"rollout_is_threshold": "0.8_1.3"}, "icepop", {"low": 0.8, "high": 1.3}),
    ("sequence", {"rollout_is_threshold": "0.5_2"}, "icepop", {"low": 0.5, "high": 2.0, "level": "sequence"}),
]


def test_weights_and_rejections(python: Path, tmp_path: Path) -> None:
    batches = [ragged(seed) for seed in range(40)]
    calls: list[Call] = [("weights", level, batch, told) for level, told, _, _ in WEIGHED for batch in batches]
    levels = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean", "seq_max": "sequence_max"}
    names = [f"{level}_{form}" for level in levels for form in ("k1", "k2", "k3") if (level, form) != ("seq_max", "k1")]
    for name in names:
        told = {"rollout_rs_threshold": "0.8_1.25" if name.endswith("k1") else 0.1}
        calls += [("rejection", name, batch, told) for batch in batches]
    ours = [(name, options) for _, _, name, options in WEIGHED for _ in batches]
    for number, ((kind, name, batch, _), theirs) in enumerate(compare(python, tmp_path, calls)):
        mask = batch["response_mask"]
        if kind == "weights":
            weight = call(WEIGHTS[ours[number][0]], batch, ours[number][1])
            torch.testing.assert_close(weight * mask, theirs.double(), rtol=1e-6, atol=1e-6, msg=str(ours[number]))
            continue
        level, _, form = name.rpartition("_")
        within = {"low": math.log(0.8), "high": math.log(1.25)} if form == "k1" else {"high": 0.1}
        kept = call(REJECTIONS["divergence"], batch, {"form": form, "level": levels[level], **within})
        assert torch.equal(kept & (mask != 0), theirs != 0), name


def test_covariance_losses_are_verls_where_the_same_tokens_are_chosen(python: Path, tmp_path: Path) -> None:
    """verl looks at the current policy, and at a micro-batch; whet at the old one, before the update."""
    batches, calls = [ragged(seed, tools=False) for seed in range(60)], []
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "token-mean"}
    for batch in batches:
        kl = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}
        calls.append(("loss", "kl_cov", batch, {**clip, "policy_loss": kl}))
    for batch in batches:
        within = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0}
        calls.append(("loss", "clip_cov", batch, {**clip, "policy_loss": within}))
    for (_, name, batch, _), (value, gradient) in compare(python, tmp_path, calls):
        log_probs, mask = batch["log_probs"].clone().requires_grad_(), batch["response_mask"]
        of_now = {**batch, "old_log_probs": batch["log_probs"], "draws": torch.zeros_like(batch["log_probs"])}
        options = {"share": 0.2, "coef": 0.5} if name == "kl_cov" else {"share": 1.0, "lower": 0.1, "upper": 5.0}
        chosen = with_mini_batch_columns(POLICY_LOSSES[name], of_now, options)["chosen"]
        loss = policy_loss(POLICY_LOSSES[name], {**batch, "log_probs": log_probs, "chosen": chosen}, options).per_token
        assert loss is not None
        total = aggregate("token-mean", loss, mask, **counts(mask), fixed_length=1)
        (ours,) = torch.autograd.grad(total, log_probs)
        torch.testing.assert_close(ours, gradient, rtol=1e-6, atol=1e-6, msg=name)
        if name == "kl_cov":  # clip_cov: verl takes the value of the chosen out, whet their gradient alone
            torch.testing.assert_close(total.detach(), value.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["naive", "dapo", "limited"])
def test_verls_own_managers(name: str, model_folder: Path) -> None:
    """The files of the release that docs/migrating.md names."""
    [file] = (
        interpreter("WHET_PEERS", ".venv-peers")
        .parents[1]
        .glob(f"lib/python3.*/site-packages/verl/experimental/reward_loop/reward_manager/{name}.py")
    )
    [cls] = re.findall(r"class (\w+RewardManager)\b", file.read_text())
    settings = {"reward": {"reward_kwargs": {"overlong_buffer_cfg": None, "max_resp_len": None}}, "reward_model": {}}
    found = scores(file, cls, model_folder, compute_score="exact_match", config=settings)
    assert [each.reward for each in found] == [1.0, 0.0]
