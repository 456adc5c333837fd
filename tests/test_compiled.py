# SPDX-License-Identifier: Apache-2.0
"""A kernel in the cache that is not whole is compiled again; loading it would end the process by a signal."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from whet.compiled import library

Damage = Callable[[bytes], bytes]


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def without_checksum(content: bytes) -> bytes:
    return content[:-32]  # as earlier versions wrote it


@pytest.mark.parametrize("damage", [cut_short, flip, without_checksum, lambda content: b""])
def test_a_damaged_kernel_is_compiled_again(damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "seven.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    load = library.__wrapped__  # without the memory of this process
    first = load(source)
    if first is None:
        pytest.skip("no C++ compiler works here")
    [built] = (tmp_path / "cache" / "whet").iterdir()
    whole = built.read_bytes()
    built.unlink()  # the damaged one is another file than the one that is loaded
    built.write_bytes(damage(whole))
    again = load(source)
    assert isinstance(again, ctypes.CDLL) and again.seven() == 7
    assert built.read_bytes() == whole
    written = built.stat().st_mtime_ns
    load(source)
    assert built.stat().st_mtime_ns == written  # a whole one is left as it is
