# SPDX-License-Identifier: Apache-2.0
"""The kernel for short rows against attention over padded rows, in values and gradients, alone and among other rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whet.kernels import packed_attention
from whet.kernels.attention import Scores
from whet.kernels.packed_attention import suits
from whet.models.packing import Layout, layout

F32, BF16 = torch.float32, torch.bfloat16


def packed(
    lengths: list[tuple[int, int]], prompts: list[int] | None = None, *, width: int = 12, share: bool = True
) -> Layout:
    """A batch with rows of (prompt, response) tokens. Rows with the same number in `prompts` have the same prompt."""
    rows = [_row(*each, width, number) for each, number in zip(lengths, prompts or range(len(lengths)), strict=True)]
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return layout(columns, share)


def _row(prompt: int, response: int, width: int, seed: int) -> Mapping[str, torch.Tensor]:
    mask = torch.zeros(2 * width, dtype=torch.long)
    mask[width - prompt : width + response] = 1
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (2 * width,), generator=draw) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(0) - 1).clamp(min=0),
        "response_mask": mask[width:],
    }


def tensors(where: Layout, *, heads: int, kv: int, dim: int, value: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    draw, count = torch.Generator().manual_seed(1), len(where.input_ids)
    shapes = (heads, dim), (kv, dim), (kv, value), (heads, value)
    return [torch.randn(count, *shape, generator=draw).to(dtype) for shape in shapes]


def with_gradients(
    where: Layout, scores: Scores, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    out = packed_attention.packed_attention(*leaves, scores, where)
    return out, *torch.autograd.grad(out, leaves, grad)


SHAPES = {
    "one head": {"heads": 1, "kv": 1, "dim": 16, "value": 16},
    "grouped": {"heads": 6, "kv": 2, "dim": 32, "value": 32},
    "odd sizes": {"heads": 4, "kv": 4, "dim": 20, "value": 7},
    "latent": {"heads": 2, "kv": 1, "dim": 40, "value": 24},
}
BATCHES = {
    "a row": ([(1, 1)], None),
    "alone": ([(3, 5), (1, 9), (12, 1), (4, 4)], None),
    "shared": ([(6, 5), (6, 3), (2, 4), (2, 12), (2, 1), (5, 5)], [0, 0, 1, 1, 1, 2]),
    "many": ([(1 + n % 12, 1 + n % 7) for n in range(60)], None),
}


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_as_over_padded_rows(shape: str, batch: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    where, scores = packed(*BATCHES[batch]), Scores(0.3, window, 0.0, None)
    given = tensors(where, **SHAPES[shape], dtype=F32)
    assert suits(*given[:3], scores, where.bunches), "no C++ compiler works here"
    found = with_gradients(where, scores, *given)
    monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    expected = with_gradients(where, scores, *(each.double() for each in given))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == F32
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def test_by_hand() -> None:
    where = packed([(1, 2)])  # of three tokens, each with itself and the earlier ones
    query = torch.zeros(3, 1, 2)
    query[2, 0, 0] = 1.0
    key = torch.zeros(3, 1, 2)
    key[1, 0, 0] = math.log(2)
    value = torch.tensor([[[4.0]], [[8.0]], [[12.0]]])
    out = packed_attention.packed_attention(query, key, value, Scores(1.0, 0, 0.0, None), where)
    # The last query weighs the keys 1 : 2 : 1; the others weigh theirs alike.
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([4.0, 6.0, (4 + 2 * 8 + 12) / 4]))


def test_bfloat16_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    where, scores = packed(*BATCHES["shared"]), Scores(0.3, 0, 0.0, None)
    given = tensors(where, **SHAPES["grouped"], dtype=BF16)
    found = with_gradients(where, scores, *given)
    monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    exact = with_gradients(where, scores, *(each.double() for each in given))
    padded = with_gradients(where, scores, *given)
    for ours, theirs, right in zip(found, padded, exact, strict=True):
        assert ours.dtype == BF16
        errors = [(each.double() - right).norm() / right.norm() for each in (ours, theirs)]
        assert errors[0] < 2**-8 and errors[0] <= errors[1]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    lengths = [(1 + n % 12, 1 + n % 7) for n in range(40)]
    where, alone = packed(lengths), packed(lengths[17:18], [17])
    given = tensors(where, **SHAPES["grouped"], dtype=dtype)
    scores = Scores(0.3, 0, 0.0, None)
    rows = where.slots // where.width
    kept = where.places // where.shape[1]
    [row] = {int(rows[state]) for state, of in zip(where.states, kept, strict=True) if of == 17}
    own = [each[rows == row] for each in given]
    threads = torch.get_num_threads()
    together = with_gradients(where, scores, *given)
    torch.set_num_threads(1)
    by_itself = with_gradients(alone, scores, *own)
    torch.set_num_threads(threads)
    for whole, part in zip(together, by_itself, strict=True):
        assert torch.equal(whole[rows == row], part)


def test_scores_far_apart_and_numbers_that_are_none() -> None:
    where, scores = packed([(3, 3)]), Scores(1.0, 0, 0.0, None)
    query, key, value, _ = tensors(where, **SHAPES["one head"], dtype=F32)
    key[1] = 1000 * query[-1]
    out = packed_attention.packed_attention(query, key, value, scores, where)
    assert out.isfinite().all() and torch.equal(out[-1], value[1])
    key[4] = math.nan
    assert packed_attention.packed_attention(query, key, value, scores, where).isnan().any(-1)[:, 0].tolist() == [
        *[False] * 4,
        True,
        True,
    ]


def test_other_attention_is_left_to_torch() -> None:
    where = packed(*BATCHES["alone"])
    query, key, value, _ = tensors(where, **SHAPES["grouped"], dtype=F32)
    plain = Scores(0.3, 0, 0.0, None)
    assert suits(query, key, value, plain, where.bunches)
    assert not suits(query, key, value, plain._replace(cap=5.0), where.bunches)
    assert not suits(query, key, value, plain._replace(sinks=torch.zeros(6)), where.bunches)
    assert not suits(query.double(), key.double(), value.double(), plain, where.bunches)
    assert not suits(query.to("meta"), key, value, plain, where.bunches)
    assert not suits(query, key, value, plain, ())
    assert not suits(query, key, value, plain, where.with_runs([int(where.input_ids[0])]).bunches)
    with Passing():
        assert not suits(query, key, value, plain, where.bunches)


class Passing(TorchDispatchMode):
    """Sees each call, as a counter of arithmetic does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keys", "dtypes"), [(32, {F32, BF16}), (33, {F32}), (64, {F32}), (65, set())])
