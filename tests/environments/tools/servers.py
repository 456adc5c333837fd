# SPDX-License-Identifier: Apache-2.0
"""An MCP server for tests: as an object (`server`), on standard input and output, or with a port over HTTP."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

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
    """Raises, hangs or dies."""
    if what == "die":
        os._exit(7)
    if what == "hang":
        time.sleep(1000)
    raise ValueError(what)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(str(os.getpid()))
    if len(sys.argv) > 1 and sys.argv[1] != "stdio":
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
