# SPDX-License-Identifier: Apache-2.0
"""Saves and restores the groups of a flow: all that are admitted and not trained on, with their tokens and versions."""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

from whet.data.loader import PromptSource
from whet.keyed import key
from whet.rollout.episode import Episode
from whet.rollout.flow import Admitted, Command, Flow, RunEpisodes
from whet.rollout.protocol import Completion
from whet.types import Media, Prompt, RewardResult, Trajectory, Turn

log = logging.getLogger(__name__)
TRAJECTORY, COMPLETION = TypeAdapter(Trajectory), TypeAdapter(Completion)
PURPOSE = "rollout"  # of the episodes that are trained on
T = TypeVar("T", Turn, Completion)


def snapshot(flow: Flow, running: Iterable[Episode]) -> list[dict[str, Any]]:
    """Returns every group that is not trained on as JSON values, in the order of admission. Includes the tokens that
    `running` episodes have so far."""
    waiting = [each for each in flow.queue.values() if each.is_kept is not False]
    if (training := flow.training) is not None:
        scored = [(group.prompt, {each.sample: each for each in group.trajectories}) for group in training.kept]
        begun = (Admitted(prompt, training.step, found, True, is_observed=True) for prompt, found in scored)
        waiting = [*begun, *waiting]
    by_prompt = defaultdict[str, list[Episode]](list)
    for episode in running:
        if episode.rules.purpose == PURPOSE:
            by_prompt[episode.prompt.uid].append(episode)
    return [_entry(admitted, by_prompt[admitted.prompt.uid], flow.scoring) for admitted in waiting]


def restore(flow: Flow, source: PromptSource, version: int, entries: Sequence[Mapping[str, Any]]) -> list[Command]:
    """Restores the groups of a snapshot. Scored groups go into the queue; the others continue to be sampled or scored.

    A group starts again from its prompt if its row has changed in the data, or if its tokens are too old for this run.
    Scored groups are scored again if `Flow.scoring` has changed. Groups beyond the limit are dropped: their prompts go
    back to the source, which returns them first."""
    queue, sampled, episodes = list[Admitted](), list[Trajectory](), list[Episode]()
    room, again, unscored = flow.most_outstanding if flow.is_ahead else 0, Counter[str](), 0
    for place, entry in enumerate(entries[:room]):
        prompt = source.find(entry["uid"])
        admitted, partial = Admitted(prompt, entry["step"]), entry["partial"]
        found = [_trajectory(each, prompt) for each in entry["samples"]]
        samples = {each.sample: each for each in found if each.sample < flow.n}
        if why := _misfit(entry, prompt, version - flow.most_age(place)):
            samples, partial, again[why] = {}, {}, again[why] + 1
        queue.append(admitted)
        is_scored = entry["is_kept"] and len(samples) == len(found) == flow.n
        if is_scored and entry.get("scoring", flow.scoring) == flow.scoring:  # older checkpoints have none
            admitted.scored, admitted.is_kept = samples, True
            admitted.is_observed = entry.get("is_observed", True)
            continue
        unscored += is_scored
        samples = {number: _unscored(each) for number, each in samples.items()}
        for episode in flow.episodes([prompt], admitted.step):
            if episode.sample not in samples:
                if (begun := partial.get(str(episode.sample))) is not None:
                    episode.go_on_from(_as_bytes(COMPLETION.validate_python(begun)), begun.get("context"))
                episodes.append(episode)
        sampled += samples.values()
    if queue:
        log.info(
            "%d groups that were sampled ahead continue from the checkpoint, %d of them complete; %d responses are "
            "sampled to their end; %d episodes of several turns start again, with the same seeds",
            *(len(queue) - again.total(), sum(each.is_kept is True for each in queue), len(episodes)),
            sum(entry.get("again", 0) for entry in entries),
        )
    if unscored:
        log.warning("%d groups of the checkpoint are scored again: reward or algorithm.filter has changed", unscored)
    for why, count in again.items():
        log.warning("%d groups of the checkpoint start again from their prompts: %s", count, why)
    source.put_back([entry["uid"] for entry in entries[room:]])
    flow.restart(version, queue)
    return [*(command for each in sampled for command in flow.on_sampled(each)), RunEpisodes(episodes)]


