# SPDX-License-Identifier: Apache-2.0
"""Episodes of one and of several turns, with a scripted engine and with a real one."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripted import VERSION, Scripted, text_prompt
from transformers import PreTrainedTokenizerBase

from tests.data.seeing import IMAGE, encoded, picture, seeing
from tests.raising import raises
from tests.rollout.playing import Playing, World
from whet.config import TrainConfig
from whet.config.schema import DataConfig
from whet.data.load import load_items
from whet.data.media import MediaLimits, MediaReader
from whet.data.written import warn_once
from whet.errors import DataError
from whet.evaluation.answers import readable
from whet.models.load import load_tokenizer
from whet.phases import watching
from whet.plugins.lessons.init_model import init_model
from whet.rollout.batch import rows_of, to_batch
from whet.rollout.codec import BARE_TAG
from whet.rollout.episode import EpisodeLimits
from whet.rollout.protocol import Completion, Event, Request, SamplingParams
from whet.trainers.build import build, build_scorer
from whet.trainers.rl import fit
from whet.types import Group, Message, Prompt, Trajectory

PARAMS = SamplingParams(max_new_tokens=64)
CHAT_TURN = "\n<|im_start|>user\n<tool_response>\n36\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
USER_ENVIRONMENTS = '''
from whet.plugins.agents.shipped import Calculator
from whet.environments.protocol import Observation
from tests.data.seeing import picture
from whet.data.media import image
from whet.types import Message


class Unmade:
    def __init__(self, prompt):
        raise KeyError(prompt.index)


class Broken:
    """Fails on answers with a 9."""

    def __init__(self, prompt, *, note="seen"):
        self.note = note

    def step(self, answer):
        if "9" in answer:
            raise RuntimeError("nine")
        return Observation(done=True, reward=0.25, fields={self.note: len(answer)})


class Endless:
    """Never done: says `more`."""

    def __init__(self, prompt):
        pass

    def step(self, answer):
        return Observation(done=False, messages=(Message("tool", "more"),), reward=1.0)


class Insistent(Calculator):
    """The calculator for a model that knows nothing: whatever is answered first is a question for 12*3."""

    def __init__(self, prompt):
        super().__init__(prompt)
        self.asked = False

    def step(self, answer):
        if self.asked:
            return Observation(done=True)
        self.asked = True
        return super().step("<calc>12*3</calc>")


class World:
    """Speaks first; lets the second response have two tokens; then shows the state instead of all that was said."""

    async def reset(self, prompt, seed):
        self.steps = 0
        return Observation(done=False, messages=(Message("user", "1+1="),))

    async def step(self, answer):
        self.steps += 1
        if self.steps == 1:
            return Observation(done=False, messages=(Message("user", "and 5"),), max_tokens=2)
        if self.steps == 2:
            return Observation(done=False, messages=(Message("user", "7+7="),), context="replace", reward=0.5)
        return Observation(done=False, truncated=True, fields={"cut": answer.finish_reason})


class Shows:
    """Speaks with a picture, then with two, one as an object in its part; writes a tag that means nothing."""

    def __init__(self, prompt):
        self.steps = 0

    def step(self, answer):
        self.steps += 1
        if self.steps == 1:
            return Observation(done=False, messages=(Message("tool", "now <image>."),), media=(image(picture(28)),))
        if self.steps == 2:
            parts = [{"type": "image", "image": picture(84)}, {"type": "text", "text": "then"}, {"type": "image"}]
            return Observation(done=False, messages=(Message("user", parts),), media=(image(picture(56)),))
        if self.steps == 3:
            return Observation(done=False, messages=(Message("user", "the tag <image>"),))
        return Observation(done=False, messages=(Message("user", "gone"),), media=(image(picture(28)),))


class Ends:
    """Tells the result with a picture."""

    def __init__(self, prompt):
        pass

    def step(self, answer):
        parts = [{"type": "image"}, {"type": "text", "text": "Right."}]
        return Observation(done=True, messages=(Message("user", parts),), media=(image(picture(28)),))


class Over:
    async def reset(self, prompt, seed):
        return Observation(done=True)

    async def step(self, answer):
        raise AssertionError
'''


@pytest.fixture
def environments(tmp_path: Path) -> str:
    path = tmp_path / "environments.py"
    path.write_text(USER_ENVIRONMENTS)
    return str(path)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> Prompt:
    messages = (Message("user", text),)
    return Prompt("0:0", 0, messages, tuple(tokenizer.encode(rendered(tokenizer, *messages))), "test", None)


def rendered(tokenizer: PreTrainedTokenizerBase, *messages: Message) -> str:
    """The whole conversation, rendered by the chat template through transformers alone."""
    dicts = [message.to_dict() for message in messages]
    return str(tokenizer.apply_chat_template(dicts, tokenize=False, add_generation_prompt=True))


def one(episodes: list[list[Trajectory]]) -> Trajectory:
    [[trajectory]] = episodes
    return trajectory


def test_one_question_one_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    engine, prompt = Scripted(tokenizer, "4"), text_prompt(tokenizer)
    answer = one(Playing(engine, tokenizer, apply_chat_template=False).collect([prompt], 1, PARAMS, step=1))
    [turn] = answer.turns
    assert turn.context_ids == prompt.token_ids
    assert turn.token_ids == (*tokenizer.encode("4"), tokenizer.eos_token_id)
    assert turn.log_probs == (-0.5, -0.75) and turn.policy_version == VERSION and turn.finish_reason == "stop"
    assert answer.messages == (Message("assistant", "4"),) and answer.uid == "0:0:0"
    assert answer.reward is None and answer.failure is None


def test_answers_come_by_prompt_and_every_draw_has_a_key_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = Scripted(tokenizer, "0", "1", "2", "3", "4", "5")
    prompts = [text_prompt(tokenizer, "1+1=", 0), text_prompt(tokenizer, "2+2=", 1)]
    collector = Playing(engine, tokenizer, apply_chat_template=False, seed=7)
    groups = collector.collect(prompts, 3, PARAMS, step=1)
    assert [[answer.messages[0].content for answer in group] for group in groups] == [["0", "1", "2"], ["3", "4", "5"]]
    assert [[answer.uid for answer in group] for group in groups][1] == ["0:1:0", "0:1:1", "0:1:2"]
    collector.collect(prompts, 3, PARAMS, step=2)
    collector.collect(prompts, 3, PARAMS, step=2, purpose="validation")
    Playing(engine, tokenizer, apply_chat_template=False, seed=8).collect(prompts, 3, PARAMS, step=1)
    assert len({request.key for request in engine.requests}) == 24
    again = Scripted(tokenizer, "0")
    Playing(again, tokenizer, apply_chat_template=False, seed=7).collect(prompts[1:], 3, PARAMS, step=1)
    assert [request.key for request in again.requests] == [request.key for request in engine.requests[3:6]]


def test_sampling_tells_the_progress_and_its_speed(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts, told = [text_prompt(tokenizer, "1+1=", 0)], list[tuple[int, int, str]]()
    collector = Playing(Scripted(tokenizer, "0", "1", "2"), tokenizer, apply_chat_template=False)
    seconds = iter(range(100, 10_000, 2))
    collector.driver._clock = lambda: float(next(seconds))
    with watching(lambda name: nullcontext(), lambda *counted: told.append(counted)):
        collector.collect(prompts, 3, PARAMS, step=1)
    assert told[-1][:2] == (3, 3)
    tokens, unit = told[-1][2].split()
    assert unit == "tokens/s" and 0 <= int(tokens) <= 3  # six tokens in at least two seconds


def test_a_stop_string_ends_a_turn_and_the_template_closes_it(tokenizer: PreTrainedTokenizerBase) -> None:
    class Stopping(Scripted):
        def say(self, answer: str, request: Request) -> Completion:
            said = super().say(answer, request)
            if len(self.requests) > 1:
                return said
            ids, log_probs = said.token_ids[:-1], said.log_probs[:-1]  # no end token
            versions = ((VERSION, len(ids)),)
            return replace(said, token_ids=ids, log_probs=log_probs, versions=versions, stop="</calc>", preemptions=2)

    engine, prompt = Stopping(tokenizer, "<calc>12*3</calc>", "36"), chat_prompt(tokenizer, "12*3=")
    answer = one(Playing(engine, tokenizer, world=World("calculator")).collect([prompt], 1, PARAMS, step=1))
    first, second = answer.turns
    assert (first.stop, first.preemptions, second.stop, second.preemptions) == ("</calc>", 2, None, 0)
    asked, told = Message("assistant", "<calc>12*3</calc>"), Message("tool", "36")  # the environment reads all of it
    assert answer.messages[:2] == (asked, told)
    assert second.context_ids == tuple(tokenizer.encode(rendered(tokenizer, *prompt.messages, asked, told)))


def test_what_the_environment_says_at_the_end_is_kept_as_text(
    tokenizer: PreTrainedTokenizerBase, environments: str
) -> None:
    collector = Playing(Scripted(tokenizer, "4"), tokenizer, world=World(f"{environments}:Ends"))
    collector.stages[""].codec.read = lambda observation: observation  # type: ignore[method-assign]  # as for a model that sees
    try:
        ended = one(collector.collect([chat_prompt(tokenizer, "2+2=")], 1, PARAMS, step=1))
    finally:
        collector.close()
    assert ended.messages == (Message("assistant", "4"), Message("user", "Right."))
    assert ended.to_dict()["messages"][-1] == {"role": "user", "content": "Right."} and ended.failure is None
    [step] = readable(ended, tokenizer)["steps"]
    assert step == {"observation": [], "action": "4", "reward": 0.0, "end": [{"role": "user", "content": "Right."}]}


def test_the_calculator_in_two_turns_continues_the_chat_as_the_template_writes_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    engine, prompt = Scripted(tokenizer, "<calc>12*3</calc>", "36"), chat_prompt(tokenizer, "12*3=")
    answer = one(Playing(engine, tokenizer, world=World("calculator")).collect([prompt], 1, PARAMS, step=1))
    asked, told = Message("assistant", "<calc>12*3</calc>"), Message("tool", "36")
    assert answer.messages == (asked, told, Message("assistant", "36"))
    first, second = answer.turns
    whole = rendered(tokenizer, *prompt.messages, asked, told)
    assert second.context_ids == tuple(tokenizer.encode(whole))
    assert second.context_ids[: len(first.context_ids) + len(first.token_ids)] == first.context_ids + first.token_ids

    [row] = rows_of(answer)
    read = len(row.response_ids) - len(first.token_ids) - len(second.token_ids)
    expected = [1] * len(first.token_ids) + [0] * read + [1] * len(second.token_ids)
    assert read > 0 and [turn >= 0 for turn in row.turn_ids] == expected
    assert row.turn_ids == [0] * len(first.token_ids) + [-1] * read + [1] * len(second.token_ids)
    between = [token for token, sampled in zip(row.response_ids, expected, strict=True) if not sampled]
    assert tokenizer.decode(between) == CHAT_TURN


def test_without_a_chat_template_the_tools_words_follow_as_they_are(tokenizer: PreTrainedTokenizerBase) -> None:
    engine, prompt = Scripted(tokenizer, "<calc>2+2</calc>", "4"), text_prompt(tokenizer)
    collector = Playing(engine, tokenizer, world=World("calculator"), apply_chat_template=False)
    answer = one(collector.collect([prompt], 1, PARAMS, step=1))
    assert tokenizer.decode(list(answer.turns[1].context_ids)) == "2+2=<calc>2+2</calc><|im_end|>4"


def test_only_those_that_are_not_done_go_on(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = Scripted(tokenizer, "4", "<calc>1+1</calc>", "2")
    prompts = [text_prompt(tokenizer, "2+2=", 0), text_prompt(tokenizer, "1+1=", 1)]
    collector = Playing(engine, tokenizer, world=World("calculator"), apply_chat_template=False)
    [[done], [asking]] = collector.collect(prompts, 1, PARAMS, step=1)
    assert len(engine.requests) == 3 and len(done.turns) == 1 and len(asking.turns) == 2
    assert asking.messages[-1].content == "2"


@pytest.mark.slow
def test_what_an_environment_raises_is_data(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    engine = Scripted(tokenizer, "5", "9", "77", by_sample=True)
    collector = Playing(engine, tokenizer, world=World(f"{environments}:Broken"), apply_chat_template=False)
    [[fine, failed, also_fine]] = collector.collect([text_prompt(tokenizer)], 3, PARAMS, step=1)
    assert fine.failure is None and also_fine.failure is None
    assert failed.failure is not None and failed.failure.source == "environment"
    assert failed.failure.message.startswith("RuntimeError: nine (") and "environments.py:" in failed.failure.message
    assert len(failed.turns) == 1 and failed.turns[0].reward == 0.0  # the answer stays, to be read
    assert to_batch([Group(failed.prompt, (failed,))], pad_token_id=0)["response_mask"].tolist() == [[0, 0]]
    assert fine.turns[0].reward == 0.25 and dict(also_fine.fields) == {"seen": 2}

    unmade = Playing(engine, tokenizer, world=World(f"{environments}:Unmade"), apply_chat_template=False)
    before = len(engine.requests)
    answer = one(unmade.collect([text_prompt(tokenizer)], 1, PARAMS, step=1))
    assert answer.failure is not None and answer.failure.message.startswith("KeyError: 0 (")
    assert answer.turns == () and len(engine.requests) == before


def test_options_reach_the_environment(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    collector = Playing(
        Scripted(tokenizer, "123"),
        tokenizer,
        world=World(f"{environments}:Broken", {"note": "length"}),
        apply_chat_template=False,
    )
    assert dict(one(collector.collect([text_prompt(tokenizer)], 1, PARAMS, step=1)).fields) == {"length": 3}


@pytest.mark.slow
def test_an_environment_speaks_first_limits_a_turn_and_replaces_the_context(
    tokenizer: PreTrainedTokenizerBase, environments: str
) -> None:
    engine, prompt = Scripted(tokenizer, "2", "123", "14"), chat_prompt(tokenizer, "2+2=")
    collector = Playing(engine, tokenizer, world=World(f"{environments}:World"))
    answer = one(collector.collect([prompt], 1, SamplingParams(max_new_tokens=40), step=1))
    asked = (*prompt.messages, Message("user", "1+1="))
    first, second, third = answer.turns
    assert first.context_ids == tuple(tokenizer.encode(rendered(tokenizer, *asked)))
    whole = rendered(tokenizer, *asked, Message("assistant", "2"), Message("user", "and 5"))
    assert second.context_ids == tuple(tokenizer.encode(whole))
    assert [request.params.max_new_tokens for request in engine.requests] == [40, 2, 40]
    assert (second.finish_reason, len(second.token_ids), second.reward) == ("length", 2, 0.5)
    assert third.context_ids == tuple(tokenizer.encode(rendered(tokenizer, Message("user", "7+7="))))
    said = [(message.role, message.content) for message in answer.messages]
    assert said == [
        *(("user", "1+1="), ("assistant", "2"), ("user", "and 5")),
        *(("assistant", "12"), ("user", "7+7="), ("assistant", "14")),
    ]
    assert [row.prompt_ids for row in rows_of(answer)] == [first.context_ids, third.context_ids]
    assert dict(answer.fields) == {"cut": "stop"} and answer.failure is None

    collector = Playing(engine, tokenizer, world=World(f"{environments}:World"), apply_chat_template=False)
    answer = one(collector.collect([prompt], 1, SamplingParams(max_new_tokens=40), step=1))
    assert tokenizer.decode(list(answer.turns[0].context_ids)) == "2+2=1+1="
    assert tokenizer.decode(list(answer.turns[2].context_ids)) == "7+7="


def test_an_episode_that_is_over_at_its_reset_has_failed(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    collector = Playing(Scripted(tokenizer, "2"), tokenizer, world=World(f"{environments}:Over"))
    answer = one(collector.collect([chat_prompt(tokenizer, "2+2=")], 1, PARAMS, step=1))
    assert answer.failure is not None and answer.turns == ()
    assert (answer.failure.source, answer.failure.timed_out) == ("environment", False)
    assert "reset" in answer.failure.message


def test_an_episode_ends_after_max_turns(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    engine = Scripted(tokenizer, "1")
    collector = Playing(
        engine,
        tokenizer,
        world=World(f"{environments}:Endless", limits=EpisodeLimits(max_turns=3)),
        apply_chat_template=False,
    )
    answer = one(collector.collect([text_prompt(tokenizer)], 1, PARAMS, step=1))
    assert len(answer.turns) == 3 and answer.score == 3.0 and answer.failure is None


@pytest.mark.slow
def test_the_budget_is_for_the_whole_response(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    # two tokens an answer (1, end) and four that are read (m o r e): 2, 6 -> 8, 12 -> the next may have 1 of 13
    engine = Scripted(tokenizer, "1")
    collector = Playing(engine, tokenizer, world=World(f"{environments}:Endless"), apply_chat_template=False)
    answer = one(collector.collect([text_prompt(tokenizer)], 1, SamplingParams(max_new_tokens=13), step=1))
    assert [request.params.max_new_tokens for request in engine.requests] == [13, 7, 1]
    assert [turn.finish_reason for turn in answer.turns] == ["stop", "stop", "length"]
    assert len(rows_of(answer)[0].response_ids) == 13

    # with 12 nothing is left after the second reading, which is then no part of the row
    engine = Scripted(tokenizer, "1")
    collector = Playing(engine, tokenizer, world=World(f"{environments}:Endless"), apply_chat_template=False)
    answer = one(collector.collect([text_prompt(tokenizer)], 1, SamplingParams(max_new_tokens=12), step=1))
    assert len(engine.requests) == 2 and len(rows_of(answer)[0].response_ids) == 8


def test_a_template_that_rewrites_is_refused_with_what_to_change(tokenizer: PreTrainedTokenizerBase) -> None:
    forgetful = "{% for message in messages[-2:] %}{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    collector = Playing(
        Scripted(tokenizer, "<calc>1+1</calc>"),
        tokenizer,
        world=World("calculator", chat_template_kwargs={"chat_template": forgetful}),
    )
    with raises(DataError, re.compile("^chat template: "), change=re.compile("data.chat_template_kwargs")):
        collector.collect([chat_prompt(tokenizer, "1+1=")], 1, PARAMS, step=1)


# ---- with the native engine, through the loop


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False])
def test_two_turns_through_the_whole_loop(
    chat: bool, environments: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    """The trainer's log-probs equal the rollout's on sampled tokens, and are 0 on the tool's.

    A random model ends its turns by chance, so most episodes have both."""
    config = train_config(
        {
            "environment.name": f"{environments}:Insistent",
            "data.apply_chat_template": chat,
            "data.max_prompt_length": 32,
            "data.max_response_length": 64,
            "data.train_batch_size": 2,
            "rollout.temperature": 0.8,
        }
    )
    run = build(config, build_scorer(config.reward, lambda solution_str: float(len(solution_str) % 3)), additions)
    groups = run.rollouts.start(8, step=1).result().groups
    batch = to_batch(groups, pad_token_id=run.pad_token_id)
    mask = batch["response_mask"]
    assert set(batch["turn_ids"].unique().tolist()) == {-1, 0, 1}
    assert torch.equal(mask == 1, batch["turn_ids"] >= 0)
    for row in range(len(batch)):
        turns, responses = batch["turn_ids"][row].tolist(), batch["responses"][row].tolist()
        if 1 in turns:
            told = run.tokenizer.decode(responses[turns.index(-1) : turns.index(1)])
            stop = run.tokenizer.decode(responses[turns.index(-1) - 1])
            # a turn that ended with the model's other stop token is closed as the template closes turns
            closing = "" if stop == "<|im_end|>" else "<|im_end|>"
            assert told == (closing + CHAT_TURN if chat else "36")
    log_probs = run.roles["actor"].forward(batch, ("log_probs",), 0.8)["log_probs"]
    assert (log_probs[mask == 0] == 0).all() and (batch["rollout_log_probs"][mask == 0] == 0).all()
    gap = (log_probs - batch["rollout_log_probs"])[mask == 1].abs()
    assert gap.mean() < 5e-6 and gap.max() < 1e-4

    fit(run)
    run.close()
    assert [record["step"] for record in run.history] == [1, 2]
    assert all(record["episode/turns"] > 1 for record in run.history)


@pytest.mark.parametrize("apply_chat_template", [True, False])
def test_observations_have_images(
    environments: str, tmp_path: Path, apply_chat_template: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sighted = seeing(load_tokenizer(init_model(tmp_path / "model", "qwen3", "nano", num_layers=1)))
    data = DataConfig(train_files=["unused"], apply_chat_template=apply_chat_template)
    row = {"prompt": "<image>?", "images": [encoded(picture(56))]}
    [prompt] = load_items(data, sighted, rows=[row], with_answers=False).items
    reader = MediaReader(MediaLimits(), sighted.encoders, tmp_path / "media")
    warn_once.cache_clear()  # another test may have had the warning
    collector = Playing(
        Scripted(sighted, *"abcd"),
        sighted,
        world=World(f"{environments}:Shows"),
        reader=reader,
        apply_chat_template=apply_chat_template,
    )
    done = one(collector.collect([prompt], 1, SamplingParams(max_new_tokens=400), step=1))
    assert [[each.tokens.count for each in turn.media if each.tokens] for turn in done.turns] == [
        *([2], [2, 1], [2, 1, 3, 2]),
        [2, 1, 3, 2],
    ]
    last = str(sighted.decode(list(done.turns[3].context_ids)))
    seen = [f"<|vision_start|>{IMAGE * count}<|vision_end|>" for count in (2, 1, 3, 2)]
    if apply_chat_template:
        turn = "<|im_end|>\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n{}"
        assert last == "".join(
            [
                f"<|im_start|>user\n{seen[0]}?<|im_end|>\n<|im_start|>assistant\na",
                turn.format("tool", f"now {seen[1]}.", "b"),
                turn.format("user", f"{seen[2]}then{seen[3]}", "c"),
                turn.format("user", "the tag <image>", ""),
            ]
        )
    else:
        ends = sighted.decode([done.turns[0].token_ids[-1]])
        said = [f"{seen[0]}?a", f"now {seen[1]}.b", f"{seen[2]}then{seen[3]}c", "the tag <image>"]
        assert last == ends.join(said)
    stored = [str(each.source) for each in done.turns[3].media[1:]]
    assert all(Path(path).parent == tmp_path / "media" for path in stored) and len(set(stored)) == 3
    assert done.failure is not None and re.search(
        r"number of images=1; expected 0, .*observation", done.failure.message
    )
    # A tag without media stays text, as the last context shows, and is warned of once.
    assert [record.getMessage() for record in caplog.records if record.name == "whet.data.written"] == [BARE_TAG]
    assert [each["digest"] for each in readable(done, sighted)["media"]] == [
        each.digest for each in done.turns[3].media
    ]


def test_images_for_a_model_of_text_fail_their_episode(tokenizer: PreTrainedTokenizerBase, environments: str) -> None:
    collector = Playing(Scripted(tokenizer, "a"), tokenizer, world=World(f"{environments}:Shows"))
    done = one(collector.collect([chat_prompt(tokenizer, "2+2=")], 1, PARAMS, step=1))
    assert (
        done.failure is not None and done.failure.source == "environment" and done.failure.message[:11] == "observation"
    )


def test_a_silent_environment_is_not_run_and_its_deadline_holds(tokenizer: PreTrainedTokenizerBase) -> None:
    """No host is opened; a request that never ends fails its episode after `episode_seconds`."""

    class Silent(Scripted):
        def poll(self, timeout_seconds: float) -> list[Event]:
            return []

    collector = Playing(
        Silent(tokenizer, "a"), tokenizer, world=World(limits=EpisodeLimits(seconds=5.0)), apply_chat_template=False
    )
    assert collector.driver.environments == {} and collector.stages[""].is_silent
    now, done = 0.0, list[Trajectory]()
    collector.driver._clock = lambda: now
    collector.driver.add(collector.episodes([text_prompt(tokenizer)], 1, PARAMS, step=1), done.append)
    now = 4.9
    collector.driver.turn(0.0)
    assert not done
    now = 5.1
    collector.driver.turn(0.0)
    assert [each.failure and each.failure.timed_out for each in done] == [True] and collector.driver.is_idle
    limited = Playing(Silent(tokenizer, "a"), tokenizer, world=World(max_episodes=1), apply_chat_template=False)
    assert limited.driver.environments.keys() == {""}, "a bound of episodes at a time is kept by a host"
    limited.close()
