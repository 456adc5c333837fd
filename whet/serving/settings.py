# SPDX-License-Identifier: Apache-2.0
"""The options of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.config.schema import Dtype


@dataclass(frozen=True)
class Settings:
    """Values of the options of `whet serve`, which has the defaults. A sample is one of the n responses to a prompt."""

    model: str  # a Hugging Face folder or hub name, a checkpoint, or a run
    name: str | None  # of the model for clients; unset: the last part of its path
    follow: bool  # load new checkpoints of the run
    best: bool  # the run's checkpoint with the best validation, not the newest
    engine: str
    option: Mapping[str, Any]  # of the engine
    dtype: Dtype
    host: str
    port: int  # 0: a free one
    api_key: str | None
    max_tokens: int  # of a response whose request names no limit
    max_running: int  # samples decoded together
    max_waiting: int  # samples beyond these; more are refused
    max_body_mib: float
    deadline_seconds: float  # of a request
    stop_seconds: float  # for running requests to end, once the server is to stop
    trust_remote_code: bool
