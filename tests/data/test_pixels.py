# SPDX-License-Identifier: Apache-2.0
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.seeing import encoded, picture
from tests.raising import raises
from whet.data.pixels import from_array, image_header, image_pixels, rgb, video_header, video_pixels
from whet.errors import DataError


def header(content: bytes) -> tuple[int, int]:
    found = image_header(io.BytesIO(content))
    return found.height, found.width


def shown(content: bytes) -> Any:
    return image_pixels(io.BytesIO(content)).getpixel((0, 0))


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says this size, and whose data are one line of it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("image", "form", "expected"),
    [
        (picture(colour=77, mode="L"), "PNG", (77, 77, 77)),
        (picture(colour=1, mode="1"), "PNG", (255, 255, 255)),
        (picture(colour=(10, 20, 30)).quantize(), "GIF", (10, 20, 30)),
        (picture(colour=(200, 0, 0, 0), mode="RGBA"), "PNG", (255, 255, 255)),  # nothing of it is seen
        (picture(colour=(0, 0, 200, 51), mode="RGBA"), "PNG", (204, 204, 244)),  # a fifth of it on white
        (picture(colour=(0, 128), mode="LA"), "PNG", (127, 127, 127)),
        (picture(colour=(0, 255, 255, 0), mode="CMYK"), "TIFF", (255, 0, 0)),
        (Image.fromarray(np.full((4, 4), 257 * 90, np.uint16)), "PNG", (90, 90, 90)),
        (Image.fromarray(np.full((4, 4), 257 * 90, np.int32)), "TIFF", (90, 90, 90)),
        (Image.fromarray(np.full((4, 4), 0.2, np.float32)), "TIFF", (51, 51, 51)),
    ],
)
def test_every_mode_becomes_rgb(image: Image.Image, form: str, expected: tuple[int, int, int]) -> None:
    content = encoded(image, form)
    assert shown(content) == expected
    assert header(content) == (image.height, image.width)


