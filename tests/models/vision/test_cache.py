# SPDX-License-Identifier: Apache-2.0
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.vision.conftest import image_of, picture
from whet.models.load import load_policy
from whet.models.vision.base import PIXELS, _cache_of, body_of
from whet.models.vision.cache import BoundedCache
from whet.models.vision.load import vision_of


def test_the_oldest_values_go_at_the_limit() -> None:
    cache: BoundedCache[bytes] = BoundedCache(10, len)
    for key in "abc":
        cache.get(key, lambda: b"1234")
    assert cache.held_bytes == 8
    assert [cache.find(key) for key in "abc"] == [None, b"1234", b"1234"]
    cache.get("b", lambda: b"never made")
    cache.get("d", lambda: b"12")
    cache.get("e", lambda: b"12")  # 12 bytes: c goes, which was used before b
    assert [key for key in "bcde" if cache.find(key)] == ["b", "d", "e"]
    assert (cache.hits, cache.misses) == (1, 5)
    assert cache.get("large", lambda: b"0" * 11) == b"0" * 11
    assert cache.find("large") is None and cache.held_bytes == 8


def test_a_value_on_its_way_is_made_once_and_an_error_reaches_the_reader() -> None:
    cache: BoundedCache[bytes] = BoundedCache(100, len, num_threads=2)
    made, go = [], threading.Event()

    def slow() -> bytes:
        go.wait(10)
        made.append(1)
        return b"slow"

    def broken() -> bytes:
        raise ValueError("broken file")

    cache.prefetch([("a", slow), ("a", slow)])
    reader = threading.Timer(0.05, go.set)
    reader.start()
    assert cache.get("a", slow) == b"slow" and made == [1]
    assert cache.hits == 1
    cache.prefetch([("b", broken)])
    with pytest.raises(ValueError, match="broken file"):
        cache.get("b", broken)


def test_pixels_are_prepared_ahead_and_features_kept_for_one_version(folder_of: Callable[[str], Path]) -> None:
    model = load_policy(folder_of("qwen2_5_vl"))
    vision = vision_of(model)
    assert vision is not None
    media = [vision.measured(image_of(picture(seed, 48, 48)), 48, 48) for seed in (91, 92)]
    before = PIXELS.misses
    vision.prefetch(media)
    for each in media:
        vision.pixels(each)
    assert PIXELS.misses == before

    fresh = vision.features(model, media)
    assert all(each.hidden.requires_grad for each in fresh)
    first = vision.features(model, media[:1], version=1)
    both = vision.features(model, media, version=1)
    cache = _cache_of(body_of(model), 1)
    assert (cache.hits, cache.misses) == (1, 2)
    assert both[0] is first[0] and not both[0].hidden.requires_grad
    for one, other in zip(both, fresh, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden.detach(), atol=2e-6, rtol=0)
    with torch.no_grad():
        next(model.base_model.visual.parameters()).add_(0.1)
    assert vision.features(model, media[:1], version=1)[0] is first[0]
    assert (vision.features(model, media[:1], version=2)[0].hidden - first[0].hidden).abs().max() > 1e-4
    assert len(pickle.dumps(vision)) < 20_000
