# SPDX-License-Identifier: Apache-2.0
"""`whet export`: writes model folders from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from whet.cli.arguments import TrustRemoteCode
from whet.errors import ConfigError


def export(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N of whet or verl, or a run (its newest checkpoint)")],
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    adapter: Annotated[bool, typer.Option("--adapter", help="write only the adapter, in peft's format")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="path of the adapter's base model, if it has moved; with --from, of the model's config and tokenizer"
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="dtype of the weights; default: the dtype of the run's rollout, or float32 without it"),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="write the format of this training engine: megatron")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="ENGINE", help="read a folder in the format of this training engine: megatron"),
    ] = None,
    hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="upload the folder to the hub too")] = None,
    private: Annotated[bool, typer.Option("--private", help="with --hub: make a new repository private")] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Export the model of a checkpoint as a Hugging Face folder."""
    from whet.checkpoints.export import check_new, export as run, from_weights, model_folder
    from whet.checkpoints.hub import address, upload
    from whet.registry import ENGINES
    from whet.tracking.console import long_phase

    unused = (
        {"--adapter": adapter, "--to": source and to} if source else {"--base": base, "--dtype": dtype} if to else {}
    )
    if found := next((name for name, value in {"--adapter": to and adapter, **unused}.items() if value), None):
        raise ConfigError(found, f"set together with {'--from' if source else '--to'}", change="leave it out")
    with long_phase("exporting"):
        check_new(out)
        if source is not None:
            model = Path(base or checkpoint)
            read = ENGINES[source].marked("reads")(checkpoint, model)
            from_weights(out, model, read, dtype=dtype or "float32", trust_remote_code=trust_remote_code)
        elif to is not None:
            with model_folder(str(checkpoint), trust_remote_code=trust_remote_code) as folder:
                ENGINES[to].marked("writes")(folder, out)
        else:
            run(checkpoint, out, adapter=adapter, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {out}")
    if hub is not None:
        with long_phase("uploading"):
            upload(out, hub, private=private)
        typer.echo(f"uploaded it to {address(hub)}")
