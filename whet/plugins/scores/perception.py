# SPDX-License-Identifier: Apache-2.0
"""Scores answers about images and video: labelled boxes, recognised text, captions, numbers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from whet.errors import ConfigError
from whet.options import Number, Share, is_number
from whet.plugins.scores.short_answers import extract_answer
from whet.registry import register_reward
from whet.rewards.gsm8k import last_number
from whet.rewards.result import after_thought, as_number, entries, number_text, truth_error

_ROUGE_WORD = re.compile(r"(?<!\w)-\d+|[a-z0-9]+")
_LIST = re.compile(r"\[\s*[{\]]")
_DIGITS = r"[-+]?(?:\d{1,9}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,2})?"  # finite: at most 9 digits before the point
_CORNERS = re.compile(r"[\[(]" + r"\s*,".join([rf"\s*({_DIGITS})"] * 4) + r"\s*[\])]")
Box = tuple[str, Sequence[float], float]  # label, corners (x1, y1, x2, y2), score


@register_reward("detection", rows_checked_by="whet.plugins.scores.perception:read_boxes")
def detection(
    solution_str: str,
    ground_truth: Any,
    *,
    metric: Literal["iou", "map"] = "iou",
    thresholds: Sequence[Share] = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
) -> dict[str, float]:
    """Scores the JSON list of boxes in a response by the mean IoU of matched boxes, or by mAP; 0 without a list.

    A box is `{"bbox_2d": [x1, y1, x2, y2], "label": ...}` (or `bbox`); it may have a `score`. `iou`: boxes of equal
    label are matched greedily, largest IoU first; the sum is divided by the larger number of boxes, so that neither
    missing nor additional boxes pay. `map`: mean over labels and `thresholds` of the area under the precision-recall
    curve, boxes in descending score. The list is the last in the text after `</think>`. The accuracy is 1 where all
    boxes match with an IoU of at least the first threshold. The parts `iou` and `map` are always reported.
    Raises: ValueError for a ground truth without boxes, and for no thresholds.
    """
    if not thresholds:
        raise ConfigError("thresholds", thresholds, "numbers such as 0.5", "list at least one")
    truths = read_boxes(ground_truth)
    nothing: Box = ("", (0, 0, 0, 0), 0.0)  # a malformed box counts as one that matches none
    boxes = [box or nothing for box in _boxes(_last_list(after_thought(solution_str)))]
    overlaps = _match(boxes, truths)
    iou = sum(overlaps) / max(len(boxes), len(truths))
    mean = sum(_average_precision(boxes, truths, each) for each in thresholds) / len(thresholds)
    exact = len(boxes) == len(truths) == sum(overlap >= thresholds[0] for overlap in overlaps)
    return {"reward": iou if metric == "iou" else mean, "accuracy": float(exact), "iou": iou, "map": mean}


def read_boxes(ground_truth: Any, *_: object) -> list[Box]:
    """Reads the boxes of a ground truth.  Raises: ValueError."""
    expected = _boxes(_last_list(ground_truth) if isinstance(ground_truth, str) else ground_truth)
    truths = [box for box in expected if box]
    if not truths or len(truths) < len(expected):
        boxes = 'a list of boxes such as [{"bbox_2d": [0, 0, 5, 5], "label": "cat"}]'
        raise truth_error(ground_truth, boxes, "write at least one")
    return truths


@register_reward("grounding", rows_checked_by="whet.plugins.scores.perception:read_box")
def grounding(
    solution_str: str, ground_truth: Any, *, metric: Literal["iou", "accuracy"] = "iou", threshold: Share = 0.5
) -> dict[str, float]:
    """Scores the last box of a response by its IoU with the true box; 0 without a box. `detection` reads several.

    A box is four numbers x1, y1, x2, y2 in brackets, in the text after the last `</think>`. With `metric=accuracy` the
    score is 1 if the IoU is at least `threshold`, else 0. The ground truth is a list of numbers, or a text with them.
    Raises: ValueError for a ground truth without a box."""
    found = _last_corners(after_thought(solution_str))
    iou = _overlap(("", found or (0, 0, 0, 0), 1.0), ("", read_box(ground_truth), 1.0))
    accuracy = float(iou >= threshold and found is not None)
    return {"reward": iou if metric == "iou" else accuracy, "accuracy": accuracy, "iou": iou}


def read_box(ground_truth: Any, *_: object) -> Sequence[float]:
    """Reads the corners of a ground truth: a list of four numbers, or a text with it.  Raises: ValueError."""
    corners = [as_number(each) for each in entries(ground_truth) or ()]
    numbers = [each for each in corners if each is not None and math.isfinite(each)]
    found = numbers if len(numbers) == len(corners) == 4 else _last_corners(str(ground_truth))
    if found is None:
        raise truth_error(ground_truth, "a box as [x1, y1, x2, y2]")
    return found


def _last_corners(text: str) -> Sequence[float] | None:
    found = _CORNERS.findall(text)
    return [float(each) for each in found[-1]] if found else None


@register_reward("ocr")
def ocr(solution_str: str, ground_truth: str, *, unit: Literal["word", "character"] = "word") -> dict[str, float]:
    """1 - WER, at least 0: the word error rate is the number of word edits divided by the words of the ground truth.

    The part `wer` is the rate. With `unit=character` it is the character error rate, and the part is `cer`; a run of
    white space is one space. The answer is the content of the last `<answer>`, else the text after the last `</think>`.
    Raises: ValueError for a ground truth without words."""
    truth, answer = _words_of(ground_truth), (extract_answer(solution_str, needs_tag=False) or "").split()
    if unit == "character":
        truth, answer = list(" ".join(truth)), list(" ".join(answer))
    row = list(range(len(truth) + 1))  # edits from the words so far to the first words of the truth
    for count, word in enumerate(answer, start=1):
        diagonal, row[0] = row[0], count
        for position, expected in enumerate(truth, start=1):
            best = min(row[position] + 1, row[position - 1] + 1, diagonal + (word != expected))
            diagonal, row[position] = row[position], best
    rate = row[-1] / len(truth)
    return {"reward": max(0.0, 1 - rate), "accuracy": float(answer == truth), f"{unit[0]}er": rate}


@register_reward("rouge_l")
def rouge_l(solution_str: str, ground_truth: str) -> dict[str, float]:
    """ROUGE-L (Lin 2004): F1 of the longest common subsequence of words, in lower case and without punctuation.

    The sign of a number stays. The answer is the content of the last `<answer>`, else the text after the last
    `</think>`.
    Raises: ValueError for a ground truth without words.
    """
    truth = _words_of(ground_truth, letters=True)
    answer = _ROUGE_WORD.findall((extract_answer(solution_str, needs_tag=False) or "").lower())
    row = [0] * (len(truth) + 1)
    for word in answer:
        diagonal = 0
        for position, expected in enumerate(truth, start=1):
            best = diagonal + 1 if word == expected else max(row[position], row[position - 1])
            diagonal, row[position] = row[position], best
    return {"reward": 2 * row[-1] / (len(answer) + len(truth)), "accuracy": float(answer == truth)}


@register_reward("relative_error", rows_checked_by="whet.plugins.scores.perception:read_number")
def relative_error(
    solution_str: str, ground_truth: str | int | float, *, tolerance: Share = 0.0
) -> dict[str, float | str | None]:
    """1 - |x - t| / |t|, at least 0, for the last number x of the answer and the number t of the ground truth.

    The answer is the content of the last `<answer>`, else the text after the last `</think>`. The accuracy is 1 for a
    relative error of at most `tolerance`. For t = 0 the error is 0 or 1. `pred` is x.
    Raises: ValueError for a ground truth without a number.
    """
    found, truth = _numbers(solution_str, ground_truth)
    if found is None:
        return {"reward": 0.0, "accuracy": 0.0, "pred": None}
    error = float(abs(found - truth) / abs(truth)) if truth else float(found != truth)
    return {"reward": max(0.0, 1 - error), "accuracy": float(error <= tolerance), "pred": number_text(found)}


@register_reward("counting", rows_checked_by="whet.plugins.scores.perception:read_number")
def counting(
    solution_str: str, ground_truth: str | int | float, *, tolerance: Number = 0
) -> dict[str, float | str | None]:
    """1 - |x - t| / (tolerance + 1), at least 0, for the last number x of the answer and t of the ground truth.

    So by default only the exact number pays, and with `tolerance=1` its neighbours pay 1/2. The answer is the content
    of the last `<answer>`, else the text after the last `</think>`. The accuracy is 1 for the exact number. `pred` is
    x.  Raises: ValueError for a ground truth without a number."""
    found, truth = _numbers(solution_str, ground_truth)
    if found is None:
        return {"reward": 0.0, "accuracy": 0.0, "pred": None}
    reward = max(0.0, 1 - float(abs(found - truth)) / (tolerance + 1))
    return {"reward": reward, "accuracy": float(found == truth), "pred": number_text(found)}


def _numbers(solution_str: str, ground_truth: str | int | float) -> tuple[Decimal | None, Decimal]:
    """Returns the last numbers of the answer and of the ground truth.  Raises: ValueError."""
    return _number(extract_answer(solution_str, needs_tag=False) or ""), read_number(ground_truth)


def read_number(ground_truth: str | int | float, *_: object) -> Decimal:
    """Reads a ground truth that is a number, or a text with one.  Raises: ValueError."""
    truth = _number(str(ground_truth))
    if truth is None:
        raise truth_error(ground_truth, "a number")
    return truth


def _number(text: str) -> Decimal | None:
    """Returns the number that a text is, also with an exponent; else the last number in it."""
    return Decimal(text.strip()) if re.fullmatch(_DIGITS, text.strip()) else last_number(text)


def _words_of(ground_truth: str, *, letters: bool = False) -> list[str]:
    found = _ROUGE_WORD.findall(ground_truth.lower()) if letters else ground_truth.split()
    if not found:
        raise truth_error(ground_truth, "a text with words")
    return found


def _last_list(text: str) -> object:
    """Returns the last JSON list of objects in a text; an empty list without one."""
    for opening in list(_LIST.finditer(text))[-20:][::-1]:
        try:
            return json.JSONDecoder().raw_decode(text, opening.start())[0]
        except (ValueError, RecursionError):
            continue
    return []


def _boxes(found: object) -> list[Box | None]:
    """Reads the boxes in a list; None for a malformed box."""
    return [_box(each) for each in found] if isinstance(found, list | tuple) else []


def _box(found: object) -> Box | None:
    if not isinstance(found, Mapping):
        return None
    corners, score = found.get("bbox_2d", found.get("bbox")), found.get("score", 1.0)
    numbers = [*corners, score] if isinstance(corners, list | tuple) else []
    if len(numbers) != 5 or not all(is_number(each) and abs(each) < 1e9 for each in numbers):
        return None
    return str(found.get("label", "")).strip().casefold(), corners, score


def _overlap(box: Box, other: Box) -> float:
    """Returns the intersection over union of two boxes; 0 for different labels."""
    (x1, y1, x2, y2), (u1, v1, u2, v2) = box[1], other[1]
    shared = max(0.0, min(x2, u2) - max(x1, u1)) * max(0.0, min(y2, v2) - max(y1, v1))
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
    return shared / union if box[0] == other[0] and shared > 0 else 0.0


def _match(boxes: Sequence[Box], truths: Sequence[Box]) -> list[float]:
    """Matches boxes with true boxes one to one, largest overlap first. Returns the overlaps of the pairs."""
    pairs = [(_overlap(box, truth), i, j) for i, box in enumerate(boxes) for j, truth in enumerate(truths)]
    matched, rows, columns = list[float](), set[int](), set[int]()
    for overlap, i, j in sorted(pairs, key=lambda pair: -pair[0]):
        if overlap > 0 and i not in rows and j not in columns:
            matched.append(overlap)
            rows.add(i)
            columns.add(j)
    return matched


def _average_precision(boxes: Sequence[Box], truths: Sequence[Box], threshold: float) -> float:
    """Returns the mean over labels of the area under the precision-recall curve. Precision at a recall is the largest
    precision at that recall or above. A label that is not in the ground truth counts 0."""
    labels = {box[0] for box in (*boxes, *truths)}
    return sum(_area(label, boxes, truths, threshold) for label in labels) / len(labels)


def _area(label: str, boxes: Sequence[Box], truths: Sequence[Box], threshold: float) -> float:
    free = [truth for truth in truths if truth[0] == label]
    total, precisions, hits = len(free), list[float](), 0
    ranked = sorted((box for box in boxes if box[0] == label), key=lambda box: -box[2])
    for rank, box in enumerate(ranked, start=1):
        best = max(free, key=lambda truth: _overlap(box, truth), default=None)
        if best is not None and _overlap(box, best) >= threshold:
            free.remove(best)
            hits += 1
            precisions.append(hits / rank)
    return sum(max(precisions[at:]) for at in range(hits)) / total if total else 0.0
