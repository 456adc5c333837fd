# SPDX-License-Identifier: Apache-2.0
"""Reads images, videos and audio of rows and observations within limits, identifies them by digest, decodes to RGB."""

from __future__ import annotations

import base64
import binascii
import hashlib
import threading
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, Protocol, cast
from urllib.parse import unquote, unquote_to_bytes, urlparse

import numpy as np
from PIL import Image

from whet import files
from whet.data.pixels import (
    REPLACE,
    MediaHeader,
    from_array,
    image_header,
    image_pixels,
    opened,
    png,
    video_header,
    video_pixels,
)
from whet.errors import DataError, StorageError
from whet.options import as_list, is_number
from whet.types import Media

Kind = Literal["image", "video", "audio"]
KINDS: tuple[Kind, ...] = ("image", "video", "audio")
TAGGED = frozenset({"image", "video"})  # kinds with tags in texts, even if the model does not read the kind
Encoded = str | bytes  # a path, or the bytes of a file
URL_SECONDS, URL_ATTEMPTS, URL_BYTES = 30.0, 3, 64 * 2**20  # for one media
# Limits that an object may set for itself, as in {"image": PATH, "max_pixels": 65536}, with the replaced field's name.
OWN_LIMITS = {"min_pixels": "min_pixels", "max_pixels": "max_pixels", "fps": "video_fps", "max_frames": "max_frames"}
UNREAD = ("resized_height", "resized_width", "total_pixels", "nframes", "min_frames", "video_start", "video_end")
CONTENT = ("bytes", "path", "url", *KINDS)  # fields of an object, the first that it has
MAX_TOKENS = 2**18  # of one media
_writing = threading.Lock()  # two threads may store the same bytes


def audio_header(file: IO[bytes]) -> MediaHeader:
    """Reads an audio header: channels (as height), samples (as width) and length in seconds.  Raises: DataError."""
    try:
        with wave.open(file) as sound:
            samples, rate = sound.getnframes(), sound.getframerate()
            return MediaHeader(sound.getnchannels(), samples, ".wav", (samples / rate,))
    except (wave.Error, EOFError, ZeroDivisionError) as error:
        raise DataError("format", f"no WAV file ({error})", "a WAV file of plain samples", REPLACE) from error


HEADERS: Mapping[Kind, Callable[[IO[bytes]], MediaHeader]] = {"image": image_header, "audio": audio_header}


