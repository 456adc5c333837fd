# SPDX-License-Identifier: Apache-2.0
"""The step of `CompactAdamW` on an accelerator. One Triton kernel updates all weights with equal dtypes; it reads their
addresses from a table. Random bits, codes and formulas equal the reference, `compact_adamw`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from whet.devices import moved
from whet.kernels.compact_adamw import Work

MOST = 512  # weights of a launch: each program searches for its own weight among them
BLOCKS, WARPS = 8, 4  # BLOCKS: number of blocks of 256 numbers that one program updates
ALIGNED = 16  # if addresses and numbers of columns are multiples of it, loads are vectorized
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}


@triton.jit
def _mixed(bits):
    """Computes `compact_adamw._mix` in Triton."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(values, noise):
    """Rounds float32 values to bfloat16, kept as float32: adds `noise` of 16 bits, then clears the lower 16 bits."""
    return ((values.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(values, DTYPE: tl.constexpr):
    """Rounds to the nearest numbers of a dtype, ties to even; the interpreter's own conversion truncates."""
    if DTYPE == tl.bfloat16:
        values = _rounded(values, 0x7FFF + ((values.to(tl.uint32, bitcast=True) >> 16) & 1))
    return values.to(DTYPE)


@triton.jit
def _read(moment, scales, codes, at, block, inside, CODED: tl.constexpr):
    """Loads a moment as float32."""
    if CODED:
        code = tl.load(moment + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scales + block, mask=tl.max(inside.to(tl.int32), 1) > 0, other=0.0)
        return tl.where(inside, tl.load(codes + code) * scale[:, None], 0.0)
    else:
        return tl.load(moment + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _encoded(values, scales, nearest, block, inside):
    """Returns the codes of a moment, and stores its scales."""
    scale = tl.max(tl.abs(values), 1)
    tl.store(scales + block, scale, mask=tl.max(inside.to(tl.int32), 1) > 0)
    shares = tl.div_rn(values, tl.maximum(scale, 1.1754943508222875e-38)[:, None])
    return tl.load(nearest + (shares.to(tl.uint32, bitcast=True) >> 13))


@triton.jit
def _step(
    table, scalars, codes, codes_sq, nearest, nearest_sq, count,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, ROUNDING: tl.constexpr,
    WEIGHTS: tl.constexpr, FIELDS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Updates N blocks of one weight and the moments of these blocks."""
    program, w = tl.program_id(0).to(tl.int64), tl.arange(0, WEIGHTS)
    begins = tl.load(table + w, mask=w < count, other=2**62)
    own = tl.sum((begins <= program).to(tl.int32), 0) - 1
    begin, at = tl.load(table + own), count + own * FIELDS
    columns, a_row, blocks = tl.load(table + at + 7) // STEP * STEP, tl.load(table + at + 8), tl.load(table + at + 9)
    block = (program - begin) * N + tl.arange(0, N)
    row, column = block // a_row, (block % a_row)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (block < blocks)[:, None] & (column < columns)
    place = tl.load(table + at + 10) + row[:, None] * tl.load(table + at + 11) + column
    bits = _mixed(place.to(tl.uint32) ^ tl.load(table + at + 12).to(tl.uint32))
    bits = _mixed(bits ^ tl.load(table + at + 13).to(tl.uint32))
    where = row[:, None] * columns + column
    weight = tl.multiple_of(tl.load(table + at).to(tl.pointer_type(WEIGHT)), STEP)
    grad = tl.multiple_of(tl.load(table + at + 1).to(tl.pointer_type(GRAD)), STEP)
    first_at = tl.multiple_of(tl.load(table + at + 2).to(tl.pointer_type(MOMENT)), STEP)
    second_at = tl.multiple_of(tl.load(table + at + 3).to(tl.pointer_type(MOMENT)), STEP)
    scale_at = tl.load(table + at + 4).to(tl.pointer_type(tl.float32))
    scale_sq_at = tl.load(table + at + 5).to(tl.pointer_type(tl.float32))
    new_share, old_share_sq = tl.load(scalars + at + 14).to(tl.float32), tl.load(scalars + at + 15).to(tl.float32)
    new_share_sq, root = tl.load(scalars + at + 16).to(tl.float32), tl.load(scalars + at + 17).to(tl.float32)
    eps, kept = tl.load(scalars + at + 18).to(tl.float32), tl.load(scalars + at + 19).to(tl.float32)
    rate = tl.load(scalars + at + 20).to(tl.float32)
    CODED: tl.constexpr = MOMENT == tl.uint8
    g = tl.load(grad + where, mask=inside, other=0.0).to(tl.float32)
    first = _read(first_at, scale_at, codes, where, block, inside, CODED)
    second = _read(second_at, scale_sq_at, codes_sq, where, block, inside, CODED)
    first = first + new_share * (g - first)
    second = second * old_share_sq + new_share_sq * g * g
    if CODED:
        tl.store(first_at + where, _encoded(first, scale_at, nearest, block, inside), mask=inside)
        tl.store(second_at + where, _encoded(second, scale_sq_at, nearest_sq, block, inside), mask=inside)
    else:
        stored_second = second
        if MOMENT == tl.bfloat16:
            stored_second = _rounded(second, bits & 0xFFFF)
        tl.store(first_at + where, _nearest(first, MOMENT), mask=inside)
        tl.store(second_at + where, stored_second.to(MOMENT), mask=inside)

    scale = tl.div_rn(tl.sqrt_rn(second), root) + eps
    new = tl.load(weight + where, mask=inside, other=0.0).to(tl.float32) * kept
    new += tl.div_rn(rate * first, scale)
    if ROUNDING == "kahan":
        lost = tl.multiple_of(tl.load(table + at + 6).to(tl.pointer_type(WEIGHT)), STEP)
        new += tl.load(lost + where, mask=inside, other=0.0).to(tl.float32)
        stored = _nearest(new, WEIGHT)
        tl.store(lost + where, _nearest(new - stored.to(tl.float32), WEIGHT), mask=inside)
        tl.store(weight + where, stored, mask=inside)
    elif ROUNDING == "stochastic":
        tl.store(weight + where, _rounded(new, bits >> 16).to(WEIGHT), mask=inside)
    else:
        tl.store(weight + where, _nearest(new, WEIGHT), mask=inside)


def step(work: Sequence[Work], tables: Sequence[torch.Tensor], rounding: str | None, width: int) -> None:
    """Updates weights with equal dtypes and the same kind of moments. `tables`, on the device, are the codes of the
    first and of the second moment, then the nearest codes of both. `width` is the number of columns of a block."""
    for start in range(0, len(work), MOST):
        some = work[start : start + MOST]
        device, grads = some[0].weight.device, [each.grad.contiguous() for each in some]
        begins, records, programs, step = list[int](), list[int](), 0, ALIGNED
        for each, grad in zip(some, grads, strict=True):
            begins.append(programs)
            fields = _record(each, grad, width)
            programs += triton.cdiv(fields[9], BLOCKS)
            records += fields
            step = 1 if any(number % ALIGNED for number in fields[:8]) else step
        table = moved(torch.tensor([*begins, *records]), device)
        if programs:
            _step[(programs,)](
                table, table.view(torch.float64), *tables, len(some),
                WEIGHT=DTYPES[some[0].weight.dtype], GRAD=DTYPES[grads[0].dtype],
                MOMENT=DTYPES[some[0].state["exp_avg"].dtype], ROUNDING=rounding or "",
                WEIGHTS=triton.next_power_of_2(len(some)), FIELDS=len(records) // len(some), N=BLOCKS, WIDTH=width,
                STEP=step, num_warps=WARPS,
            )  # fmt: skip
        # torch does not see these writes; copies of weights are refreshed when a version counter has changed
        torch.autograd.graph.increment_version([each.weight for each in some])


def _record(work: Work, grad: torch.Tensor, width: int) -> list[int]:
    """Lists the fields of a weight in the kernel's table: addresses, sizes, places of random bits, bits of factors."""
    (rows, columns), state, part = work.weight.shape, work.state, work.draws.part
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "lost")
    tensors = work.weight, grad, *map(state.get, names)
    a_row = triton.cdiv(columns, width)
    return [
        *(0 if each is None else each.data_ptr() for each in tensors),
        *(columns, max(1, a_row), rows * a_row, part.first_row * part.columns + part.first_column, part.columns),
        *work.draws.keys,
        *struct.unpack("<7q", struct.pack("<7d", *work.factors)),
    ]
