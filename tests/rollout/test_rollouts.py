# SPDX-License-Identifier: Apache-2.0
"""Groups handed out by `start`: complete, scored, filtered, whatever the responses are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, text_prompt
from transformers import PreTrainedTokenizerBase

from tests.raising import raises
from tests.rollout.playing import Playing, World
from whet.algorithms.filters import dynamic_sampling
from whet.data.loader import PromptLoader, PromptSource
from whet.errors import DataError, EngineError
from whet.rewards.pool import RewardPool
from whet.rollout.batch import to_batch, with_scores
from whet.rollout.driver import Driver
from whet.rollout.flow import Filter
from whet.rollout.protocol import Event, Failed, Request, SamplingParams
from whet.rollout.rollouts import Rollouts
from whet.types import Failure, Group

DYNAMIC = Filter(dynamic_sampling, {}, max_refills=3)
PAYING = """
from whet.environments.protocol import Observation


class Paying:
    def __init__(self, prompt):
        pass

    def step(self, answer):
        return Observation(done=True, reward=len(answer))
"""


def number(solution_str: str) -> dict[str, float]:
    """The answer is its own reward; 7 cannot be judged, and 8 has no style."""
    if solution_str == "7":
        raise ValueError("no sevens")
    return {"reward": float(solution_str), **({} if solution_str == "8" else {"style": float(solution_str == "2")})}


def rollouts(
    tokenizer: PreTrainedTokenizerBase,
    *answers: str,
    group_filter: Filter | None = None,
    function: Callable[..., Any] = number,
    environment: str = "single_turn",
    engine: Scripted | None = None,
) -> Playing:
    """Two scripted responses a prompt, to endlessly many prompts in order."""
    pool = RewardPool(function, num_workers=0, timeout_seconds=5.0, correct_threshold=1.0)
    prompts = [text_prompt(tokenizer, f"{index}+0=", index) for index in range(6)]
    loader = PromptLoader(prompts, seed=0, shuffle=False)
    return Playing(
        engine or Scripted(tokenizer, *answers, by_sample=environment != "single_turn"),
        tokenizer,
        world=World(environment),
        apply_chat_template=False,
        seed=1,
        prompts=loader,
        scorer=pool,
        n=2,
        group_filter=group_filter,
    )


def asked(of: Rollouts) -> list[str]:
    """The texts of the prompts that were answered, without repeats."""
    assert isinstance(of.driver.engine, Scripted)
    texts = [of.tokenizer.decode(list(request.prompt_ids)) for request in of.driver.engine.requests]
    return list(dict.fromkeys(str(text) for text in texts))


def rewards(groups: list[Group]) -> list[list[float | None]]:
    return [[answer.reward for answer in group.trajectories] for group in groups]


def test_n_groups_in_the_order_of_the_data(tokenizer: PreTrainedTokenizerBase) -> None:
    of = rollouts(tokenizer, "0", "1", "2", "3")
    taken = of.start(2, step=1).result()
    assert [group.prompt.uid for group in taken.groups] == ["0:0", "0:1"]
    assert rewards(taken.groups) == [[0.0, 1.0], [2.0, 3.0]]
    assert [[answer.accuracy for answer in group.trajectories] for group in taken.groups] == [[0.0, 1.0], [1.0, 1.0]]
    assert taken.groups[1].trajectories[0].parts == {"style": 1.0}
    assert of.metrics.reduce() == {}
    assert of.metrics.timings().keys() == {"time/rollout", "time/reward"}
    assert [group.prompt.uid for group in of.start(5, step=2).result().groups] == ["0:2", "0:3", "0:4", "0:5", "1:0"]


class Staggered(Scripted):
    """Ends a response with each `poll`, the last one first, and notes when."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ended: list[float] = []

    def poll(self, timeout_seconds: float) -> list[Event]:
        if not self._events:
            return []
        time.sleep(0.3)
        self.ended.append(time.time())
        return [self._events.pop()]


