# SPDX-License-Identifier: Apache-2.0
"""The command `whet serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from whet.cli.arguments import KeyValues, TrustRemoteCode, read_options
from whet.errors import ConfigError, of_extra
from whet.registry import ENGINES, ROLLOUT_ENGINES, TOOL_PARSERS, register_command


@register_command("serve", panel="After training")
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="model folder, hub name, checkpoint, or run (newest checkpoint)")],
    name: Annotated[str | None, typer.Option(help="the model's name for clients; unset: last part of MODEL")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="load each new checkpoint of the run")] = False,
    best: Annotated[bool, typer.Option("--best", help="serve the checkpoint with the best validation score")] = False,
    engine: Annotated[str, typer.Option(help="registered rollout engine, or path/file.py:MyEngine")] = "native",
    option: KeyValues = None,
    tool_parser: Annotated[str | None, typer.Option(help="format of tool calls; unset: from the chat template")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="dtype of sampling; auto: bfloat16 where the machine multiplies it"),
    ] = "auto",
    host: Annotated[str, typer.Option(help="address to listen on; 0.0.0.0 is every network")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: a free one")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="WHET_API_KEY", help="key that clients must send; unset: none", metavar="KEY")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="most tokens of a response if its request sets none")] = 2048,
    max_running: Annotated[int, typer.Option(min=1, help="most samples decoded at the same time")] = 256,
    max_waiting: Annotated[int, typer.Option(min=0, help="most samples that wait; more get status 429")] = 1024,
    max_body_mib: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="largest body of a request, in MiB; unset: 4, with --tinker 16", show_default=False
        ),
    ] = None,
    deadline_seconds: Annotated[float, typer.Option(min=0.1, help="time limit of a request, in seconds")] = 600.0,
    stop_seconds: Annotated[float, typer.Option(min=1.0, help="seconds for requests to end after Ctrl-C")] = 30.0,
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
    with of_extra("serve", "google", "starlette", "uvicorn", "prometheus_client"):
        from whet.plugins.serving.app import ServeSettings
        from whet.plugins.serving.server import serve as run
        from whet.plugins.serving.tinker.server import serve as run_tinker
    most = max_body_mib or (16.0 if tinker else 4.0)
    # The fields of the settings have the names of the parameters.
    (run_tinker if tinker else run)(ServeSettings(**{**context.params, "option": options, "max_body_mib": most}))