def test_a_palette_with_a_transparent_colour_is_on_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0, 9, 9, 9])
    assert shown(encoded(image, "PNG", transparency=0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_exif_turns_the_picture(form: str) -> None:
    image, exif = picture(60, 20), Image.Exif()
    image.paste((0, 0, 255), (0, 0, 30, 20))  # blue on the left
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show it
    content = encoded(image, form, exif=exif)
    assert header(content) == (60, 20)
    upright = image_pixels(io.BytesIO(content))
    assert upright.size == (20, 60)
    assert [max(range(3), key=upright.getpixel((10, row)).__getitem__) for row in (5, 55)] == [2, 0]  # type: ignore[union-attr]
    assert header(encoded(image, form)) == (20, 60)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_a_truncated_file_is_found_when_it_is_read(form: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    content = encoded(noise, form)
    assert header(content) == (64, 64)
    for share in (0.5, 0.9):
        with raises(DataError, re.compile("^(content|format)$")):
            header(content[: int(len(content) * share)])


def test_a_picture_of_any_size_is_read_where_that_is_asked_for() -> None:
    size = (9_000, 30_000)  # more than Pillow reads
    content = bomb(*size)
    code = "import io, sys, whet.data.pixels as of; print(of.image_header(io.BytesIO(sys.stdin.buffer.read())))"
    allowed = {**os.environ, "WHET_MAX_IMAGE_PIXELS": str(size[0] * size[1])}
    read = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, env=allowed, check=True)
    assert b"height=30000, width=9000" in read.stdout


def test_a_number_of_pixels_that_is_none_is_named() -> None:
    code = "import whet.errors\ntry: import whet.data.pixels\nexcept whet.errors.ConfigError as e: print(e.args)"
    given = {**os.environ, "WHET_MAX_IMAGE_PIXELS": "abc"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, env=given, check=True)
    assert re.match(rb"\(.WHET_MAX_IMAGE_PIXELS.*, .abc.,", said.stdout)


def test_a_jpeg_with_bytes_behind_its_end_is_whole() -> None:
    content = encoded(picture(), "JPEG")
    assert header(content + bytes(5000)) == (28, 56)


LARGE = {"expected": re.compile("67,108,864"), "change": re.compile("WHET_MAX_IMAGE_PIXELS=NUMBER$")}


@pytest.mark.parametrize(
    ("content", "key", "fields"),
    [
        (bomb(9_000, 9_000), "size", {"found": "9000 x 9000 pixels", **LARGE}),
        (bomb(20_000, 20_000), "size", {"found": "400,000,000 pixels", **LARGE}),
        (bomb(20_000, 1), "size", {"found": "20000 x 1 pixels", "expected": re.compile(" 200 ")}),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "format", {}),  # would run ghostscript
        (b"<svg/>", "format", {}),
    ],
)
def test_dangerous_files_are_refused_by_their_header(content: bytes, key: str, fields: dict[str, object]) -> None:
    with raises(DataError, key, **fields):
        header(content)
    with raises(DataError, key, **fields):
        image_pixels(io.BytesIO(content))


def test_one_pixel_is_an_image() -> None:
    assert header(encoded(picture(1, 1))) == (1, 1) and shown(encoded(picture(1, 1))) == (200, 30, 30)
    assert header(encoded(picture(200, 1))) == (1, 200)


def test_arrays_become_images() -> None:
    assert rgb(from_array(np.full((2, 3), 0.5))).getpixel((0, 0)) == (128, 128, 128)
    assert from_array(np.zeros((2, 3, 1), np.uint8)).size == (3, 2)
    assert from_array(np.full((2, 3, 4), 9, np.uint8)).mode == "RGBA"


def film(
    path: Path,
    num_frames: int = 8,
    rate: int = 4,
    size: tuple[int, int] = (64, 32),
    options: dict[str, str] | None = None,
) -> Path:
    """A film whose frames grow brighter."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", options=options or {}) as out:
        stream = out.add_stream("libvpx" if path.suffix == ".webm" else "mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *size, "yuv420p", 2_000_000
        out.start_encoding()
        for number in range(num_frames):
            frame = av.VideoFrame.from_image(picture(*size, colour=(number * 30,) * 3))
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_films_are_read_by_pyav(tmp_path: Path, name: str) -> None:
    content = film(tmp_path / name).read_bytes()
    found = video_header(io.BytesIO(content))
    assert (found.height, found.width, found.suffix) == (32, 64, Path(name).suffix)
    assert found.seconds == tuple(number / 4 for number in range(8))
    grey = [image.getpixel((9, 9))[0] for image in video_pixels(io.BytesIO(content), (1, 4, 7))]  # type: ignore[index]
    assert [round(value / 30) for value in grey] == [1, 4, 7]


def test_films_without_pictures_are_refused(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "sound.mp4"), "w") as out:
        stream = out.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        out.mux(stream.encode(frame))
        out.mux(stream.encode())
    whole = film(tmp_path / "a.avi").read_bytes()
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    for content, key in [
        ((tmp_path / "sound.mp4").read_bytes(), "video stream"),
        (b"not a film", "content"),
        (b"", "content"),
        (playlist, "content"),
        (whole[:1500], re.compile("content|number of")),
    ]:
        with raises(DataError, key):
            video_header(io.BytesIO(content))
    with raises(DataError, key="decoded frames", found=1, expected=re.compile("^2")):
        video_pixels(io.BytesIO(whole), (2, 200))


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.mp4", {"movflags": "faststart"}), ("a.mkv", {}), ("a.webm", {}), ("a.avi", {}), ("a.gif", {})],
)
def test_half_a_film_is_refused(tmp_path: Path, name: str, options: dict[str, str]) -> None:
    if name == "a.gif":
        frames = [Image.fromarray(np.random.default_rng(at).integers(0, 256, (32, 64, 3), np.uint8)) for at in range(8)]
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    else:
        film(tmp_path / name, options=options)
    content = (tmp_path / name).read_bytes()
    for whole in (content, content + bytes(100) if name != "a.gif" else content):  # as some programs pad them
        assert len(video_header(io.BytesIO(whole)).seconds) == 8
    for share in (0.6, 0.9, 0.99):
        part = content[: int(len(content) * share)]
        with raises(DataError, "content") if name == "a.gif" else raises(DataError, "number of bytes", found=len(part)):
            video_header(io.BytesIO(part))


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_a_film_without_frames_says_so(tmp_path: Path, name: str) -> None:
    content = film(tmp_path / name, num_frames=0).read_bytes()
    with raises(DataError, key="number of frames", found=0):
        video_header(io.BytesIO(content))


def test_a_film_of_unknown_length_is_read(tmp_path: Path) -> None:
    content = film(tmp_path / "a.mkv", options={"live": "1"}).read_bytes()  # written to a pipe, as browsers do
    assert len(video_header(io.BytesIO(content)).seconds) == 8
