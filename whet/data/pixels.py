# SPDX-License-Identifier: Apache-2.0
"""Decodes untrusted images and videos: sizes and times from the header, pixels as RGB."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from whet.errors import ConfigError, DataError, pip_install

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")  # none that runs a program
ANIMATIONS = ("GIF", "WEBP", "PNG", "AVIF")
_given = os.environ.get("WHET_MAX_IMAGE_PIXELS", "")
if _given and not (_given.isdecimal() and int(_given)):
    raise ConfigError("WHET_MAX_IMAGE_PIXELS in the environment", _given, "a number above 0, or none")
MAX_PIXELS = int(_given or 2**26)  # of one frame; 2**26 are 192 MiB as RGB
Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, MAX_PIXELS)  # Pillow itself refuses twice this number
SMALLER = "save it smaller, or allow it with the environment variable WHET_MAX_IMAGE_PIXELS=NUMBER"
MAX_ASPECT = 200  # as Qwen's processors
# No playlist, which would name other files and servers.
CONTAINERS = "mov,mp4,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,ogg,asf,m4v,h264,hevc,ivf"
ORIENTATION = 0x0112  # the EXIF tag
BOXES = frozenset(b"ftyp styp mdat moov moof free skip wide uuid sidx mfra meta pdin".split())  # of MP4
FRAME_SECONDS = 0.1  # the default of browsers, for an animation without durations
REPLACE = "replace it, or drop the row"


@dataclass(frozen=True)
class MediaHeader:
    """The displayed size of a picture; for a video the time, in seconds, at which each frame begins."""

    height: int
    width: int
    suffix: str  # of its file
    seconds: tuple[float, ...] = ()  # none for an image


@contextmanager
def opened(source: str | bytes) -> Iterator[IO[bytes]]:
    """Opens a path, or encoded bytes.  Raises: DataError."""
    try:
        file: IO[bytes] = io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError("file", f"cannot be opened ({reason})", "", "correct the path") from error
    with file:
        if not file.read(1):
            raise DataError("number of bytes", 0, "at least one", REPLACE)
        file.seek(0)
        yield file


def image_header(file: IO[bytes]) -> MediaHeader:
    """Reads the size of an image. Also decodes it, unless the end of the file already shows that the file is complete.

    Raises: DataError for a file that is no image, an animation, truncated, too large or too narrow."""
    with _picture(file, FORMATS) as image:
        if (count := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # its further frames are previews
            change = "use it as a video (field `videos`, tag <video>), or save one frame of it"
            raise DataError("number of frames", count, "one image", change)
        width, height = _checked(*image.size)
        if _is_turned(image, file):
            width, height = height, width
        form = image.format or ""
        if not _is_whole(form, file):
            image.load()
    if form == "PNG":
        with _picture(file, FORMATS) as image:
            image.verify()
    return MediaHeader(height, width, f".{'jpg' if form in ('JPEG', 'MPO') else form.lower()}")


def image_pixels(file: IO[bytes]) -> Image.Image:
    """Decodes an image, upright and in RGB.  Raises: DataError."""
    with _picture(file, FORMATS) as image:
        _checked(*image.size)
        return rgb(image)


def video_header(file: IO[bytes]) -> MediaHeader:
    """Reads size and times of a video. Decodes only its first frame, but all of an animation.  Raises: DataError."""
    if not _is_animation(file):
        return _film_header(file)
    with _picture(file, ANIMATIONS) as image:
        width, height = _checked(*image.size)
        seconds, end = [], 0.0
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            image.load()
            seconds.append(end)
            end += float(image.info.get("duration") or 1e3 * FRAME_SECONDS) / 1e3
        return MediaHeader(height, width, f".{(image.format or '').lower()}", tuple(seconds))


def video_pixels(file: IO[bytes], numbers: Sequence[int]) -> list[Image.Image]:
    """Decodes the frames with these numbers (ascending) to RGB.  Raises: DataError."""
    found: list[Image.Image] = []
    if _is_animation(file):
        with _picture(file, ANIMATIONS) as image:
            _checked(*image.size)
            for number in numbers:
                image.seek(number)
                found.append(rgb(image))
        return found
    with _film(file) as container:
        wanted = {*numbers}
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                found.append(_upright(frame))
            if number == numbers[-1]:
                break
    if len(found) < len(numbers):
        raise DataError("decoded frames", len(found), f"{len(numbers)}: the file is damaged", REPLACE)
    return found


def rgb(image: Image.Image) -> Image.Image:
    """Converts to RGB and upright. Transparent pixels become white, 16-bit and float values are scaled to 8 bits."""
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        image = _grey(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def png(image: Image.Image) -> bytes:
    """Encodes an image as PNG, in RGB."""
    with io.BytesIO() as file:
        rgb(image).save(file, "PNG", compress_level=1)
        return file.getvalue()


def from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    """Makes an image from an array [height, width] or [height, width, 1 to 4 channels]: uint8, or floats from 0 to 1.

    Raises: DataError."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (2, 3, 4))
    if not is_shaped or 0 in array.shape or (array.dtype != np.uint8 and array.dtype.kind != "f"):
        expected = "[height, width] or [height, width, channels] of uint8, or of floats from 0 to 1"
        raise DataError("array", f"{[*array.shape]} of {array.dtype}", expected)
    if array.dtype != np.uint8:
        array = np.rint(np.clip(np.nan_to_num(array), 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


def _grey(image: Image.Image) -> Image.Image:
    """Scales a picture with one channel of more than 8 bits to 8 bits."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    largest = float(values.max(initial=0))
    if image.mode == "F":
        top = 1.0 if largest <= 1 else 255.0
    else:
        top = 255.0 if image.mode == "I" and largest <= 255 else 65535.0
    return Image.fromarray(np.clip(np.rint(values * (255 / top)), 0, 255).astype(np.uint8))


def _checked(width: int, height: int) -> tuple[int, int]:
    """Checks a size before any decoding, and returns it.  Raises: DataError for a size beyond the limits."""
    size = f"{width} x {height} pixels"
    if width < 1 or height < 1:
        raise DataError("size", size, "at least one", "replace it")
    if width * height > MAX_PIXELS:
        raise DataError("size", size, f"at most {MAX_PIXELS:,} in all", SMALLER)
    if max(width, height) > MAX_ASPECT * min(width, height):
        expected = f"no side over {MAX_ASPECT} times the other, which no model reads"
        raise DataError("size", size, expected, "crop or drop it")
    return width, height


def _is_turned(image: Image.Image, file: IO[bytes]) -> bool:
    """Tells whether an image's EXIF data swap height and width."""
    if image.format == "PNG":  # Pillow would decode the whole PNG to look for EXIF data
        place = file.tell()
        file.seek(0)
        content = file.read()
        file.seek(place)
        if b"eXIf" not in content and b"XML:com.adobe.xmp" not in content:
            return False
    return image.getexif().get(ORIENTATION) in (5, 6, 7, 8)


def _is_whole(form: str, file: IO[bytes]) -> bool:
    """Tells whether the end or the length of the file shows that it is complete."""
    place, length = file.tell(), file.seek(0, io.SEEK_END)
    file.seek(max(0, length - 1024))
    end = file.read()
    file.seek(0)
    beginning = file.read(8)
    file.seek(place)
    if form in ("JPEG", "MPO"):
        return b"\xff\xd9" in end
    return form == "PNG" or (form == "WEBP" and int.from_bytes(beginning[4:], "little") + 8 <= length)


def _is_animation(file: IO[bytes]) -> bool:
    """Tells whether the file has a format of animations, which Pillow reads as a video. It may have a single frame."""
    try:
        with _picture(file, ANIMATIONS):
            return True
    except _OtherFormatError:
        return False


class _OtherFormatError(DataError):
    """Raised for a file of no supported format."""


@contextmanager
def _picture(file: IO[bytes], formats: Sequence[str]) -> Iterator[Image.Image]:
    """Opens a file with Pillow.  Raises: DataError, also for errors inside the block."""
    Image.init()
    file.seek(0)
    try:
        yield Image.open(file, formats=tuple(each for each in formats if each in Image.OPEN))
    except DataError:
        raise
    except UnidentifiedImageError as error:
        problem = "it is not supported, or the file is cut off"
        raise _OtherFormatError("format", problem, f"one of {', '.join(formats)}", REPLACE) from error
    except Image.DecompressionBombError as error:
        size = f"{int(found[0]):,}" if (found := re.findall(r"\((\d+) pixels\)", str(error))) else "too many"
        raise DataError("size", f"{size} pixels", f"at most {MAX_PIXELS:,} in all", SMALLER) from error
    except Exception as error:  # Pillow's readers raise whatever a damaged file leads to
        raise _unreadable(error, "video" if formats is ANIMATIONS else "image") from error


def _film_header(file: IO[bytes]) -> MediaHeader:
    with _film(file) as container:
        stream = container.streams.video[0]
        rate, form = float(stream.average_rate or stream.guessed_rate or 25), str(container.format.name)
        count = sum(packet.size > 0 and not packet.is_discard for packet in container.demux(stream))
        if count:
            container.seek(0)
        first = next(iter(container.decode(video=0)), None) if count else None
        if first is None:
            raise DataError("number of frames", 0, "at least one", REPLACE)
        width, height = _checked(*_upright(first).size)
    suffix = {"mov": ".mp4", "matroska": ".mkv"}.get(form.split(",")[0], f".{form.split(',')[0]}")
    return MediaHeader(height, width, suffix, tuple(number / rate for number in range(count)))


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


@contextmanager
def _film(file: IO[bytes]) -> Iterator[Any]:
    """Opens a video with PyAV.  Raises: DataError."""
    try:
        import av
    except ImportError as error:
        found = "it is not GIF, WebP or APNG, and other videos need PyAV"
        raise DataError("format", found, "", f"install it: {pip_install('video')}") from error
    announced, length = _announced_bytes(file), file.seek(0, io.SEEK_END)
    if announced > length:
        expected = f"the {announced:,} that its header announces: it is cut off"
        raise DataError("number of bytes", length, expected, REPLACE)
    file.seek(0)
    try:
        with av.open(file, options={"format_whitelist": CONTAINERS}) as container:
            if not container.streams:
                raise DataError("number of frames", 0, "at least one", REPLACE)
            if not container.streams.video:
                raise DataError("video stream", "there is none, only sound or text", "", REPLACE)
            video = container.streams.video[0].codec_context
            if video.width and video.height:
                _checked(video.width, video.height)
            yield container
    except DataError:
        raise
    except EOFError as error:  # there is nothing after the header
        raise DataError("number of frames", 0, "at least one", REPLACE) from error
    except Exception as error:  # FFmpeg's readers raise whatever a damaged file leads to
        raise _unreadable(error, "video") from error


def _announced_bytes(file: IO[bytes]) -> int:
    """Returns the file length that the headers of an MP4, AVI or Matroska file announce; 0 if they announce none."""
    file.seek(0)
    start = file.read(64)
    if start[:4] == b"RIFF":
        return int.from_bytes(start[4:8], "little") % 0xFFFFFFFF + 8
    if start[:4] == b"\x1aE\xdf\xa3":  # EBML, whose sizes begin with as many zeros as bytes follow
        place, size = _ebml_size(start, 4)
        place, size = _ebml_size(start, place + size + 4)  # of the segment
        return place + size
    place = file.seek(0)
    while (box := file.read(16))[4:8] in BOXES:
        size = int.from_bytes(box[:4], "big")
        size = int.from_bytes(box[8:], "big") if size == 1 else size
        if size < 8:  # 0: up to the end
            break
        place += size
        file.seek(place)
    return place


def _ebml_size(content: bytes, place: int) -> tuple[int, int]:
    """Reads an EBML size. Returns the index after it, and the size; 0 if unknown, as in a file written to a pipe."""
    first = content[place] if place < len(content) else 0xFF
    length = 9 - first.bit_length()
    bits = 7 * length
    size = int.from_bytes(content[place : place + length], "big") & ((1 << bits) - 1)
    return place + length, 0 if size == (1 << bits) - 1 else size


def _unreadable(error: Exception, kind: str = "image") -> DataError:
    found, article = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__, "n" * (kind == "image")
    return DataError("content", f"cannot be read as a{article} {kind}: {found}", "", REPLACE)
