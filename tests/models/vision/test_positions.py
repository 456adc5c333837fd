# SPDX-License-Identifier: Apache-2.0
"""The rule by which grids and time steps give a model's positions."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.models.vision.conftest import image_of, picture, video_of
from whet.models.load import load_policy
from whet.models.vision.load import vision_of
from whet.types import Media


def positions(ids: Sequence[int], media: Sequence[Media]) -> torch.Tensor:
    """[3, L]: text counts on; a run of patches has the grid's times, rows and columns after it, and the text goes on
    after the larger of its height and width."""
    grids = [(each.tokens.token_id, grid, each.tokens.time_step) for each in media for grid in each.tokens.grids]  # type: ignore[union-attr]
    found, after, place = [], 0, 0
    while place < len(ids):
        if not grids or ids[place] != grids[0][0]:
            found.append(torch.full((3, 1), after))
            after, place = after + 1, place + 1
            continue
        _, (times, height, width), step = grids.pop(0)
        assert step is not None
        axes = ((torch.arange(times) * step).long(), torch.arange(height), torch.arange(width))
        found.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + after)
        after, place = after + max(height, width), place + times * height * width
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("seconds_apart", [0.5, 0.4, 1 / 3, 7.5])
def test_grids_and_time_steps_give_the_models_own_positions(
    family: str, seconds_apart: float, folder_of: Callable[[str], Path]
) -> None:
    model = load_policy(folder_of(family))
    vision = vision_of(model)
    assert vision is not None
    frames = [picture(seed, 40, 70) for seed in range(7)]
    video = vision.measured(video_of(frames), 40, 70, [seconds_apart * place for place in range(7)])
    images = [vision.measured(image_of(picture(seed, 50, 20 * seed)), 50, 20 * seed) for seed in (1, 5)]
    media, ids = [images[0], video, images[1]], [300, 301]
    for each in media:
        assert each.tokens is not None
        for grid in each.tokens.grids:
            count = grid[0] * grid[1] * grid[2]
            ids += [3, *[each.tokens.token_id] * count, 4]
        ids += [302] * 3
    image, film = vision.forbidden
    kinds = torch.tensor([[(token == image) + 2 * (token == film) for token in ids]])
    pixels = [vision.pixels(each) for each in media]
    grids = {name: torch.cat([each[name] for each in pixels if name in each]) for name in ("image_grid_thw",)}
    grids["video_grid_thw"] = pixels[1]["video_grid_thw"]
    if family == "qwen2_5_vl":
        grids["second_per_grid_ts"] = [2 * seconds_apart]  # type: ignore[assignment]
    expected, delta = model.base_model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, **grids)
    found = positions(ids, media)
    assert torch.equal(found, expected[:, 0])
    assert int(found.max()) + 1 - len(ids) == int(delta)
    times = video.tokens.grids[0][0]  # type: ignore[union-attr]
    assert times == (1 if family.startswith("qwen3") else 4)