SLOW = """
import time

def one(solution_str):
    begun = time.time()
    time.sleep(0.2)
    return {"reward": float(solution_str), "begun": begun}

def every(solution_strs):
    return [{"reward": float(text), "begun": time.time(), "together": len(solution_strs)} for text in solution_strs]
"""


@pytest.mark.parametrize("name", ["one", "every"])
def test_a_response_is_scored_while_others_are_sampled(
    name: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    engine = Staggered(tokenizer, *"012345")
    pool = RewardPool(f"{tmp_path}/slow.py:{name}", num_workers=1, timeout_seconds=30.0, correct_threshold=1.0)
    prompts = [text_prompt(tokenizer, f"{index}+0=", index) for index in range(3)]
    loader = PromptLoader(prompts, seed=0, shuffle=False)
    of = Playing(engine, tokenizer, apply_chat_template=False, seed=1, prompts=loader, scorer=pool, n=2)
    taken = of.start(3, step=1).result()
    of.close()
    assert rewards(taken.groups) == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]  # in the order of the rows
    scored = [answer for group in taken.groups for answer in group.trajectories]
    if name == "every":  # a function of all responses gets all of them
        assert [answer.parts["together"] for answer in scored] == [6.0] * 6
        return
    begun = sorted(answer.parts["begun"] for answer in scored)  # 1.5 s pass from the first end to the last
    assert len([each for each in begun if each < engine.ended[-1]]) >= 3, (begun, engine.ended)


def filtered(of: Playing) -> dict[str, float]:
    """The filter's metrics, without the scores of sampled groups."""
    return {name: value for name, value in of.metrics.reduce().items() if "sampled" not in name}


