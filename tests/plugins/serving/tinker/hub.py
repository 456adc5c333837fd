# SPDX-License-Identifier: Apache-2.0
"""A hub on this machine with the part of the API that downloads of models and data sets use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "1" * 40


@contextmanager
def serving(repos: Mapping[str, Path]) -> Iterator[str]:
    """Serves folders as repositories: `models/OWNER/NAME` and `datasets/OWNER/NAME`.  Yields the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/revision/[^/]+)?", path):
                return self._info(found[1])
            if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
                files = [each for each in self._files(found[1]) if each["path"].startswith(found[2])]
                return self._json(files if files or not found[2] else None)
            if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                return self._file(f"{found[1] or 'models/'}{found[2]}", found[3])
            return self._json(None)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/paths-info/[^/]+", self.path)
            if found is None:
                return self._json(None)
            asked = json.loads(body)["paths"] if body[:1] == b"{" else re.findall(r"paths=([^&]+)", body.decode())
            return self._json([each for each in self._files(found[1]) if each["path"] in asked])

        def log_message(self, *_: Any) -> None:
            pass

        def _files(self, repo: str) -> list[dict[str, Any]]:
            folder = repos.get(repo)
            paths = [] if folder is None else sorted(each for each in folder.rglob("*") if each.is_file())
            return [_entry(each, str(each.relative_to(folder))) for each in paths]

        def _info(self, repo: str) -> None:
            siblings = [{"rfilename": each["path"]} for each in self._files(repo)]
            told = {"id": repo.partition("/")[2], "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
            self._json(told if repo in repos else None)

        def _file(self, repo: str, name: str) -> None:
            folder = repos.get(repo)
            if folder is None or not (folder / name).is_file():
                self._json(None)
            else:
                content = (folder / name).read_bytes()
                self._send(200, content, {"ETag": f'"{_digest(folder / name)}"', "X-Repo-Commit": COMMIT})

        def _json(self, told: Any) -> None:
            code = {} if told is not None else {"X-Error-Code": "EntryNotFound", "X-Error-Message": "not here"}
            content = json.dumps(told if told is not None else {"error": "not here"}).encode()
            self._send(200 if told is not None else 404, content, {"Content-Type": "application/json", **code})

        def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _entry(path: Path, name: str) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path)}


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
