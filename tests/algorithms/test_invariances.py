# SPDX-License-Identifier: Apache-2.0
"""What holds for every shipped function of a kind, those of tomorrow included: a new one is tested here by its name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whet.algorithms.adapters import estimate, policy_loss, settle
from whet.algorithms.aggregation import aggregate, counts
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, Entry

Batch = dict[str, Tensor]
MakeBatch = Callable[..., Batch]

ESTIMATORS = [pytest.param(entry, id=entry.name) for entry in ADV_ESTIMATORS]
LOSSES = [pytest.param(entry, id=entry.name) for entry in (*POLICY_LOSSES, *VALUE_LOSSES)]
seeds = st.integers(0, 2**31)
few = settings(max_examples=8, deadline=None)


def columns_of(entry: Entry, batch: Batch) -> list[Tensor]:
    """All per-token columns that a function gives."""
    if entry.name == "max_rl":  # for scores of 0 or more
        batch = {**batch, "token_level_rewards": batch["token_level_rewards"].abs()}
    if entry.kind == ADV_ESTIMATORS.kind:
        result = estimate(entry, batch, {})
        return [result.advantages] if result.returns is None else [result.advantages, result.returns]
    loss = policy_loss(entry, settle(entry, batch, {}), {})
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
@given(seed=seeds, split=st.lists(st.integers(0, 12), max_size=4))
def test_the_gradient_does_not_depend_on_the_split(
    make_batch: MakeBatch, entry: Entry, seed: int, split: list[int]
) -> None:
    batch = settle(entry, make_batch(seed, poison=True), {})
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
