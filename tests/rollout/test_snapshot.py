# SPDX-License-Identifier: Apache-2.0
"""The responses in a snapshot of the flow, and the tokens with which restored episodes continue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.simulation.actors import Letters
from whet.data.loader import PromptLoader
from whet.environments.protocol import Observation
from whet.rollout.episode import Episode, Rules, Sample
from whet.rollout.flow import Command, Flow, ReturnedFirst, RunEpisodes, Score
from whet.rollout.protocol import Completion, Partial, Request, SamplingParams
from whet.rollout.snapshot import restore, snapshot
from whet.types import Message, Prompt, Trajectory, Turn


def made() -> Flow:
    """One prompt a step and two ahead, each with two responses."""
    rows = [Prompt("", index, (Message("user", "p"),), (ord("p"),), "test", None) for index in range(9)]
    rules = Rules(Letters(), SamplingParams(8), seed=1, step=1)

    def episodes(prompts: Sequence[Prompt], step: int) -> list[Episode]:
        return [Episode(prompt, sample, rules) for prompt in prompts for sample in range(2)]

    return Flow(2, 1, ReturnedFirst(PromptLoader(rows, shuffle=False)), episodes, 1.0)


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


def restored(entries: Sequence[Mapping[str, Any]]) -> tuple[Flow, list[Episode]]:
    flow = made()
    flow.source.take(2)
    assert isinstance(flow.source, ReturnedFirst)
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
