# SPDX-License-Identifier: Apache-2.0
"""Encoders of media. A family of models has an `Encoder`. A loaded model has `Encoders`, which cache prepared media and
features by digest, up to a number of bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from whet.errors import DataError
from whet.metrics import Metrics
from whet.types import Media, MediaTokens

Prepared = dict[str, torch.Tensor]  # what a tower reads of one media: the outputs of a processor
Size = tuple[int, int]  # height and width in pixels
PixelLimits = tuple[int | None, int | None]  # fewest and most pixels of an image or a frame; None: the processor's own
Hidden = tuple[torch.Tensor, tuple[torch.Tensor, ...]]  # the first fields of `Features` after the kind
FEATURE_CACHE_BYTES = 2**30
PREPARING_THREADS = 2
Value = TypeVar("Value")


@dataclass(frozen=True)
class Features:
    """The output of the tower for one media: the features of its patch tokens, in token order."""

    kind: str
    hidden: torch.Tensor  # [n, H]
    deepstack: tuple[torch.Tensor, ...] = ()  # [n, H] for each of the first language layers, of Qwen3-VL

    def part(self, tokens: slice) -> Features:
        """Selects the features of some tokens."""
        return Features(self.kind, self.hidden[tokens], tuple(each[tokens] for each in self.deepstack))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.nbytes for each in (self.hidden, *self.deepstack))


@dataclass(frozen=True)
class EncoderOutput:
    """The output of a tower, with the field names that transformers' model reads."""

    pooler_output: Any
    deepstack_features: Any = None


def body_of(model: Any) -> nn.Module:
    """Returns the module that contains the towers: the body of a language model or of a value model."""
    found: nn.Module = model.base_model if isinstance(model, PreTrainedModel) else model.body
    parts = dict(model.named_children())
    return parts.get("model", found) if found is model else found  # Llama 4 has no part with its base_model_prefix


class Encoder(Protocol):
    """The code by which a family of models reads some kinds of media. It has no weights.

    It is registered as MODEL_TYPE/KIND: `@register_encoder("qwen2_vl/image", aliases=("qwen2_vl/video",))`."""

    towers: ClassVar[tuple[str, ...]]  # modules and weights of the body that only these media pass, a module first
    auto_class: ClassVar[Any] = AutoModelForImageTextToText  # the class of transformers that loads the model
    streams: ClassVar[Mapping[str, str]] = {}  # by kind: the encoder output that contains it, if it has another name
    both_ways: ClassVar[bool] = False  # True if the tokens of a media attend to later tokens of it
    config: Any  # the model's transformers config
    identity: str  # part of cache keys: equal for encoders whose `prepare` gives equal results

    @classmethod
    def load(cls, path: str | Path, config: Any, *, trust_remote_code: bool = False) -> Self:
        """Loads the encoder of the model at `path`, with this transformers config.  Raises: ModelError."""

    @property
    def patches_per_token(self) -> float:
        """The number of patches in the tower that become one token of the text."""

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The ids of patch tokens, which must never be sampled."""

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        """Computes the text and tokens of a media in a prompt, without decoding it: from height and width in pixels,
        and the seconds of a video's chosen frames; for audio from channels, samples and seconds.

        Raises: DataError; ValueError for a size that the processor refuses."""

    def prepare(self, media: Media) -> Prepared:
        """Decodes a measured media into the tensors that the tower reads.  Raises: DataError."""

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        """Computes the features of media in one pass of the tower; `prepared` tensors are on the tower's device."""

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        """Converts the features of one stream to the form that the model's body reads."""

    def smallest(self) -> Prepared:
        """Returns the tensors that the tower reads for the smallest possible media; all numbers are 0."""

    def save(self, folder: Path) -> None:
        """Writes the processor's files, unchanged, into a model's folder."""


