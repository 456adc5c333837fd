# SPDX-License-Identifier: Apache-2.0
"""`whet doctor`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe
from whet.cli.inputs import For, run_config_of
from whet.planning.units import plural

if TYPE_CHECKING:
    from whet.planning.doctor import Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def doctor(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    command: For = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="also check every node of the Ray cluster")] = False,
) -> None:
    """Check the installation, the machine, and a config."""
    recipe, overrides = split_recipe(words, config_name)
    config = run_config_of(command, recipe, overrides)

    from whet.config import problems
    from whet.planning.doctor import Finding, examine, examine_cluster
    from whet.planning.planner import planner
    from whet.tracking.console import long_phase
    from whet.trainers.frame import run_folder

    with long_phase("checking"):
        sections = examine(run_folder(config.trainer))
        if cluster:
            sections |= examine_cluster(config, run_folder(config.trainer))
        if recipe is not None or overrides:
            refused = [Finding("config", "refused", str(each), is_problem=True) for each in problems(config)]
            sections["this run"] = [*refused, *(planner().findings(config) if config.model.path else [])]
    _print(sections)
    if Counter(finding.status for found in sections.values() for finding in found)["problem"]:
        raise typer.Exit(1)


def _print(sections: dict[str, list[Finding]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.what) for found in sections.values() for finding in found)
    for section, found in sections.items():
        console.print(Text(section, style="bold"))
        for finding in found:
            style = STYLES[finding.status]
            line = Text.assemble(("  " + finding.status.ljust(9), style), finding.what.ljust(width + 2), finding.found)
            if finding.advice:
                line.append(f"; {finding.advice}", style=style)
            console.print(line)
    sums = Counter(finding.status for found in sections.values() for finding in found)
    told = "whet runs here" if not sums["problem"] else "solve the problems before a run"
    counted = f"{plural(sums['problem'], 'problem')}, {plural(sums['note'], 'note')}, {sums['ok']} ok"
    console.print(Text(f"{counted}: {told}", style="red" if sums["problem"] else "green"))
