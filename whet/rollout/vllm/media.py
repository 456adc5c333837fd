# SPDX-License-Identifier: Apache-2.0
"""Images and videos of requests for vLLM: pixel values in shared memory, read when its worker encodes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

from whet.errors import EngineError
from whet.models.positions import patches, rotary_positions
from whet.models.vision.base import Vision
from whet.models.vision.qwen import Qwen3Vision, QwenVision
from whet.rollout.protocol import Request
from whet.rollout.servers.weights import weights_file
from whet.types import Media

HEADER_BYTES = 2**12  # names and shapes of the pixel values of one media


class SharedMedia:
    """Pixel values in shared memory: each media once, for as long as a request needs it."""

    def __init__(self, vision: Vision | None) -> None:
        self.vision = vision
        self._lock = Lock()
        self._files: dict[str, tuple[str, ExitStack]] = {}  # by digest
        self._users: dict[str, int] = {}

    def check(self, request: Request) -> None:
        """Raises: EngineError where vLLM cannot read the media of a request."""
        if not isinstance(self.vision, QwenVision) or isinstance(self.vision, Qwen3Vision):  # log-probs 5e-3 off
            model = "reads text" if self.vision is None else f"is {self.vision.config.model_type}"
            raise EngineError(
                f"request {request.uid} has {request.media[0].kind}s, and the model {model}; whet gives vLLM images "
                "of Qwen2-VL and Qwen2.5-VL: change the model, or rollout.engine.name to native or hf"
            )
        for each in request.media:
            if each.kind not in self.vision.kinds or each.tokens is None:
                reads = ", ".join(f"{kind}s" for kind in sorted(self.vision.kinds))
                raise EngineError(f"request {request.uid} has {each.kind}s, and the model reads text, {reads}")

    @contextmanager
    def opened(self, request: Request, version: int) -> Iterator[dict[str, Any]]:
        """The fields of a body for the media of a request, whose files are there until the end of the context.

        `version` is that of the weights: features of other weights are not used.  Raises: DataError."""
        with ExitStack() as held:
            features: dict[str, dict[str, list[Any]]] = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
            for media, places in zip(request.media, patches(request.prompt_ids, request.media), strict=True):
                run = {"offset": places[0], "length": len(places)}
                given = f"{media.digest} version {version}", run, held.enter_context(self._file(media))
                for field, value in zip(features.values(), given, strict=True):
                    field.setdefault(media.kind, []).append(value)
            yield features

    @contextmanager
    def _file(self, media: Media) -> Iterator[str]:
        """The path of a safetensors file with the outputs of the processor."""
        digest = media.digest
        with self._lock:
            if digest not in self._files:
                assert self.vision is not None
                written = ExitStack()
                pixels = self.vision.pixels(media)
                path = written.enter_context(weights_file(pixels.items(), header_bytes=HEADER_BYTES))
                self._files[digest] = path, written
            self._users[digest] = self._users.get(digest, 0) + 1
            path = self._files[digest][0]
        try:
            yield path
        finally:
            with self._lock:
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
                    self._files.pop(digest)[1].close()


def positions_of(request: Request) -> list[list[int]] | None:
    """Multimodal rotary positions [3, T] of all tokens that a request begins with; vLLM's own differ behind videos."""
    positions = rotary_positions((*request.prompt_ids, *request.sampled_ids), request.media, request.opening)
    return None if positions is None else positions.tolist()
