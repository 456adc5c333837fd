# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from whet.cli.arguments import program


def quickstart(
    run_dir: Annotated[Path, typer.Option(help="the folder to write")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="random seed")] = 0,
) -> None:
    """Train a small model on arithmetic in about three minutes."""
    from whet.tracking.long_phases import LongPhases
    from whet.trainers.quickstart import quickstart as run

    with LongPhases().watch():
        run(run_dir, seed, program())
