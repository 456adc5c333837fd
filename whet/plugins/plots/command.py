# SPDX-License-Identifier: Apache-2.0
"""`whet plot` and `whet.plot`: metrics of runs as figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.errors import DataError
from whet.registry import register_command, register_part

if TYPE_CHECKING:
    from whet.plugins.plots.figures import Drawing
    from whet.tracking.runs import RunFolder

log = logging.getLogger(__name__)


@register_command("plot", panel="After training")
def plot(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or folders with runs")],
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", help="a metric or a pattern (val/*), several times; unset: the main ones"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a PNG file; unset: plot.png")] = None,
) -> None:
    """Draw metrics of one or several runs into a PNG file."""
    output = output or Path("plot.png")
    check_png("--output", output)
    found = with_metrics(folders)
    figure, names = drawn(found, metric)
    figure.write(output)
    typer.echo(f"wrote {output}: {', '.join(names)} of {len(found)} run{'s' * (len(found) > 1)}")


def check_png(option: str, output: Path) -> None:
    """Checks that `output` names a PNG file.  Raises: DataError naming `option`."""
    if output.suffix != ".png":
        found = f"{output} ends in {output.suffix or 'nothing'}"
        raise DataError(option, found, "a name that ends in .png", "name a .png file")


def with_metrics(folders: Sequence[Path]) -> list[RunFolder]:
    """Reads the runs in the folders, and leaves out runs without metrics that are in a subfolder.  Raises: DataError if
    a run in `folders` has no metrics, or no run is left."""
    from whet.tracking.runs import find_runs, read_run

    paths = [path for folder in folders for path in find_runs(folder) or [folder]]
    found = [read_run(path) for path in dict.fromkeys(paths)]
    if not found:
        raise DataError("run", None, "a run's folder", "give its path")
    read, empty = [run for run in found if run.records], [run.path for run in found if not run.records]
    if wrong := [path for path in empty if path in folders or not read]:
        change = "wait for a first step, or add jsonl to trainer.logger"
        raise DataError(", ".join(map(str, wrong)), "no metrics to draw yet", change=change)
    if empty:
        log.warning("left out, without metrics: %s", ", ".join(map(str, empty)))
    return read


def drawn(read: Sequence[RunFolder], metric: Sequence[str] | None) -> tuple[Drawing, list[str]]:
    """Draws the metrics of the runs, by default the main ones.  Returns the drawing and the names of the metrics.

    Raises: DataError if no run has such a metric."""
    from whet.plugins.plots.figures import Panel, Series, plot_panels
    from whet.tracking.runs import chosen_metrics, main_metrics, short_names

    names = chosen_metrics(read, metric) if metric else [name.lstrip("-~") for name in main_metrics(read)]
    if not names:
        found, expected = "the runs have none of the main metrics", f"some of {', '.join(read[0].metrics)}"
        raise DataError("metrics", found, expected, "choose metrics by name")
    labels, panels = short_names([run.path for run in read]), []
    for name in names:
        curves = [(label, *run.curve(name)) for label, run in zip(labels, read, strict=True)]
        rare = {label: len(x) < len(run.records) / 2 for (label, x, _), run in zip(curves, read, strict=True)}
        panels.append(Panel(name, [Series(label, x, y, markers=rare[label]) for label, x, y in curves]))
    return plot_panels(panels, title=labels[0] if len(labels) == 1 else ""), names


@register_part("plot")
def draw(folders: Sequence[Path], metrics: Sequence[str] | None = None, output: Path | None = None) -> Drawing:
    """Draws metrics of runs into a figure, and writes it to the PNG file `output`, unless this is None.  Raises:
    DataError naming `runs`, `metrics` or `output`."""
    if output is not None:
        check_png("output", output)
    argument = "runs"
    try:
        read, argument = with_metrics(folders), "metrics"
        figure, _ = drawn(read, metrics)
    except DataError as error:
        raise error.at(argument) from error
    if output is not None:
        figure.write(output)
    return figure
