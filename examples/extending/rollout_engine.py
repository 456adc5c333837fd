# SPDX-License-Identifier: Apache-2.0
"""A rollout engine of your own: whet train ... rollout.engine.name=examples/extending/rollout_engine.py:Recorded \\
rollout.engine.options.file=requests.jsonl

The parameters before `*` are whet's, by name: dtype, max_batch_size, load_tokenizer, device, num_devices, model,
cache_room.
whet/rollout/protocol.py has the methods of an engine; in a checkout the suite of the shipped ones runs with yours:
python -m pytest tests/rollout/test_engines.py --rollout-engine examples/extending/rollout_engine.py:Recorded \\
--rollout-engine-options '{"file": "requests.jsonl"}'"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Event, Finished


class Recorded(NativeEngine):
    """`native`, which writes each finished request into `file` as a line of JSON."""

    def __init__(
        self,
        dtype: torch.dtype,
        max_batch_size: int,
        load_tokenizer: Callable[[], Any] | None = None,
        *,
        file: str,
        kv_cache_bytes: int = 2**30,
    ) -> None:
        super().__init__(dtype, max_batch_size, load_tokenizer, kv_cache_bytes=kv_cache_bytes)
        self.file = Path(file)

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Decodes as `native` does, and writes the finished responses."""
        events = super().poll(timeout_seconds)
        with self.file.open("a", encoding="utf-8") as lines:
            for each in events:
                if isinstance(each, Finished):
                    done = each.completion
                    record = {"uid": each.uid, "token_ids": done.token_ids, "log_probs": done.log_probs}
                    lines.write(json.dumps(record) + "\n")
        return events
