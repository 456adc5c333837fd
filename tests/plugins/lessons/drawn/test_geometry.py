# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import math
import random
import re

import pytest
from PIL import Image

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.lessons.drawn.geometry import KINDS, Point, Sheet, questions
from whet.rewards.math import geo3k


class Recorded(Sheet):
    """Keeps the labels and lines."""

    def __init__(self) -> None:
        self.labels: dict[str, Point] = {}
        self.drawn: list[tuple[Point, ...]] = []

    def lines(self, *points: Point) -> None:
        self.drawn.append(points)

    def circle(self, centre: Point, radius: float) -> None:
        assert (centre, radius) == ((0.5, 0.5), 0.4)

    def label(self, text: str, at: Point) -> None:
        self.labels[text] = at


def drawn(kind: str, seed: int) -> tuple[Recorded, str, int]:
    sheet = Recorded()
    problem, answer = KINDS[kind](random.Random(seed), sheet)
    assert all(0 < x < 1 and 0 < y < 1 for points in (*sheet.drawn, sheet.labels.values()) for x, y in points)
    return sheet, problem, answer


def angle(at: Point, one: Point, other: Point) -> float:
    """In degrees."""
    turns = [math.atan2(point[1] - at[1], point[0] - at[0]) for point in (one, other)]
    between = abs(math.degrees(turns[0] - turns[1]))
    return min(between, 360 - between)


@pytest.mark.parametrize("seed", range(20))
def test_the_angles_of_a_triangle_are_drawn_as_labelled(seed: int) -> None:
    sheet, _, answer = drawn("triangle", seed)
    [(a, b, c, _)] = sheet.drawn
    measured = sorted(angle(*corners) for corners in ((a, b, c), (b, c, a), (c, a, b)))
    labelled = [int(text[:-1]) for text in re.findall(r"\d+°", " ".join(sheet.labels))]
    equal = {len(labelled): labelled, 1: labelled * 2}  # two equal angles have one label
    assert measured == pytest.approx(sorted([answer, *equal[min(2, len(labelled))]]))


@pytest.mark.parametrize("seed", range(20))
def test_a_right_triangle_obeys_pythagoras(seed: int) -> None:
    sheet, _, answer = drawn("right_triangle", seed)
    assert "x" in sheet.labels
    one, other = (int(text) for text in sheet.labels if text != "x")
    is_longest = sheet.labels["x"][0] > 0.2 and sheet.labels["x"][1] < 0.8
    assert answer == (math.hypot(one, other) if is_longest else math.sqrt(abs(one**2 - other**2)))


@pytest.mark.parametrize("seed", range(20))
def test_a_rectangle_by_its_sides(seed: int) -> None:
    sheet, problem, answer = drawn("rectangle", seed)
    [(a, b, c, *_)] = sheet.drawn
    width, height = b[0] - a[0], c[1] - b[1]
    numbers = [int(text) for text in sheet.labels if text != "x"]
    if "x" in sheet.labels:
        assert int(re.findall(r"\d+", problem)[0]) == numbers[0] * answer
        assert width / height == pytest.approx(numbers[0] / answer)
    else:
        sides = (numbers * 2)[:2]  # a square has one label
        assert width / height == pytest.approx(sides[0] / sides[1])
        assert answer == (sides[0] * sides[1] if "area" in problem else 2 * sum(sides))


@pytest.mark.parametrize("seed", range(20))
def test_an_inscribed_angle_is_half_of_the_central_one(seed: int) -> None:
    sheet, _, answer = drawn("inscribed_angle", seed)
    (left, top, right), (_, centre, _) = sheet.drawn
    [known] = [int(text[:-1]) for text in sheet.labels if text != "x"]
    found = {answer, known}
    assert found == {round(angle(top, left, right)), round(angle(centre, left, right))}
    assert max(found) == 2 * min(found)


@pytest.mark.parametrize("seed", range(20))
def test_a_chord_is_drawn_to_scale(seed: int) -> None:
    sheet, _, answer = drawn("chord", seed)
    [(left, right, centre, foot)] = sheet.drawn
    radius, distance = sorted((int(text) for text in sheet.labels if text != "x"), reverse=True)
    assert answer == 2 * math.sqrt(radius**2 - distance**2)
    assert math.dist(left, right) / math.dist(centre, right) == pytest.approx(answer / radius)
    assert math.dist(centre, foot) / 0.4 == pytest.approx(distance / radius)


def test_rows_have_the_form_of_geometry3k() -> None:
    for row in questions("train", 0, num_rows=20):
        assert row.keys() == {"images", "problem", "answer"}
        assert Image.open(io.BytesIO(row["images"][0])).size == (224, 224)
        assert geo3k(rf"<think>a</think>\boxed{{{row['answer']}}}", row["answer"])["reward"] == 1.0


def test_kinds_are_chosen() -> None:
    rows = questions("train", 0, num_rows=20, kinds=["chord"])
    assert {row["problem"].rpartition(" ")[2] for row in rows} == {"chord."}
    with raises(DataError, key="kinds", found=re.compile("'cube'"), expected=re.compile("triangle, ")):
        questions("train", 0, kinds=["cube"])
    with raises(DataError, key="kinds", expected=re.compile("triangle, ")):
        questions("train", 0, kinds=[])
