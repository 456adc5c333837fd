# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from whet.plugins.lessons import quickstart
from whet.plugins.plots.figures import COLOURS, Panel, Series, plot_learning_curve, plot_panels, running_mean


def pixels_near(picture: np.ndarray, colour: str) -> np.ndarray:
    """Rows and columns of the pixels in this colour."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.argwhere(np.abs(picture[..., :3] - wanted).max(axis=-1) < 0.02)


def test_a_rising_curve_is_drawn_rising_from_left_to_right(tmp_path: Path) -> None:
    plot_learning_curve(tmp_path / "new" / "curve.png", [Series("reward", range(20), range(20))], title="A run")
    picture = imread(tmp_path / "new" / "curve.png")
    assert picture.shape[:2] == (675, 1200)
    line = pixels_near(picture, COLOURS[0])
    left, right = line[line[:, 1].argmin()], line[line[:, 1].argmax()]
    assert right[1] - left[1] > 900 and left[0] - right[0] > 400  # across, and up


def test_each_series_has_its_own_colour(tmp_path: Path) -> None:
    x = range(50)
    falling = Series("held-out", [0, 25, 49], [0.9, 0.5, 0.1], markers=True)
    plot_learning_curve(tmp_path / "curve.png", [Series("reward", x, [i / 50 for i in x]), falling], title="A run")
    picture = imread(tmp_path / "curve.png")
    assert len(pixels_near(picture, COLOURS[0])) > 500 and len(pixels_near(picture, COLOURS[1])) > 500


def test_the_curve_of_a_quickstart_is_drawn(tmp_path: Path) -> None:
    history = [{"step": step, "critic/score/mean": step / 9} for step in range(9)] + [{"step": 9, "val/accuracy": 1.0}]
    quickstart.plot(tmp_path / "curve.png", history, quickstart.ADDITION)
    picture = imread(tmp_path / "curve.png")
    assert len(pixels_near(picture, COLOURS[1])) > 200


def test_the_running_mean_takes_what_there_is_at_the_ends() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0, 0.0], 1) == pytest.approx([1.5, 3.0, 4.0, 10 / 3, 2.0])
    assert running_mean([1.0, float("nan"), 3.0], 1) == [1.0, 2.0, 3.0]
    assert running_mean([5.0, 7.0], 0) == [5.0, 7.0]


@pytest.mark.slow
def test_a_run_has_the_same_colour_in_every_panel(tmp_path: Path) -> None:
    a, b = Series("a", [0, 1, 2], [0, 1, 2]), Series("b", [0, 1, 2], [2, 1, 0])
    plot_panels([Panel("one", [a, b]), Panel("two", [a, Series("b", [], [])])]).write(tmp_path / "panels.png")
    picture = imread(tmp_path / "panels.png")
    middle = picture.shape[1] // 2
    for side, in_it in ((picture[:600, :middle], True), (picture[:600, middle:], False)):  # the legend is below
        assert len(pixels_near(side, COLOURS[0])) > 500
        assert (len(pixels_near(side, COLOURS[1])) > 500) == in_it