class Encoders:
    """The encoders of a loaded model by kind of media, made by `load_encoders`, with their caches."""

    def __init__(self, by_kind: Mapping[str, Encoder]) -> None:
        self.by_kind, self.own = by_kind, list(dict.fromkeys(by_kind.values()))
        self.kinds, self.config = frozenset(by_kind), self.own[0].config
        self.towers = tuple(dict.fromkeys(tower for each in self.own for tower in each.towers))
        self.forbidden = tuple(token_id for each in self.own for token_id in each.forbidden)
        self.both_ways = tuple(token_id for each in self.own if each.both_ways for token_id in each.forbidden)

    def measured(
        self,
        media: Media,
        height: int,
        width: int,
        seconds: Sequence[float] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Media:
        """Returns `media` with its `tokens`, as `Encoder.measure` counts them.

        `min_pixels` and `max_pixels` are for an image, or each frame of a video; None: the processor's limits.  Raises:
        DataError for a kind that the model does not read, and for a shape that its processor refuses."""
        if media.kind not in self.kinds:
            reads = " and ".join(f"{kind}s" for kind in sorted(self.kinds))
            change = "remove the row, or change the model"
            raise DataError(media.kind, f"{self.config.model_type} reads {reads} only", reads, change)
        encoder = self.by_kind[media.kind]
        if media.kind == "video" and not seconds:
            raise DataError("number of frames", 0, "at least one", "remove the row, or repair the file")
        try:
            tokens = encoder.measure(media.kind, (height, width), seconds, (min_pixels, max_pixels))
            return replace(media, tokens=tokens)
        except DataError:
            raise
        except ValueError as error:
            found = f"{height} x {width} pixels (height x width), which {type(encoder).__name__} refuses: {error}"
            raise DataError("size", found, "", "resize it, or remove the row") from error

    def stream(self, kind: str) -> str:
        """Returns the name of the encoder output that contains a kind of media."""
        return self.by_kind[kind].streams.get(kind, kind)

    def prepared(self, media: Media) -> Prepared:
        """Returns the tensors that the tower reads for a measured media, if possible cached.  Raises: DataError."""
        return PREPARED.get(self._key(media), lambda: self.by_kind[media.kind].prepare(media))

    @contextmanager
    def timed(self, metrics: Metrics, ranks: int) -> Iterator[None]:
        """Records the seconds in which the block waits for prepared media, divided by `ranks`, the number of ranks that
        wait at the same time."""
        before = PREPARED.waited_seconds
        yield
        metrics.seconds("perf/media_wait_seconds", (PREPARED.waited_seconds - before) / ranks)

    def prefetch(self, media: Iterable[Media], model: nn.Module | None = None) -> None:
        """Decodes and prepares media in threads before forward passes read them. `media` is in the order of the passes,
        each media as often as they read it. Skips media for which a frozen tower of `model` has cached features."""
        version = None if model is None else self.frozen_version(model)
        if version is not None and model is not None:
            held = _cache_of(body_of(model), version)
            media = [each for each in dict.fromkeys(media) if held.find(each.digest) is None]
        PREPARED.prefetch((self._key(each), partial(self.by_kind[each.kind].prepare, each)) for each in media)

    def encode(self, model: PreTrainedModel, media: Sequence[Media], version: Hashable | None = None) -> dict[str, Any]:
        """Returns keywords for the forward pass of the model or its body: the features of the media, in token order.
        Empty without media. `version` is as in `features`.  Raises: DataError."""
        return self.outputs(self.features(model, media, version))

    def features(
        self, model: PreTrainedModel, media: Sequence[Media], version: Hashable | None = None
    ) -> list[Features]:
        """Computes the tower's features of each media, in one pass.

        Without `version` they are differentiable. With a version of the weights (`fingerprint`) they have no gradient,
        and are cached until a call has another version."""
        if version is None:
            return self._fresh(model, media)
        cache = _cache_of(body_of(model), version)
        found = {each.digest: cache.find(each.digest) for each in media}
        missing = {each.digest: each for each in media if found[each.digest] is None}
        with torch.no_grad():
            fresh = self._fresh(model, list(missing.values()))
        found |= {digest: cache.put(digest, each) for digest, each in zip(missing, fresh, strict=True)}
        cache.hits, cache.misses = cache.hits + len(media) - len(missing), cache.misses + len(missing)
        return [found[each.digest] for each in media]  # type: ignore[misc]

    def outputs(self, features: Sequence[Features]) -> dict[str, Any]:
        """Returns the keywords that `encode` returns, from computed features or from slices of them."""
        streams: dict[str, list[Features]] = {}
        for each in features:
            streams.setdefault(self.stream(each.kind), []).append(each)
        found = {stream: self.by_kind[group[0].kind].output(group) for stream, group in streams.items()}
        return {"mm_encoder_outputs": found} if found else {}

    def types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the keyword `token_type_ids` for transformers' own forward, which builds its mask from it: 1 for
        media tokens that attend to each other in both directions."""
        marked = ids.new_tensor(self.both_ways)
        return {"token_type_ids": torch.isin(ids, marked).int()} if self.both_ways else {}

    def dummy(self, model: PreTrainedModel) -> torch.Tensor:
        """Returns 0, computed by the towers from their smallest media. As all ranks of a sharded model must run the
        towers, a rank whose batch has no media calls this."""
        kinds = {encoder: kind for kind, encoder in self.by_kind.items()}.values()
        features = self._embedded(model, [(kind, self.by_kind[kind].smallest()) for kind in kinds])
        sums = [tensor.sum() for each in features for tensor in (each.hidden, *each.deepstack)]
        return torch.stack(sums).sum() * 0.0

    @torch.no_grad()
    def fingerprint(self, model: nn.Module) -> Hashable:
        """Returns hashes that identify the weights of the towers: for each weight the exclusive or of its bits."""
        return tuple(torch.stack([torch.hash_tensor(weight) for weight in self._weights(model)]).tolist())

    def is_frozen(self, model: nn.Module) -> bool:
        """Tells whether no weight of the towers is trained."""
        return not any(weight.requires_grad for weight in self._weights(model))

    def frozen_version(self, model: nn.Module) -> Hashable | None:
        """Returns the `fingerprint` of frozen towers, cached until their weights change; None if they are trained."""
        if not self.is_frozen(model):
            return None
        body, state = body_of(model), tuple((each._version, each.data_ptr()) for each in self._weights(model))
        if body not in _FROZEN or _FROZEN[body][0] != state:
            _FROZEN[body] = state, self.fingerprint(model)
        return _FROZEN[body][1]

    def tower_weights(self, model: nn.Module) -> list[str]:
        """Lists the names of the towers' weights in the model, tied weights under each of their names."""
        parts = [f".{tower}." for tower in self.towers]
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        return [name for name in names if any(part in f".{name}." for part in parts)]

    def _weights(self, model: nn.Module) -> list[nn.Parameter]:
        parts = tuple(f"{tower}." for tower in self.towers)
        return [weight for name, weight in body_of(model).named_parameters() if f"{name}.".startswith(parts)]

    def _key(self, media: Media) -> Hashable:
        assert media.tokens is not None
        return self.by_kind[media.kind].identity, media.digest, media.tokens.size

    def _fresh(self, model: PreTrainedModel, media: Sequence[Media]) -> list[Features]:
        if not media:
            return []
        by_key = {self._key(each): each for each in media}
        prepared = {key: self.prepared(by_key[key]) for key in PREPARED.in_order(by_key)}
        return self._embedded(model, [(each.kind, prepared[self._key(each)]) for each in media])

    def _embedded(self, model: PreTrainedModel, media: Sequence[tuple[str, Prepared]]) -> list[Features]:
        body, found = body_of(model), dict[int, Features]()
        for encoder in self.own:
            places = [place for place, (kind, _) in enumerate(media) if self.by_kind[kind] is encoder]
            if places:
                device = next(body.get_submodule(encoder.towers[0]).parameters()).device
                there = [{name: value.to(device) for name, value in media[place][1].items()} for place in places]
                for place, hidden in zip(places, encoder.embed(body, there), strict=True):
                    found[place] = Features(media[place][0], *hidden)
        return [found[place] for place in range(len(media))]


class BoundedCache(Generic[Value]):
    """A cache of values by key with at most `limit_bytes`; the least recently used are dropped first. Thread-safe.

    Prefetched values stay until they are read. They take at most half of the limit; when some are read, more are made.
    `hits` counts the calls of `get` that found a value, finished or in progress; `misses` counts the calls that made a
    value; `waited_seconds` is the time that all calls of `get` took."""

    def __init__(self, limit_bytes: int, size: Callable[[Value], int], num_threads: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.hits = self.misses = self.held_bytes = 0
        self.waited_seconds = 0.0
        self._size, self._num_threads = size, num_threads
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._waiting: OrderedDict[Hashable, Callable[[], Value]] = OrderedDict()  # prefetch jobs not started, in order
        self._coming: dict[Hashable, Future[Value]] = {}  # prefetch jobs that run
        self._ahead: dict[Hashable, int] = {}  # sizes in bytes of prefetched values that were not read yet
        self._reads: Counter[Hashable] = Counter()  # number of expected calls of `get` by key
        self._largest_bytes = inf  # size of the largest prefetched value
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def find(self, key: Hashable) -> Value | None:
        """Returns the value of `key`; None if the cache does not have it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of `key`. Calls `make` if it is neither cached nor in progress.  Raises: its errors."""
        start = perf_counter()
        try:
            return self._get(key, make)
        finally:
            with self._lock:
                self.waited_seconds += perf_counter() - start

    def _get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        with self._lock:
            coming, found = self._coming.get(key), self._values.get(key)
            is_missing = found is None and coming is None
            self.hits, self.misses = self.hits + (not is_missing), self.misses + is_missing
            if is_missing and key in self._waiting:  # the reader skipped the keys before this one: drop them
                for each in [*self._ahead, *takewhile(lambda each: each != key, self._waiting)]:
                    self._ahead.pop(each, None)
                    self._waiting.pop(each, None)
                    del self._reads[each]
            self._waiting.pop(key, None)
            if found is not None:
                self._values.move_to_end(key)
            if coming is None:
                self._read(key)
        if coming is None:
            return self.put(key, make()) if found is None else found
        value = coming.result()
        with self._lock:
            self._read(key)
        return value

    def in_order(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Sorts the keys in the order of their `prefetch`."""
        with self._lock:
            place = {key: place for place, key in enumerate((*self._ahead, *self._coming, *self._waiting))}
        return sorted(keys, key=lambda key: place.get(key, -1))

    def put(self, key: Hashable, value: Value) -> Value:
        """Caches a value, unless it is larger than the limit.  Returns it."""
        with self._lock:
            if self._size(value) <= self.limit_bytes:
                self._hold(key, value)
        return value

    def prefetch(self, jobs: Iterable[tuple[Hashable, Callable[[], Value]]]) -> None:
        """Makes values in threads, before the calls of `get` and in their order; `jobs` has a key once for each call.
        After a failed job the `get` of its key raises the job's error, or makes the value again."""
        times: Counter[Hashable] = Counter()
        with self._lock:
            for key, make in jobs:
                times[key] += 1
                if key not in self._coming and key not in self._ahead:
                    self._waiting.setdefault(key, make)
            for key, number in times.items():
                self._reads[key] = max(self._reads[key], number)
            self._top_up()

    def clear(self) -> None:
        """Drops all values."""
        with self._lock:
            self._values.clear()
            self._ahead.clear()
            self.held_bytes = 0

    def _make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        try:
            value = make()
            with self._lock:
                self._ahead[key] = size = self._size(value)
                self._largest_bytes = size if self._largest_bytes == inf else max(self._largest_bytes, size)
                self._hold(key, value)
            return value
        finally:
            with self._lock:
                self._coming.pop(key, None)
                self._top_up()

    def _top_up(self) -> None:
        """Starts waiting prefetch jobs while there is memory for their values."""
        while self._waiting and (
            not (self._coming or self._ahead)
            or 2 * (sum(self._ahead.values()) + self._largest_bytes * (len(self._coming) + 1)) <= self.limit_bytes
        ):
            key, make = self._waiting.popitem(last=False)
            if key in self._values:
                self._ahead[key] = self._size(self._values[key])
                continue
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="whet-media")
            self._coming[key] = self._threads.submit(self._make, key, make)

    def _read(self, key: Hashable) -> None:
        self._reads[key] -= 1
        if self._reads[key] <= 0:
            del self._reads[key]
            self._ahead.pop(key, None)
        self._trim()
        self._top_up()

    def _hold(self, key: Hashable, value: Value) -> None:
        """Caches a value, and drops the least recently used values, but no prefetched value that was not read yet."""
        if key not in self._values:
            self._values[key] = value
            self.held_bytes += self._size(value)
        self._trim()

    def _trim(self) -> None:
        while self.held_bytes > self.limit_bytes:
            oldest = next((key for key in self._values if key not in self._ahead), None)
            if oldest is None:
                return
            self.held_bytes -= self._size(self._values.pop(oldest))


PREPARED: BoundedCache[Prepared] = BoundedCache(
    2**30, lambda prepared: sum(each.nbytes for each in prepared.values()), PREPARING_THREADS
)
_FROZEN: WeakKeyDictionary[nn.Module, tuple[Hashable, Hashable]] = WeakKeyDictionary()  # state and fingerprint
_FEATURES: WeakKeyDictionary[nn.Module, tuple[Hashable, BoundedCache[Features]]] = WeakKeyDictionary()


def keep_prepared(gib: float) -> None:
    """Limits the cache of prepared media in this process to `gib` GiB."""
    PREPARED.limit_bytes = int(gib * 2**30)


def _cache_of(body: nn.Module, version: Hashable) -> BoundedCache[Features]:
    """Returns the cache of features that `body` computed with this version of its weights. Features of other versions
    are dropped."""
    found, cache = _FEATURES.get(body, (None, None))
    if cache is None:
        cache = BoundedCache(FEATURE_CACHE_BYTES, lambda features: features.nbytes)
    if found != version:
        cache.clear()
    _FEATURES[body] = version, cache
    return cache
