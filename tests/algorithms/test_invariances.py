# SPDX-License-Identifier: Apache-2.0
"""Properties of every shipped function of a kind: a new function is tested here by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.algorithms.calling import estimate, policy_loss, with_mini_batch_columns
from tests.first import only
from whet.algorithms.aggregation import aggregate, counts
from whet.algorithms.calls import call
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, REJECTIONS, VALUE_LOSSES, WEIGHTS, WRAPPERS, Entry

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]


def named(entries: Iterable[Entry]) -> list[ParameterSet]:
    return [pytest.param(entry, id=entry.name) for entry in entries]


# Of each kind of function: of rows alone, of groups, with a critic, of steps; by token, by sequence, of values.
FAST = {"cpo", "gae", "gigpo", "grpo", "reinforce_plus_plus", "rloo"}
FAST |= {"clipped", "gspo", "kl_cov", "ppo_clip", "reinforce"}
ESTIMATORS = only(FAST, named(ADV_ESTIMATORS), others=pytest.mark.slow)
LOSSES = only(FAST, named((*POLICY_LOSSES, *VALUE_LOSSES)), others=pytest.mark.slow)
seeds = st.integers(0, 2**31)
few = settings(max_examples=8, deadline=None)


def columns_of(entry: Entry, batch: Batch) -> list[Tensor]:
    """All per-token columns that a function gives."""
    if entry.name == "max_rl":  # for scores of 0 or more
        batch = {**batch, "token_level_rewards": batch["token_level_rewards"].abs()}
    if entry.kind == ADV_ESTIMATORS.kind:
        result = estimate(entry, batch, {})
        return [result.advantages] if result.returns is None else [result.advantages, result.returns]
    loss = policy_loss(entry, with_mini_batch_columns(entry, batch, {}), {})
    assert loss.per_token is not None
    outside = batch["response_mask"] == 0
    return [loss.per_token, *(value.masked_fill(outside, 0.0) for value in loss.diagnostics.values())]


def with_rows(batch: Batch, rows: Tensor) -> Batch:
    return {name: column[rows] for name, column in batch.items()}


@pytest.mark.parametrize("entry", [*ESTIMATORS, *LOSSES])
@few
@given(seed=seeds)
def test_nan_in_masked_places_changes_no_bit(make_batch: MakeBatch, entry: Entry, seed: int) -> None:
    clean, poisoned = (columns_of(entry, make_batch(seed, poison=poison)) for poison in (False, True))
    for a, b in zip(clean, poisoned, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.parametrize("entry", [*ESTIMATORS, *LOSSES])
@few
@given(seed=seeds)
def test_permuted_rows_give_permuted_rows(make_batch: MakeBatch, entry: Entry, seed: int) -> None:
    batch = make_batch(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    for a, b in zip(columns_of(entry, batch), columns_of(entry, with_rows(batch, order)), strict=True):
        torch.testing.assert_close(b, a[order])


@pytest.mark.parametrize("entry", [*ESTIMATORS, *LOSSES])
def test_positions_without_sampled_tokens_can_be_added(make_batch: MakeBatch, entry: Entry) -> None:
    """A longer padding, and text of a tool in front."""
    batch = make_batch(11)
    padding = {"response_mask": 0, "turn_ids": -1, "state_hash": 0}
    wider = {
        name: torch.nn.functional.pad(column, (2, 3), value=padding.get(name, torch.nan))
        if column.shape == batch["response_mask"].shape
        else column
        for name, column in batch.items()
    }
    for a, b in zip(columns_of(entry, batch), columns_of(entry, wider), strict=True):
        torch.testing.assert_close(b[:, 2:-3], a)


@pytest.mark.parametrize("entry", [*ESTIMATORS, *LOSSES])
def test_float32_gives_what_float64_gives(make_batch: MakeBatch, entry: Entry) -> None:
    for seed in range(5):
        batch = make_batch(seed, rows=40)
        single = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
        for a, b in zip(columns_of(entry, batch), columns_of(entry, single), strict=True):
            assert (a.dtype, b.dtype) in ((torch.float64, torch.float32), (torch.bool, torch.bool))
            torch.testing.assert_close(b.to(a.dtype), a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("entry", [*ESTIMATORS, *LOSSES])
def test_the_columns_stay_as_they_were(make_batch: MakeBatch, entry: Entry) -> None:
    batch, untouched = make_batch(9), make_batch(9)
    columns_of(entry, batch)
    assert all(torch.equal(batch[name], column) for name, column in untouched.items())


@pytest.mark.parametrize("entry", ESTIMATORS)
@few
@given(seed=seeds)
def test_groups_may_have_any_names(make_batch: MakeBatch, entry: Entry, seed: int) -> None:
    batch = make_batch(seed)
    renamed = {**batch, "uid": -3 * batch["uid"] + 2**40}
    for a, b in zip(columns_of(entry, batch), columns_of(entry, renamed), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("entry", ESTIMATORS)
@few
@given(seed=seeds)
def test_failed_rows_can_be_left_out(make_batch: MakeBatch, entry: Entry, seed: int) -> None:
    batch = make_batch(seed)
    alive = batch["response_mask"].any(-1)
    for a, b in zip(columns_of(entry, batch), columns_of(entry, with_rows(batch, alive)), strict=True):
        torch.testing.assert_close(b, a[alive])
        assert not a[~alive].any()


@pytest.mark.parametrize("entry", ESTIMATORS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_nothing_sampled_gives_zeros(make_batch: MakeBatch, entry: Entry, rows: int) -> None:
    batch = with_rows(make_batch(0), torch.zeros(rows, dtype=torch.long))  # copies of the failed row
    for column in columns_of(entry, batch):
        assert torch.equal(column, torch.zeros(rows, 9, dtype=torch.float64))


# A teacher has something to say of a single answer too.
@pytest.mark.parametrize(
    "entry", [p for p in ESTIMATORS if "uid" in p.values[0].columns and "teacher_log_probs" not in p.values[0].columns]
)
def test_groups_of_one_carry_no_signal(make_batch: MakeBatch, entry: Entry) -> None:
    batch = {**make_batch(4), "uid": torch.arange(12)}
    assert not columns_of(entry, batch)[0].any()


@pytest.mark.parametrize("entry", LOSSES)
@few
@given(seed=seeds)
def test_what_was_not_sampled_has_no_gradient(make_batch: MakeBatch, entry: Entry, seed: int) -> None:
    batch = with_mini_batch_columns(entry, make_batch(seed), {})
    trained = "values" if "values" in entry.columns else "log_probs"
    leaf, mask = batch[trained].clone().requires_grad_(), batch["response_mask"]
    loss = policy_loss(entry, {**batch, trained: leaf}, {}).per_token
    assert loss is not None
    aggregate("token-mean", loss, mask, **counts(mask), fixed_length=9).backward()
    assert leaf.grad is not None and not leaf.grad[mask == 0].any()


@pytest.mark.parametrize("entry", LOSSES)
@few
@given(seed=seeds, split=st.lists(st.integers(0, 12), max_size=4))
def test_the_gradient_does_not_depend_on_the_split(
    make_batch: MakeBatch, entry: Entry, seed: int, split: list[int]
) -> None:
    batch = with_mini_batch_columns(entry, make_batch(seed, poison=True), {})
    trained = "values" if "values" in entry.columns else "log_probs"
    mode = entry.marks.get("aggregation", "token-mean")
    whole = {**counts(batch["response_mask"]), "fixed_length": 9}

    def gradient(edges: list[int]) -> Tensor:
        leaf = batch[trained].clone().requires_grad_()
        for start, end in pairwise(edges):
            part = with_rows({**batch, trained: leaf}, torch.arange(start, end))
            loss = policy_loss(entry, part, {}).per_token
            assert loss is not None
            aggregate(mode, loss, part["response_mask"], **whole).backward()
        assert leaf.grad is not None
        return leaf.grad

    once = gradient([0, 12])
    assert once.isfinite().all()
    assert once.any()
    torch.testing.assert_close(gradient([0, *sorted(split), 12]), once)


@pytest.mark.parametrize("entry", [p for p in LOSSES if p.values[0].kind == POLICY_LOSSES.kind])
@pytest.mark.parametrize("apart", [1e4, -1e4])
def test_ratios_that_overflow_leave_loss_and_gradient_finite(make_batch: MakeBatch, entry: Entry, apart: float) -> None:
    """A policy that has run away from some samples, by more than exp can hold."""
    batch = make_batch(8)
    far = batch["response_mask"].bool() & (torch.rand(12, 9, generator=torch.Generator().manual_seed(0)) < 0.3)
    batch["log_probs"] = torch.where(far, batch["old_log_probs"] + apart, batch["log_probs"]).requires_grad_()
    loss = policy_loss(entry, with_mini_batch_columns(entry, batch, {}), {}).per_token
    assert loss is not None and loss.isfinite().all()
    loss.masked_fill(batch["response_mask"] == 0, 0.0).sum().backward()
    assert batch["log_probs"].grad is not None and batch["log_probs"].grad.isfinite().all()


# ---- the wrappers of CPO, the weights of tokens, rejections


FAST_OTHERS = {"icepop", "importance", "divergence", "mi", "naive", "tok_kl", "seq_kl", "token", "sequence_max", "gate"}
OTHERS = [
    *(pytest.param(ADV_ESTIMATORS["cpo"], {"wrap_method": entry.name}, id=entry.name) for entry in WRAPPERS),
    *(pytest.param(entry, {}, id=entry.name) for entry in (*WEIGHTS, *REJECTIONS)),
    *(pytest.param(WEIGHTS[name], {"level": "sequence"}, id=f"{name} sequence") for name in ("importance", "icepop")),
    *(
        pytest.param(REJECTIONS["divergence"], {"level": level, "high": 0.1}, id=level)
        for level in ("token", "sequence_mean", "sequence_sum", "sequence_max")
    ),
    *(
        pytest.param(WEIGHTS[name], {"level": level}, id=f"{name} {level}")
        for name in ("importance", "icepop")
        for level in ("geometric", "segment")
    ),
    pytest.param(WEIGHTS["importance"], {"floor": 0.7, "cap": 1.2}, id="floor"),
    pytest.param(ADV_ESTIMATORS["cpo"], {"gate": True, "loss_position": "entropy"}, id="gate"),
]


def column_of(entry: Entry, batch: Batch, options: dict[str, Any]) -> Tensor:
    """The result of a function at each sampled token."""
    result = call(entry, batch, options)
    column = result[0] if isinstance(result, tuple) else result
    return column.expand(batch["response_mask"].shape).masked_fill(batch["response_mask"] == 0, 0)


@pytest.mark.parametrize(("entry", "options"), only(FAST_OTHERS, OTHERS, others=pytest.mark.slow))
@few
@given(seed=seeds)
def test_the_same_holds_for_weights_and_wrappers(
    make_batch: MakeBatch, entry: Entry, options: dict[str, Any], seed: int
) -> None:
    """Padding and tools' text do not matter, nor does the order of rows or the precision."""
    batch = make_batch(seed)
    column = column_of(entry, batch, options)
    assert column.isfinite().all()
    assert torch.equal(column_of(entry, make_batch(seed, poison=True), options), column)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(column_of(entry, with_rows(batch, order), options), column[order])
    alive = batch["response_mask"].any(-1)
    torch.testing.assert_close(column_of(entry, with_rows(batch, alive), options), column[alive])


@pytest.mark.parametrize(("entry", "options"), only(FAST_OTHERS, OTHERS, others=pytest.mark.slow))
@pytest.mark.parametrize("apart", [torch.inf, -torch.inf])
def test_an_impossible_token_makes_nothing_but_a_bounded_weight(
    make_batch: MakeBatch, entry: Entry, options: dict[str, Any], apart: float
) -> None:
    """A sampler that gave a token probability 0."""
    batch = make_batch(8)
    one = batch["response_mask"].bool() & (batch["response_mask"].cumsum(-1) == 1)
    batch["rollout_log_probs"] = batch["rollout_log_probs"].masked_fill(one, apart)
    assert column_of(entry, batch, options).isfinite().all()
