# SPDX-License-Identifier: Apache-2.0
"""The steps of the Dockerfile, read and carried out without a daemon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import dockerfile_in_root
from tests.dockerfile_in_root import (
    ROOT,
    Image,
    StepError,
    carry_out,
    missing,
    mounted_below,
    parse,
    pip_of_this_machine,
)

SCRIPT = ROOT / "tests" / "dockerfile_in_root.py"


@pytest.fixture
def image(tmp_path: Path) -> Image:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nwhet:x:1000:1001::/home/whet:/bin/sh\n")
    return Image(tmp_path, {"UID": "1000"})


def step(image: Image, kind: str, text: str) -> None:
    carry_out(image, kind, text, dockerfile_in_root.MIRROR)


def test_the_instructions_of_the_dockerfile() -> None:
    text = "# a\nFROM python:3.11-slim-bookworm\nRUN a \\\n    # b\n    && b\n\ncopy x ./\n"
    assert parse(text) == [("FROM", "python:3.11-slim-bookworm"), ("RUN", "a && b"), ("COPY", "x ./")]
    kinds = [kind for kind, _ in parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))]
    assert kinds[:2] == ["FROM", "RUN"] and kinds[-4:] == ["USER", "WORKDIR", "ENTRYPOINT", "CMD"]


def test_what_an_image_has_beside_its_files(image: Image) -> None:
    text = 'ARG UID=7\nARG X=1\nENV A=${X}b C="d e"\nUSER ${UID}\nENTRYPOINT ["whet"]\nCMD ["--help"]'
    for each in parse(text):
        step(image, *each)
    assert image.arguments == {"UID": "1000", "X": "1"}
    assert (image.environment["A"], image.environment["C"]) == ("1b", "d e")
    assert image.account() == ("whet", "1000", "1001", "/home/whet")
    assert image.entrypoint + image.command == ["whet", "--help"]
    image.has_index = True
    step(image, "ARG", "PIP_EXTRA_INDEX_URL=https://x")
    assert "PIP_EXTRA_INDEX_URL" not in image.arguments


def test_files_are_copied_below_the_working_folder(image: Image) -> None:
    for text in ("/opt/whet", "below"):
        step(image, "WORKDIR", text)
    step(image, "COPY", "LICENSE README.md ./")
    step(image, "COPY", "whet/config whet")
    place = image.root / "opt/whet/below"
    assert (place / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (place / "whet/compose.py").read_bytes() == (ROOT / "whet/config/compose.py").read_bytes()
    assert not list(place.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("FROM", "alpine:3", "only python:VERSION-slim-SUITE can be made by debootstrap"),
        ("VOLUME", "/x", "this instruction is not known here; add it to dockerfile_in_root.py"),
        ("COPY", "--chown=1 a b", "options of COPY are not known here; give the owner with chown in a RUN"),
    ],
)
def test_what_cannot_be_carried_out_is_told(kind: str, text: str, told: str, image: Image) -> None:
    with pytest.raises(StepError, match=re.escape(told)):
        step(image, kind, text)


def test_a_user_that_is_not_there_is_told(image: Image) -> None:
    step(image, "USER", "nobody")
    with pytest.raises(StepError, match="USER nobody: the image has no such user; make it with useradd before"):
        image.run(["true"], is_build=False)


def test_pip_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pem").touch()
    conf = tmp_path / "pip.conf"
    conf.write_text(f"[global]\ncert = {tmp_path}/pem\n")
    monkeypatch.setattr(dockerfile_in_root, "PIP_FILES", (conf, tmp_path / "none"))
    assert pip_of_this_machine() == ({}, [conf, tmp_path / "pem"], [], False)
    links = f"{tmp_path} https://a/tmp"
    monkeypatch.setenv("PIP_FIND_LINKS", links)
    assert pip_of_this_machine() == ({"PIP_FIND_LINKS": links}, [conf, tmp_path / "pem"], [tmp_path], True)


def test_it_is_refused_without_root_and_without_debootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert (missing() or "").startswith("this needs root, for debootstrap and mounts; run it with sudo")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert (missing() or "").startswith(
        "debootstrap, unshare, mount, pivot_root, setpriv not found; install debootstrap"
    )


def test_mounts_below_a_root_are_seen() -> None:
    mounts = "proc /r/a/proc proc rw 0 0\nx /r/ab tmpfs rw 0 0\ny /r/a/b c rw 0 0\nz / ext4 rw 0 0\n"
    assert mounted_below(Path("/r/a"), mounts) == ["/r/a/proc", "/r/a/b"]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_dockerfile_gives_an_image_that_learns(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(lacking)
    command = [sys.executable, SCRIPT, "--host-pip", "--seconds=900"]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=2300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    told = dict(re.findall(r"^== as 1000: (whet .*)\n((?:(?!^-- ).*\n)*)", done.stdout, re.MULTILINE))
    assert list(told) == ["whet --help", "whet --version", "whet doctor", "whet quickstart"]
    assert re.search(r"\d+\.\d+\.\d+", told["whet --version"])
    assert re.search(r"ok +C\+\+ compiler +/usr/bin/g\+\+", told["whet doctor"])
    assert "runs/quickstart" in told["whet quickstart"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_fails_and_one_that_is_stopped_leave_nothing(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(lacking)
    file, folder = tmp_path / "Dockerfile", tmp_path / "roots"
    file.write_text("FROM python:3.11-slim-bookworm\n")
    folder.mkdir()
    variables = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, str(SCRIPT), str(file)]
    failed = subprocess.run(
        [*command, "--mirror=http://127.0.0.1:9/debian"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert failed.returncode == 1 and "step 1 of 1: FROM python:3.11-slim-bookworm: exit status" in failed.stderr
    assert not list(folder.iterdir())
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stopped:
        deadline = time.monotonic() + 60
        while not list(folder.glob("*/debootstrap/*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(60) == 143
    assert not list(folder.iterdir())
    assert str(folder) not in Path("/proc/mounts").read_text(encoding="utf-8")
