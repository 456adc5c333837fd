# SPDX-License-Identifier: Apache-2.0
"""`whet`: the table of contents, and how an error looks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import typer

from whet.cli.algorithms import algorithms
from whet.cli.compare import compare
from whet.cli.config import config
from whet.cli.data import data
from whet.cli.doctor import doctor
from whet.cli.eval import evaluate
from whet.cli.export import export
from whet.cli.generate import generate
from whet.cli.init_model import init_model
from whet.cli.lm_eval import lm_eval
from whet.cli.plan import plan
from whet.cli.quickstart import quickstart
from whet.cli.sft import sft
from whet.cli.train import train
from whet.errors import WhetError

START, TRAIN, AFTER, LOOK = "Start", "Train", "After training", "Look things up"

app = typer.Typer(
    help="Post-train language models with reinforcement learning.",
    epilog="A mistake is shown as one block; --debug or WHET_DEBUG=1 adds the traceback.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("quickstart", rich_help_panel=START)(quickstart)
app.command("init-model", rich_help_panel=START)(init_model)
app.command("train", rich_help_panel=TRAIN)(train)
app.command("sft", rich_help_panel=TRAIN)(sft)
app.command("eval", rich_help_panel=AFTER)(evaluate)
app.command("generate", rich_help_panel=AFTER)(generate)
app.command("compare", rich_help_panel=AFTER)(compare)
app.command(
    "lm-eval",
    rich_help_panel=AFTER,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(lm_eval)
app.command("export", rich_help_panel=AFTER)(export)
app.command("doctor", rich_help_panel=LOOK)(doctor)
app.command("plan", rich_help_panel=LOOK)(plan)
app.command("config", rich_help_panel=LOOK)(config)
app.command("data", rich_help_panel=LOOK)(data)
app.add_typer(algorithms, name="algorithms", rich_help_panel=LOOK)


class ConsoleHandler(logging.Handler):
    """Shows what whet logs on the console that steps and bars are drawn on, so that neither tears the other apart."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record, a warning in yellow."""
        from rich.text import Text

        from whet.tracking.console import shared_console

        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        shared_console().print(Text(self.format(record), style=style), soft_wrap=True)


CONSOLE = ConsoleHandler()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command that `arguments` (by default those of the process) name, then exits: 2 after a WhetError."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("WHET_DEBUG", "0") not in ("", "0")
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    logger.addHandler(CONSOLE)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no text of a row ends a command while it is shown
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="whet")
    except WhetError as error:
        if debug:
            raise
        _show(error)
        sys.exit(2)


def _show(error: WhetError) -> None:
    """A red block on a terminal; elsewhere plain lines, which a log keeps whole."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(stderr=True)
    name = type(error).__name__
    if console.is_terminal:
        console.print(Panel(Text(str(error), style="red"), title=name, title_align="left", border_style="red"))
    else:
        sys.stderr.write(f"{name}: {error}\n")
