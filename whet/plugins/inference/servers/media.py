# SPDX-License-Identifier: Apache-2.0
"""Passes images and videos of requests to a server, as pixel values in shared memory that its processes read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch

from whet.errors import EngineError
from whet.models.encoders.base import Encoders
from whet.models.positions import patches, rotary_positions
from whet.plugins.inference.servers.weights import weights_file
from whet.rollout.protocol import Request
from whet.types import Media

Sees = tuple[str, ...]  # types of models whose images a server reads
QWEN: Sees = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
HEADER_BYTES = 2**12  # names and shapes of the pixel values of one media


@dataclass(frozen=True)
class RequestMedia:
    """An image or video of a request, with its file of pixel values."""

    kind: str  # to the server: a video of SmolVLM is an image of many tiles
    digest: str
    path: str  # of a safetensors file with the outputs of the processor
    places: list[int]  # of its patch tokens in the prompt


class SharedMedia:
    """Keeps pixel values in shared memory: each image or video once, as long as a request needs it."""

    def __init__(self, encoders: Encoders | None) -> None:
        self.encoders = encoders
        self._lock = Lock()
        self._files: dict[str, tuple[Future[str], ExitStack]] = {}  # by digest: the path, once written
        self._users: dict[str, int] = {}

    def prefetch(self, request: Request) -> None:
        """Prepares the media of a request in threads, before `opened` needs them."""
        if self.encoders is not None and request.media:
            self.encoders.prefetch(request.media)

    @contextmanager
    def opened(self, request: Request) -> Iterator[list[RequestMedia]]:
        """Yields the media of a request. Their files exist until the end of the block.  Raises: DataError."""
        assert self.encoders is not None
        with ExitStack() as held:
            yield [
                RequestMedia(
                    self.encoders.stream(media.kind), media.digest, held.enter_context(self._file(media)), places
                )
                for media, places in zip(request.media, patches(request.prompt_ids, request.media), strict=True)
            ]

    @contextmanager
    def _file(self, media: Media) -> Iterator[str]:
        """Yields the path of a safetensors file with the processor's outputs."""
        digest = media.digest
        with self._lock:
            is_first = digest not in self._files
            file, written = self._files.setdefault(digest, (Future(), ExitStack()))
            self._users[digest] = self._users.get(digest, 0) + 1
        try:
            if is_first:
                self._write(media, file, written)
            yield file.result()
        finally:
            with self._lock:
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest], self._files[digest]
                    written.close()

    def _write(self, media: Media, file: Future[str], written: ExitStack) -> None:
        assert self.encoders is not None
        try:
            pixels = self.encoders.prepared(media)
            file.set_result(written.enter_context(weights_file(pixels.items(), header_bytes=HEADER_BYTES)))
        except BaseException as error:  # for the other requests that wait for this media
            file.set_exception(error)


def check_media(encoders: Encoders | None, title: str, sees: Sees, media: Sequence[Media], whose: str) -> None:
    """Raises: EngineError if a server for the model types `sees` cannot read `media` of the prompt named `whose`."""
    if encoders is None or encoders.config.model_type not in sees:
        model = "reads text" if encoders is None else f"is {encoders.config.model_type}"
        families = f"Qwen2-VL, Qwen2.5-VL, Qwen3-VL{' and SmolVLM' * ('smolvlm' in sees)}, whose images {title} reads"
        change = "change the model, or rollout.engine.name to native or hf"
        raise EngineError(whose, f"has {media[0].kind}s, and the model {model}", families, change)
    for each in media:
        if each.kind not in encoders.kinds or each.tokens is None:
            reads = ", ".join(f"{kind}s" for kind in sorted(encoders.kinds))
            raise EngineError(whose, f"has {each.kind}s", f"what the model reads: text, {reads}")


def config_overrides(argument: str, config: Any) -> dict[str, Any]:
    """Returns the server argument that overrides fields of config.json; {} if none is overridden. A server interleaves
    Qwen3-VL's rotary positions only if the config says so, as published ones do; transformers always does."""
    if not config.model_type.startswith("qwen3_vl"):
        return {}
    rope = {**config.text_config.rope_parameters, "mrope_interleaved": True}
    return {argument: {"text_config": {"rope_parameters": rope}}}


def positions_of(request: Request) -> torch.Tensor | None:
    """Returns the rotary positions [3, T] of a request's tokens so far; None without media. They are sent, because the
    server's own positions differ after a video."""
    return rotary_positions((*request.prompt_ids, *request.sampled_ids), request.media, request.opening)
