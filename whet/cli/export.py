# SPDX-License-Identifier: Apache-2.0
"""`whet export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoints/global_step_N of a run, or a run for its newest")],
    out: Annotated[Path, typer.Argument(help="the folder to write")],
) -> None:
    """Write a checkpoint's model as a plain Hugging Face folder."""
    from whet.trainers.export import export as run

    typer.echo(f"wrote {run(checkpoint, out)}")
