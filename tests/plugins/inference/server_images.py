# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos: every engine with a server answers as the native engine, also under new weights.

A check of CHECKS takes the engine and the model that its server samples from, and begins with the model's weights."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[2]))
import server_conformance as servers
from pictures import asked, image, video

from whet.config import TrainConfig, load_config
from whet.errors import EngineError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer
from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.lessons.drawn.figures import counting
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.trainers.build import train
from whet.types import Media

log = logging.getLogger(__name__)
Check = Callable[[Any, PreTrainedModel], None]
GAP = 5e-6  # of log-probs in float32
RUN = {
    "data.train_files": [],
    "data.val_files": [],
    "data.train_batch_size": 4,
    "data.max_response_length": 6,
    "rollout.n": 4,
    "actor.mini_batch_size": 2,  # two updates a step, which need log-probs of the trainer
    "trainer.total_steps": 4,
    "trainer.val_freq": -1,
    "trainer.save_freq": 0,
    "trainer.logger": ["jsonl"],
}


def shown(model: PreTrainedModel) -> list[tuple[Media, ...]]:
    """The media of some prompts: one image, none, three of different sizes, the same one twice."""
    vision = seeing(model)
    first, *others = (image(vision, seed, size) for seed, size in enumerate(((56, 56), (84, 56), (56, 140))))
    return [(first,), (), (first, *others), (others[0], others[0])]


def seeing(model: PreTrainedModel) -> Encoders:
    found = encoders_of(model)
    assert found is not None
    return found


def requests(
    model: PreTrainedModel, prompts: Sequence[tuple[Media, ...]], n: int = 2, **params: float
) -> list[Request]:
    tokenizer, forbidden = load_tokenizer(model.config._name_or_path), seeing(model).forbidden
    words = tuple((each,) for each in forbidden)
    sampling = SamplingParams(16, bad_words=words, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    prompt_ids = [asked(tokenizer, media, f"count {number}") for number, media in enumerate(prompts)]
    return [
        Request(f"{number}:{sample}", prompt_ids[number], sampling, 10 * number + sample, media=media)
        for number, media in enumerate(prompts)
        for sample in range(n)
    ]


def native(model: PreTrainedModel, made: Sequence[Request]) -> list[Completion]:
    engine = NativeEngine(torch.float32, 16, servers.CPU)
    engine.attach(model, 0)
    return generate(engine, made)


def assert_equal(found: Sequence[Completion], expected: Sequence[Completion], most: float = GAP) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    gaps = [
        abs(a - b)
        for one, other in zip(found, expected, strict=True)
        for a, b in zip(one.log_probs, other.log_probs, strict=True)
    ]
    assert max(gaps) < most


def check_answers(engine: ServerEngine, model: PreTrainedModel) -> None:
    for temperature in (0.0, 1.0):
        made = requests(model, shown(model), temperature=temperature)
        assert_equal(generate(engine, made), native(model, made))


def check_another_image(engine: ServerEngine, model: PreTrainedModel) -> None:
    """The prompts have the same token ids."""
    made = requests(model, [(image(seeing(model), seed),) for seed in range(3)], n=1)
    made = [replace(each, prompt_ids=made[0].prompt_ids) for each in made]
    found = generate(engine, made)
    assert len({each.log_probs for each in found}) == 3
    assert_equal(found, native(model, made))


def check_new_weights(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Features and prefixes of the old weights are not used again."""
    made = requests(model, shown(model))
    before = generate(engine, made)
    other, tower = load_policy(model.config._name_or_path).eval(), {*seeing(model).tower_weights(model)}
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.mul_(1.5 if name in tower else 1.0)
    engine.load(servers.named(other), 1)
    after = generate(engine, made)
    assert max(abs(a - b) for a, b in zip(before[0].log_probs, after[0].log_probs, strict=True)) > 100 * GAP
    assert_equal(after, native(other, made))
    assert all(each.versions == ((1, 16),) for each in after)


def check_patch_tokens(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Patches are likely, and are not sampled."""
    other, banned = load_policy(model.config._name_or_path).eval(), seeing(model).forbidden
    with torch.no_grad():
        other.get_input_embeddings().weight[list(banned)] *= 20.0
    engine.load(servers.named(other), 1)
    made = requests(model, shown(model), temperature=1.0)
    free = [replace(each, params=replace(each.params, bad_words=())) for each in made]
    assert {token for each in native(other, free) for token in each.token_ids} & set(banned)
    assert_equal(generate(engine, made), native(other, made), most=20 * GAP)  # rounding grows with the logits


def check_earlier_tokens(engine: ServerEngine, model: PreTrainedModel) -> None:
    made = requests(model, shown(model), n=1)
    whole = generate(engine, made)
    rest = [
        replace(each, uid=f"rest {each.uid}", sampled_ids=done.token_ids[:5])
        for each, done in zip(made, whole, strict=True)
    ]
    assert [each.token_ids for each in generate(engine, rest)] == [each.token_ids[5:] for each in whole]


def check_videos(engine: ServerEngine, model: PreTrainedModel) -> None:
    seen = video(seeing(model), 0, 6), image(seeing(model), 1)
    made = requests(model, [seen, seen[:1]])
    assert_equal(generate(engine, made), native(model, made))


def check_pixel_values_are_freed(engine: ServerEngine, model: PreTrainedModel) -> None:
    generate(engine, requests(model, shown(model)))
    assert not engine._media._files and not engine._media._users


def check_media_of_other_kinds(engine: ServerEngine, model: PreTrainedModel) -> None:
    [made] = requests(model, shown(model)[:1], n=1)
    with raises(EngineError, found=re.compile("audios"), expected=re.compile("text, images, videos$")):
        engine.submit(replace(made, media=(replace(made.media[0], kind="audio"),)))


CHECKS: tuple[Check, ...] = (
    check_answers,
    check_another_image,
    check_new_weights,
    check_patch_tokens,
    check_earlier_tokens,
    check_videos,
    check_pixel_values_are_freed,
    check_media_of_other_kinds,
)


def check_run(engine: str, folder: Path, run_dir: Path, freeze: Sequence[str] = ()) -> None:
    """Four steps: each samples with the weights that the last one trained, and sees each image again."""
    runs = []
    for name, options in ((engine, servers.SMALL), ("native", {})):
        overrides = {
            **RUN,
            "model": {"path": str(folder), "freeze": [*freeze]},
            "rollout.engine": {"name": name, "options": options},
            "trainer.run_dir": str(run_dir / name),
        }
        config = load_config(TrainConfig, "vlm_quickstart", overrides, given={"data", "reward"}).config
        runs.append(train(config, reward=letters, data=list(counting("train", 0, num_rows=4, prompt="<image>?"))))
    steps, others = (run.history for run in runs)
    gaps = [each["correction/abs_max"] for each in steps]
    log.info("%s: largest gap of log-probs at each step: %s", engine, ", ".join(f"{gap:.1e}" for gap in gaps))
    assert len(gaps) == 4 and max(gaps) < GAP
    for metric in ("critic/score/mean", "actor/grad_norm"):
        assert [each[metric] for each in steps] == pytest.approx([each[metric] for each in others], rel=1e-3)


def letters(solution_str: str) -> float:
    """Pays letters, so that random answers differ."""
    return sum(letter.isalnum() for letter in solution_str) / 10
