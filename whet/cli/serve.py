# SPDX-License-Identifier: Apache-2.0
"""The commands that listen on a port: `whet serve`, `whet serve-sandbox` and `whet view`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from whet.cli.arguments import KeyValues, TrustRemoteCode
from whet.errors import ConfigError, pip_install


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="a model folder, a hub name, a checkpoint, or a run (its newest)")],
    name: Annotated[str | None, typer.Option(help="the model's name for clients; unset: last part of MODEL")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="load new checkpoints of the run as they come")] = False,
    best: Annotated[bool, typer.Option("--best", help="serve the run's checkpoint with the best validation")] = False,
    engine: Annotated[str, typer.Option(help="registered rollout engine, or path/file.py:MyEngine")] = "native",
    option: KeyValues = None,
    tool_parser: Annotated[str | None, typer.Option(help="format of tool calls; unset: the chat template's")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="dtype of sampling; auto: bfloat16 where the machine multiplies it"),
    ] = "auto",
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="WHET_API_KEY", help="key that clients must send; unset: none", metavar="KEY")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens of a response that names no limit")] = 2048,
    max_running: Annotated[int, typer.Option(min=1, help="most samples that are decoded together")] = 256,
    max_waiting: Annotated[int, typer.Option(min=0, help="most samples that wait; more get status 429")] = 1024,
    max_body_mib: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="largest body of a request, in MiB; unset: 4, with --tinker 16", show_default=False
        ),
    ] = None,
    deadline_seconds: Annotated[float, typer.Option(min=0.1, help="longest time of a request, in seconds")] = 600.0,
    stop_seconds: Annotated[float, typer.Option(min=1.0, help="seconds for running requests after Ctrl-C")] = 30.0,
    trust_remote_code: TrustRemoteCode = False,
    tinker: Annotated[bool, typer.Option("--tinker", help="train and sample for clients of the tinker SDK")] = False,
    folder: Annotated[
        str, typer.Option(help="folder of checkpoints, with --tinker", metavar="FOLDER")
    ] = "tinker-checkpoints",
    train_engine: Annotated[str, typer.Option(help="registered training engine, with --tinker")] = "single",
    ranks: Annotated[int, typer.Option(min=1, help="processes that train, with --tinker")] = 1,
) -> None:
    """Serve a model or a run to clients of OpenAI or Tinker.

    It answers /v1/chat/completions and /v1/completions, with streaming, tools, log-probs and token ids."""
    from whet.registry import ENGINES, ROLLOUT_ENGINES, TOOL_PARSERS

    others = ("follow", "best", "tool_parser", "max_tokens") if tinker else ("folder", "train_engine", "ranks")
    for each in others:
        if (source := context.get_parameter_source(each)) is not None and source.name == "COMMANDLINE":
            found = f"set {'beside' if tinker else 'without'} --tinker"
            raise ConfigError(f"--{each.replace('_', '-')}", found, change="leave it out")
    options = read_options(option or [])
    ROLLOUT_ENGINES[engine].resolve_options(options, "--option")
    ENGINES[train_engine]
    if tool_parser is not None:
        TOOL_PARSERS[tool_parser].load()
    with _of_servers():
        from whet.serving.app import Settings
        from whet.serving.server import serve as run
        from whet.serving.tinker.server import serve as run_tinker
    most = max_body_mib or (16.0 if tinker else 4.0)
    # The fields of the settings have the names of the parameters.
    (run_tinker if tinker else run)(Settings(**{**context.params, "option": options, "max_body_mib": most}))


def serve_sandbox(
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="WHET_SANDBOX_KEY", help="key that clients must send; unset: none", metavar="KEY"),
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="programs at a time; unset: one for each core")] = None,
    sandbox: Annotated[str, typer.Option(help="bubblewrap, or unisolated: held by Landlock alone")] = "bubblewrap",
    python: Annotated[str | None, typer.Option(help="Python interpreter of programs; unset: this one's")] = None,
    path: Annotated[list[str] | None, typer.Option(help="folder that programs may read; may be repeated")] = None,
) -> None:
    """Serve a sandbox for untrusted programs.

    It answers POST /run_code as SandboxFusion does. A run that uses it has
    reward.kwargs.sandbox=http://HOST:PORT, and the key in WHET_SANDBOX_KEY."""
    import os

    from whet.sandbox.protocol import open_sandbox

    if sandbox not in ("bubblewrap", "unisolated"):
        raise ConfigError("--sandbox", sandbox, "bubblewrap or unisolated, which can be served", "name one of them")
    with _of_servers():
        from whet.serving.sandbox import serve as run
    box = open_sandbox(sandbox, python, paths=tuple(path or ()))
    typer.echo(f"programs run in {box.name}; POST http://{host}:{port}/run_code; Ctrl-C ends it")
    run(box, host, port, concurrency or os.cpu_count() or 1, api_key)


@contextmanager
def _of_servers() -> Iterator[None]:
    """Names the extra where a package of HTTP servers is missing.  Raises: ConfigError."""
    try:
        yield
    except ImportError as error:
        if str(error.name).partition(".")[0] not in ("google", "prometheus_client", "starlette", "uvicorn"):
            raise
        raise ConfigError(str(error.name), "not installed", change=f"run {pip_install('serve')}") from error


def read_options(words: list[str], name: str = "--option") -> dict[str, Any]:
    """Reads options, each value read as YAML.  Raises: ConfigError."""
    import yaml

    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(name, f"{word} has no value", f"{name} KEY=VALUE", "add the value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name} {word}", f"cannot be read: {error}", "a value as YAML", "quote it") from error
    return options


def view(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a run's folder, or a folder with runs in it")],
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8100,
    open_page: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Show runs on a page: curves, trajectories, tokens.

    The page follows a running run. It needs no network, and changes nothing."""
    import webbrowser

    from whet.viewer.server import open_server

    with open_server(folder, host, port) as server:
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        url = f"http://{shown}:{server.server_address[1]}/"
        typer.echo(f"{folder} at {url} (Ctrl-C ends it)")
        if open_page:
            webbrowser.open(url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
