# SPDX-License-Identifier: Apache-2.0
"""An MCP server for tests: as an object (`server`), on standard input and output, or with a port over HTTP, where it
asks for the header that the environment variable WANTED has."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("numbers")
noted: list[int] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@server.tool()
def note(value: int) -> str:
    """Notes a number in the session."""
    noted.append(value)
    return " ".join(map(str, noted))


@server.tool()
def bad(what: str) -> str:
    """Raises, hangs or dies; "once": the first of all sessions that share the file of MARK dies."""
    if what == "die":
        os._exit(7)
    if what == "once":
        try:
            Path(os.environ["MARK"]).touch(exist_ok=False)
        except FileExistsError:
            return "alive"
        os._exit(7)
    if what == "hang":
        time.sleep(1000)
    raise ValueError(what)


@server.tool()
def picture(png: str) -> list[str | Image]:
    """Shows a picture between words."""
    return ["before", "it", Image(data=bytes.fromhex(png), format="png"), "after"]


class Guarded:
    """An app that answers 401 without the header."""

    def __init__(self, app: Any, wanted: str) -> None:
        self.app, self.wanted = app, wanted.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or (b"authorization", self.wanted) in scope["headers"]:
            await self.app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(str(os.getpid()))
    if wanted := os.environ.get("WANTED"):
        import uvicorn

        uvicorn.run(Guarded(server.streamable_http_app(), wanted), host="127.0.0.1", port=int(sys.argv[1]))
    elif len(sys.argv) > 1 and sys.argv[1] != "stdio":
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