class Measures(Protocol):
    """The part of a model's encoders that computes the tokens of media."""

    kinds: frozenset[str]  # that the model reads
    forbidden: tuple[int, ...]  # token ids that may not be in a context, except in the tokens of a media

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
        """Adds the model's tokens to the media. `seconds` are the times of the chosen frames.  Raises: DataError."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits for reading media: the folder of relative paths, sizes in pixels, frames of a video."""

    image_dir: str | None = None
    beside: str | None = None  # folder of the data file: a relative path is tried there, then in the working folder
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float = 2.0
    max_frames: int = 16
    limit_images: int | None = None  # images and videos of one prompt
    allow_urls: bool = False

    @classmethod
    def of(cls, data: Any, beside: str | None = None) -> MediaLimits:
        """Reads the limits from a data section of the config."""
        names = ("image_dir", "min_pixels", "max_pixels", "video_fps", "max_frames", "limit_images")
        return cls(beside=beside, **{name: data[name] for name in names}, allow_urls=data.allow_media_urls)

    def frames(self, seconds: Sequence[float]) -> tuple[int, ...]:
        """Returns the numbers of the frames to read: `video_fps` per second, evenly spaced, at most `max_frames`."""
        total = len(seconds)
        step = (seconds[-1] - seconds[0]) / (total - 1) if total > 1 else 0.0
        count = max(1, min(total, self.max_frames, round(step * total * self.video_fps)))
        return tuple(number * total // count for number in range(count))

    def named(self, kind: Kind) -> bytes:
        """Returns the limits that change decoded pixels, as bytes, which become a part of the digest."""
        own = (self.video_fps, self.max_frames) if kind == "video" else ()
        return repr((kind, self.min_pixels, self.max_pixels, *own)).encode()


class MediaReader:
    """Reads media for one model, within limits. Several threads may use it."""

    def __init__(self, limits: MediaLimits, encoders: Measures | None, folder: Path | None = None) -> None:
        """`folder` stores media that are not files, in files named by digest; None: their bytes stay in memory."""
        self.limits, self.encoders, self.folder = limits, encoders, folder

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of media that messages may contain."""
        own = frozenset[str]() if self.encoders is None else self.encoders.kinds
        return tuple(kind for kind in KINDS if kind in TAGGED | own)

    def read(self, kind: Kind, value: Any) -> Media:
        """Finds, checks, identifies and measures an image, video or audio, of which only the header is decoded.

        `value`: a path, the bytes of a file, a data: URI, {"bytes": , "path": }, a PIL image, an array, a Media; of a
        video also a list of frames; an http(s) URL where data.allow_media_urls is set; {"image": , "video": or "audio":
        any of these}, with limits of its own (`OWN_LIMITS`).  Raises: DataError."""
        if self.encoders is None or kind not in self.encoders.kinds:
            reads = "text" if self.encoders is None else f"text and {' and '.join(sorted(self.encoders.kinds))}s"
            raise DataError(kind, f"the model reads {reads} alone", "", "exclude such rows (data.filter)")
        try:
            content, own = unwrapped(value)
            return self._for(own)._read(kind, content)
        except DataError as error:
            raise error.at(f"{kind} {_name(value)}") from error

    def _for(self, own: Mapping[str, Any]) -> MediaReader:
        """Returns a reader with the limits that an object sets for itself.  Raises: DataError."""
        given = {name: number for name, number in own.items() if number is not None}
        for name, number in given.items():
            if name in UNREAD:
                raise DataError(name, number, f"one of {', '.join(OWN_LIMITS)}", "remove it: whet ignores it")
            if not (is_number(number) and number > 0):
                raise DataError(name, number, "a number above 0")
        if not given:
            return self
        values = {OWN_LIMITS[name]: float(each) if name == "fps" else int(each) for name, each in given.items()}
        limits = replace(self.limits, **values)  # type: ignore[arg-type]
        if (low := limits.min_pixels) is not None and (high := limits.max_pixels) is not None and low > high:
            if {"min_pixels", "max_pixels"} <= given.keys():
                raise DataError("min_pixels", low, f"at most max_pixels={high}", "lower it, or raise max_pixels")
            both = high if "max_pixels" in given else low
            limits = replace(limits, min_pixels=both, max_pixels=both)
        return MediaReader(limits, self.encoders, self.folder)

    def _read(self, kind: Kind, value: Any) -> Media:
        source = self._source(kind, value)
        if kind == "video":
            return self._video(source)
        if isinstance(source, tuple):
            raise DataError("type", "list", f"one {kind}")
        header = _header(kind, source)
        digest = self._digest(kind, source)
        media = Media(kind, digest, self._stored(digest, source, header.suffix))
        return self._measured(media, header, header.seconds)

    def _video(self, source: Encoded | tuple[Encoded, ...]) -> Media:
        if not isinstance(source, tuple):
            with opened(source) as file:
                header = video_header(file)
            digest = self._digest("video", source)
            frames = self.limits.frames(header.seconds)
            media = Media("video", digest, self._stored(digest, source, header.suffix), frames)
        else:
            headers = [_header("image", frame) for frame in source]
            if not headers:
                raise DataError("number of frames", 0, "at least one")
            if len(sizes := {(each.height, each.width) for each in headers}) > 1:
                raise DataError("frames", f"they have {len(sizes)} sizes, as {sorted(sizes)[:2]}", "one size")
            header = replace(headers[0], seconds=tuple(at / self.limits.video_fps for at in range(len(source))))
            frames = self.limits.frames(header.seconds)
            digests = [self._digest("image", frame) for frame in source]
            digest = hashlib.sha256(self.limits.named("video") + "".join(digests).encode()).hexdigest()
            stored = tuple(self._stored(digests[at], source[at], headers[at].suffix) for at in frames)
            media = Media("video", digest, stored, frames)
        return self._measured(media, header, [header.seconds[number] for number in frames])

    def _measured(self, media: Media, header: MediaHeader, seconds: Sequence[float]) -> Media:
        assert self.encoders is not None
        low, high = self.limits.min_pixels, self.limits.max_pixels
        found = self.encoders.measured(media, header.height, header.width, seconds, min_pixels=low, max_pixels=high)
        if found.tokens is not None and found.tokens.count > MAX_TOKENS:
            is_enlarged = low is not None and header.height * header.width < low
            limit = f"min_pixels={low} (data.min_pixels)" if is_enlarged else f"max_pixels={high} (data.max_pixels)"
            frames = " or data.max_frames" if media.kind == "video" else ""
            change = f"lower {limit}{frames}"
            raise DataError("number of tokens", found.tokens.count, f"at most {MAX_TOKENS:,}", change)
        return found

    def _source(self, kind: Kind, value: Any) -> Encoded | tuple[Encoded, ...]:
        """Finds the path or bytes of a value, or of each of its frames.  Raises: DataError."""
        if isinstance(value, Media):
            if value.kind != kind:
                raise DataError("kind", value.kind, kind)
            value = value.source
        value, own = unwrapped(value)
        if own:
            raise DataError(next(iter(own)), "is set for a frame", "", "set the limit for the whole video")
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, str | Path):
            return self._named(str(value))
        if isinstance(value, Image.Image):
            return png(value)
        if kind == "image" and isinstance(value, np.ndarray):
            return png(from_array(value))
        if kind == "video" and isinstance(value, list | tuple | np.ndarray):
            return tuple(cast(Encoded, self._source("image", frame)) for frame in value)
        raise DataError("type", type(value).__name__, "a path, bytes or a PIL image")

    def _named(self, text: str) -> Encoded:
        """Finds the path or bytes that a text names: a path, data: URI or URL.  Raises: DataError."""
        scheme = text[:8].lower()
        if scheme.startswith("data:"):
            return _of_uri(text)
        if scheme.startswith(("http://", "https://")):
            if not self.limits.allow_urls:
                change = "download it, or set data.allow_media_urls=true"
                raise DataError("", "it is a URL, which is not fetched", "", change)
            return _fetched(text)
        path = Path(unquote(urlparse(text).path) if scheme.startswith("file://") else text).expanduser()
        folders = [self.limits.image_dir] if self.limits.image_dir is not None else [self.limits.beside or ".", "."]
        places = [Path(folder).expanduser() / path for folder in folders]
        try:
            place = next((each for each in places if each.is_file()), places[0])
            is_file, is_folder = place.is_file(), place.is_dir()
        except OSError as error:
            raise DataError("path", f"{error.strerror}", "a path, bytes or a data: URI") from error
        if not is_file:
            state = "is a folder" if is_folder else "does not exist"
            raise DataError(str(place)[:300], state, "a file", "correct the path, or set data.image_dir to its folder")
        return str(place.absolute())

    def _digest(self, kind: Kind, source: Encoded) -> str:
        found = hashlib.sha256(self.limits.named(kind))
        with opened(source) as file:
            return hashlib.file_digest(file, lambda: found).hexdigest()  # type: ignore[arg-type, return-value]

    def _stored(self, digest: str, source: Encoded, suffix: str) -> Encoded:
        """Stores bytes in the folder, if there is one.  Returns their path, else `source`.  Raises: StorageError."""
        if self.folder is None or isinstance(source, str):
            return source
        path = self.folder.absolute() / f"{digest}{suffix}"
        try:
            with _writing:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.is_file():
                    files.write(path, source)
        except OSError as error:
            found = f"cannot be written: {error.strerror}"
            raise StorageError(str(path), found, "", "free space, or move the run") from error
        return str(path)


def unwrapped(value: Any) -> tuple[Any, dict[str, Any]]:
    """Splits an object {"image": , "max_pixels": } into its content and its limits.  Raises: DataError."""
    limits: dict[str, Any] = {}
    while isinstance(value, Mapping):
        limits = {name: value[name] for name in (*OWN_LIMITS, *UNREAD) if value.get(name) is not None} | limits
        found = [value[name] for name in CONTENT if value.get(name) is not None]
        if not found:
            raise DataError("object", f"it has {', '.join(map(str, value)) or 'nothing'}", "bytes or path")
        value = found[0]
    return value, limits


def image(value: Any) -> Media:
    """Makes an image for an observation from a path, encoded bytes, a PIL image or an array; not measured yet.

    Raises: DataError."""
    return _unmeasured("image", value)


def video(value: Any) -> Media:
    """Makes a video for an observation from a path, encoded bytes or frames; not measured yet.  Raises: DataError."""
    return _unmeasured("video", value)


def _unmeasured(kind: Kind, value: Any) -> Media:
    reader = MediaReader(MediaLimits(), None)
    source = reader._source(kind, value)
    own = as_list(source)
    digests = "".join(reader._digest(kind, each) for each in own)
    return Media(kind, digests if len(own) == 1 else hashlib.sha256(digests.encode()).hexdigest(), source)


def has_pixels(media: Media) -> bool:
    """Tells whether `images` can decode the media, measured or not."""
    return media.kind == "image" or isinstance(media.source, tuple)


def images(media: Media) -> list[Image.Image]:
    """Decodes a media to RGB: one image, or the chosen frames of a video.  Raises: DataError."""
    try:
        if has_pixels(media):
            return [_decoded(each) for each in media.sources]
        with opened(media.source) as file:
            return video_pixels(file, media.frames)
    except DataError as error:
        place = f"{media.kind} {_name(media.source)} (digest {media.digest[:12]})"
        raise error.at(place).at(media.origin) from error


def _header(kind: Kind, source: Encoded) -> MediaHeader:
    with opened(source) as file:
        return HEADERS[kind](file)


def _decoded(source: Encoded) -> Image.Image:
    with opened(source) as file:
        return image_pixels(file)


def _of_uri(text: str) -> bytes:
    head, comma, content = text.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        return base64.b64decode(content, validate=True) if head.endswith(";base64") else unquote_to_bytes(content)
    except (ValueError, binascii.Error) as error:
        raise DataError("data: URI", f"cannot be decoded ({error})", "", "correct it") from error


def _fetched(url: str) -> bytes:
    """Downloads the file at `url`, within limits of time and size.  Raises: DataError."""
    from whet.http import CallError, fetch

    try:
        return fetch("GET", url, bytes, seconds=URL_SECONDS, attempts=URL_ATTEMPTS, most=URL_BYTES, follow=True)
    except CallError as error:
        raise DataError("", f"it cannot be fetched ({error})", "", "download it once, and name the file") from error


def _name(value: Any) -> str:
    """Returns a short name of a media value (path, URL or type), for errors."""
    if isinstance(value, Mapping):
        found = [value[key] for key in ("path", "url", *CONTENT) if value.get(key) is not None]
        return _name(found[0]) if found else "(an object)"
    if isinstance(value, Media):
        return _name(value.source)
    if isinstance(value, str | Path):
        text = str(value)
        if text[:4].lower() == "http":
            from whet.http import shown

            text = shown(text)
        return text if len(text) <= 200 else f"{text[:60]}..."
    size = f" of {len(value):,} bytes" if isinstance(value, bytes | bytearray) else ""
    return f"({type(value).__name__}{size})"
