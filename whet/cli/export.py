# SPDX-License-Identifier: Apache-2.0
"""`whet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoints/global_step_N of a run, or a run (its newest)")],
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="write only the trained adapter, in peft's format, without merging it")
    ] = False,
    base: Annotated[str | None, typer.Option(help="path of the adapter's base model, if it has moved")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run Python code from the model's folder")
    ] = False,
) -> None:
    """Export the model of a checkpoint as a Hugging Face folder."""
    from whet.checkpoints.export import export as run

    typer.echo(f"wrote {run(checkpoint, out, adapter=adapter, base=base, trust_remote_code=trust_remote_code)}")
