# SPDX-License-Identifier: Apache-2.0
"""A pretend accelerator: tensors that say `gpu:0` over host memory, and a check of every operation on them.

    python -m tests.pretend_gpu MODULE:FUNCTION '{"argument": 1}'

calls the function where torch.accelerator finds this device, and prints what it returned as JSON. In a process of its
own, as torch cannot forget a device. torch's PrivateUse1 gives the name, `Pretend.__torch_dispatch__` sees every
operation: it raises where devices mix as on a real one (a host tensor without dimensions may join), runs the operation
on the host's memory, and counts in `LOG` what the host waits for and what is copied how. Numbers and autograd are real.
A copy to the host that was not waited for holds NaN until `torch.accelerator.synchronize`. Not seen: streams, memory,
a kernel's rounding, compilation, several devices.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
NAME = "gpu"
LOG: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)  # places by kind
_late: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies on their way to the host

# Results whose size depends on numbers: the host has to ask for it.
ASKS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "is_nonzero", "equal"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
NARROWED = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")  # by autocast


def waits() -> int:
    """How often the host waited for the device so far."""
    return sum(sum(places.values()) for kind, places in LOG.items() if kind.startswith("wait"))


def note(kind: str) -> None:
    """Counts one, at the innermost line of whet."""
    lines = [frame for frame in traceback.extract_stack() if "/whet/" in frame.filename]
    where = f"{lines[-1].filename.rpartition('/whet/')[2]}:{lines[-1].lineno}" if lines else "elsewhere"
    LOG[kind][where] += 1


class Pretend(torch.Tensor):
    """A tensor of the device; `host` holds its numbers."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Pretend:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
        )
        made.host = host
        return made

    def __repr__(self) -> str:
        return f"on {NAME}: {self.host!r}"

    def tolist(self) -> Any:
        note("wait: copy to the host")
        return self.host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{NAME}:0 tensor to numpy: use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        raise RuntimeError(f"data_ptr of a {NAME}:0 tensor: a kernel for the host would read there")

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretend:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made._is_param = True
        memo[id(self)] = made
        return made

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, Pretend):
            raise RuntimeError("data of another device")
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.host = other.host

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operation, args, kwargs or {})


class Everywhere(TorchDispatchMode):
    """Records operations without a tensor of the device too: operations that create one."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(operation, args, kwargs or {})


def dispatch(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the host's memory of its arguments."""
    given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = [each for each in given if isinstance(each, Pretend)]
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if not ours and wanted != NAME:
        return operation(*args, **kwargs)
    name = operation.overloadpacket.__name__
    if operation.namespace != "aten":
        keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key) for key in keys):
            raise NotImplementedError(f"{operation} has no kernel for an accelerator")
    copies = name in ("_to_copy", "copy_", "_copy_from")
    if copies:
        is_ours = _note_copy(name, args, kwargs, wanted)
    else:
        is_ours = wanted in (None, NAME) and name != "_local_scalar_dense"
        _check_devices(operation, name, args, given, ours)
        _note_wait(name, args, kwargs)
    if wanted == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    late = copies and not is_ours and kwargs.pop("non_blocking", False)
    kwargs = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking") or not value}
    bare, named = tree_map(lambda each: each.host if isinstance(each, Pretend) else each, (args, kwargs))
    found = operation(*bare, **named)
    if late:
        _late.append((found, found.clone()))
        return found.fill_(float("nan") if found.is_floating_point() else -(2**30))
    known = {id(each.host): each for each in ours}  # written in place

    def ours_again(each: Any) -> Any:
        if not isinstance(each, torch.Tensor) or isinstance(each, Pretend) or not is_ours:
            return each
        return known[id(each)] if id(each) in known else Pretend(each)

    result = tree_map(ours_again, found)
    if operation._schema.is_mutable and any(each.shape != each.host.shape for each in ours):
        raise NotImplementedError(f"{operation} changed the shape of a tensor")
    return result


def _check_devices(operation: Any, name: str, args: Any, given: list[Any], ours: list[Any]) -> None:
    if not ours:
        return
    for each in given:
        if isinstance(each, Pretend) or each.dim() == 0:
            continue
        if name in INDEXED and each is not args[0] and not (len(args) > 2 and each is args[2]):
            note("copy: index from pageable memory")
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu ({operation}, {each.shape})"
        )


def _note_wait(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    masks = [each for each in (args[1] or ()) if _is_mask(each)] if name in INDEXED else []
    if name == "_local_scalar_dense":
        note("wait: a number is read")
    elif name in ASKS or masks or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note(f"wait: size of {name}")


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _note_copy(name: str, args: Any, kwargs: dict[str, Any], wanted: str | None) -> bool:
    """Whether the result lies on the device."""
    target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
    here = isinstance(source, Pretend)
    there = isinstance(target, Pretend) if target is not None else (here if wanted is None else wanted == NAME)
    is_async = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and bool(args[2]))
    if here and not there and not (is_async and target is None):
        note("wait: copy to the host")
    elif here and not there:
        note("copy: to the host")
    elif there and not here and source.dim():
        is_pinned = vars(source).get("is_in_pinned_memory", False)
        note("copy: pinned" if is_pinned and is_async else "copy: pageable")
    return there


class Device(backend_registration._DummyBackendModule):
    """The object that torch.get_device_module returns."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        pass


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class Event:
    """A mark in the device's work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        synchronize()


def synchronize(*_: Any) -> None:
    note("wait: synchronize")
    for copy, numbers in _late:
        copy.copy_(numbers)
    _late.clear()


def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    made = tensor.clone()
    made.is_in_pinned_memory = True  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def present() -> Iterator[None]:
    """torch.accelerator finds the device, from now on until the process ends."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Device(), None, Guard())
    torch.accelerator.synchronize = synchronize  # type: ignore[assignment]
    torch._dynamo.config.disable = True  # no compiler knows the device, and one that tries keeps references to weights
    torch.Event = Event  # type: ignore[assignment,misc]
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.get_memory_info = lambda *_: (64 * 2**30, 80 * 2**30)  # type: ignore[assignment]
    torch.accelerator.memory_reserved = torch.accelerator.memory_allocated = lambda *_: 0  # type: ignore[assignment]
    torch.accelerator.max_memory_allocated = lambda *_: 3 * 2**30  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment,method-assign]
    torch.__future__.set_swap_module_params_on_conversion(True)  # else Module.to unties what is tied: the types differ
    autocast = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    for name in NARROWED:
        autocast.impl(name, _narrowed(getattr(aten, name).default))
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="gpu") goes by way of the host
    with Everywhere():
        yield


def _narrowed(operation: Any) -> Any:
    def narrow(*args: Any, **kwargs: Any) -> Any:
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(key):
            dtype = torch.get_autocast_dtype(NAME)
            wide = (torch.float32, torch.bfloat16)
            return operation(
                *(each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype in wide else each for each in args),
                **kwargs,
            )

    return narrow


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    call = getattr(importlib.import_module(module), function)
    with present():
        result = call(**json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps({"result": result, "log": LOG}) + "\n")


if __name__ == "__main__":
    sys.modules["tests.pretend_gpu"] = sys.modules["__main__"]  # one log, whoever imports it
    main()
