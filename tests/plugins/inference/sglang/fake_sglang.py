# SPDX-License-Identifier: Apache-2.0
"""A server that answers as SGLang's does, without a model: token n of a response is n + 3, its log-prob -1 / (n + 1).

The first token of a prompt says what happens: see the constants."""

from __future__ import annotations

import base64
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
sys.path.append(str(Path(__file__).parents[4] / "whet" / "plugins" / "inference" / "servers" / "inside"))
from fake_http import TOKEN_SECONDS, JsonHandler, serve
from whet_weight_parts import weights_in

UPDATES = ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update")
QUICK, SLOW, REFUSED, ENDS = range(3, 7)


class State:
    """Shared by the threads of the server."""

    lock = threading.Condition()
    sent: dict[str, int] = {}  # tokens of running requests  # noqa: RUF012
    aborted: set[str] = set()  # noqa: RUF012
    paused = False
    version = "0"
    is_updating = False


class Handler(JsonHandler):
    """SGLang's paths."""

    def get(self) -> None:
        """Health and progress."""
        with State.lock:
            self.answer({"internal_states": [{"whet_sent": State.sent}]})

    def post(self, body: Any) -> None:
        """Handles requests, and calls that change the server."""
        if self.path == "/generate":
            self.generate(body)
            return
        with State.lock:
            if self.path == "/pause_generation":
                State.paused = True
            elif self.path == "/continue_generation":
                State.paused = False
            elif self.path == "/abort_request":  # of all whose names begin so
                State.aborted |= {name for name in State.sent if name.startswith(body["rid"])}
            elif (self.path == "/begin_weight_update") == State.is_updating and self.path in UPDATES:
                self.answer({"success": False, "message": "a weight-update session is already open"}, 400)
                return
            elif self.path in ("/begin_weight_update", "/end_weight_update"):
                State.is_updating = self.path == "/begin_weight_update"
            elif self.path == "/update_weights_from_tensor":
                weights = dict(weights_in(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))))
                if "model.norm.weight" in weights and not weights["model.norm.weight"].any():
                    self.answer({"success": False, "message": "zeros"}, 400)
                    return
            elif self.path == "/update_weight_version":
                State.version = body["new_version"]
            State.lock.notify_all()
        self.answer({})

    def generate(self, body: dict[str, Any]) -> None:
        """Tokens, one after the other."""
        name, kind, total = body["rid"], body["input_ids"][0], body["sampling_params"]["max_new_tokens"]
        if kind == REFUSED:
            self.answer({"error": "a bad request"}, 400)
            return
        if kind == ENDS:
            os._exit(0)
        self.begin_stream()
        first, spans, count, reason = len(body["input_ids"]) - 2, list[dict[str, Any]](), 0, None
        with State.lock:
            State.sent[name] = 0
        while reason is None:
            with State.lock:
                if State.paused and name not in State.aborted:
                    State.lock.wait(0.05)
                    continue
                if not spans or spans[-1]["version"] != State.version:
                    spans.append({"version": State.version, "start": count})
                count += 1
                spans[-1]["end"] = State.sent[name] = count
                kinds = {"abort": name in State.aborted, "length": count == total}
                reason = next(({"type": each} for each, holds in kinds.items() if holds), None)
                place = first + count - 1
                about = {"finish_reason": reason, "completion_tokens": count, "weight_versions": spans}
                about["output_token_logprobs"] = [[-1 / (place + 1), place + 3, None]]
                self.chunk({"output_ids": [place + 3], "meta_info": about})
            if kind == SLOW:
                time.sleep(TOKEN_SECONDS)
        with State.lock:
            del State.sent[name]
        self.chunk(None)


if __name__ == "__main__":
    serve(Handler)
