# SPDX-License-Identifier: Apache-2.0
"""The command `whet view`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from whet.registry import register_command


@register_command("view", panel="After training")
def view(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a run's folder, or a folder with runs in it")],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8100,
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Show runs on a page: curves, trajectories, tokens.

    The page follows a running run. It needs no network, and changes nothing."""
    import webbrowser

    from whet.plugins.viewer.server import open_server

    with open_server(folder, host, port) as server:
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"http://{shown}:{server.server_address[1]}/"
        typer.echo(f"{folder} at {url} (Ctrl-C ends it)")
        if open_page:
            webbrowser.open(url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
