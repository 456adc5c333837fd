# SPDX-License-Identifier: Apache-2.0
"""AdamW that keeps its two moments in 2 bytes a weight or in 1, and computes in float32.

`bfloat16`: the first moment is rounded to nearest. The second changes by 1 - beta2 = 0.1 % a step, less than half a
step of bfloat16, and would stand still; it is rounded up or down at random so that the mean is kept.
`int8`: blocks of 256 numbers, each one of 256 codes between -1 and 1 times the block's largest number. Codes are dense
near 0 and near 1 (dynamic tree quantisation). Dettmers et al. 2022, https://arxiv.org/abs/2110.02861. Tensors with
fewer numbers than `SMALL` stay float32, as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from whet.keyed import key

BLOCK = 256
SMALL = 4096
LOWER = 13  # bits of a float32 that choose no code: 10 of the mantissa are left, codes are 0.7 % apart or more
CHUNK = 2**20  # numbers that stand in float32 at once; a multiple of BLOCK
State = dict[str, torch.Tensor]


class CompactAdamW(torch.optim.Optimizer):
    """Decoupled weight decay as in torch.optim.AdamW (Loshchilov and Hutter 2019)."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: Literal["bfloat16", "int8"],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._small: Codec = Rounded() if state_dtype == "bfloat16" else Whole()
        self._large: Codec = Rounded() if state_dtype == "bfloat16" else Blocks()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the engine computes the loss before
        """Changes every parameter that has a gradient."""
        assert closure is None
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, place)
                place += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Puts back what `state_dict` gave, in the types that it has (torch's own would take the parameter's)."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, stored in state_dict["state"].items():
            parameter = parameters[place]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in stored.items()}

    def begin(self, parameter: nn.Parameter) -> State:
        """The state of a parameter, with moments of 0 where it has none yet."""
        state: State = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            self._codec(parameter).start(state, parameter)
        return state

    def _codec(self, parameter: nn.Parameter) -> Codec:
        return self._small if parameter.numel() < SMALL else self._large

    def _step(self, parameter: nn.Parameter, group: dict[str, Any], place: int) -> None:
        codec, state = self._codec(parameter), self.begin(parameter)
        state["step"] += 1
        step = int(state["step"])
        (beta1, beta2), lr = group["betas"], group["lr"]
        draw = torch.Generator(parameter.device).manual_seed(key(0, "second moment", place, step))
        weight, grad = parameter.view(-1), parameter.grad
        assert grad is not None
        for at, g in zip(_chunks(parameter.numel()), grad.reshape(-1).float().split(CHUNK), strict=True):
            first, second = codec.read(state, "exp_avg", at), codec.read(state, "exp_avg_sq", at)
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            codec.write(state, "exp_avg", at, first, None)
            codec.write(state, "exp_avg_sq", at, second, draw)
            scale = second.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
            weight[at].mul_(1 - lr * group["weight_decay"]).addcdiv_(first, scale, value=-lr / (1 - beta1**step))


class Codec(Protocol):
    """How the moments of one parameter are kept."""

    def start(self, state: State, parameter: torch.Tensor) -> None:
        """Puts moments of 0 into `state`."""
        ...

    def read(self, state: State, name: str, at: slice) -> torch.Tensor:
        """A moment as float32, in memory of its own."""
        ...

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draw: torch.Generator | None) -> None:
        """Keeps a moment. `draw` is given where rounding to nearest would lose it."""
        ...


class Whole:
    """float32."""

    dtype = torch.float32

    def start(self, state: State, parameter: torch.Tensor) -> None:
        """Moments of 0."""
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.numel(), dtype=self.dtype, device=parameter.device)

    def read(self, state: State, name: str, at: slice) -> torch.Tensor:
        """A moment as float32."""
        return state[name][at].to(torch.float32, copy=True)

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draw: torch.Generator | None) -> None:
        """Keeps a moment."""
        state[name][at] = values


class Rounded(Whole):
    """bfloat16: the upper half of float32."""

    dtype = torch.bfloat16

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draw: torch.Generator | None) -> None:
        """Keeps a moment; with `draw` a number between two is rounded up as often as it is near the upper one."""
        if draw is not None:
            noise = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=draw)
            values = (values.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32)
        state[name][at] = values


class Blocks:
    """8-bit codes and a float32 scale for each block."""

    def start(self, state: State, parameter: torch.Tensor) -> None:
        """Moments of 0."""
        count = -(-parameter.numel() // BLOCK)
        for name in ("exp_avg", "exp_avg_sq"):
            zero = int((_codes(name == "exp_avg") == 0).nonzero())
            state[name] = torch.full((parameter.numel(),), zero, dtype=torch.uint8, device=parameter.device)
            state[f"{name}_scale"] = torch.zeros(count, device=parameter.device)

    def read(self, state: State, name: str, at: slice) -> torch.Tensor:
        """A moment as float32."""
        codes = _codes(name == "exp_avg").to(state[name].device)
        values = codes.index_select(0, state[name][at].int())
        return _blocks(values).mul_(self._scale(state, name, at)).view(-1)[: len(values)]

    def write(self, state: State, name: str, at: slice, values: torch.Tensor, draw: torch.Generator | None) -> None:
        """Keeps a moment; what is above 0 stays above 0, as the first moment is divided by its root."""
        blocks, scale = _blocks(values), self._scale(state, name, at)
        torch.amax(blocks.abs(), 1, keepdim=True, out=scale)
        shares = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).view(-1)[: len(values)]
        upper_bits = shares.view(torch.int32).bitwise_right_shift_(LOWER).bitwise_and_(2 ** (32 - LOWER) - 1)
        state[name][at] = _nearest(name == "exp_avg").to(values.device).index_select(0, upper_bits)

    @staticmethod
    def _scale(state: State, name: str, at: slice) -> torch.Tensor:
        return state[f"{name}_scale"][at.start // BLOCK : -(-at.stop // BLOCK), None]


@cache
def _codes(signed: bool) -> torch.Tensor:
    """The 256 numbers that a code may mean, rising: seven decades, each with twice the numbers of the one below."""
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
    """The code nearest to every float32 number, by its upper bits: a search would take ten times as long."""
    codes, upper_bits = _codes(signed), torch.arange(2 ** (32 - LOWER), dtype=torch.int64)
    numbers = ((upper_bits << LOWER) + 2 ** (LOWER - 1)).to(torch.int32).view(torch.float32).nan_to_num(1.0)
    nearest = torch.bucketize(numbers, (codes[1:] + codes[:-1]) / 2)
    if not signed:
        nearest[1:].clamp_(min=1)
    return nearest.to(torch.uint8)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """[n] -> [blocks, BLOCK], zeros at the end."""
    return F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)


def _chunks(count: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
