# SPDX-License-Identifier: Apache-2.0
"""A server of the games' pages on 127.0.0.1, for a browser on this machine or, by `adb reverse`, on a phone."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

PAGES = Path(__file__).parent / "pages"
FILES = {"number-game": "number_game.html", "tree-game": "tree_game.html"}


class _Handler(SimpleHTTPRequestHandler):
    timeout = 10  # seconds for which a connection may be silent

    def log_message(self, *words: Any) -> None:
        """Says nothing."""


class PageServer:
    """Serves the pages while the `with` block runs."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(PAGES)))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def url(self, game: str, seed: int, rounds: int = 10, lang: str = "en") -> str:
        """The address of a game's page."""
        asked = {"seed": seed, "rounds": rounds} | ({} if lang == "en" else {"lang": lang})
        return f"http://127.0.0.1:{self.port}/{FILES[game]}?{urlencode(asked)}"

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10.0)
