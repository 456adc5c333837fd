# SPDX-License-Identifier: Apache-2.0
"""Trajectories as rows and rows as a batch, worked by hand."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, strategies as st

from tests.raising import raises
from whet.errors import DataError
from whet.rollout.batch import NOT_SAMPLED, Row, rows_of, to_batch
from whet.types import Failure, Group, Message, Prompt, Trajectory, Turn

PAD = 0


def prompt(*token_ids: int, uid: str = "0:0") -> Prompt:
    return Prompt(uid, 0, (Message("user", "?"),), token_ids or (1, 2), "test", None)


def turn(context: tuple[int, ...], *token_ids: int, reward: float = 0.0, version: int = 4) -> Turn:
    log_probs = tuple(-token / 8 for token in token_ids)
    return Turn(context, token_ids, log_probs, "stop", ((version, len(token_ids)),), reward)


def trajectory(*turns: Turn, of: Prompt | None = None, sample: int = 0, **said: Any) -> Trajectory:
    of = of or prompt()
    return Trajectory(f"{of.uid}:{sample}", of, turns, sample, **said)


# prompt 1 2, sampled 3 4, a tool says 5, sampled 6 7 8 by later weights
TWO_TURNS = (turn((1, 2), 3, 4, reward=0.5), turn((1, 2, 3, 4, 5), 6, 7, 8, version=5))
# the second context is not the first one continued: 3 4 was rewritten to 9
REWRITTEN = (turn((1, 2), 3, 4, reward=0.5), turn((1, 2, 9, 5), 6, 7, version=5))


def paid(of: Trajectory) -> tuple[list[list[int]], list[list[float]]]:
    """Mask and scores of a trajectory's rows."""
    batch = to_batch([Group(of.prompt, (of,))], pad_token_id=PAD)
    return batch["response_mask"].tolist(), batch["token_level_scores"].tolist()


def test_one_turn_is_one_row_whose_reward_is_on_its_last_token() -> None:
    assert rows_of(trajectory(turn((1, 2), 3, 4, 5), reward=2.0)) == [
        Row((1, 2), [3, 4, 5], [-3 / 8, -4 / 8, -5 / 8], [0, 0, 0], [4, 4, 4])
    ]
    assert paid(trajectory(turn((1, 2), 3, 4, 5), reward=2.0)) == ([[1, 1, 1]], [[0.0, 0.0, 2.0]])


def test_a_turn_that_continues_the_context_goes_on_in_its_row() -> None:
    [row] = rows_of(trajectory(*TWO_TURNS, reward=1.0))
    assert row.prompt_ids == (1, 2)
    assert row.response_ids == [3, 4, 5, 6, 7, 8]
    assert row.turn_ids == [0, 0, NOT_SAMPLED, 1, 1, 1]
    assert row.log_probs == [-3 / 8, -4 / 8, 0.0, -6 / 8, -7 / 8, -1.0]
    assert row.versions == [4, 4, 0, 5, 5, 5]
    # the environment paid 0.5 for the first turn: on its last sampled token, before the tool's text
    mask, scores = paid(trajectory(*TWO_TURNS, reward=1.0))
    assert mask == [[1, 1, 0, 1, 1, 1]] and scores == [[0.0, 0.5, 0.0, 0.0, 0.0, 1.0]]


def test_a_rewritten_context_starts_a_row_and_the_reward_is_paid_in_the_last() -> None:
    first, second = rows_of(trajectory(*REWRITTEN, reward=1.0))
    assert (first.prompt_ids, first.response_ids) == ((1, 2), [3, 4])
    assert (second.prompt_ids, second.response_ids) == ((1, 2, 9, 5), [6, 7])
    assert second.turn_ids == [1, 1] and second.versions == [5, 5]
    assert paid(trajectory(*REWRITTEN, reward=1.0))[1] == [[0.0, 0.5], [0.0, 1.0]]


def test_the_reward_is_paid_on_a_sampled_token_where_the_last_turn_is_not_trained_on() -> None:
    first, last = turn((1, 2), 3, 4, reward=0.5), turn((1, 2, 3, 4, 5), 6, 7)
    mask, scores = paid(trajectory(first, replace(last, is_trained=False), reward=1.0))
    assert mask == [[1, 1, 0, 0, 0]] and scores == [[0.0, 1.5, 0.0, 0.0, 0.0]]


