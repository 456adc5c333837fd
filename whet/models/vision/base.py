# SPDX-License-Identifier: Apache-2.0
"""The common part of all families: pixel values of media, and features of the vision tower, both cached by digest."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import DataError, ModelError
from whet.metrics import Metrics
from whet.models.vision.cache import BoundedCache
from whet.types import Media, MediaTokens

Pixels = dict[str, torch.Tensor]  # the outputs of an image processor for one media
Size = tuple[int, int]  # height and width in pixels
PixelLimits = tuple[int | None, int | None]  # fewest and most pixels of an image or a frame; None: the processor's own
Hidden = tuple[torch.Tensor, tuple[torch.Tensor, ...]]  # the first fields of `Features` after the kind
FEATURE_CACHE_BYTES = 2**30
PIXEL_THREADS = 2
BOTH_WAYS = (
    "in it the tokens of an image attend to each other in both directions, and whet's attention is causal",
    "",
    "train and sample on text alone, or choose Qwen-VL, SmolVLM or InternVL",
)


@dataclass(frozen=True)
class Features:
    """The tower's output for the patch tokens of one media, in the order of the tokens."""

    kind: str
    hidden: torch.Tensor  # [n, H]
    deepstack: tuple[torch.Tensor, ...] = ()  # [n, H] for each of the first language layers, of Qwen3-VL

    def part(self, tokens: slice) -> Features:
        """The features of some of the media's tokens."""
        return Features(self.kind, self.hidden[tokens], tuple(each[tokens] for each in self.deepstack))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.hidden, *self.deepstack))


@dataclass(frozen=True)
class EncoderOutput:
    """The fields of a tower's output that the body of a model reads."""

    pooler_output: Any
    deepstack_features: Any = None


def body_of(model: Any) -> nn.Module:
    """The module that holds the towers: the body of a language model or of a value model."""
    found: nn.Module = model.base_model if isinstance(model, PreTrainedModel) else model.body
    return found


