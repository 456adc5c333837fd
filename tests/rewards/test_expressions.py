# SPDX-License-Identifier: Apache-2.0
import pytest

from whet.rewards.math import MAX_CHARS, find_expressions, last_expression


@pytest.mark.parametrize(
    ("text", "expressions"),
    [
        ("so 2/3 of 5 apples", ["2/3 of 5"]),
        ("x = 2 or x = 3. It's 7!", ["x = 2 or x = 3", "7"]),
        (r"$a + b$, then \(c\), with $$d.$$", ["$a + b$", r"\(c\)", "$$d.$$"]),
        ("a or b = a - c where x = a then", ["a or b = a - c", "x = a"]),
        ("2 + 2 = 4, 4 * 3 = 12", ["4", "12"]),
        ("It costs $5 and $6, a well-known price", ["$5 and $6"]),
        ("(see 5), [with 6", ["5", "6"]),
        ("\n - 5\n* 6\n-7", ["5", "6", "-7"]),
        ("f(2, 3) and max(2, 3)", ["f(2, 3) and max(2, 3)"]),
        (
            r"\begin{pmatrix} 1 & 2 \end{pmatrix} \implies \text{so 5}",
            [r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\text{so 5}"],
        ),
        ("none here, e.g. an x-axis", []),
    ],
)
def test_expressions_are_whole(text, expressions):
    assert [found for _, found in find_expressions(text)] == expressions


def test_an_expression_has_a_place():
    text = "The sum is 5. It is\n12"
    assert [text[start:].strip().startswith(found) for start, found in find_expressions(text)] == [True, True]


def test_the_last_expression_of_a_long_text():
    words = "nothing to be found here\n" * MAX_CHARS
    assert last_expression(f"{words}so 5\n") == "5"
    assert last_expression(f"so 5 {words}") == "5"
    assert last_expression(words) is None
    assert len(last_expression("1+" * MAX_CHARS + "1")) == 2 * MAX_CHARS + 1