def test_a_failed_trajectory_keeps_its_text_and_teaches_nothing() -> None:
    failed = trajectory(*TWO_TURNS, failure=Failure("tool", "broken"), reward=1.0)
    [row] = rows_of(failed)
    assert row.response_ids == [3, 4, 5, 6, 7, 8]
    assert paid(failed) == ([[0] * 6], [[0.0] * 6])
    assert paid(replace(failed, turns=REWRITTEN)) == ([[0, 0]] * 2, [[0.0, 0.0]] * 2)


def test_rewards_by_token_stay_where_they_are_but_for_those_on_text_that_was_read() -> None:
    given = (0.25, 0.0, 8.0, 0.5, 0.0, 1.0)  # 8 on the tool's token: it belongs to the 4 before it
    _, scores = paid(trajectory(*TWO_TURNS, reward=sum(given), token_rewards=given))
    assert scores == [[0.25, 0.5 + 8.0, 0.0, 0.5, 0.0, 1.0]]


def test_rewards_by_token_are_for_the_row_that_was_judged_the_last() -> None:
    _, scores = paid(trajectory(*REWRITTEN, reward=3.0, token_rewards=(1.0, 2.0)))
    assert scores == [[0.0, 0.5], [1.0, 2.0]]


def test_rows_are_divided_once_and_anew_for_other_turns() -> None:
    whole = trajectory(*TWO_TURNS)
    assert whole.rows == ((0, 1),) and trajectory(*REWRITTEN).rows == ((0,), (1,))
    scored = replace(whole, reward=1.0)
    assert scored.turns is whole.turns and scored.rows is whole.rows
    assert replace(whole, turns=whole.turns[:1]).rows == ((0,),)
    assert pickle.loads(pickle.dumps(whole)).rows == whole.rows
    untrained = replace(whole, turns=tuple(replace(turn, is_trained=False) for turn in whole.turns))
    assert untrained.rows == () and rows_of(untrained) == []


def test_no_turn_no_row() -> None:
    assert rows_of(trajectory(failure=Failure("environment", "broken"))) == []


