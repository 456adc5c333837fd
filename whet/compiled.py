# SPDX-License-Identifier: Apache-2.0
"""C++ kernels, which are compiled once for the instruction set of this machine, and cached in the user's cache folder.

Each kernel has an equivalent in plain torch, which is used without a working compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from whet import files

log = logging.getLogger(__name__)
# No -ffast-math: it would switch the whole process to flush-to-zero when the library is loaded.
FLAGS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-fno-math-errno", "-fno-trapping-math"]
COMPILE_DEADLINE_SECONDS = 120
CHECKSUM_BYTES = 32


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """Compiles and loads `source`; None, with one warning, without a working C++ compiler."""
    if (found := compiler()) is None:
        log.warning("no C++ compiler found for %s; whet uses plain torch instead, which is slower", source.name)
        return None
    sources = [source, *sorted(source.parent.glob("*.h"))]
    made_from = b"".join(map(Path.read_bytes, sources)) + " ".join([found, *FLAGS, instruction_set()]).encode()
    path = cache_folder() / f"{source.stem}_{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    try:
        if not _is_whole(path):
            _compile(found, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        message = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("%s did not compile; whet uses plain torch instead, which is slower: %s", source.name, message)
        return None


def cache_folder() -> Path:
    """Returns the cache folder of the user, for compiled kernels and other files that whet makes once."""
    folder = os.environ.get("WHET_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "whet"


def compiler() -> str | None:
    """Returns the C++ compiler of this machine; None without one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        subprocess.run(
            [compiler, *FLAGS, str(source), "-o", str(built)],
            check=True,
            capture_output=True,
            timeout=COMPILE_DEADLINE_SECONDS,
        )
        files.write(library, built.read_bytes() + hashlib.sha256(built.read_bytes()).digest())  # loaders ignore the end


def _is_whole(library: Path) -> bool:
    """Tells whether a library file ends with the checksum of its content. A truncated file would crash the process."""
    content = library.read_bytes() if library.exists() else b""
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


def instruction_set() -> str:
    """Returns the processor's features. Cached kernels are named by them, because machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
