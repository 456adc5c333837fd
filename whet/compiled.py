# SPDX-License-Identifier: Apache-2.0
"""C++ kernels: compiled once for this machine's instruction set and kept in the user's cache folder.

Each has a twin in plain torch that takes its place where no compiler works.
"""

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
    """`source` compiled, or None (said once in the log) where no C++ compiler works."""
    compiler = _compiler()
    if compiler is None:
        return None
    made_from = source.read_bytes() + " ".join([compiler, *FLAGS, _instruction_set()]).encode()
    path = _cache_folder() / f"{source.stem}_{hashlib.sha256(made_from).hexdigest()[:16]}.so"
    try:
        if not _is_whole(path):
            _compile(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("%s did not compile, plain torch takes its place, which is slower: %s", source.name, said)
        return None


@cache
def _compiler() -> str | None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.warning("no C++ compiler found: attention over the KV cache runs in plain torch, several times slower")
    return compiler


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
        files.write(library, built.read_bytes() + hashlib.sha256(built.read_bytes()).digest())  # loaders stop before it


def _is_whole(library: Path) -> bool:
    """Tells whether the file ends in the checksum of what is before it: running a library that was cut short kills."""
    content = library.read_bytes() if library.exists() else b""
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


def _cache_folder() -> Path:
    base = os.environ.get("WHET_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "whet"


def _instruction_set() -> str:
    """Describes the processor that `-march=native` compiles for: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
