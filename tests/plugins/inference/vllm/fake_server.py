# SPDX-License-Identifier: Apache-2.0
"""A server that answers as vLLM's does, without a model: token n of a response is n + 3, and its log-prob -1 / (n + 1).

The first token of a prompt says what happens: see the constants. With the argument `old` it is as vLLM 0.26: without
what whet adds to 0.32, the versions of tokens, and the reason of a stream that was aborted.
"""

from __future__ import annotations

import os
import socket
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

NONE = ("finish_reason", "stop_reason", "weight_versions")
UPDATES = ("/start_weight_update", "/update_weights", "/finish_weight_update")
IS_OLD = "old" in sys.argv
QUICK, SLOW, STUCK, REFUSED, GARBAGE, ENDS, KILLED, TOO_FEW, CUT = range(3, 12)


class State:
    """Shared by the threads of the server."""

    lock = threading.Condition()
    requests: dict[str, dict[str, Any]] = {}  # by id, as the server names it  # noqa: RUF012
    paused = False
    version = "default"
    is_updating = False
    calls: list[str] = []  # noqa: RUF012
    bodies: list[Any] = []  # of requests  # noqa: RUF012
    sampled = 0  # tokens


class Handler(JsonHandler):
    """vLLM's paths."""

    def get(self) -> None:
        """Health and requests."""
        with State.lock:
            requests = dict(State.requests)
        if self.path == "/health":
            self.answer({})
        elif self.path == "/metrics":
            text = f'# HELP\nvllm:generation_tokens_total{{engine="0",model_name="m"}} {State.sampled}.0\nvllm:x 7.0\n'
            self.answer(text)
        elif self.path == "/bodies":
            self.answer(State.bodies)
        elif IS_OLD and self.path.startswith("/whet"):
            self.answer({"error": "no such path"}, 404)
        elif self.path == "/whet/requests?count":
            self.answer({"tokens": sum(len(each["token_ids"]) for each in requests.values())})
        elif self.path == "/whet/requests":
            self.answer([{"request_id": name, **each} for name, each in requests.items()])
        elif self.path == "/calls":
            self.answer(State.calls)

    def post(self, body: Any) -> None:
        """Handles requests, and calls that change the server."""
        State.calls.append(self.path)
        if self.path == "/inference/v1/generate":
            State.bodies.append(body)
            self.generate(body)
            return
        with State.lock:
            if self.path.startswith("/pause"):
                State.paused = True
            elif self.path == "/resume":
                State.paused = False
            elif self.path == "/abort_requests":
                for name in body["request_ids"]:
                    if name in State.requests:
                        State.requests[name]["aborted"] = True
            elif (self.path == "/start_weight_update") == State.is_updating and self.path in UPDATES:
                self.answer({"error": "start_weight_update called while a weight update is already active"}, 500)
                return
            elif self.path == "/start_weight_update":
                State.is_updating = True
            elif self.path == "/update_weights":
                names = [name for name, _ in weights_in(body["update_info"]["part"][0])]
                State.calls[-1] += " " + " ".join(names)
                if "refused" in names:
                    State.is_updating = False
                    self.answer({"error": "no such weight"}, 500)
                    return
            elif self.path == "/finish_weight_update":
                State.version, State.is_updating = body["weight_version"], False
            elif self.path == "/collective_rpc" and body["method"] == "abandon_update":
                State.is_updating = False
            elif self.path == "/update_weight_version":
                State.version = body["new_version"]
            elif self.path in ("/v1/load_lora_adapter", "/collective_rpc"):
                folder = body.get("lora_path") or body["args"][1]
                State.calls[-1] += " " + " ".join(sorted(each.name for each in Path(folder).iterdir()))
            State.lock.notify_all()
        self.answer({})

    def generate(self, body: dict[str, Any]) -> None:
        """Tokens, one after the other."""
        name, kind, params = f"generate-tokens-{body['request_id']}", body["token_ids"][0], body["sampling_params"]
        if kind == REFUSED:
            self.answer({"error": "a bad request"}, 400)
        elif kind == GARBAGE:
            self.answer({"nothing": "of use"})
        elif kind == ENDS:
            os._exit(0)
        elif kind == KILLED:
            os.abort()
        elif kind == CUT and not name.endswith("-again"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        if REFUSED <= kind < TOO_FEW or (kind == CUT and not name.endswith("-again")):
            return
        state = {"token_ids": [], "log_probs": [], "weight_versions": [], "aborted": False}
        with State.lock:
            State.requests[name] = state
        extra, streams = params["extra_args"], body.get("stream", False)
        first = len(body["token_ids"]) - 2 if extra is None else extra["sampled"]  # prompts have two
        if streams:
            self.begin_stream()
        while len(state["token_ids"]) < params["max_tokens"] and not state["aborted"]:
            with State.lock:
                if State.paused or kind == STUCK:
                    State.lock.wait(0.05)
                    continue
                self.add(state, first + len(state["token_ids"]))
            if streams:
                token, log_prob = state["token_ids"][-1], {"logprob": state["log_probs"][-1]}
                none = {"finish_reason": None} if IS_OLD else dict.fromkeys(NONE)
                self.chunk({"choices": [{"token_ids": [token], "logprobs": {"content": [log_prob]}, **none}]})
            if kind == SLOW:
                time.sleep(TOKEN_SECONDS)
        with State.lock:
            del State.requests[name]
        tokens, log_probs = state["token_ids"], state["log_probs"]
        choice = {
            "token_ids": tokens[:-1] if kind == TOO_FEW else tokens,
            "logprobs": {"content": [{"logprob": each} for each in log_probs]},
            "finish_reason": "abort" if state["aborted"] else "length",
            "stop_reason": None,
            "weight_versions": state["weight_versions"] or None,
        }
        if IS_OLD:
            del choice["stop_reason"], choice["weight_versions"]
        if streams:
            if not (IS_OLD and state["aborted"]):
                self.chunk({"choices": [{**choice, "token_ids": [], "logprobs": None}]})
            self.chunk(None)
        else:
            self.answer({"choices": [choice]})

    @staticmethod
    def add(state: dict[str, Any], place: int) -> None:
        """Appends the token at `place` of a response."""
        State.sampled += 1
        state["token_ids"].append(place + 3)
        state["log_probs"].append(-1 / (place + 1))
        spans, count = state["weight_versions"], len(state["token_ids"])
        if not spans or spans[-1]["version"] != State.version:
            spans.append({"version": State.version, "start": count - 1, "end": count})
        spans[-1]["end"] = count


if __name__ == "__main__":
    serve(Handler)
