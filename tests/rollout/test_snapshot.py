# SPDX-License-Identifier: Apache-2.0
"""The responses in a snapshot of the flow, and the tokens with which restored episodes continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.simulation.actors import Letters
from whet.data.loader import PromptLoader
from whet.environments.protocol import Observation
from whet.rollout.episode import Episode, Rules, Sample, Stage
from whet.rollout.flow import Command, Flow, RunEpisodes, Score
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams
from whet.rollout.snapshot import restore, snapshot
from whet.types import Failure, Media, Message, Prompt, Trajectory, Turn


def made(media: tuple[Media, ...] = ()) -> Flow:
    """One prompt a step and two ahead, each with two responses."""
    rows = [Prompt("", index, (Message("user", "p"),), (ord("p"),), "test", None, media=media) for index in range(9)]
    rules = Rules({"": Stage(Letters())}, SamplingParams(8), seed=1, step=1)

    def episodes(prompts: Sequence[Prompt], step: int) -> list[Episode]:
        return [Episode(prompt, sample, rules) for prompt in prompts for sample in range(2)]

    return Flow(2, 1, PromptLoader(rows, shuffle=False), episodes, 1.0)


def saved(flow: Flow, running: Sequence[Episode]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(json.dumps(snapshot(flow, running)))
    return entries


def started(commands: Sequence[Command]) -> list[Episode]:
    return [episode for command in commands if isinstance(command, RunEpisodes) for episode in command.episodes]


def begun(text: str) -> tuple[Flow, list[Episode]]:
    """Episodes whose environments say `text` at their reset, each with two tokens of its first turn."""
    flow = made()
    episodes = started(flow.on_version(0))
    for episode in episodes:
        request = requested(episode, text)
        episode.on_partial(Partial(request.uid, 0, 0, (65, 66), (-0.5, -0.25), ((0, 2),)))
    return flow, episodes


def requested(episode: Episode, text: str) -> Request:
    """The request of an episode whose environment says `text` at its reset."""
    episode.start()
    [sample] = episode.on_observation(Observation(done=False, messages=(Message("user", text),)))
    assert isinstance(sample, Sample)
    return sample.request


def restored(
    entries: Sequence[Mapping[str, Any]], media: tuple[Media, ...] = (), scoring: str = ""
) -> tuple[Flow, list[Episode]]:
    flow = made(media)
    flow.scoring = scoring
    flow.source.take(2)
    return flow, started(restore(flow, flow.source, 0, entries))


@pytest.mark.parametrize(("text", "kept"), [("q", (65, 66)), ("r", ()), ("qq", ())])
def test_tokens_of_a_first_turn_go_on_behind_the_context_that_they_were_sampled_from(
    text: str, kept: tuple[int, ...]
) -> None:
    flow, episodes = restored(saved(*begun("q")))
    assert len(episodes) == 4
    request = requested(episodes[0], text)
    assert (request.prompt_ids, request.sampled_ids) == ((ord("p"), *map(ord, text)), kept)
    episodes[0].on_completion(Completion((67,), (-1.0,), "abort", ((1, 1),)))
    assert episodes[0].sampled is not None and episodes[0].sampled.token_ids == (*kept, 67)
    # the others are saved before their environments have begun, and keep what is known
    _, again = restored(saved(flow, episodes))
    assert requested(again[0], text).sampled_ids == (*kept, 67)
    assert requested(again[1], text).sampled_ids == kept


def test_tokens_of_an_older_checkpoint_go_on_behind_any_context() -> None:
    entries = saved(*begun("q"))
    for entry in entries:
        assert [each.pop("context") is None for each in entry["partial"].values()] == [False, False]
    _, episodes = restored(entries)
    assert requested(episodes[0], "r").sampled_ids == (65, 66)


def test_a_response_whose_fields_have_no_form_in_json_is_sampled_again(caplog: pytest.LogCaptureFixture) -> None:
    """Fields of an environment: bytes that are no text, an object, an endless list. Numbers of numpy stay."""
    endless: list[Any] = []
    endless.append(endless)
    for value, expected in (
        (np.float32(0.5), 0.5),
        ({"deep": [np.int64(3), np.bool_(True)]}, {"deep": [3, True]}),
        (b"\xff\xd8", None),
        (object(), None),
        (endless, None),
    ):
        flow = made()
        episodes = started(flow.on_version(0))
        prompt = episodes[0].prompt
        turn = Turn((1,), (65,), (-0.5,), "stop", ((0, 1),))
        caplog.clear()
        flow.on_sampled(Trajectory(f"{prompt.uid}:0", prompt, (turn,), 0, fields={"seen": value}))
        entries = saved(flow, episodes[1:])
        assert [each["fields"] for each in entries[0]["samples"]] == ([{"seen": expected}] if expected else [])
        assert ("0:0:0" in [record.args[0] for record in caplog.records if record.args]) == (expected is None)
        again, episodes = restored(entries)
        assert [each.sample for each in episodes if each.prompt.uid == "0:0"] == ([1] if expected else [0, 1])
        other = Trajectory(f"{prompt.uid}:1", prompt, (turn,), 1)
        if expected:
            [command] = again.on_sampled(other)
            assert isinstance(command, Score) and command.trajectories[0].fields == {"seen": expected}


@pytest.mark.parametrize("expert", [3, 200, 300])
def test_experts_of_any_number_are_kept(expert: int) -> None:
    routed = (np.array([1, expert], np.int16).tobytes(), b"")
    flow = made()
    ended, running, *_ = episodes = started(flow.on_version(0))
    flow.on_sampled(
        Trajectory("0:0:0", ended.prompt, (Turn((1,), (65, 66), (-1.0, -1.0), "stop", ((0, 2),), routed=routed),), 0)
    )
    request = requested(running, "q")
    running.on_partial(Partial(request.uid, 0, 0, (65, 66), (-0.5, -0.25), ((0, 2),), routed=routed))
    entries = saved(flow, episodes[1:])
    again, left = restored(entries)
    assert again.queue["0:0"].sampled[0].turns[0].routed == routed
    assert left[0].sampled is not None and left[0].sampled.routed == routed
    if expert < 128:  # as older checkpoints have them
        entries[0]["samples"][0]["turns"][0]["routed"] = [each.decode() for each in routed]
        entries[0]["partial"]["1"]["routed"] = [each.decode() for each in routed]
        again, left = restored(entries)
        assert again.queue["0:0"].sampled[0].turns[0].routed == routed
        assert left[0].sampled is not None and left[0].sampled.routed == routed


def test_a_response_so_far_that_has_no_form_in_json_is_sampled_again(caplog: pytest.LogCaptureFixture) -> None:
    flow = made()
    episodes = started(flow.on_version(0))
    odd: Any = object()
    episodes[0].go_on_from(Completion((65,), (-0.5,), "abort", ((0, 1),), stop=odd))
    assert saved(flow, episodes)[0]["partial"] == {}
    assert [record.args[0] for record in caplog.records if record.args] == [episodes[0].id]


def test_media_of_a_turn_are_read_back_as_they_were() -> None:
    """The media of the prompt come from the data: their bytes are no text. A video of an environment has frames."""
    own, video = Media("image", "a", b"\x89PNG"), Media("video", "b", ("0.png", "1.png"), (0, 1))
    flow = made((own,))
    prompt = started(flow.on_version(0))[0].prompt
    turn = Turn((1,), (65,), (-0.5,), "stop", ((0, 1),), media=(own, video))
    flow.on_sampled(Trajectory("0:0:0", prompt, (turn,), 0))
    again, _ = restored(saved(flow, ()), (own,))
    found = again.queue["0:0"].sampled[0].turns[0].media
    assert [each.source for each in found] == [b"\x89PNG", ("0.png", "1.png")] and found[1].frames == (0, 1)


@pytest.mark.parametrize("scoring", ["then", None, "now"])
def test_responses_are_scored_again_by_another_reward(scoring: str | None) -> None:
    """An older checkpoint does not say which reward its scores are from."""
    flow = made()
    flow.scoring = "then"
    prompt = started(flow.on_version(0))[0].prompt
    turn = Turn((1,), (65,), (-0.5,), "stop", ((0, 1),))
    ended = [Trajectory(f"0:0:{sample}", prompt, (turn,), sample) for sample in range(2)]
    for each in ended:
        flow.on_sampled(each)
    flow.on_scored([replace(ended[0], reward=7.0, accuracy=1.0, parts={"a": 1.0}, logged={"b": 2.0})])
    flow.on_scored([replace(ended[1], failure=Failure("reward", "too late"))])
    entries = saved(flow, ())
    if scoring is None:
        del entries[0]["scoring"], entries[0]["is_observed"]
    again = made()
    again.source.take(2)
    again.scoring = scoring or "now"
    scores = [each for each in restore(again, again.source, 0, entries) if isinstance(each, Score)]
    found = again.queue["0:0"]
    if scoring == "now":
        assert [each.trajectories for each in scores] == [ended] and not found.scored and not found.is_observed
    else:
        assert scores == [] and found.scored[0].reward == 7.0 and found.is_observed == (scoring is None)