def test_groups_that_differ_are_kept_and_only_what_is_missing_is_asked_again(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    # groups: 0 0 | 0 1 | 0 0, two are missing: 1 1 | 0 1, one is missing: 1 0
    of = rollouts(tokenizer, *"00 01 00 11 01 10".replace(" ", ""), group_filter=DYNAMIC)
    taken = of.start(3, step=1).result()
    assert rewards(taken.groups) == [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    assert asked(of) == ["0+0=", "1+0=", "2+0=", "3+0=", "4+0=", "5+0="]
    assert filtered(of) == {"filter/dropped_groups": 3.0, "filter/kept_fraction": 0.5}


def test_refills_are_bounded_and_what_there_is_is_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    # one group of the first two differs, and then none of four: 1 + 3 rounds
    of = rollouts(tokenizer, *"01 00 00 00 00".replace(" ", ""), group_filter=DYNAMIC)
    taken = of.start(2, step=1).result()
    assert rewards(taken.groups) == [[0.0, 1.0]]
    assert len(asked(of)) == 2 + 3
    assert filtered(of) == {"filter/dropped_groups": 4.0, "filter/kept_fraction": 0.2}
    assert of.metrics.reduce()["filter/sampled_score"] == 0.1  # one of the 10 answers is right


def test_where_everything_is_dropped_the_run_goes_on_without_training_and_says_so(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    # two steps of three rounds that drop all, one that keeps its group, one more that drops all
    of = rollouts(tokenizer, *"1" * 12, "0", *"1" * 9, group_filter=Filter(dynamic_sampling, {}, max_refills=2))
    taken = of.start(2, step=1).result()
    assert [group.prompt.uid for group in taken.groups] == ["0:0", "0:1"] and not taken.kept
    assert filtered(of) == {"filter/dropped_groups": 6.0, "filter/kept_fraction": 0.0}
    batch = with_scores(to_batch(taken.groups, pad_token_id=0), taken.groups, is_dropped=not taken.kept)
    assert batch["response_mask"].sum() == 0 and batch["attention_mask"].sum() > 0
    assert [record.args for record in caplog.records] == [(1, 6)]


def test_failures_are_counted_and_no_part_of_what_a_filter_sees(tokenizer: PreTrainedTokenizerBase) -> None:
    # 7 fails: with it 0 7 is one answer, which cannot differ, and 7 7 is none
    of = rollouts(tokenizer, *"07 77 01 01".replace(" ", ""), group_filter=DYNAMIC)
    taken = of.start(2, step=1).result()
    assert rewards(taken.groups) == [[0.0, 1.0], [0.0, 1.0]]
    assert of.metrics.reduce()["failures/reward"] == 3.0

    of = rollouts(tokenizer, "0", "7")
    unfiltered = of.start(1, step=1).result()
    [[fine, failed]] = [group.trajectories for group in unfiltered.groups]
    assert fine.failure is None and failed.reward is None and failed.accuracy is None
    assert failed.failure is not None and failed.failure.message.startswith("ValueError: no sevens")
    assert of.metrics.reduce() == {"failures/reward": 1.0}


class GivesUp(Scripted):
    """Gives up the second request."""

    def submit(self, request: Request) -> bool:
        super().submit(request)
        if len(self.requests) == 2:
            self._events[-1] = Failed(request.uid, request.attempt, Failure("engine", "out of blocks"))
        return True


def test_what_an_engine_gave_up_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    of = rollouts(tokenizer, engine=GivesUp(tokenizer, "2"))
    taken = of.start(2, step=1).result()
    failures = [each.failure for group in taken.groups for each in group.trajectories]
    assert failures == [None, Failure("engine", "out of blocks"), None, None]
    assert rewards(taken.groups) == [[2.0, None], [2.0, 2.0]] and of.metrics.reduce()["failures/engine"] == 1.0


def test_what_failed_in_its_environment_is_not_judged(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("class Broken:\n    def __init__(self, prompt): raise OSError('no room')\n")
    seen: list[str] = []
    of = rollouts(tokenizer, "1", function=lambda solution_str: seen.append(solution_str), environment=f"{path}:Broken")
    taken = of.start(2, step=1).result()
    assert seen == [] and of.metrics.reduce() == {"failures/environment": 4.0}
    found = re.compile(" 0:0:0 in the environment: OSError: no room")
    with raises(EngineError, key="all 4 trajectories", found=found):
        of.failures.record(taken.groups)
    assert all(answer.failure is not None for group in taken.groups for answer in group.trajectories)


def test_a_function_reads_the_whole_trajectory_of_an_environment(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "paying.py"
    path.write_text(PAYING.replace("reward=len(answer)", "reward=len(answer), fields={'won': 2.0}"))
    seen: list[Any] = []
    of = rollouts(
        tokenizer,
        "12",
        "345",
        function=lambda trajectory: (seen.append(trajectory), sum(trajectory["turn_rewards"]))[1],
        environment=f"{path}:Paying",
    )
    [group] = of.start(1, step=1).result().groups
    assert [each.score for each in group.trajectories] == [2.0 * 2, 2.0 * 3]  # the environment's, and the function's
    said = {"role": "assistant", "content": "12"}
    assert seen[0] == {"messages": [said], "turn_rewards": [2.0], "fields": {"won": 2.0}, "limit": None}
    assert seen[1]["turn_rewards"] == [3.0]


def test_a_filter_by_reward_and_by_a_part(tokenizer: PreTrainedTokenizerBase) -> None:
    by_reward = rollouts(tokenizer, *"11 35".replace(" ", ""), group_filter=Filter(dynamic_sampling, {}, "reward"))
    assert rewards(by_reward.start(1, step=1).result().groups) == [[3.0, 5.0]]
    by_part = rollouts(tokenizer, *"35 23".replace(" ", ""), group_filter=Filter(dynamic_sampling, {}, "style"))
    assert rewards(by_part.start(1, step=1).result().groups) == [[2.0, 3.0]]
    absent = rollouts(tokenizer, "2", "8", group_filter=Filter(dynamic_sampling, {}, "style"))
    expected = re.compile(" 0:0:1: accuracy, reward$")
    with raises(DataError, key="algorithm.filter.metric", found="style", expected=expected):
        absent.start(1, step=1).result()


def test_the_reward_is_given_the_whole_answer_and_its_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    seen: list[Any] = []

    def look(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, prompt_str: str) -> list[float]:
        seen.append((data_source, solution_str, ground_truth, prompt_str))
        return [0.5, 0.0, 2.0][: len(solution_str) + 1]

    of = rollouts(tokenizer, "12", "34", function=look)
    [group] = of.start(1, step=1).result().groups
    assert seen == [("test", "12", "4", "0+0="), ("test", "34", "4", "0+0=")]
    assert [answer.token_rewards for answer in group.trajectories] == [(0.5, 0.0, 2.0)] * 2
    assert [answer.reward for answer in group.trajectories] == [2.5, 2.5]


def test_the_messages_of_a_prompt_reach_a_reward_function_of_trl(tokenizer: PreTrainedTokenizerBase) -> None:
    def first(prompts: Any, completions: Any, answer: list[str]) -> list[float]:
        assert prompts == [[{"role": "user", "content": "0+0="}]] * 2
        assert completions == [[{"role": "assistant", "content": text}] for text in ("4", "34")]
        return [float(each[0]["content"] == truth) for each, truth in zip(completions, answer, strict=True)]

    [group] = rollouts(tokenizer, "4", "34", function=first).start(1, step=1).result().groups
    assert [each.reward for each in group.trajectories] == [1.0, 0.0]


def test_what_is_left_is_taken_after_a_restart_with_the_same_draws(tokenizer: PreTrainedTokenizerBase) -> None:
    straight, stopped, resumed = (rollouts(tokenizer, "0", "1") for _ in range(3))
    straight.start(4, step=1).result()
    first = stopped.start(4, step=1).result().groups
    resumed.load_state(stopped.state())  # before the step was trained: its groups come again
    assert [group.prompt.uid for group in resumed.start(4, step=1).result().groups] == [
        group.prompt.uid for group in first
    ]
    stopped.on_weights(1)
    resumed.load_state(stopped.state())
    expected, got = straight.start(4, step=2).result().groups, resumed.start(4, step=2).result().groups
    assert (
        [group.prompt.uid for group in got] == [group.prompt.uid for group in expected] == ["0:4", "0:5", "1:0", "1:1"]
    )
    keys = [[request.key for request in of.driver.engine.requests[-8:]] for of in (straight, resumed)]  # type: ignore[attr-defined]
    assert keys[0] == keys[1]


def test_without_a_scorer_an_answer_is_worth_what_its_environment_paid(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "paying.py"
    path.write_text(PAYING)
    of = rollouts(tokenizer, "5", "12", environment=f"{path}:Paying")
    of.scorer, of._training.scorers, of.correct_threshold = None, [], 2.0
    [group] = of.start(1, step=1).result().groups
    assert [(answer.reward, answer.score, answer.accuracy) for answer in group.trajectories] == [
        (0.0, 1.0, 0.0),
        (0.0, 2.0, 1.0),
    ]


def test_without_a_source_prompts_are_given(tokenizer: PreTrainedTokenizerBase) -> None:
    of = rollouts(tokenizer, "1", "2")
    of.flow.source = of.prompts = PromptSource()
    prompt = text_prompt(tokenizer)
    [group] = of.sample([prompt], 2, SamplingParams(8), step=0, purpose="evaluation")
    assert group.prompt is prompt and rewards([group]) == [[1.0, 2.0]]
    assert of.sample([], 2, SamplingParams(8), step=0) == []
    assert of.state() == {}
    with raises(DataError, key="source of prompts", found=None):
        of.start(1, step=1).result()


def test_lengths_come_in_stages() -> None:
    params, stages = SamplingParams(max_new_tokens=16), {1: 4, 10: 8, 20: 99}
    driver = Driver(None, {})  # type: ignore[arg-type]
    rollouts = Rollouts(PromptSource(), driver, {}, None, None, n=1, params=params, length_stages=stages)  # type: ignore[arg-type]
    assert [rollouts.params_at(step).max_new_tokens for step in (0, 1, 9, 10, 19, 20)] == [16, 4, 4, 8, 8, 16]
