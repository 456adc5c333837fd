# SPDX-License-Identifier: Apache-2.0
"""`whet`: the list of commands, and the output of errors."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from whet import registry
from whet.cli.algorithms import algorithms
from whet.cli.arguments import Command, CommandGroup
from whet.cli.checks import doctor
from whet.cli.environments import environments
from whet.cli.evaluate import compare, evaluate, generate, select
from whet.cli.inputs import config, data
from whet.cli.models import export
from whet.cli.rewards import rewards
from whet.cli.runs import runs, show
from whet.cli.train import command_of
from whet.errors import ConfigError, RegistryError, WhetError, did_you_mean, exit_error
from whet.manifests import missing_plugin
from whet.threads import yield_soon
from whet.version import __version__

COME_WITH = {"play": f"install it; it comes with {registry.GAMES}"}
LOOK = "Checks and reference"

app = typer.Typer(
    cls=CommandGroup,
    help="Post-train language models with reinforcement learning.",
    epilog="Errors are printed without a traceback; --debug or WHET_DEBUG=1 adds it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _later() -> None:
    """A placeholder in the list of commands for a plugin's command, which is imported when it is called."""


PANELS: dict[str, Sequence[Callable[..., None]]] = {
    "Getting started": (),
    "Training": [*map(command_of, registry.TRAINERS.shipped.values())],
    "After training": (runs, show, evaluate, generate, select, compare, export),
    LOOK: (doctor, config, data),
}
GROUPS = {"": app, "algorithms": algorithms, "rewards": rewards, "env": environments}
for panel, functions in PANELS.items():
    for function in functions:
        name = "eval" if function is evaluate else function.__name__.replace("_", "-")
        app.command(name, cls=Command, rich_help_panel=panel)(function)
    for entry in registry.COMMANDS.shipped.values():  # of plugins, whose signatures are read when they are called
        group, _, name = entry.name.rpartition(" ")
        if group in GROUPS and entry.marks.get("panel", LOOK) == panel:
            shown = None if group else panel
            GROUPS[group].command(name, cls=Command, rich_help_panel=shown, help=entry.doc)(_later)
for name, typed in list(GROUPS.items())[1:]:
    app.add_typer(typed, name=name, cls=CommandGroup, rich_help_panel=LOOK)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"whet {__version__}")
        raise typer.Exit


@app.callback()
def whet(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Post-train language models with reinforcement learning."""


def _check_encoding(words: Sequence[str]) -> None:
    encoding = sys.getfilesystemencoding()
    if wrong := next((word for word in words if re.search("[\ud800-\udfff]", word)), None):
        found = f"{os.fsencode(wrong)!r} has characters that {encoding}, the encoding of this locale, cannot read"
        change = "set PYTHONUTF8=1, or a locale of UTF-8 such as LC_ALL=C.UTF-8, and write the word in UTF-8"
        raise ConfigError("command line", found, change=change)


class ConsoleHandler(logging.Handler):
    """Prints log records on the console that also shows steps and progress bars, so that they do not overwrite it."""

    is_beside_json = False  # True with --json: then logs go to standard error

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record, a warning in yellow."""
        from whet.tracking.console import shared_console

        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        shared_console().stderr = self.is_beside_json
        shared_console().print(Text(self.format(record), style=style), soft_wrap=True)


CONSOLE = ConsoleHandler()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command in `arguments` (default: the process's own), then exits; the status is 2 after a WhetError."""
    yield_soon()
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in given if word != "--debug"]
    debug = words != given or os.environ.get("WHET_DEBUG", "0") not in ("", "0")
    logger = logging.getLogger("whet")
    logger.setLevel(logging.INFO)
    logger.addHandler(CONSOLE)
    CONSOLE.is_beside_json = "--json" in words
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # printing the text of a row never raises
    try:
        _check_encoding(words)
        is_own = not words or words[0] in _own_commands() or missing_plugin("command", words[0])
        if not is_own and not words[0].startswith("-"):
            if ":" not in words[0] and words[0] not in registry.TRAINERS:
                sys.exit(_installed_command(words[0])(words[1:]))
            app.command(words[0], cls=Command)(command_of(registry.trainer_of(words[0])))
        app(args=words, prog_name="whet")
    except WhetError as error:
        if debug:
            raise
        _show(error)
        sys.exit(2)
    except SystemExit as error:
        own = registry.COMMANDS.shipped.get(words[0]) if words else None
        if (own and own.marks.get("exits")) or debug or not _is_below(error):
            raise
        _show(exit_error(error))
        sys.exit(2)


def _own_commands() -> list[str]:
    return [*(str(each.name) for each in app.registered_commands), *(str(each.name) for each in app.registered_groups)]


def _installed_command(name: str) -> Callable[[Sequence[str]], int]:
    """Returns the function of a command that an installed package adds.  Raises: RegistryError."""
    installed = registry.entry_points().get("whet.command", {})
    if name in installed:
        with registry.loading(name, installed[name]):
            return registry.load_target(installed[name])
    known = [*_own_commands(), *registry.TRAINERS.names(), *installed, *COME_WITH]
    hint = did_you_mean(name, known, "`whet --help` lists the commands")
    raise RegistryError(f"whet {name}", "unknown command", change=COME_WITH.get(name, hint))


def _is_below(error: SystemExit) -> bool:
    """Tells whether user code, not a command, called `sys.exit`."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("whet.") and not name.startswith("whet.cli.") for name in modules)


def _show(error: WhetError) -> None:
    """Prints an error to stderr: a red panel on a terminal, else plain text."""
    console = Console(stderr=True)
    name = type(error).__name__
    if console.is_terminal:
        console.print(Panel(Text(str(error), style="red"), title=name, title_align="left", border_style="red"))
    else:
        sys.stderr.write(f"{name}: {error}\n")
