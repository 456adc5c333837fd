# SPDX-License-Identifier: Apache-2.0
"""The start of an SGLang server: its command line and its variables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet import devices
from whet.rollout.servers.client import HOST
from whet.rollout.servers.process import variables

INSIDE = Path(__file__).parent / "inside"  # what SGLang's processes import, and nothing else of whet


def command(python: str, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """The command line of a server with these arguments; those that are false or None are left out."""
    flags = ["--host", HOST, "--port", str(port)]
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return [python, "-m", "whet_sglang", *flags]


def environment(threads: int, device: torch.device, num_devices: int, patches: Sequence[int] = ()) -> dict[str, str]:
    """The environment variables of a server that computes with so many threads, or on accelerators from `device` on.

    The server samples none of the tokens `patches`."""
    engine = {"SGLANG_USE_CPU_ENGINE": "1"} if device == devices.HOST else {}
    return variables(threads, device, num_devices, INSIDE) | engine | {"WHET_PATCHES": json.dumps(list(patches))}
