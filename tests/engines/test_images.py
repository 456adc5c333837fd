# SPDX-License-Identifier: Apache-2.0
"""Training on rows with images: the same outputs and gradients whatever the split, on one process and on two."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tests.first import first
from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from tests import pictures
from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.engines.single import SingleEngine
from whet.errors import EngineError
from whet.models.encoders import base
from whet.models.encoders.base import BoundedCache
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy, load_tokenizer
from whet.models.outputs import ForwardSettings, model_outputs
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate
from whet.types import Media

OPTIM = OptimConfig(lr=1e-3, eps=1.0, weight_decay=0.0)
PADDED = suite.Variant(False, 10**6)


SEEING = (*pictures.QWEN, *pictures.BUILT)
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]  # an image of SmolVLM is cut into tiles of many patches


@pytest.fixture(
    scope="module", params=[*first(1, SEEING, others=pytest.mark.slow), pytest.param("smolvlm", marks=SLOW)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures.seeing_folder(tmp_path_factory.mktemp("models") / "seeing", request.param)


def engine(folder: Path, variant: suite.Variant, **changes: object) -> SingleEngine:
    given = EngineConfig(name="single", packing=variant.packing, logits_chunk_tokens=16)
    changes = {"optim": OPTIM, "max_tokens_per_micro_batch": variant.max_tokens_per_micro_batch, **changes}
    return SingleEngine(suite.settings(folder, given, **changes), None, torch.device("cpu"))


def test_log_probs_are_those_of_transformers(folder: Path) -> None:
    """Of each row alone, with the positions that the model itself computes. Rows of several turns too."""
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    model, batch = load_policy(folder), pictures.batch_of_rows(folder)
    vision = encoders_of(model)
    assert vision is not None
    needs, columns = frozenset({"log_probs"}), {**batch.tensors(), **batch.non_tensor_batch}
    with torch.no_grad():
        found = [
            model_outputs(model, columns, needs, ForwardSettings(packing, share))["log_probs"]
            for packing, share in ((True, True), (True, False), (False, False))
        ]
        for row in range(len(batch)):
            real = columns["attention_mask"][row].bool()
            ids = columns["input_ids"][row][real][None]
            media = (*columns["media"][row], *columns["response_media"][row])
            pixels = [vision.prepared(each) for each in media]
            given = pictures.together(pixels)
            if media and vision.config.model_type.startswith("qwen"):
                given["mm_token_type_ids"] = (ids == media[0].tokens.token_id).int()
            if vision.both_ways:
                given["token_type_ids"] = (ids == vision.both_ways[0]).int()
            plain.model.rope_deltas = None
            log_probs = plain(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits.log_softmax(-1)
            expected = log_probs[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            mask = columns["response_mask"][row].bool()
            expected = expected[-int(real.sum() - columns["prompts"].shape[1] + (~real).sum()) :][-len(mask) :]
            own = real[columns["prompts"].shape[1] :]
            for each in found:
                got = each[row][own & mask]
                torch.testing.assert_close(got, expected[-int(own.sum()) :][mask[own]], atol=5e-6, rtol=0)


VARIANTS = suite.VARIANTS[:1] + suite.VARIANTS[2:]
SPLITS = [
    pytest.param(arch, variant, marks=SLOW if arch == "smolvlm" else [pytest.mark.slow] * ((place - number) % 3 > 0))
    for place, arch in enumerate([*pictures.QWEN, "smolvlm"])
    for number, variant in enumerate(VARIANTS)
]  # the fast tests split with each of the families, and in each of the ways


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "variant"), SPLITS, ids=str, indirect=["folder"])
def test_a_split_changes_nothing(folder: Path, variant: suite.Variant) -> None:
    batch_at = partial(pictures.batch_of_rows, folder)
    suite.check_forward(engine(folder, PADDED), engine(folder, variant), batch_at)
    for objective in suite.OBJECTIVES[1:3]:
        suite.check_update(engine(folder, PADDED), engine(folder, variant), objective, 2, batch_at)


@pytest.mark.slow
@pytest.mark.parametrize("folder", first(1, pictures.QWEN, others=pytest.mark.slow), indirect=True)
def test_a_frozen_tower_and_an_adapter(folder: Path) -> None:
    """Features are computed once, for training and sampling; the results equal a tower's that runs anew."""
    pytest.importorskip("peft")
    batch_at = partial(pictures.batch_of_rows, folder)
    lora = {"lora": LoraConfig(rank=4), "seed": 1}
    suite.check_update(
        engine(folder, PADDED, **lora), engine(folder, suite.VARIANTS[2], **lora), suite.OBJECTIVES[1], 2, batch_at
    )
    frozen = engine(folder, suite.VARIANTS[0], freeze=("vision",))
    before = {name: weight.clone() for name, weight in frozen.model.named_parameters()}
    suite.update(frozen, batch_at(), suite.OBJECTIVES[1])
    suite.check_forward(engine(folder, PADDED), engine(folder, PADDED, freeze=("vision",)), batch_at)
    vision, calls = encoders_of(frozen.model), list[int]()
    assert vision is not None
    encode = vision.by_kind["image"].embed
    vision.by_kind["image"].embed = lambda body, pixels: calls.append(len(pixels)) or encode(body, pixels)  # type: ignore
    sampler = NativeEngine()
    sampler.attach(frozen.model, 0)
    [media] = batch_at().non_tensor_batch["media"][0]
    ids = pictures.asked(load_tokenizer(folder), [media])
    generate(sampler, [Request("a", ids, SamplingParams(2), 0, media=(media,))], 60.0)
    suite.update(frozen, batch_at(), suite.OBJECTIVES[1])
    assert calls == []  # the first update has encoded all of them
    moved = {name.split(".")[1] for name, weight in frozen.model.named_parameters() if not weight.equal(before[name])}
    assert moved == {"language_model"}


