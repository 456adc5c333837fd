# SPDX-License-Identifier: Apache-2.0
"""How a command ends that a signal stopped."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from whet.cli.arguments import program


@contextmanager
def shown_when_stopped() -> Iterator[None]:
    """Says what was saved and how to go on, then exits as the shell expects after a signal: 130 after Ctrl-C."""
    from whet.trainers.stop import Stopped

    try:
        yield
    except Stopped as stopped:
        words = [word.replace("trainer.resume=never", "trainer.resume=auto") for word in sys.argv[1:]]
        typer.echo(f"{stopped}:\n  {program()} {shlex.join(words)}", err=True)
        raise typer.Exit(128 + stopped.number if stopped.number is not None else 0) from stopped
