# SPDX-License-Identifier: Apache-2.0
"""Adaptive samplers under rollouts that go on while models train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import text_prompt
from transformers import PreTrainedTokenizerBase

from tests.rollout.playing import Playing
from tests.rollout.test_continuous import Slow, continuous, uids
from whet.data.loader import SamplerLoader
from whet.data.samplers import Learnability
from whet.rollout.episode import Episode
from whet.rollout.flow import Filter, Flow, keep_all
from whet.rollout.protocol import Completion, Request
from whet.types import Group, Prompt, Trajectory


class Watched(Learnability):
    """Keeps the groups that it observed; with memory 1 its counts are sums."""

    seen: tuple[Group, ...] = ()
    at_state: tuple[Group, ...] = ()  # that it had observed when its state was read

    def observe(self, groups: Sequence[Group]) -> None:
        self.seen += (*groups,)
        super().observe(groups)

    def state(self) -> dict[str, Any]:
        self.at_state = self.seen
        return super().state()


def expected(seen: Sequence[Group]) -> dict[str, Any]:
    """Places, right and answered: even rows are right once in two, odd ones twice."""
    times = Counter(group.prompt.index for group in seen)
    right = [times[place] * (1.0 + place % 2) for place in sorted(times)]
    return {"places": sorted(times), "right": right, "answered": [2.0 * times[place] for place in sorted(times)]}


class ByRow(Slow):
    def say(self, answer: str, request: Request) -> Completion:
        _, _, _, index, sample, _ = map(str, request.uid.split(":"))
        return super().say("4" if int(index) % 2 or sample == "0" else "0", request)


def adaptive(tokenizer: PreTrainedTokenizerBase) -> SamplerLoader:
    rows = [text_prompt(tokenizer, f"{i}+0=", i) for i in range(6)]
    return SamplerLoader(rows, Watched(rows, 0, memory=1.0), "watched")


@pytest.mark.parametrize("k", [0, 1, 2.5])
def test_an_adaptive_sampler_observes_each_group_once(tokenizer: PreTrainedTokenizerBase, k: float) -> None:
    """Before a checkpoint after step 2 and after it; without staleness all is as in the synchronous rollouts."""
    seen, trained = list[Group](), list[Group]()
    saved: dict[str, Any] | None = None
    for steps in ((1, 2), (3, 4)):
        loader, engine = adaptive(tokenizer), ByRow(tokenizer, "")
        engine.version = len(trained) // 2
        given: dict[str, Any] = {"engine": engine, "loader": loader, "state": saved, "version": engine.version}
        with continuous(tokenizer, k=k, **given) as of:
            for step in steps:
                trained += of.start(2, step=step).result().groups
                engine.version = step
                of.on_weights(step)
            saved = dict(of.state())
        assert isinstance(loader.sampler, Watched)
        seen += loader.sampler.at_state
    assert saved is not None and saved["sampler"] == {"batches": saved["sampler"]["batches"], **expected(seen)}
    waiting = {entry["uid"] for entry in saved.get("stream", ())}
    assert len({group.prompt.uid for group in seen}) == len(seen) and len(trained) == 8
    assert [next(each for each in seen if each.prompt.uid == uid) for uid in uids(trained)] == trained
    assert set(uids(seen)) - set(uids(trained)) <= waiting
    if k == 0:
        loader, engine = adaptive(tokenizer), ByRow(tokenizer, "")
        given = {"prompts": loader, "scorer": of.scorer, "n": 2, "params": of.params}
        synchronous, alone = Playing(engine, tokenizer, apply_chat_template=False, seed=1, **given), list[Group]()
        for step in (1, 2, 3, 4):
            engine.version = step - 1
            alone += synchronous.start(2, step=step).result().groups
        assert trained == alone
        assert loader.sampler.state() == saved["sampler"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_groups_that_a_step_reads_are_observed_in_the_order_in_which_they_ended(order: Sequence[int]) -> None:
    """Of three groups the step takes two, in whatever order the scores come."""
    rows = [Prompt("", index, (), (1,), "", "") for index in range(12)]
    sampler, begun = Watched(rows, 0), list[Prompt]()

    def episodes(prompts: Sequence[Prompt], step: int) -> list[Episode]:
        begun.extend(prompts)
        return []

    source, half = SamplerLoader(rows, sampler, "watched"), Filter(keep_all, {}, extra=0.5)
    flow = Flow(1, 2, source, episodes, group_filter=half, scores_alone=True)
    for step in (1, 2):
        begun.clear()
        flow.ask(step)
        ended = [Trajectory(f"{each.uid}:0", each, (), 0) for each in begun]
        for place in (1, 0, 2):
            flow.on_sampled(ended[place])
        for place in order:
            flow.on_scored([replace(ended[place], reward=1.0, accuracy=1.0)])
        assert [each.prompt.uid for each in sampler.seen[-2:]] == [begun[1].uid, begun[0].uid]
        assert len(sampler.seen) == 2 * step
        flow.on_version(step)


def test_a_refill_is_drawn_after_the_groups_before_it_are_observed() -> None:
    rows = [Prompt("", index, (), (1,), "", "") for index in range(12)]
    sampler, begun = Watched(rows, 0), list[tuple[Prompt, int]]()

    def episodes(prompts: Sequence[Prompt], step: int) -> list[Episode]:
        begun.extend((each, len(sampler.seen)) for each in prompts)
        return []

    source = SamplerLoader(rows, sampler, "watched")
    flow = Flow(1, 2, source, episodes, group_filter=Filter(lambda values: values[0] > 0, {}))
    flow.ask(1)
    for number, reward in enumerate((0.0, 1.0, 1.0)):
        ended = Trajectory(f"{begun[number][0].uid}:0", begun[number][0], (), 0)
        flow.on_sampled(ended)
        flow.on_scored([replace(ended, reward=reward, accuracy=reward)])
    assert [seen for _, seen in begun] == [0, 0, 2]
    assert uids(sampler.seen) == [prompt.uid for prompt, _ in begun]
