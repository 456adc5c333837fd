# SPDX-License-Identifier: Apache-2.0
"""Rotary positions against the models' own `get_rope_index`, to the last integer."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.encoders.conftest import image_of, picture, video_of
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy
from whet.models.positions import rotary_positions
from whet.types import Media

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
APART = (0.1, 0.25, 1 / 3, 0.4, 0.5, 0.6, 2 / 3, 0.75, 1.0, 1.25, 1.5, 3.0, 6.0, 7.5, 1 / 30, 1.001 / 30)


class Reference:
    """A tiny model, whose `get_rope_index` gives the expected positions of a prompt with media."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_policy(folder)
        vision = encoders_of(self.model)
        assert vision is not None
        self.encoders = vision
        self.step = vision.by_kind["image"].processor.temporal_patch_size

    def image(self, seed: int, size: tuple[int, int]) -> Media:
        return self.encoders.measured(image_of(picture(seed, *size)), *size)

    def video(self, seed: int, size: tuple[int, int], frames: int, apart: float) -> Media:
        film = video_of([picture(seed + at, *size) for at in range(frames)])
        return self.encoders.measured(film, *size, [3.7 + apart * at for at in range(frames)])

    def expected(self, ids: Sequence[int], media: Sequence[Media], apart: Sequence[float]) -> tuple[torch.Tensor, int]:
        """Positions [3, L] and the delta; `apart` are the seconds between frames of each video."""
        image, film = self.encoders.forbidden
        kinds = torch.tensor([[(token == image) + 2 * (token == film) for token in ids]])
        options: dict[str, Any] = {}
        for each in media:
            grid = {key: value for key, value in self.encoders.prepared(each).items() if "grid" in key}
            options |= {
                key: torch.cat([options[key], value]) if key in options else value for key, value in grid.items()
            }
        if apart and self.model.config.model_type == "qwen2_5_vl":
            options["second_per_grid_ts"] = torch.tensor([self.step / (1 / each) for each in apart])
        body = self.model.base_model
        found, delta = body.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, **options)
        return found[:, 0], int(delta)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Reference:
    return Reference(folder_of(request.param))


def written(draw: random.Random, media: Sequence[Media]) -> list[int]:
    """Token ids of texts and the patches of media, one after the other."""
    ids = [300] * draw.randint(0, 5)
    for each in media:
        assert each.tokens is not None
        for time, height, width in each.tokens.grids:
            ids += [3, *[each.tokens.token_id] * (time * height * width), 4]
        ids += [301] * draw.randint(0, 5)
    return [*ids, 302]


@pytest.mark.parametrize("apart", APART)
def test_frames_of_any_distance_have_the_models_own_positions(reference: Reference, apart: float) -> None:
    film = reference.video(1, (24, 40), 16, apart)
    ids = written(random.Random(0), [film])
    expected, delta = reference.expected(ids, [film], [apart])
    found = rotary_positions(ids, [film])
    assert found is not None
    assert found.tolist() == expected.tolist()
    assert int(found.max()) + 1 - len(ids) == delta


@pytest.mark.parametrize("seconds", [2, 4, 25])
def test_any_number_of_positions_a_second(folder_of: Callable[[str], Path], seconds: int) -> None:
    made = Reference(folder_of("qwen2_5_vl"))
    made.model.config.vision_config.tokens_per_second = made.encoders.config.vision_config.tokens_per_second = seconds
    draw = random.Random(seconds)
    for seed in range(40):
        apart = draw.choice([*APART, draw.uniform(0.02, 8)])
        film = made.video(seed, (24, 24), draw.randint(2, 9), apart)
        ids = written(draw, [film])
        assert rotary_positions(ids, [film]).tolist() == made.expected(ids, [film], [apart])[0].tolist()  # type: ignore[union-attr]


def test_random_prompts_of_images_videos_and_text(reference: Reference) -> None:
    draw = random.Random(7)
    for seed in range(40):
        media, apart = [], []
        for place in range(draw.randint(1, 5)):
            size = (draw.randint(20, 90), draw.randint(20, 90))
            if draw.random() < 0.5:
                media.append(reference.image(10 * seed + place, size))
            else:
                apart.append(draw.choice([*APART, draw.uniform(0.02, 8)]))
                media.append(reference.video(10 * seed + place, size, draw.randint(1, 7), apart[-1]))
        ids = written(draw, media)
        expected, delta = reference.expected(ids, media, apart)
        found = rotary_positions(ids, media)
        assert found is not None
        assert found.tolist() == expected.tolist(), (seed, apart)
        assert int(found.max()) + 1 - len(ids) == delta


def test_times_of_a_video(reference: Reference) -> None:
    film = reference.video(0, (40, 70), 7, 0.5)
    assert film.tokens is not None
    assert film.tokens.grids[0][0] == (1 if reference.model.config.model_type.startswith("qwen3") else 4)
