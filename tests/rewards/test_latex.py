# SPDX-License-Identifier: Apache-2.0
"""Parsing in two stages gives the trees, and the errors, of latex2sympy2's own parser."""

from __future__ import annotations

from typing import Any

import pytest
from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy2
from sympy import srepr

from whet.rewards.math import TwoStageParser

EXPRESSIONS = [
    r"\frac{1}{2}x^2 + 3xy - \sqrt[3]{7}",
    r"2\sin^2 x\cos(2x) - \ln 3x",
    r"f(x+1)g(2)",
    r"x(y+1)!",
    r"|x - |y||",
    r"\{1, \frac{2}{3}, x\}",
    r"(-\infty, 2] \cup [3, \infty)",
    r"x = 3, y = -4",
    r"1 < x \le 2",
    r"\begin{pmatrix} 1 & x \\ 2 & 3 \end{pmatrix}",
    r"\binom{5}{2} \cdot 10^{-3}",
    r"\log_2 8 + e^{i\pi}",
    r"3\frac{1}{2}",
    r"\sum_{k=1}^{n} k^2",
    r"a \mod b",
    r"12\%",
    r"1,234,567",
    r"\frac{1}{",  # an error
    r"2 + * 3",
    r"x \\unknown @ 3",
    r")(",
    "",
]


def parsed(parser: type, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(latex2sympy2, "PSParser", parser)
    try:
        return str(srepr(latex2sympy2._Latex2Sympy().parse(text)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
def test_trees_and_errors_are_those_of_the_parser_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    [own] = TwoStageParser.__bases__
    found = {text: parsed(TwoStageParser, text, monkeypatch) for text in EXPRESSIONS}
    assert found == {text: parsed(own, text, monkeypatch) for text in EXPRESSIONS}
    assert sum(tree.startswith("Exception: ") for tree in found.values()) >= 3
    assert len(set(found.values())) > 0.9 * len(found)


def test_the_second_stage_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    [own] = TwoStageParser.__bases__
    text, real, tried = r"\frac{x}{2} + 1", own.math, list[Any]()
    expected = parsed(own, text, monkeypatch)

    def math(self: Any) -> Any:
        """The first attempt fails when it has read the text."""
        tried.append(self._interp.predictionMode)
        tree = real(self)
        if len(tried) == 1:
            raise SyntaxError
        return tree

    monkeypatch.setattr(own, "math", math)
    assert parsed(TwoStageParser, text, monkeypatch) == expected
    assert tried == [PredictionMode.SLL, PredictionMode.LL]
