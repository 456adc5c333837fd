# SPDX-License-Identifier: Apache-2.0
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch

from tests.models.encoders.conftest import image_of, picture
from whet.models.encoders.base import PREPARED, BoundedCache, _cache_of, body_of
from whet.models.encoders.load import encoders_of
from whet.models.load import load_policy


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
    assert 0.03 < cache.waited_seconds < 10
    assert cache.hits == 1
    cache.prefetch([("b", broken)])
    with pytest.raises(ValueError, match="broken file"):
        cache.get("b", broken)


def test_pixels_are_prepared_ahead_and_features_kept_for_one_version(folder_of: Callable[[str], Path]) -> None:
    model = load_policy(folder_of("qwen2_5_vl"))
    vision = encoders_of(model)
    assert vision is not None
    media = [vision.measured(image_of(picture(seed, 48, 48)), 48, 48) for seed in (91, 92)]
    before = PREPARED.misses
    vision.prefetch(media)
    for each in media:
        vision.prepared(each)
    assert PREPARED.misses == before

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


class Made:
    """Makes values of a size, and counts how often each was made."""

    def __init__(self, size: int = 10) -> None:
        self.count: Counter[Hashable] = Counter()
        self.size = size
        self.most = 0  # bytes held at the time

    def job(self, cache: BoundedCache[bytes], key: Hashable) -> tuple[Hashable, Callable[[], bytes]]:
        def make() -> bytes:
            self.count[key] += 1
            self.most = max(self.most, cache.held_bytes)
            return bytes(self.size)

        return key, make


@pytest.mark.parametrize("limit", [35, 100, 10_000])
def test_every_value_of_a_batch_larger_than_the_cache_is_made_once(limit: int) -> None:
    cache: BoundedCache[bytes] = BoundedCache(limit, len, num_threads=2)
    for step in range(3):  # the second finds the end of the first
        made = Made()
        jobs = [made.job(cache, key) for key in range(60)]
        cache.prefetch([job for job in jobs for _ in range(2)])
        for key, make in jobs:
            for _ in range(2):  # as for rows of two micro-batches
                assert cache.get(key, make) == bytes(10)
        assert cache.held_bytes <= limit and made.most <= limit
        expected = 0 if limit == 10_000 and step else 1
        assert {made.count[key] for key in range(60)} <= {0, 1}
        assert {made.count[key] for key in range(50)} == {expected}


def test_work_goes_on_ahead_of_the_reader() -> None:
    cache: BoundedCache[bytes] = BoundedCache(80, len, num_threads=1)
    made = Made()
    jobs = [made.job(cache, key) for key in range(9)]
    cache.prefetch(jobs)
    _settled(cache)
    assert sorted(made.count) == [0, 1, 2, 3]
    assert cache.get(*jobs[0]) == bytes(10)
    _settled(cache)
    assert sorted(made.count) == [0, 1, 2, 3, 4]
    before = cache.misses
    assert [cache.get(*job) for job in jobs] == [bytes(10)] * 9
    assert cache.misses <= before + 1  # the first, which went when the fifth came


def test_values_that_nobody_reads_do_not_keep_others_out() -> None:
    cache: BoundedCache[bytes] = BoundedCache(80, len, num_threads=1)
    made = Made()
    cache.prefetch([made.job(cache, f"aborted {key}") for key in range(9)])
    jobs = [made.job(cache, key) for key in range(6)]
    cache.prefetch(jobs)
    _settled(cache)
    assert made.count[0] == 0
    assert cache.get(*jobs[0]) == bytes(10)
    _settled(cache)
    assert [made.count[key] for key in range(6)] == [1, 1, 1, 1, 1, 0] and made.count["aborted 8"] == 0
    assert [cache.get(*job) for job in jobs[1:]] == [bytes(10)] * 5
    assert made.count["aborted 8"] == 0 and set(made.count.values()) == {1}


def test_a_value_over_the_limit_is_made_once_and_not_kept() -> None:
    cache: BoundedCache[bytes] = BoundedCache(5, len, num_threads=2)
    made = Made()
    jobs = [made.job(cache, key) for key in range(4)]
    cache.prefetch(jobs)
    assert [cache.get(*job) for job in jobs] == [bytes(10)] * 4
    assert set(made.count.values()) == {1} and cache.held_bytes == 0


def _settled(cache: BoundedCache[bytes]) -> None:
    until = time.monotonic() + 20
    while cache._coming and time.monotonic() < until:
        time.sleep(0.005)
    assert not cache._coming
