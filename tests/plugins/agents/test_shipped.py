# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from whet.environments.protocol import Observation
from whet.plugins.agents.shipped import Calculator, calculate
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", "?"),), (1,), "test", None)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-(2-5)", "3"),
        (" 6/2 ", "3"),
        ("1/8", "0.125"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("99999*99999", "9999800001"),  # exact, beyond the six digits of a plain %g
        ("123456789012345678901234567890+1", "123456789012345678901234567891"),
        ("1/0", "error: division by zero"),
        ("1e200*1e200", "error: too large"),
        ("1e999/1e999", "error: too large"),
        ("10**9", "error: not arithmetic"),
        ("True+1", "error: not arithmetic"),
        ("x+1", "error: not arithmetic"),
        ("__import__('os').getcwd()", "error: not arithmetic"),
        ("(1", "error: not arithmetic"),
        ("", "error: not arithmetic"),
        ("(" * 5000 + "1" + ")" * 5000, "error: not arithmetic"),
        ("9" * 5000, "error: not arithmetic"),
    ],
)
def test_arithmetic_and_nothing_else(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(
    st.recursive(
        st.integers(0, 10**9).map(str),
        lambda x: st.tuples(x, st.sampled_from("+-*"), x).map("({0[0]}{0[1]}{0[2]})".format),
        max_leaves=12,
    )
)
def test_integers_are_exact(expression: str) -> None:
    assert calculate(expression) == str(eval(expression))


@pytest.mark.slow
@given(st.text(max_size=30))
def test_whatever_a_model_writes_is_answered(expression: str) -> None:
    assert isinstance(calculate(expression), str)


def test_an_answer_without_a_question_ends_the_episode() -> None:
    assert Calculator(PROMPT).step("it is 36") == Observation(done=True)


def test_the_last_question_is_answered() -> None:
    answer = "first <calc>1+1</calc> then <calc>12\n*3</calc> so"
    assert Calculator(PROMPT).step(answer) == Observation(
        done=False, messages=(Message("tool", "error: not arithmetic"),)
    )
    answer = "first <calc>1+1</calc> then <calc>12*3</calc> so"
    assert Calculator(PROMPT).step(answer) == Observation(done=False, messages=(Message("tool", "36"),))
    assert Calculator(PROMPT, role="user").step("<calc>2</calc>").messages == (Message("user", "2"),)
    assert Calculator(PROMPT).step("<calc>2").done


@pytest.mark.parametrize(
    ("turn", "value"),
    [
        ("<calc>1+1</calc> and <calc>2+2</calc>", "4"),
        ("<calc>1+1</calc> and <calc>2+2", "2"),
        ("<calc>1+1</calc> </calc>", "2"),
        ("<calc><calc>3</calc>", "3"),
        ("<calc>" * 100_000 + "5</calc>", "5"),
    ],
)
def test_the_last_whole_call_counts(turn: str, value: str) -> None:
    assert Calculator(PROMPT).step(turn) == Observation(done=False, messages=(Message("tool", value),))


def test_a_hundred_thousand_openings_take_no_time() -> None:
    assert Calculator(PROMPT).step("<calc>" * 100_000).done
