# SPDX-License-Identifier: Apache-2.0
"""Images, videos and rows with them, for tests of models that see."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerBase

from tests.models.encoders.conftest import PLACES, built
from whet.batch import Batch
from whet.models.encoders.base import Encoders, Prepared
from whet.models.encoders.load import encoders_of
from whet.models.load import load_tokenizer
from whet.plugins.lessons.init_model import Arch, init_model
from whet.rollout.batch import to_batch
from whet.types import Group, Media, Prompt, Trajectory, Turn

QWEN: tuple[Arch, ...] = ("qwen2_vl", "qwen2.5_vl", "qwen3_vl")
BUILT = tuple(PLACES)  # families that `init_model` does not make
SIZES = ((56, 56), (84, 56), (56, 112))  # width, height


def seeing_folder(folder: Path, arch: Arch | str) -> Path:
    """A random model of two layers that reads images, of patches of 14 pixels; of `BUILT`, of 8."""
    if arch in BUILT:
        return built(folder, arch, seeing_folder(folder.with_name("qwen3_vl"), "qwen3_vl"))
    return init_model(folder, arch, "nano", num_layers=2, max_position_embeddings=1024)  # type: ignore[arg-type]


def picture(seed: int, size: tuple[int, int] = (56, 56)) -> bytes:
    """A PNG file with a figure."""
    draws, image = random.Random(seed), Image.new("RGB", size, (255, 255, 255))
    left, top = draws.randint(0, 20), draws.randint(0, 20)
    colour = (draws.randint(0, 200), draws.randint(0, 200), draws.randint(0, 200))
    ImageDraw.Draw(image).ellipse([left, top, left + 25, top + 30], fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image(vision: Encoders, seed: int, size: tuple[int, int] = (56, 56)) -> Media:
    """A measured image."""
    encoded = picture(seed, size)
    media = Media("image", hashlib.sha256(encoded).hexdigest(), encoded)
    return vision.measured(media, size[1], size[0])


def video(vision: Encoders, seed: int, frames: int, size: tuple[int, int] = (56, 56)) -> Media:
    """A measured video of some frames, two a second."""
    encoded = tuple(picture(seed + frame, size) for frame in range(frames))
    digest = hashlib.sha256(b"".join(encoded)).hexdigest()
    media = Media("video", digest, encoded, frames=tuple(range(frames)))
    return vision.measured(media, size[1], size[0], [frame / 2 for frame in range(frames)])


def together(pixels: Sequence[Prepared]) -> Prepared:
    """The arguments of a forward pass of transformers for one row: patches one after the other, tiles of an image."""
    axis = 1 if pixels and "pixel_attention_mask" in pixels[0] else 0
    names = dict.fromkeys(name for each in pixels for name in each)
    return {name: torch.cat([each[name] for each in pixels if name in each], axis) for name in names}


def token_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str | Media]) -> tuple[int, ...]:
    """The ids of texts and media, one after the other."""
    parts = []
    for word in words:
        if isinstance(word, Media):
            assert word.tokens is not None
            patches = "".join(piece * times for piece, times in word.tokens.text)
            word = f"<|vision_start|>{patches}<|vision_end|>"
        parts.append(word)
    return tuple(tokenizer("".join(parts), add_special_tokens=False)["input_ids"])


def asked(tokenizer: PreTrainedTokenizerBase, media: Sequence[Media], text: str = "count") -> tuple[int, ...]:
    """A prompt that shows media."""
    return token_ids(tokenizer, ["<|im_start|>user\n", *media, f"{text}<|im_end|>\n<|im_start|>assistant\n"])


def batch_of_rows(folder: Path, rows: int = 12, seed: int = 0) -> Batch:
    """Rows of three answers to a prompt: with an image, with two, with a second image after the first answer, with
    none; the columns of `engine_conformance.ragged_batch`."""
    tokenizer = load_tokenizer(folder)
    vision, draws = encoders_of(tokenizer), random.Random(seed)
    assert vision is not None
    groups = []
    for number in range(rows // 3):
        shown = (1, 2, 1, 0)[number % 4]
        media = tuple(image(vision, 100 * seed + 10 * number + at, draws.choice(SIZES)) for at in range(shown))
        prompt = Prompt(f"0:{number}", number, (), asked(tokenizer, media), "test", "", media=media)
        answers = [_answer(prompt, sample, draws, tokenizer, vision, later=number % 4 == 2) for sample in range(3)]
        groups.append(Group(prompt, tuple(answers)))
    batch = to_batch(groups, pad_token_id=0)
    mask = batch["response_mask"]
    log_probs = batch["rollout_log_probs"]
    given = torch.Generator().manual_seed(seed)
    return batch.with_columns(
        number=torch.arange(len(batch)),
        names=[f"row {row}" for row in range(len(batch))],
        old_log_probs=log_probs,
        ref_log_probs=1.1 * log_probs,
        advantages=torch.randn(mask.shape, generator=given) * mask,
    )


def _answer(
    prompt: Prompt, sample: int, draws: random.Random, tokenizer: PreTrainedTokenizerBase, vision: Encoders, later: bool
) -> Trajectory:
    def turn(context: tuple[int, ...], media: tuple[Media, ...]) -> Turn:
        length = draws.randint(2, 9)
        written = tuple(draws.randrange(20, 200) for _ in range(length))
        log_probs = tuple(-3.0 - draws.random() for _ in written)
        return Turn(context, written, log_probs, "stop", ((0, length),), media=media)

    turns = [turn(prompt.token_ids, prompt.media)]
    if later:
        seen = image(vision, draws.randrange(1000), draws.choice(SIZES))
        context = turns[0].context_ids + turns[0].token_ids + asked(tokenizer, [seen], "and now")
        turns.append(turn(context, (*prompt.media, seen)))
    return Trajectory(f"{prompt.uid}:{sample}", prompt, tuple(turns), sample, reward=draws.random())