def test_every_column_of_a_batch_by_hand() -> None:
    other = prompt(11, 12, 13, uid="0:1")
    groups = [
        Group(
            prompt(), (trajectory(*TWO_TURNS, reward=1.0, accuracy=1.0), trajectory(*REWRITTEN, sample=1, reward=2.0))
        ),
        Group(other, (trajectory(turn((11, 12, 13), 14), of=other, reward=-1.0, accuracy=0.5),)),
    ]
    batch = to_batch(groups, pad_token_id=PAD)
    assert batch["prompts"].tolist() == [[0, 0, 1, 2], [0, 0, 1, 2], [1, 2, 9, 5], [0, 11, 12, 13]]
    assert batch["responses"].tolist() == [
        [3, 4, 5, 6, 7, 8],
        [3, 4, 0, 0, 0, 0],
        [6, 7, 0, 0, 0, 0],
        [14, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))
    assert batch["attention_mask"].tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    ]
    assert batch["position_ids"].tolist() == [
        [0, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 0, 1, 2, 3, 3, 3, 3, 3],
        [0, 1, 2, 3, 4, 5, 5, 5, 5, 5],
        [0, 0, 1, 2, 3, 3, 3, 3, 3, 3],
    ]
    assert batch["response_mask"].tolist() == [
        [1, 1, 0, 1, 1, 1],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
    ]
    assert batch["turn_ids"].tolist() == [
        [0, 0, -1, 1, 1, 1],
        [0, 0, -1, -1, -1, -1],
        [1, 1, -1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1],
    ]
    assert batch["policy_version"].tolist() == [
        [4, 4, 0, 5, 5, 5],
        [4, 4, 0, 0, 0, 0],
        [5, 5, 0, 0, 0, 0],
        [4, 0, 0, 0, 0, 0],
    ]
    assert batch["rollout_log_probs"][0].tolist() == [-0.375, -0.5, 0.0, -0.75, -0.875, -1.0]
    assert batch["rollout_log_probs"][3].tolist() == [-1.75, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert batch["token_level_scores"].tolist() == [
        [0.0, 0.5, 0.0, 0.0, 0.0, 1.0],
        [0.0, 0.5, 0.0, 0.0, 0.0, 0.0],
        [0.0, 2.0, 0.0, 0.0, 0.0, 0.0],
        [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]
    assert batch["uid"].tolist() == [0, 0, 0, 1] and batch["uid"].dtype == torch.int64
    assert batch["trajectory_uid"].tolist() == [0, 1, 1, 2]
    assert batch["accuracy"].tolist() == [1.0, 0.0, 0.0, 0.5]
    assert batch["policy_version"].dtype == torch.int32
    assert list(batch["uid_name"]) == ["0:0", "0:0", "0:0", "0:1"]
    assert list(batch["trajectory_uid_name"]) == ["0:0:0", "0:0:1", "0:0:1", "0:1:0"]
    assert list(batch["data_source"]) == ["test"] * 4 and list(batch["error"]) == [None] * 4
    assert batch.meta_info == {"reward_part_names": []}


def test_what_failed_before_its_first_token_is_a_masked_row() -> None:
    failure = Failure("environment", "broken")
    batch = to_batch([Group(prompt(), (trajectory(failure=failure),))], pad_token_id=PAD)
    assert batch["prompts"].tolist() == [[1, 2]] and batch["responses"].tolist() == [[PAD]]
    assert batch["response_mask"].tolist() == [[0]] and batch["turn_ids"].tolist() == [[NOT_SAMPLED]]
    assert batch["token_level_scores"].tolist() == [[0.0]] and list(batch["error"]) == [failure]


def test_parts_and_columns_are_what_reward_and_environment_report() -> None:
    answers = (
        trajectory(turn((1, 2), 3), reward=1.0, parts={"style": 0.25, "depth": 2.0}, fields={"moves": 7}),
        trajectory(turn((1, 2), 3), sample=1, reward=1.0, parts={"style": 0.5}),
        trajectory(turn((1, 2), 3), sample=2, failure=Failure("reward", "late")),
    )
    batch = to_batch([Group(prompt(), answers)], pad_token_id=PAD, columns=["style", "moves"])
    assert batch["style"].tolist() == [0.25, 0.5, 0.0]
    assert batch["moves"].tolist() == [7.0, 0.0, 0.0]
    assert batch.meta_info == {"reward_part_names": ["depth", "style"]}
    assert batch["reward_parts"].tolist() == [[2.0, 0.25], [0.0, 0.5], [0.0, 0.0]]


def test_a_column_that_nobody_reports_is_named() -> None:
    answers = (trajectory(turn((1, 2), 3), reward=1.0, parts={"style": 0.25}, fields={"moves": 7}),)
    with raises(DataError, key="reward.columns", found="styl", expected=re.compile(": moves, style$")):
        to_batch([Group(prompt(), answers)], pad_token_id=PAD, columns=["styl"])
    failed = (trajectory(turn((1, 2), 3), failure=Failure("reward", "late")),)
    batch = to_batch([Group(prompt(), failed)], pad_token_id=PAD, columns=["style"])
    assert batch["style"].tolist() == [0.0]  # where all failed, nobody could report it


TURNS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.floats(-2, 2)), min_size=1, max_size=5
)


@given(TURNS, st.floats(-2, 2))
def test_whatever_the_turns_every_sampled_token_and_every_reward_is_there_once(
    shapes: list[tuple[int, int, bool, float]], reward: float
) -> None:
    context, turns = (1, 2), []
    for count, read, rewrites, paid in shapes:
        turns.append(turn(context, *range(20, 20 + count), reward=paid))
        context = (9, *context) if rewrites else (*context, *range(20, 20 + count), *range(50, 50 + read))
    made = trajectory(*turns, reward=reward)
    batch = to_batch([Group(prompt(), (made,))], pad_token_id=PAD)
    assert batch["response_mask"].sum() == sum(count for count, *_ in shapes)
    sampled = batch["responses"][batch["response_mask"] == 1].tolist()
    assert sampled == [token for each in turns for token in each.token_ids]
    torch.testing.assert_close(batch["token_level_scores"].sum().item(), made.score, atol=1e-5, rtol=0)
    assert (batch["token_level_scores"][batch["response_mask"] == 0] == 0).all()
