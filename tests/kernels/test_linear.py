# SPDX-License-Identifier: Apache-2.0
"""Linear layers by the kernel against sums in float64, and against torch's own: values, gradients, rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from whet.compiled import compiler
from whet.kernels import linear
from whet.kernels.linear import FastLinear, product, product_of_columns

SHAPES = [
    (16, 1, 1),
    (17, 7, 5),
    (33, 130, 16),
    (64, 256, 70),
    (100, 193, 96),
    (97, 400, 31),
    (1537, 200, 337),
]  # rows, depth, columns


@pytest.fixture(autouse=True)
def has_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel also where the processor has wider registers."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    linear._kernels.cache_clear()
    yield
    linear._kernels.cache_clear()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layer(depth: int, columns: int, *, bias: bool) -> FastLinear:
    made = FastLinear(depth, columns, bias=bias)
    with torch.no_grad():
        made.weight.copy_(drawn(columns, depth))
        if bias:
            made.bias.copy_(drawn(columns))
    return made


def close(found: torch.Tensor, exact: torch.Tensor, depth: int) -> None:
    """A sum of products of normal numbers, of about the root of `depth`, in float32."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=4e-7 * depth + 1e-6)


def test_two_rows_by_hand() -> None:
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    assert product(x, weight, torch.tensor([0.5, 0.0, -1.0]), is_transposed=True).tolist() == [
        [17.5, 23.0, 28.0],  # 1 * 5 + 2 * 6 + 0.5, 1 * 7 + 2 * 8, 1 * 9 + 2 * 10 - 1
        [39.5, 53.0, 66.0],
    ]
    assert product(x, weight.t().contiguous(), is_transposed=False).tolist() == [[17.0, 23.0, 29.0], [39.0, 53.0, 67.0]]
    # x^T x: 1 + 9, 2 + 12, 4 + 16
    assert product_of_columns(x, x).tolist() == [[10.0, 14.0], [14.0, 20.0]]


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(rows: int, depth: int, columns: int, bias: bool) -> None:
    own, x = layer(depth, columns, bias=bias), drawn(rows, depth).requires_grad_()
    other = nn.Linear(depth, columns, bias=bias).double()
    other.load_state_dict(own.state_dict())
    exact = x.detach().double().requires_grad_()
    grad = drawn(rows, columns)
    found, expected = own(x), other(exact)
    found.backward(grad)
    expected.backward(grad.double())
    close(found, expected, depth)
    with torch.no_grad():
        assert torch.equal(own(x), found)
    assert x.grad is not None and own.weight.grad is not None
    close(x.grad, exact.grad, columns)  # type: ignore[arg-type]
    close(own.weight.grad, other.weight.grad, rows)  # type: ignore[arg-type]
    if bias:
        close(own.bias.grad, other.bias.grad, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [100, 1300])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_equal_bits_alone_and_among_others_whatever_the_threads(threads: int, rows: int) -> None:
    """100 rows are shared out by columns, 1,300 by rows, 384 of them at least for a thread."""
    x, weight = drawn(rows, 300), drawn(700, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([product(row[None], weight, is_transposed=True) for row in x])
        sums = product_of_columns(x, x)
        torch.set_num_threads(threads)
        assert torch.equal(product(x, weight, is_transposed=True), alone)
        assert torch.equal(product(x, weight.t().contiguous(), is_transposed=False), alone)
        assert torch.equal(product_of_columns(x, x), sums)
    finally:
        torch.set_num_threads(before)


def test_rows_need_not_lie_side_by_side() -> None:
    own, x = layer(20, 8, bias=False), drawn(3, 20, 7).transpose(1, 2)
    with torch.no_grad():
        close(own(x), x.double() @ own.weight.double().t(), 20)
    assert own(x).shape == (3, 7, 8)


def test_what_is_not_a_number_stays_in_its_row_and_column() -> None:
    x, weight = drawn(20, 40), drawn(30, 40)
    x[3, 5], weight[7, 1] = float("nan"), float("inf")
    found = product(x, weight, is_transposed=True)
    assert found[3].isnan().all()
    others = torch.ones(20, 30, dtype=torch.bool)
    others[3], others[:, 7] = False, False
    assert found[others].isfinite().all() and not found[:3, 7].isfinite().any()


def test_where_the_kernel_does_not_fit_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, other numbers, autocast, operators that are counted, a processor with wider registers."""
    own = layer(24, 6, bias=True)
    monkeypatch.setattr(linear, "product", lambda *_, **__: pytest.fail("the kernel ran"))
    few = drawn(15, 24)
    assert torch.equal(own(few), nn.functional.linear(few, own.weight, own.bias))
    many = drawn(40, 24)
    with FlopCounterMode(display=False) as counter:
        own(many)
    assert counter.get_total_flops() == 2 * 40 * 24 * 6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert own(many).dtype == torch.bfloat16
    assert own.double()(many.double()).dtype == torch.float64
    assert own.float().to("meta")(many.to("meta")).shape == (40, 6)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    linear._kernels.cache_clear()
    wide = layer(24, 6, bias=False)
    assert torch.equal(wide(many), nn.functional.linear(many, wide.weight))


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "library", lambda _: None)
    linear._kernels.cache_clear()
    own, x = layer(24, 6, bias=False), drawn(40, 24)
    assert torch.equal(own(x), nn.functional.linear(x, own.weight))
