# SPDX-License-Identifier: Apache-2.0
"""The command `whet serve-sandbox`."""

from __future__ import annotations

from typing import Annotated

import typer

from whet.errors import ConfigError, of_extra
from whet.registry import register_command


@register_command("serve-sandbox", panel="After training")
def serve_sandbox(
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WHET_SANDBOX_KEY", help="key that clients must send; unset: none", metavar="KEY"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="programs at a time; unset: one for each core")] = None,
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or unisolated: only Landlock confines it")] = "bubblewrap",
    python: Annotated[str | None, typer.Option(help="Python interpreter of programs; unset: whet's own")] = None,
    path: Annotated[list[str] | None, typer.Option(help="folder that programs may read; may be repeated")] = None,
) -> None:
    """Serve a sandbox for untrusted programs.

    It answers POST /run_code as SandboxFusion does. A run uses it with reward.kwargs.sandbox=http://HOST:PORT, and with
    the key in the environment variable WHET_SANDBOX_KEY."""
    import os

    from whet.programs.protocol import open_sandbox

    if sandbox not in ("bubblewrap", "unisolated"):
        raise ConfigError("--sandbox", sandbox, "bubblewrap or unisolated, which can be served", "name one of them")
    with of_extra("serve", "starlette", "uvicorn"):
        from whet.plugins.sandbox.server import bound_to, serve as run
    box = open_sandbox(sandbox, python, paths=tuple(path or ()))
    with bound_to(host, port) as bound:
        typer.echo(f"programs run in {box.name}; POST http://{host}:{port}/run_code; Ctrl-C ends it")
        run(box, bound, host, concurrency or os.cpu_count() or 1, api_key)
