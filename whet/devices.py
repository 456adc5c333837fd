# SPDX-License-Identifier: Apache-2.0
"""The accelerator of a process, of any kind, and asynchronous copies to it."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

HOST = torch.device("cpu")


def count() -> int:
    """Returns the number of accelerators that this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def here() -> torch.device:
    """The accelerator of this process; the host if there is none."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return HOST if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to `device`; from the host through pinned memory, and asynchronously."""
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
    """The backends of a process group: gloo on the host, and the accelerator's own."""
    own = dist.get_default_backend_for_device(device_type)
    return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"


def open_store(address: str, deadline_seconds: float) -> dist.TCPStore:
    """Opens the store at which processes meet. It listens on this address only, on a port that is reserved first."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_seconds),
        master_listen_fd=listener.detach(),
    )
