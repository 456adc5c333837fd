# SPDX-License-Identifier: Apache-2.0
import base64
import hashlib
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from tests.by_hand import ByHand
from tests.data.seeing import PatchVision, encoded, picture
from tests.raising import check_fields, raises
from whet.data import media
from whet.data.media import MediaLimits, MediaReader, images
from whet.errors import DataError
from whet.types import Media

RED = (200, 30, 30)


@pytest.fixture
def vision(sighted: PreTrainedTokenizerBase) -> PatchVision:
    return sighted.encoders  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def reader(vision: PatchVision) -> MediaReader:
    return MediaReader(MediaLimits(), vision)


def test_every_form_of_an_image_is_the_same_picture(
    reader: MediaReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = encoded(picture())
    Path("a b.png").write_bytes(content)
    forms: list[Any] = [
        "a b.png",
        tmp_path / "a b.png",
        f"file://{tmp_path}/a%20b.png",
        content,
        memoryview(content),
        f"data:image/png;base64,{base64.b64encode(content).decode()}",
        {"bytes": content, "path": "elsewhere.png"},
        {"bytes": None, "path": "a b.png"},
        media.image(content),
    ]
    read = [reader.read("image", form) for form in forms]
    digest = hashlib.sha256(b"('image', None, None)" + content).hexdigest()
    assert {each.digest for each in read} == {digest}
    assert {type(each.source) for each in read[:3]} == {str}
    assert [each.source for each in read[3:7]] == [content] * 4
    for each in [*read, reader.read("image", picture()), reader.read("image", np.full((28, 56, 3), RED, np.uint8))]:
        assert each.tokens is not None and each.tokens.grids == ((1, 1, 2),)
        [shown] = images(each)
        assert (shown.mode, shown.size, shown.getcolors()) == ("RGB", (56, 28), [(56 * 28, RED)])


def test_limits_are_part_of_the_identity(vision: PatchVision) -> None:
    content = encoded(picture(112, 112))
    whole, small = (MediaReader(MediaLimits(max_pixels=most), vision).read("image", content) for most in (None, 3136))
    assert whole.tokens is not None and small.tokens is not None
    assert (whole.tokens.count, small.tokens.count, small.tokens.size) == (16, 4, (56, 56))
    assert whole.digest != small.digest and whole != small
    frames = MediaReader(MediaLimits(max_frames=3), vision).read("image", content)
    assert frames == whole  # frames are of videos


def test_bytes_are_stored_once_under_their_digest(vision: PatchVision, tmp_path: Path) -> None:
    reader = MediaReader(MediaLimits(), vision, tmp_path / "run" / "media")
    read = [reader.read("image", encoded(picture())) for _ in range(2)] + [
        reader.read("image", picture(mode="L", colour=7))
    ]
    reader.read("image", encoded(picture(), "JPEG"))
    names = sorted(path.name for path in (tmp_path / "run" / "media").iterdir())
    assert len(names) == 3 and f"{read[0].digest}.png" in names and sum(name.endswith(".jpg") for name in names) == 1
    assert read[0].source == read[1].source == str(tmp_path / "run" / "media" / f"{read[0].digest}.png")
    assert images(read[2])[0].getpixel((0, 0)) == (7, 7, 7)
    Path(tmp_path / "own.png").write_bytes(encoded(picture()))
    assert reader.read("image", tmp_path / "own.png").source == str(tmp_path / "own.png")  # a file stays in its place


def test_relative_paths_are_below_image_dir_then_beside_the_data_then_here(
    vision: PatchVision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("set", "data", "here"):
        (tmp_path / folder).mkdir()
    for folder, name in (("set", "a"), ("data", "a"), ("here", "a"), ("data", "b"), ("here", "b"), ("here", "c")):
        (tmp_path / folder / f"{name}.png").write_bytes(encoded(picture()))
    monkeypatch.chdir(tmp_path / "here")
    beside = MediaReader(MediaLimits(beside=str(tmp_path / "data")), vision)
    found = [Path(str(beside.read("image", f"{name}.png").source)).parent.name for name in "abc"]
    assert found == ["data", "data", "here"]
    given = MediaReader(MediaLimits(image_dir=str(tmp_path / "set"), beside=str(tmp_path / "data")), vision)
    assert given.read("image", "a.png").source == str(tmp_path / "set" / "a.png")
    with raises(DataError, key=f"image b.png: {tmp_path}/set/b.png", change=re.compile("data.image_dir")):
        given.read("image", "b.png")
    with raises(DataError, key=f"image {tmp_path}/set: {tmp_path}/set"):
        given.read("image", tmp_path / "set")


@pytest.mark.parametrize(
    ("value", "key", "fields"),
    [
        ("https://example.com/a.png", "image https://example.com/a.png",
         {"change": re.compile("data.allow_media_urls=true")}),
        ("data:image/png;base64,@@", ": data: URI", {}),
        ("data:image/png", ": data: URI", {"found": re.compile("comma")}),
        (b"no image", r"\(bytes of 8 bytes\): format", {"expected": re.compile("PNG, JPEG")}),
        (b"", "number of bytes", {"found": 0}),
        ({"name": "a"}, r"image \(an object\): object", {"found": re.compile("name")}),
        ({}, ": object", {}),
        (7, ": type", {"found": "int"}),
        (["a.png"], ": type", {"found": "list"}),
        (np.zeros((4, 4, 7), np.uint8), ": array", {"found": "[4, 4, 7] of uint8"}),
        (np.zeros((4, 4), np.int64), ": array", {"found": "[4, 4] of int64"}),
        (media.video([picture()]), ": kind", {"found": "video", "expected": "image"}),
        ("x" * 100_000, r"^image x{60}\.\.\.: path", {"found": "File name too long"}),
    ],
)  # fmt: skip
def test_values_that_are_no_image_are_named(
    reader: MediaReader, value: Any, key: str, fields: dict[str, object]
) -> None:
    with pytest.raises(DataError) as error:
        reader.read("image", value)
    check_fields(error.value, re.compile(f"{key}$"), **fields)
    assert len(str(error.value)) < 1000


def test_a_model_is_not_given_what_it_does_not_read(vision: PatchVision) -> None:
    with raises(DataError, key="image", change=re.compile("data.filter")):
        MediaReader(MediaLimits(), None).read("image", picture())
    vision.kinds = frozenset({"image"})
    with raises(DataError, key="video", found=re.compile("text and images ")):
        MediaReader(MediaLimits(), vision).read("video", [picture()])


def test_frames_are_spread_evenly() -> None:
    limits = MediaLimits(video_fps=2.0, max_frames=4)
    seconds = [number / 10 for number in range(15)]  # 1.5 s
    assert limits.frames(seconds) == (0, 5, 10)
    assert limits.frames([number / 10 for number in range(100)]) == (0, 25, 50, 75)
    assert limits.frames([number / 1 for number in range(3)]) == (0, 1, 2)  # never twice the same
    assert limits.frames([0.0]) == (0,)


def test_an_animation_is_a_video_with_the_times_of_its_frames(reader: MediaReader, vision: PatchVision) -> None:
    frames = [picture(colour=(40 * number, 0, 0)) for number in range(6)]
    for form, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        content = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=250, **options)
        read = reader.read("video", content)
        assert read.frames == (0, 2, 4) and read.tokens is not None and read.tokens.grids == ((2, 1, 2),)
        assert vision.seconds[-1] == (0.0, 0.5, 1.0)
        assert [round(shown.getpixel((3, 3))[0] / 40) for shown in images(read)] == [0, 2, 4]  # type: ignore[index]
        with raises(DataError, re.compile("number of frames$"), found=6, change=re.compile("`videos`.*<video>")):
            reader.read("image", content)


def test_a_list_of_frames_is_a_video_at_video_fps(vision: PatchVision, tmp_path: Path) -> None:
    reader = MediaReader(MediaLimits(max_frames=2), vision, tmp_path)
    frames = [encoded(picture(colour=(number, 0, 0))) for number in range(5)]
    read = reader.read("video", frames)
    assert read.frames == (0, 2) and vision.seconds[-1] == (0.0, 1.0)
    assert [shown.getpixel((0, 0)) for shown in images(read)] == [(0, 0, 0), (2, 0, 0)]
    assert len(list(tmp_path.iterdir())) == 2
    assert reader.read("video", np.stack([np.asarray(picture())] * 2)).frames == (0, 1)
    assert reader.read("video", media.video(frames)) == read
    assert reader.read("video", frames[:4]).digest != read.digest
    with raises(DataError, key="video (list): number of frames", found=0):
        reader.read("video", [])
    with raises(DataError, key="video (list): frames", found=re.compile("2 sizes")):
        reader.read("video", [picture(), picture(28)])


def test_a_file_that_is_damaged_later_is_named_when_it_is_decoded(reader: MediaReader, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture()))
    read = reader.read("image", path)
    path.write_bytes(path.read_bytes()[:60])
    with raises(DataError, key=f"image {path} (digest {read.digest[:12]}): content"):
        images(read)
    path.unlink()
    with raises(DataError, re.compile("file$"), found=re.compile(r"\(No such file or directory\)")):
        images(read)


