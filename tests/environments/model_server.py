# SPDX-License-Identifier: Apache-2.0
"""A model server for tests: it answers OpenAI's and Ollama's requests by a rule that reads the screenshot."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from whet_environments.devices import number_agent, tree_agent
from whet_environments.devices.backends import Question

KINDS = {
    (agent, text): kind
    for agent in (number_agent, tree_agent)
    for prompts in agent.PROMPTS.values()
    for kind, text in prompts.items()
}


def rule(text: str, png: bytes | None) -> str:
    """The answer of a game's rule to the text of a question."""
    for (agent, prompt), kind in KINDS.items():
        if text.startswith(prompt.partition("{")[0]):
            return str(agent.rule(Question(kind, text, png)))
    return "What is the question?"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *words: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, dict(self.headers)))
        if self.path == "/v1/chat/completions":
            text, image = body["messages"][0]["content"], None
            if isinstance(text, list):
                text, image = text[0]["text"], text[1]["image_url"]["url"].removeprefix("data:image/png;base64,")
            png = base64.b64decode(image, validate=True) if image else None
            reply: Any = {"choices": [{"message": {"role": "assistant", "content": self.server.answer(text, png)}}]}
        elif self.path == "/v1/completions":
            reply = {"choices": [{"text": self.server.answer(body["prompt"], None)}]}
        else:
            assert self.path == "/api/generate" and body["stream"] is False
            png = base64.b64decode(body["images"][0], validate=True) if "images" in body else None
            reply = {"model": body["model"], "response": self.server.answer(body["prompt"], png), "done": True}
        data = self.server.raw or json.dumps(reply).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            for start in range(0, len(data), self.server.piece):
                time.sleep(self.server.pause_seconds)
                self.wfile.write(data[start : start + self.server.piece])
        except OSError:
            pass  # the client has gone


@contextmanager
def serving(answer: Any = rule, **how: Any) -> Iterator[Any]:
    """Serves on 127.0.0.1; yields the server, with `url` and the list `requests`."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    settings = {
        "answer": answer,
        "requests": [],
        "status": 200,
        "raw": b"",
        "piece": 10**9,
        "pause_seconds": 0.0,
        **how,
    }
    vars(server).update(settings)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