@pytest.mark.slow
@pytest.mark.parametrize("folder", SEEING, indirect=True)
def test_two_ranks_take_the_steps_of_one(folder: Path) -> None:
    """Some micro-batches have no image, and some ranks no row."""
    batch_at, fsdp = partial(pictures.batch_of_rows, folder), EngineConfig(name="fsdp", logits_chunk_tokens=16)
    one, two = suite.settings(folder), suite.settings(folder, fsdp)
    [expected, got] = [
        suite.drive(suite.launched({"actor": each}, ranks)["actor"], steps=range(4), batch_at=batch_at)
        for each, ranks in ((one, 1), (two, 2))
    ]
    suite.check_records(expected, got)


def test_a_text_model_refuses_rows_with_images(folder: Path, model_folder: Path) -> None:
    with raises(EngineError, found=re.compile("images")):
        engine(model_folder, PADDED).forward(pictures.batch_of_rows(folder), frozenset({"log_probs"}))


@pytest.mark.parametrize(
    "folder", [*first(1, pictures.QWEN, others=pytest.mark.slow), pytest.param("smolvlm", marks=SLOW)], indirect=True
)
def test_a_batch_larger_than_the_cache_of_pixels_is_prepared_once_a_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BoundedCache(2**30, base.PREPARED._size, 2)
    monkeypatch.setattr(base, "PREPARED", cache)
    limit = 840_000 if load_policy(folder).config.model_type == "smolvlm" else 400_000  # 2.7 of the largest images
    built, made = engine(folder, suite.Variant(True, 200), media_cache_gib=limit / 2**30), Counter[str]()
    vision = encoders_of(built.model)
    assert vision is not None
    own = vision.by_kind["image"].prepare

    def counted(media: Media) -> base.Prepared:
        made[media.digest] += 1
        return own(media)

    monkeypatch.setattr(vision.by_kind["image"], "prepare", counted)
    batch = pictures.batch_of_rows(folder, 24)
    shown = {each.digest for name in ("media", "response_media") for row in batch[name] for each in row}
    for _ in range(2):
        made.clear()
        built.forward(batch, frozenset({"log_probs"}))
        assert cache.held_bytes <= limit == cache.limit_bytes
        assert set(made.values()) == {1}
        assert len(shown - set(made)) <= 5  # which the pass before has left
    assert len(shown) > 12