def test_media_for_observations_carry_their_bytes() -> None:
    made = media.image(picture())
    assert (made.kind, made.tokens, type(made.source)) == ("image", None, bytes)
    assert made == media.image(picture()) and made != media.image(picture(28))
    assert images(made)[0].size == (56, 28)
    with raises(DataError, key="type", found="int"):
        media.image(7)
    assert isinstance(media.video([picture(), picture()]).source, tuple)


def test_urls_are_fetched_only_within_limits(vision: PatchVision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Media are fetched within limits; failures on the way are in tests/test_http.py."""
    content, status = encoded(picture()), b"200 OK"

    def answer(connection: socket.socket) -> bool:
        connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))
        return True

    with closing(ByHand(answer)) as server:
        url, reader = f"http://127.0.0.1:{server.port}/a.png", MediaReader(MediaLimits(allow_urls=True), vision)
        assert reader.read("image", f"{url}?key=secret") == reader.read("image", content)
        with monkeypatch.context() as patch, raises(DataError, key=f"image {url}?...", found=re.compile("10 bytes")):
            patch.setattr(media, "URL_BYTES", 10)
            reader.read("image", f"{url}?key=secret")
        status = b"404 Gone"
        with raises(DataError, key=f"image {url}", found=re.compile("404")):
            reader.read("image", {"url": url})


def test_the_types_of_media_are_cheap_to_compare() -> None:
    one = Media("image", "d", b"x" * 10)
    assert one == Media("image", "d", "a path") and hash(one) == hash(Media("image", "d", None))
    assert isinstance(Image.new("L", (1, 1)), Image.Image)
