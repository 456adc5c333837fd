# SPDX-License-Identifier: Apache-2.0
"""AdamW with compact state: each of the two moments takes 2 bytes or 1 byte a weight; on request weights take 2 bytes.

It computes in float32. Moments in `bfloat16`: the first is rounded to nearest. The second changes by 1 - beta2 = 0.1 %
a step, less than half the spacing of bfloat16, so rounding to nearest would never change it. It is rounded at random,
which keeps the mean. Moments in `int8`: a row is split into blocks of 256 numbers, and each number is one of 256 codes
between -1 and 1 times the block's largest number. Codes are dense near 0 and near 1 (dynamic tree quantisation).
Dettmers et al. 2022, https://arxiv.org/abs/2110.02861. As in that paper, vectors and tensors with fewer than `SMALL`
numbers keep float32 moments. A weight in bfloat16 would not change by a step of less than half its spacing: so
`stochastic` rounds weights at random, and `kahan` keeps the rounding error and adds it to the next step. Zamirai et al.
2021, https://arxiv.org/abs/2010.06192.

Each rank keeps the state of its own shard of a weight. Random bits depend on a number's place in the whole weight, so
the bits are the same for any number of ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from whet.devices import HOST, runs_triton
from whet.keyed import key

BLOCK = 256
SMALL = 4096
LOWER = 13  # lowest bits of a float32, which `_nearest` ignores: 10 mantissa bits suffice for codes 0.7 % apart or more
CHUNK = 2**20  # numbers that are converted to float32 at once, but at least one row
HALF = 2**16
MANY_KERNELS = "an optimizer step with compact moments takes about twenty kernel calls per million weights"
State = dict[str, torch.Tensor]


class CompactAdamW(torch.optim.Optimizer):
    """AdamW as in torch (Loshchilov and Hutter 2019), with fewer bits for moments, and on request for weights."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: Literal["float32", "bfloat16", "int8"],
        weight_rounding: Literal["stochastic", "kahan"] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._small: Codec = Rounded() if state_dtype == "bfloat16" else Exact()
        self._large: Codec = Blocks() if state_dtype == "int8" else self._small
        self._rounding, self._seed = weight_rounding, seed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the engine computes the loss before
        """Updates every parameter that has a gradient."""
        assert closure is None
        place, together = 0, defaultdict[tuple[object, ...], list[Work]](list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    work = self._begin(parameter, group, place)
                    weight, dtypes = work.weight, {work.weight.dtype, work.grad.dtype}
                    is_plain = weight.is_contiguous() and dtypes <= {torch.float32, torch.bfloat16}
                    if is_plain and runs_triton(weight.device, MANY_KERNELS):
                        together[work.weight.dtype, work.grad.dtype, work.state["exp_avg"].dtype].append(work)
                    else:
                        self._step(work)
                place += 1
        for same in together.values():
            from whet.kernels import compact_adamw_triton

            where = same[0].weight.device
            tables = [_there(table, signed, where) for table in (_codes, _nearest) for signed in (True, False)]
            compact_adamw_triton.step(same, tables, self._rounding, BLOCK)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict` in its own dtypes. (torch's own method would convert to the parameter's dtype.)"""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, stored in state_dict["state"].items():
            parameter = parameters[place]
            self.state[parameter] = {
                name: value.to(parameter.device if value.dim() else HOST, copy=True) for name, value in stored.items()
            }

    def begin(self, parameter: torch.Tensor) -> State:
        """Returns the state of a parameter. A new state has moments of 0."""
        state: State = self.state[parameter]
        if not state:
            own = own_part(parameter)
            state["step"] = torch.zeros(())
            self._codec(parameter).start(state, own)
            if self._rounding == "kahan":
                state["lost"] = torch.zeros_like(own)
        return state

    def _codec(self, parameter: torch.Tensor) -> Codec:
        is_small = parameter.numel() < SMALL or parameter.dim() < 2
        return self._small if is_small else self._large

    def _begin(self, parameter: nn.Parameter, group: dict[str, Any], place: int) -> Work:
        """Begins a step of parameter number `place`: counts the step, collects tensors, random bits and factors."""
        codec, state, part = self._codec(parameter), self.begin(parameter), RankPart.of(parameter)
        assert parameter.grad is not None
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2), lr = group["betas"], group["lr"]
        draws = Draws(key(self._seed, "optimizer", place, step), part)
        root, kept, rate = (1 - beta2**step) ** 0.5, 1 - lr * group["weight_decay"], -lr / (1 - beta1**step)
        factors = 1 - beta1, beta2, 1 - beta2, root, group["eps"], kept, rate
        return Work(as_rows(part.own), as_rows(own_part(parameter.grad)), codec, state, draws, factors)

    def _step(self, work: Work) -> None:
        weight, grad, codec, state, draws, (new_share, old_square, new_square, root, eps, kept, rate) = work
        for at in chunks(weight):
            g = grad[at].float()
            first, second = codec.read(state, "exp_avg", at), codec.read(state, "exp_avg_sq", at)
            first.lerp_(g, new_share)
            second.mul_(old_square).addcmul_(g, g, value=new_square)
            codec.write(state, "exp_avg", at, first, None)
            codec.write(state, "exp_avg_sq", at, second, draws)
            scale = second.sqrt_().div_(root).add_(eps)
            new = weight[at].to(torch.float32, copy=self._rounding is not None).mul_(kept)
            new.addcdiv_(first, scale, value=rate)
            self._write(state, weight, at, new, draws)

    def _write(self, state: State, weight: torch.Tensor, at: slice, new: torch.Tensor, draws: Draws) -> None:
        """Stores new float32 weights, rounded by `weight_rounding`. (If unset, `new` is a view of float32 weights.)"""
        if self._rounding == "kahan":
            lost = as_rows(state["lost"])
            new.add_(lost[at])
            weight[at] = new
            lost[at] = new.sub_(weight[at])
        elif self._rounding == "stochastic":
            weight[at] = round_at_random(new, draws.upper(at))
        elif weight.dtype != torch.float32:
            weight[at] = new


class Work(NamedTuple):
    """The data for one step of a weight, or of this rank's part of it."""

    weight: torch.Tensor  # [rows, product of the other dimensions]
    grad: torch.Tensor
    codec: Codec
    state: State
    draws: Draws
    factors: tuple[float, ...]  # 1 - beta1, beta2, 1 - beta2, root(1 - beta2^t), eps, 1 - lr decay, -lr / (1 - beta1^t)


class RankPart(NamedTuple):
    """A rank's part of a weight: consecutive rows, and a range of columns of these rows."""

    own: torch.Tensor
    first_row: int
    first_column: int
    columns: int  # of the whole weight

    @classmethod
    def of(cls, weight: torch.Tensor) -> RankPart:
        """Returns this rank's part of a sharded weight; the whole weight if it is not sharded."""
        columns = math.prod(weight.shape[1:]) if weight.dim() > 1 else weight.numel()
        if not isinstance(weight, DTensor):
            return cls(weight.detach(), 0, 0, columns)
        _, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        own = own_part(weight)
        if weight.dim() < 2:
            return cls(own, 0, start[0] if weight.dim() else 0, columns)
        inner = [math.prod(weight.shape[dim + 1 :]) for dim in range(1, weight.dim())]
        return cls(own, start[0], sum(at * size for at, size in zip(start[1:], inner, strict=True)), columns)


def own_part(weight: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a weight, detached; the whole weight if it is not sharded."""
    return weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()


class Draws:
    """Random bits for a part of a weight, 32 for each number. They depend only on the key and on the number's place in
    the whole weight."""

    def __init__(self, seed: int, part: RankPart) -> None:
        self.keys = [(seed >> shift) & 0x7FFFFFFF for shift in (0, 31)]
        self.part = part
        self._made: tuple[slice, torch.Tensor] | None = None

    def lower(self, at: slice) -> torch.Tensor:
        """Returns the lower 16 of the 32 random bits for each number of the rows `at`."""
        return self._bits(at).bitwise_and(HALF - 1)

    def upper(self, at: slice) -> torch.Tensor:
        """Returns the upper 16 of the 32 random bits for each number of the rows `at`."""
        return self._bits(at).bitwise_right_shift(16).bitwise_and_(HALF - 1)

    def _bits(self, at: slice) -> torch.Tensor:
        if self._made is None or self._made[0] != at:
            own, first_row, first_column, columns = self.part
            rows = torch.arange(first_row + at.start, first_row + at.stop, device=own.device) * columns + first_column
            along = torch.arange(as_rows(own).shape[1], device=own.device, dtype=torch.int32)
            bits = rows.to(torch.int32)[:, None] + along  # int32 arithmetic wraps around
            for number in self.keys:
                _mix(bits.bitwise_xor_(number))
            self._made = at, bits
        return self._made[1]


def _mix(bits: torch.Tensor) -> None:
    """Mixes the bits of 32-bit numbers in place by a bijection: Wellons' lowbias32,
    https://nullprogram.com/blog/2018/07/31.

    Right shifts of negative numbers shift in ones; the masks clear these bits."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def round_at_random(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Rounds float32 values to one of the two nearest bfloat16 values, more often to the nearer one, so that the mean
    is exact. `bits` are 16 random bits for each value. The result stays float32; infinity and NaN do not change."""
    return (values.view(torch.int32) + bits).bitwise_and_(-HALF).view(torch.float32)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor as [rows, product of the other dimensions]. A vector is one row."""
    if tensor.dim() < 2:
        return tensor.view(1, -1)
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))


def chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Yields slices of rows. The rows of a slice are processed together."""
    count = max(1, CHUNK // max(1, rows.shape[1]))
    if rows.numel():
        for start in range(0, len(rows), count):
            yield slice(start, min(start + count, len(rows)))


class Exact:
    """Keeps the moments of one parameter in float32."""

    dtype = torch.float32

    def start(self, state: State, own: torch.Tensor) -> None:
        """Adds moments of 0 to `state`, for a weight or this rank's part of it."""
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(own, dtype=self.dtype)

    def read(self, state: State, name: str, at: slice) -> torch.Tensor:
        """Returns a copy of some rows of a moment in float32."""
        return as_rows(state[name])[at].to(torch.float32, copy=True)

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draws: Draws | None) -> None:
        """Stores rows of a moment. The caller passes `draws` if rounding to nearest would lose the change."""
        as_rows(state[name])[at] = values


class Rounded(Exact):
    """Keeps moments in bfloat16, the upper half of float32."""

    dtype = torch.bfloat16

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draws: Draws | None) -> None:
        """Stores rows of a moment, rounded to nearest, or at random if there are `draws`."""
        as_rows(state[name])[at] = values if draws is None else round_at_random(values, draws.lower(at))


class Blocks:
    """Keeps moments as 8-bit codes with a float32 scale for each block. A row's last block may be shorter."""

    def start(self, state: State, own: torch.Tensor) -> None:
        """Adds moments of 0 to `state`."""
        rows = as_rows(own)
        for name in ("exp_avg", "exp_avg_sq"):
            zero = int((_codes(name == "exp_avg") == 0).nonzero())
            state[name] = torch.full_like(own, zero, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(len(rows), -(-rows.shape[1] // BLOCK), device=own.device)

    def read(self, state: State, name: str, at: slice) -> torch.Tensor:
        """Returns rows of a moment as float32."""
        codes = as_rows(state[name])[at]
        table = _there(_codes, name == "exp_avg", codes.device)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
        return _blocks(values).mul_(state[f"{name}_scale"][at, :, None]).flatten(1)[:, : codes.shape[1]].contiguous()

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draws: Draws | None) -> None:
        """Stores rows of a moment. A positive second moment stays positive, because the update divides by its root."""
        blocks = _blocks(values)
        scale = blocks.abs().amax(2)
        state[f"{name}_scale"][at] = scale
        shares = (blocks / scale[:, :, None].clamp(min=torch.finfo(torch.float32).tiny)).flatten(1)
        shares = shares[:, : values.shape[1]].contiguous()
        upper_bits = shares.view(torch.int32).bitwise_right_shift_(LOWER).bitwise_and_(2 ** (32 - LOWER) - 1)
        codes = _there(_nearest, name == "exp_avg", values.device).index_select(0, upper_bits.flatten())
        as_rows(state[name])[at] = codes.view(values.shape)


Codec = Exact | Blocks


@cache
def _codes(signed: bool) -> torch.Tensor:
    """Returns the 256 code values, ascending: seven decades, each with twice as many values as the one below."""
    decades = []
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        middles = 0.1 + 0.9 * (torch.arange(count) + 0.5) / count
        decades.append(middles * 10.0 ** (decade - 6))
    positive = torch.cat(decades)
    ends = torch.tensor([0.0, 1.0])
    return torch.cat([-positive, positive, ends] if signed else [positive, ends]).sort().values


@cache
def _nearest(signed: bool) -> torch.Tensor:
    """Returns a table from the upper bits of a float32 to its nearest code. A search would take ten times as long."""
    codes, upper_bits = _codes(signed), torch.arange(2 ** (32 - LOWER), dtype=torch.int64)
    numbers = ((upper_bits << LOWER) + 2 ** (LOWER - 1)).to(torch.int32).view(torch.float32).nan_to_num(1.0)
    nearest = torch.bucketize(numbers, (codes[1:] + codes[:-1]) / 2)
    if not signed:
        nearest[1:].clamp_(min=1)
    return nearest.to(torch.uint8)


@cache
def _there(table: Callable[[bool], torch.Tensor], signed: bool, device: torch.device) -> torch.Tensor:
    """Returns `table(signed)` on the device. The table is copied to each device once."""
    return table(signed).to(device)


def _blocks(rows: torch.Tensor) -> torch.Tensor:
    """Splits rows into blocks, padded with zeros: [rows, columns] -> [rows, blocks, BLOCK]."""
    missing = -rows.shape[1] % BLOCK
    return (F.pad(rows, (0, missing)) if missing else rows).unflatten(1, (-1, BLOCK))