class Vision(ABC):
    """The way in which a model reads images and videos. Made by `load_vision`; holds no weights.

    A file of a family gives `_measure`, `_pixels`, `_features` and `smallest`.
    """

    towers: ClassVar[tuple[str, ...]]  # modules of the body that only images and videos pass through
    processor_name: ClassVar[str]  # of its image processor's class, without the back end
    # the encoder output that a kind is part of
    streams: ClassVar[dict[str, str]] = {"image": "image", "video": "video"}
    both_ways: ClassVar[bool] = False  # True where the tokens of an image attend to later ones

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any], kinds: Iterable[str]) -> None:
        self.config, self.processor, self.files = config, processor, files
        self.kinds = frozenset(kinds)
        self.identity = hashlib.sha256(f"{type(self).__name__} {processor.to_json_string()}".encode()).hexdigest()

    @property
    @abstractmethod
    def patches_per_token(self) -> float:
        """The number of patches in the tower that become a token of the text."""

    @property
    @abstractmethod
    def forbidden(self) -> tuple[int, ...]:
        """Token ids that must never be sampled: those of patches."""

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
        """`media` with its `tokens`, from its height and width in pixels and the seconds of a video's chosen frames.

        `min_pixels` and `max_pixels` are for an image, or each frame of a video; None: the processor's own.
        Raises: DataError for a kind that the model does not read, and for a shape that its processor refuses.
        """
        if media.kind not in self.kinds:
            reads = " and ".join(f"{kind}s" for kind in sorted(self.kinds))
            change = "remove it, or change the model"
            raise DataError(media.kind, f"{self.config.model_type} reads {reads} only", reads, change)
        if self.both_ways:
            raise DataError(self.config.model_type, *BOTH_WAYS)
        if media.kind == "video" and not seconds:
            raise DataError("number of frames", 0, "at least one", "remove the row, or repair the file")
        try:
            return replace(media, tokens=self._measure(media.kind, (height, width), seconds, (min_pixels, max_pixels)))
        except DataError:
            raise
        except ValueError as error:
            name = type(self.processor).__name__
            found = f"{height} x {width} pixels (height x width), which {name} refuses: {error}"
            raise DataError("size", found, "", "resize it, or remove the row") from error

    def pixels(self, media: Media) -> Pixels:
        """The outputs of the processor for a measured media, decoded where they are not cached. Raises: DataError."""
        return PIXELS.get(self._pixels_key(media), lambda: self._pixels(media))

    @contextmanager
    def timed(self, metrics: Metrics, ranks: int) -> Iterator[None]:
        """Records the seconds in which the block waits for pixel values, divided by the ranks that wait beside it."""
        before = PIXELS.waited_seconds
        yield
        metrics.seconds("perf/media_wait_seconds", (PIXELS.waited_seconds - before) / ranks)

    def prefetch(self, media: Iterable[Media], model: nn.Module | None = None) -> None:
        """Decodes and prepares media in threads, ahead of passes and in their order, each as often as passes read it;
        none of which the frozen tower of `model` holds features."""
        version = None if model is None else self.frozen_version(model)
        if version is not None and model is not None:
            held = _cache_of(body_of(model), version)
            media = [each for each in dict.fromkeys(media) if held.find(each.digest) is None]
        PIXELS.prefetch((self._pixels_key(each), lambda each=each: self._pixels(each)) for each in media)  # type: ignore[misc]

    def encode(self, model: PreTrainedModel, media: Sequence[Media], version: Hashable | None = None) -> dict[str, Any]:
        """Keywords for the forward pass of the model or its body: the features of the media, in the order of their
        tokens; empty without media. `version` as in `features`.  Raises: DataError, ModelError."""
        if media and self.both_ways:
            raise ModelError(self.config.model_type, *BOTH_WAYS)
        return self.outputs(self.features(model, media, version))

    def features(
        self, model: PreTrainedModel, media: Sequence[Media], version: Hashable | None = None
    ) -> list[Features]:
        """The tower's features of each media, in one pass.

        Without `version` they are differentiable. With the version of the weights they have no gradient, and are cached
        until another version comes (`fingerprint`).
        """
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
        """`encode` of features, or of slices of features."""
        streams: dict[str, list[Features]] = {}
        for each in features:
            streams.setdefault(self.streams[each.kind], []).append(each)
        found = {stream: self._output(group) for stream, group in streams.items()}
        return {"mm_encoder_outputs": found} if found else {}

    def dummy(self, model: PreTrainedModel) -> torch.Tensor:
        """0, computed by the tower from its smallest image: for a rank of a sharded model whose batch has no media."""
        (features,) = self._encoded(model, [("image", self.smallest())])
        return torch.stack([each.sum() for each in (features.hidden, *features.deepstack)]).sum() * 0.0

    @torch.no_grad()
    def fingerprint(self, model: nn.Module) -> Hashable:
        """Tells the weights of the towers from others: the exclusive or of each one's bits."""
        return tuple(torch.stack([torch.hash_tensor(weight) for weight in self._weights(model)]).tolist())

    def is_frozen(self, model: nn.Module) -> bool:
        """True where no weight of the towers is trained."""
        return not any(weight.requires_grad for weight in self._weights(model))

    def frozen_version(self, model: nn.Module) -> Hashable | None:
        """The `fingerprint` of frozen towers, computed again after weights were loaded; None where they are trained."""
        if not self.is_frozen(model):
            return None
        body, state = body_of(model), tuple((each._version, each.data_ptr()) for each in self._weights(model))
        if body not in _FROZEN or _FROZEN[body][0] != state:
            _FROZEN[body] = state, self.fingerprint(model)
        return _FROZEN[body][1]

    def tower_weights(self, model: nn.Module) -> list[str]:
        """Names of the towers' weights in the model, tied ones under each name."""
        parts = [f".{tower}." for tower in self.towers]
        names = (name for name, _ in model.named_parameters(remove_duplicate=False))
        return [name for name in names if any(part in f".{name}" for part in parts)]

    def save(self, folder: Path) -> None:
        """Writes the files of the processor into a model's folder, as they were read."""
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @abstractmethod
    def smallest(self) -> Pixels:
        """The pixel values of the smallest image, all 0."""

    @abstractmethod
    def _measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens: ...

    @abstractmethod
    def _pixels(self, media: Media) -> Pixels: ...

    @abstractmethod
    def _features(self, body: Any, pixels: Sequence[Pixels]) -> list[Hidden]:
        """The features of media whose pixel values are on the tower's device, in one pass of the tower."""

    @abstractmethod
    def _output(self, features: Sequence[Features]) -> EncoderOutput: ...

    def _weights(self, model: nn.Module) -> list[nn.Parameter]:
        return [weight for name in self.towers for weight in body_of(model).get_submodule(name).parameters()]

    def _pixels_key(self, media: Media) -> Hashable:
        assert media.tokens is not None
        return self.identity, media.digest, media.tokens.size

    def _fresh(self, model: PreTrainedModel, media: Sequence[Media]) -> list[Features]:
        if not media:
            return []
        by_key = {self._pixels_key(each): each for each in media}
        pixels = {key: self.pixels(by_key[key]) for key in PIXELS.in_order(by_key)}
        return self._encoded(model, [(each.kind, pixels[self._pixels_key(each)]) for each in media])

    def _encoded(self, model: PreTrainedModel, pixels: Sequence[tuple[str, Pixels]]) -> list[Features]:
        body = body_of(model)
        device = next(body.get_submodule(self.towers[0]).parameters()).device
        there = [{name: value.to(device) for name, value in each.items()} for _, each in pixels]
        found = self._features(body, there)
        return [Features(kind, *each) for (kind, _), each in zip(pixels, found, strict=True)]


PIXELS: BoundedCache[Pixels] = BoundedCache(
    2**30, lambda pixels: sum(each.nbytes for each in pixels.values()), PIXEL_THREADS
)
_FROZEN: WeakKeyDictionary[nn.Module, tuple[Hashable, Hashable]] = WeakKeyDictionary()  # state, fingerprint
_FEATURES: WeakKeyDictionary[nn.Module, tuple[Hashable, BoundedCache[Features]]] = WeakKeyDictionary()


def keep_pixels(gib: float) -> None:
    """Sets the memory of pixel values that this process keeps."""
    PIXELS.limit_bytes = int(gib * 2**30)


def _cache_of(body: nn.Module, version: Hashable) -> BoundedCache[Features]:
    """The features that `body` gave with this version of its weights; those of another version are forgotten."""
    found, cache = _FEATURES.get(body, (None, None))
    if cache is None:
        cache = BoundedCache(FEATURE_CACHE_BYTES, lambda features: features.nbytes)
    if found != version:
        cache.clear()
    _FEATURES[body] = version, cache
    return cache