def test_longer_rows_are_left_to_matrix_products(keys: int, dtypes: set[torch.dtype]) -> None:
    where = packed([(keys - 1, 1)], width=66)
    for dtype in (F32, BF16):
        query, key, value, _ = tensors(where, **SHAPES["one head"], dtype=dtype)
        assert suits(query, key, value, Scores(0.3, 0, 0.0, None), where.bunches) == (dtype in dtypes)


def test_most_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    where, scores = packed([(100, 28), (100, 1), (127, 1)], [0, 0, 1], width=128), Scores(0.3, 0, 0.0, None)
    given = tensors(where, **SHAPES["grouped"], dtype=F32)
    monkeypatch.setattr(packed_attention, "suits", lambda *_: True)
    found = with_gradients(where, scores, *given)
    monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    torch.testing.assert_close(found, with_gradients(where, scores, *given), rtol=1e-4, atol=1e-5)


def test_without_a_compiler_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    where = packed(*BATCHES["alone"])
    query, key, value, _ = tensors(where, **SHAPES["grouped"], dtype=F32)
    monkeypatch.setattr(packed_attention, "library", lambda source: None)
    monkeypatch.setattr(packed_attention, "_kernels", packed_attention._kernels.__wrapped__)
    assert not suits(query, key, value, Scores(0.3, 0, 0.0, None), where.bunches)
