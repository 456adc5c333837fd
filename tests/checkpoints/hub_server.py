# SPDX-License-Identifier: Apache-2.0
"""A server on this machine with the part of the hub's API that uploads use: repositories, LFS objects, commits."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """Files of each repository by path; a repository's visibility; the messages of commits."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that serves until the end of the block."""
    with Hub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._reply(401, {"error": "Invalid credentials in Authorization header"})
        parts = self.path.strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts[-1] == "batch":
            return self._batch(json.loads(body))
        repo, action = "/".join(parts[2:4]), parts[4]
        if repo not in self.server.files:
            return self._reply(404, {"error": "Repository not found"})
        if action == "preupload":
            return self._modes(json.loads(body))
        return self._commit(repo, [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        self.server.objects[digest] = content
        self._reply(200, {})

    def log_message(self, *_: Any) -> None:
        pass

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        url = f"{self.server.url}/{repo}"
        is_new = repo not in self.server.files
        if is_new:
            self.server.files[repo] = {}
            self.server.private[repo] = asked.get("visibility") == "private"
        self._reply(200 if is_new else 409, {"error": "" if is_new else "You already created this repo", "url": url})

    def _modes(self, asked: dict[str, Any]) -> None:
        def mode(path: str) -> str:
            return "lfs" if path.endswith((".safetensors", ".state")) else "regular"

        files = [
            {"path": each["path"], "uploadMode": mode(each["path"]), "shouldIgnore": False} for each in asked["files"]
        ]
        self._reply(200, {"files": files})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.server.url}/objects/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        self._reply(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[repo][value["path"]] = self.server.objects[value["oid"]]
        self._reply(
            200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/{repo}/commit/{'0' * 40}"}
        )

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
