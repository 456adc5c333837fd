# SPDX-License-Identifier: Apache-2.0
"""`whet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoints/global_step_N of a run, or a run for its newest")],
    out: Annotated[Path, typer.Argument(help="the folder to write")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="the trained adapter alone, not merged, as peft loads it")
    ] = False,
    base: Annotated[str | None, typer.Option(help="where the adapter's base model lies now")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the code that the model brings along")
    ] = False,
) -> None:
    """Write a checkpoint's model as a plain Hugging Face folder."""
    from whet.checkpoints.export import export as run

    typer.echo(f"wrote {run(checkpoint, out, adapter=adapter, base=base, trust_remote_code=trust_remote_code)}")
