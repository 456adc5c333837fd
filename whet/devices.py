# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a process, of any kind, and asynchronous copies to it."""

from __future__ import annotations

import ctypes
import logging
import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist

from whet.compiled import instruction_set

log = logging.getLogger(__name__)
HOST = torch.device("cpu")
# Of an accelerator: bytes of its libraries (0.5 GiB on an H100); allocated bytes per byte of tensors (1.05 to 1.13).
LIBRARY_BYTES, ALLOCATED = 2**30, 1.1
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # Linux's names of instructions for bfloat16 products; bf16: on Arm
# Values of ONEDNN_MAX_CPU_ISA, in lower case, with which oneDNN uses none of these instructions.
WITHOUT_BFLOAT16 = {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2", "avx512_core", "avx512_core_vnni"}
# Options of glibc's `mallopt` by number: bytes from which a block is a mapping of its own, freed bytes that are kept,
# and bytes by which the heap grows.
KEPT_BLOCKS = {-3: 2**25, -1: 2**29, -2: 2**26}

_share = 1.0  # the share of the accelerator's memory that this process may use


def count() -> int:
    """Returns the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def here() -> torch.device:
    """Returns the accelerator of this process; the host if there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return HOST if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def bfloat16_instructions() -> list[str]:
    """Returns the processor's bfloat16 matrix instructions that torch uses; empty without any.

    Like torch, this obeys ATEN_CPU_CAPABILITY (for kernels) and ONEDNN_MAX_CPU_ISA (for matrix products). AVX-512 alone
    has no such instruction."""
    found = BFLOAT16 & {*instruction_set().split()}
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    has_wide = "bf16" in found or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return sorted(found) if has_wide and limit.lower() not in WITHOUT_BFLOAT16 else []


def keep_freed_memory() -> None:
    """Makes glibc keep blocks that are freed, up to 512 MiB, for later ones. Otherwise each step of a small model
    returns memory to the system and takes it again, at a page fault per 4 KiB."""
    if not any(name.startswith("MALLOC_") for name in os.environ) and "malloc" not in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        with suppress(AttributeError, OSError):  # another C library
            for option, size in KEPT_BLOCKS.items():
                ctypes.CDLL(None).mallopt(option, size)


def accelerates_bfloat16() -> bool:
    """Tells whether the accelerator multiplies bfloat16 in hardware. Older accelerators convert every number."""
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    return bool(module.is_bf16_supported(including_emulation=False)) if module is torch.cuda else module is not None


class MemoryUse(NamedTuple):
    """The memory of an accelerator, in bytes."""

    free: int
    total: int
    held: int  # reserved by the allocator of this process
    allocated: int  # used by tensors of this process


def memory(device: torch.device | int) -> MemoryUse | None:
    """Returns the memory of an accelerator; None for the host, and for accelerators that do not report it."""
    if device == HOST:
        return None
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except RuntimeError:  # MPS has no such allocator
        return None
    held, allocated = torch.accelerator.memory_reserved(device), torch.accelerator.memory_allocated(device)
    return MemoryUse(min(free, max(0, round(_share * total) - held)), round(_share * total), held, allocated)


def take_share(share: float) -> None:
    """Limits this process to a share of its accelerator's memory."""
    global _share
    _share = share
    if share < 1 and here().type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)


def needed_for_tensors(tensor_bytes: int) -> int:
    """Returns the accelerator memory, in bytes, that a process with `tensor_bytes` of tensors needs."""
    return LIBRARY_BYTES + round(ALLOCATED * tensor_bytes)


def room_for_tensors(device_bytes: float) -> float:
    """Returns how many bytes of tensors fit into `device_bytes` of accelerator memory."""
    return (device_bytes - LIBRARY_BYTES) / ALLOCATED


@cache
def runs_triton(device: torch.device, otherwise: str) -> bool:
    """Tells whether Triton compiles for the device. If not on an accelerator, warns once; `otherwise` is the effect."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return True
    if device != HOST:
        log.warning("no Triton on %s: %s", device, otherwise)
    return False


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device`. From the host it copies asynchronously through pinned memory."""
    if tensor.device.type == device.type:
        return tensor
    return (tensor.pin_memory() if tensor.device == HOST else tensor).to(device, non_blocking=device != HOST)


def synchronize(device: torch.device) -> None:
    """Waits for all work on `device`."""
    if device != HOST:
        torch.accelerator.synchronize(device)


def release(device: torch.device) -> None:
    """Frees cached memory of the device that no tensor uses."""
    if device != HOST:
        torch.accelerator.empty_cache()


def backends(device_type: str) -> str:
    """Returns the backends of a process group: gloo on the host, and the accelerator's own."""
    own = dist.get_default_backend_for_device(device_type)
    return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"


def open_store(address: str, deadline_seconds: float) -> dist.TCPStore:
    """Opens the store through which the processes of a group find each other, on any free port of this address only."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_seconds),
        master_listen_fd=listener.detach(),
    )
