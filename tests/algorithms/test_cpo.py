# SPDX-License-Identifier: Apache-2.0
"""CPO against a slow reference: token by token in plain Python, each wrapper written out once more from its definition.
And the faults of its public code, each as a test that it is not here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import estimate
from tests.raising import raises
from whet.algorithms.cpo import positions
from whet.errors import ConfigError, RegistryError
from whet.registry import ADV_ESTIMATORS, WRAPPERS

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]
NAMES = [entry.name for entry in WRAPPERS]
LAMBDA, POS, NEG = 1.5, 0.7, 0.3
KEEPS_SIGN = {"naive", "noaccmask", "mi", "mi_accmask", "mi_unify"}


@pytest.fixture
def batch(make_batch: MakeBatch) -> Batch:
    """The common batch, with right and wrong rows in one group, a group all wrong and one all right."""
    return right_and_wrong(make_batch(3, rows=24))


def right_and_wrong(made: Batch) -> Batch:
    mask = made["response_mask"]
    uid = torch.arange(len(mask)) // 4  # groups of four: 0 all wrong, 1 all right, the others mixed
    right = (torch.arange(len(mask)) % 3 == 0) & (uid != 0) | (uid == 1)
    last = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
    scores = last * right.double()[:, None]
    return {
        **made,
        "uid": uid,
        "token_level_scores": scores,
        "token_level_rewards": scores + 0.01 * last * torch.arange(len(mask))[:, None],
        "entropy": made["values"].abs(),
        "teacher_log_probs": made["old_log_probs"] + 2 * made["values"],
    }


def advantages(batch: Batch, **options: Any) -> Tensor:
    return estimate(ADV_ESTIMATORS["cpo"], batch, options).advantages


def slow(name: str, batch: Batch) -> Tensor:
    """The advantages of GRPO with the term of a wrapper, computed in a loop."""
    base = estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages
    result, mask = base.clone(), batch["response_mask"]
    right = [float(row.sum()) >= 1 for row in batch["token_level_scores"]]
    for row in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[row, t]]
        if not at:
            continue
        group = [right[r] for r in range(len(mask)) if batch["uid"][r] == batch["uid"][row] and mask[r].any()]
        d = 1 if all(group) else 0 if any(group) else -1
        o, g, h = (batch[c][row].tolist() for c in ("old_log_probs", "teacher_log_probs", "entropy"))
        hs = [h[t] for t in at]
        low, high = min(hs), max(hs)
        kbar, hbar = sum(g[t] - o[t] for t in at) / len(at), sum(hs) / len(at)
        for t in at:
            a, k = float(base[row, t]), g[t] - o[t]
            u = (h[t] - low) / (high - low) if high > low else 0.0
            mi = math.exp(g[t]) * k
            added = added_by(name, right[row], d, a, k, mi, u, h[t], high, o[t], g[t], kbar, hbar)
            after = a + added
            if name in KEEPS_SIGN and added != 0:
                after = max(after, 0.0) if right[row] else min(after, 0.0)
            result[row, t] = after
    return result


def added_by(
    name: str,
    right: bool,
    d: int,
    a: float,
    k: float,
    mi: float,
    u: float,
    h: float,
    high: float,
    o: float,
    g: float,
    kbar: float,
    hbar: float,
) -> float:
    if name in ("naive", "noaccmask"):
        w = min(max(math.exp(k), 1 / LAMBDA), LAMBDA)
        everybody = name == "noaccmask"
        if w >= LAMBDA and math.exp(g) > 0.1 and (right or everybody):
            return POS * h
        if w <= 1 / LAMBDA and math.exp(o) > 0.1 and (not right or everybody):
            return -NEG * (high - h)
        return 0.0
    if name == "mi":
        return POS * mi * u if mi >= 0 else NEG * mi * (1 - u)
    if name == "mi_accmask":
        if mi >= 0:
            return POS * mi * (1 + u) if right else 0.0
        return 0.0 if right else NEG * mi * (2 - u)
    if name == "mi_unify":
        return (POS if right else NEG) * mi * (1 - u)
    if name == "mi_clamp_unify":
        return (POS if right else NEG) * min(mi, 10) * (1 - u)
    if name == "mi_clamp_unify_difficulty":
        return (POS if d != 0 else NEG) * min(mi, 10) * (1 - u)
    if name == "mi2":
        return POS * u if right else NEG * mi
    if name == "seq_kl":
        return POS * hbar if right else NEG * kbar if d == -1 else min(NEG * kbar, abs(a) / 2)
    if name == "negonly_seq_kl":
        return POS * kbar if right else NEG * kbar if d == -1 else 0.0
    near = min(max(k, -10), 10)
    if right:
        return POS * u
    if name == "tok_kl":
        return NEG * near if d == -1 else min(NEG * near, abs(a) / 2)
    if name == "negonly_tok_kl":
        return NEG * near if d == -1 else 0.0
    if name == "negonly_mi":
        return NEG * mi if d == -1 else 0.0
    wrong = NEG * mi * u if mi >= 0 else NEG * mi * (1 - u)
    return {
        "mi3": wrong,
        "negonly_mi3": wrong if d == -1 else 0.0,
        "reverse_mi3": -wrong,
        "addition_mi3": wrong if mi >= 0 else 0.0,
    }[name]


def test_there_are_seventeen() -> None:
    assert len(NAMES) == 17


@pytest.mark.parametrize("name", NAMES)
def test_wrappers_equal_the_slow_reference(name: str, make_batch: MakeBatch) -> None:
    for seed in range(4):
        batch = right_and_wrong(make_batch(seed, rows=24))
        got = advantages(batch, wrap_method=name, cpo_lambda=LAMBDA, pos_alpha=POS, neg_alpha=NEG)
        torch.testing.assert_close(got, slow(name, batch))
        assert not torch.equal(got, estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages)


@pytest.mark.parametrize("name", NAMES)
def test_without_alphas_it_is_grpo(name: str, batch: Batch) -> None:
    expected = estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages
    assert torch.equal(advantages(batch, wrap_method=name, pos_alpha=0.0, neg_alpha=0.0), expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_all_wrong_group_learns_through_the_wrapper_alone(name: str, batch: Batch) -> None:
    batch = {**batch, "token_level_rewards": batch["token_level_scores"]}
    hard = batch["uid"] == 0
    assert not estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages[hard].any()
    got = advantages(batch, wrap_method=name, cpo_lambda=LAMBDA, pos_alpha=POS, neg_alpha=NEG)[hard]
    assert got.any()


def test_the_difficulty_is_that_of_the_group(batch: Batch) -> None:
    """A comparison of a list with a number made every negonly wrapper inert in the public code."""
    mixed, hard = (batch["uid"] > 1) & (batch["token_level_scores"].sum(1) < 1), batch["uid"] == 0
    got = advantages(batch, wrap_method="negonly_tok_kl", pos_alpha=0.0, neg_alpha=NEG)
    base = estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages
    assert torch.equal(got[mixed], base[mixed])
    assert (got[hard] != base[hard]).any()


def test_each_call_starts_from_the_same_advantages(batch: Batch) -> None:
    """They were edited in place in the public code, and grew from epoch to epoch."""
    first, second = (advantages(batch, wrap_method="tok_kl", pos_alpha=POS, neg_alpha=NEG) for _ in range(2))
    assert torch.equal(first, second)


def test_any_threshold_works(batch: Batch) -> None:
    """Only rewards of exactly +1 and -1 did in the public code."""
    scaled = {**batch, "token_level_scores": 5 * batch["token_level_scores"] - 0.0}
    options = {"wrap_method": "mi2", "pos_alpha": POS, "neg_alpha": NEG}
    assert torch.equal(advantages(scaled, **options, correct_threshold=5.0), advantages(batch, **options))


def test_an_unknown_wrapper_is_refused(batch: Batch) -> None:
    with raises(RegistryError, "CPO wrapper", found="mi4", change=re.compile("'mi'")):
        advantages(batch, wrap_method="mi4")


def test_positions_by_hand() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1, 1, 0]])
    entropy = torch.tensor([[5.0, 99.0, 1.0, 2.0, 3.0, 4.0, 99.0]])
    # the 80 % quantile of 5, 1, 2, 3, 4 is 4.2
    assert positions("entropy", entropy, mask).int().tolist() == [[1, 0, 0, 0, 0, 0, 0]]
    assert positions("first", entropy, mask).int().tolist() == [[1, 0, 0, 0, 0, 0, 0]]
    longer = torch.ones(1, 6, dtype=torch.long)  # a fifth of six tokens is one and a bit
    assert positions("first", entropy[:, :6], longer).int().tolist() == [[1, 1, 0, 0, 0, 0]]
    assert torch.equal(positions("all", entropy, mask), mask.bool())
    key, three = "algorithm.adv_options.loss_position", "one of all, entropy, first"
    with raises(ConfigError, key, found="last", expected=three):
        ADV_ESTIMATORS["cpo"].resolve_options({"loss_position": "last"}, "algorithm.adv_options")


def test_the_position_says_where_something_is_added(batch: Batch) -> None:
    base = estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages
    options = {"wrap_method": "mi2", "pos_alpha": POS, "neg_alpha": NEG}
    whole = advantages(batch, **options)
    part = advantages(batch, **options, loss_position="first")
    first = positions("first", batch["entropy"], batch["response_mask"])
    assert torch.equal(part, torch.where(first, whole, base))


def test_the_gate_leaves_groups_whose_hint_was_of_no_use(batch: Batch) -> None:
    right = batch["token_level_scores"].sum(1, keepdim=True) >= 1
    way = torch.where(right, 1.0, -1.0) * torch.where(batch["uid"] % 2 == 0, 1.0, -1.0)[:, None]
    hinted = {**batch, "teacher_log_probs": batch["old_log_probs"] + way}
    options = {"wrap_method": "mi2", "pos_alpha": POS, "neg_alpha": NEG}
    base, open_, gated = (
        estimate(ADV_ESTIMATORS["grpo"], hinted, {}).advantages,
        advantages(hinted, **options),
        advantages(hinted, **options, gate=True),
    )
    helped = (batch["uid"] % 2 == 0)[:, None]
    assert torch.equal(gated, torch.where(helped, open_, base))


def test_metrics_say_what_was_done(batch: Batch) -> None:
    options = {"wrap_method": "naive", "pos_alpha": POS, "neg_alpha": NEG, "cpo_lambda": LAMBDA}
    metrics = estimate(ADV_ESTIMATORS["cpo"], batch, options).metrics
    sampled = batch["response_mask"] != 0
    k = (batch["teacher_log_probs"] - batch["old_log_probs"])[sampled]
    added = (slow("naive", batch) - estimate(ADV_ESTIMATORS["grpo"], batch, {}).advantages)[sampled]
    assert float(metrics["cpo/k"]) == pytest.approx(float(k.mean()))
    assert float(metrics["cpo/added"]) == pytest.approx(float(added.mean()))
    assert float(metrics["cpo/changed"]) == pytest.approx(float((added != 0).double().mean()), abs=1e-6)
    assert 0 <= float(metrics["cpo/hint_helped"]) <= 1
