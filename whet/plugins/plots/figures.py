# SPDX-License-Identifier: Apache-2.0
"""Learning curves as figures and PNG files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from whet.registry import register_part

COLOURS = ("#3366cc", "#dc6b2f", "#2e9e6b", "#9b59b6", "#c0392b", "#7f8c8d", "#17a2b8", "#000000", "#d4a017")
SMOOTH_FROM = 30  # points; shorter curves are drawn as they are


class Series(NamedTuple):
    """A curve: its label, and its points in the order of measurement."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    markers: bool = False  # draws a dot on each point, for rare measurements


@dataclass(frozen=True)
class Panel:
    """A graph with curves; its title names their metric."""

    title: str
    series: Sequence[Series]


@register_part("learning_curve")
def plot_learning_curve(path: Path, series: Sequence[tuple[Any, ...]], *, title: str, y_label: str = "reward") -> None:
    """Draws the curves into a PNG file. A long curve is drawn faintly, with its running mean in full colour.

    Each of `series` is a `Series`, or a tuple of its fields."""
    figure = _figure(8, 4.5)
    axes = figure.add_subplot()
    _fill(axes, [Series(*each) for each in series], y_label)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=12)
    if len(series) > 1:
        axes.legend(frameon=False, loc="best")
    figure.write(path)


class Drawing(Figure):
    """A figure that notebooks show, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, dpi=80)
        return png.getvalue()

    def write(self, path: Path) -> None:
        """Writes a PNG file; creates its folder if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.savefig(path)


def plot_panels(panels: Sequence[Panel], *, title: str = "") -> Drawing:
    """Draws graphs side by side, at most three a row, with one legend. A label has the same colour in all graphs."""
    columns = min(3, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    figure = _figure(max(8, 5 * columns), 4.5 if rows == 1 else 3.2 * rows + 0.5)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        _fill(axes, panel.series, "")
        axes.set_title(panel.title, loc="left", fontsize=11)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    labels = [each.label for each in panels[0].series]
    if len(labels) > 1:
        lines = [Line2D([], [], color=colour, linewidth=2) for colour, _ in zip(cycle(COLOURS), labels, strict=False)]
        figure.legend(lines, labels, loc="outside lower center", frameon=False, ncols=min(len(labels), 3))
    return figure


def _figure(width: float, height: float) -> Drawing:
    figure = Drawing(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _fill(axes: Axes, series: Sequence[Series], y_label: str) -> None:
    for colour, each in zip(cycle(COLOURS), series, strict=False):
        _draw(axes, each, colour)
    axes.set_xlabel("step")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def running_mean(values: Sequence[float], reach: int) -> list[float]:
    """Averages each value with up to `reach` neighbours on either side."""
    numbers = np.asarray(values, dtype=float)
    return [float(np.nanmean(numbers[max(0, i - reach) : i + reach + 1])) for i in range(len(numbers))]


def _draw(axes: Axes, series: Series, colour: str) -> None:
    if series.markers or len(series.y) < SMOOTH_FROM:
        marker = "o" if series.markers else ""
        axes.plot(series.x, series.y, color=colour, linewidth=2, marker=marker, label=series.label)
        return
    axes.plot(series.x, series.y, color=colour, linewidth=0.8, alpha=0.3)
    smooth = running_mean(series.y, max(1, len(series.y) // 30))
    axes.plot(series.x, smooth, color=colour, linewidth=2.2, label=series.label)