def _digest(prompt: Prompt) -> int:
    """A hash of the prompt fields that a step reads. An object that JSON cannot hold counts by its type only."""
    read = (prompt.token_ids, prompt.ground_truth, [media.digest for media in prompt.media])
    return key(0, "prompt", json.dumps(read, default=lambda value: type(value).__name__, skipkeys=True))


def _misfit(entry: Mapping[str, Any], prompt: Prompt, oldest: int) -> str:
    """The reason why a saved group's tokens cannot be used; "" if they can. `oldest` is the first valid version."""
    if entry.get("prompt") not in (None, _digest(prompt)):  # older checkpoints have none
        return "the rows of their prompts have changed in the data"
    turns = chain(*(each["turns"] for each in entry["samples"]), entry["partial"].values())
    is_old = any(version < oldest for turn in turns for version, _ in turn["versions"])
    return "tokens are older than rollout.max_staleness and data.train_batch_size allow now" if is_old else ""


def _plain(value: Any) -> Any:
    """Converts a numpy scalar to a Python number, for JSON.  Raises: TypeError for other objects."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"JSON cannot represent a {type(value).__name__}")


def _as_text(sampled: T) -> T:
    """Encodes the experts as base64, because bytes are written to JSON as UTF-8."""
    return replace(sampled, routed=tuple(map(b64encode, sampled.routed)))


def _as_bytes(sampled: T) -> T:
    """Decodes `_as_text`. Older checkpoints have the bytes themselves, whose second byte is 0."""
    return replace(sampled, routed=tuple(each if b"\0" in each else b64decode(each) for each in sampled.routed))


def _trajectory(written: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    """Restores a trajectory. The media of its prompt come from the data, since a snapshot may lack their sources."""
    found = TRAJECTORY.validate_python({**written, "prompt": prompt})
    own = {each: each for each in prompt.media}

    def restored(media: Media) -> Media:
        source = tuple(media.source) if isinstance(media.source, list) else media.source
        return own.get(media, replace(media, source=source))

    turns = (replace(_as_bytes(turn), media=tuple(map(restored, turn.media))) for turn in found.turns)
    return replace(found, turns=tuple(turns))


def _unscored(scored: Trajectory) -> Trajectory:
    """Removes the results of the reward function, and its failure."""
    failure = None if scored.failure is not None and scored.failure.source == "reward" else scored.failure
    none = {**vars(RewardResult(0.0, 0.0)), "reward": None, "accuracy": None}
    return replace(scored, failure=failure, **none)


def _values(of: TypeAdapter[Any], found: object, uid: str) -> list[dict[str, Any]]:
    """Converts a trajectory or completion to JSON values. Returns nothing if it has objects of an environment."""
    try:
        return [of.serializer.to_python(found, mode="json", exclude={"prompt"}, fallback=_plain)]
    except (TypeError, ValueError) as error:
        log.warning("the checkpoint leaves out %s, which a resumed run samples again: %s", uid, error)
        return []


def _entry(admitted: Admitted, running: Sequence[Episode], scoring: str) -> dict[str, Any]:
    """Converts a group to JSON values, without the responses that have no form in JSON; they are sampled again."""
    own = {each: replace(each, source=None) for each in admitted.prompt.media}
    is_scored = admitted.is_kept is True
    ended = (admitted.scored if is_scored else admitted.sampled).values()
    samples = list[dict[str, Any]]()
    for each in ended:
        turns = (replace(_as_text(turn), media=tuple(own.get(one, one) for one in turn.media)) for turn in each.turns)
        samples += _values(TRAJECTORY, replace(each, turns=tuple(turns)), each.uid)
    return {
        "uid": admitted.prompt.uid,
        "prompt": _digest(admitted.prompt),
        "step": admitted.step,
        "is_kept": is_scored and len(samples) == len(ended),
        "is_observed": admitted.is_observed,
        "scoring": scoring,
        "samples": samples,
        "partial": {
            str(each.sample): {**values, "context": each.context_digest}
            for each in running
            if each.sampled is not None and not each.turns
            for values in _values(COMPLETION, _as_text(each.sampled), each.id)
        },
        "again": sum(bool(each.turns) for each in running),
    }
