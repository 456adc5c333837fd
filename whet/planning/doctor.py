# SPDX-License-Identifier: Apache-2.0
"""What this machine and installation can do, looked at without loading a model."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement

from whet.config.schema import ClusterConfig
from whet.errors import pip_install
from whet.planning.fit import size
from whet.planning.machine import existing, free_disk, free_memory, total_memory
from whet.registry import ENGINES, ROLLOUT_ENGINES
from whet.threads import POLICY, spinning

Status = Literal["ok", "note", "problem"]
OLDEST_PYTHON = (3, 11)
FEW_FILES, SMALL_SHM, LITTLE_DISK, LITTLE_MEMORY = 1024, 64 * 2**20, 2**30, 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    status: Status
    what: str
    found: str
    advice: str = ""


def examine(run_dir: Path) -> dict[str, list[Finding]]:
    """Everything by section."""
    requirements = _requirements()
    return {
        "python": list(_python()),
        "packages": [_package(each) for each in requirements.get("", [])],
        "extras": [
            _extra(name, wanted) for name, wanted in requirements.items() if name and not name.startswith("dev")
        ],
        "engines": list(_engines(requirements)),
        "machine": [*_processor(), *_memory(), *_gpus(), *_limits()],
        "places": list(_places(run_dir)),
    }


def _python() -> Iterator[Finding]:
    folder = Path(__file__).resolve().parents[1]
    try:
        yield Finding("ok", "whet", f"{metadata.version('whet')} in {folder}")
    except metadata.PackageNotFoundError:
        advice = "what it needs cannot be compared with what is there: pip install -e ."
        yield Finding("note", "whet", f"{folder}, not installed", advice)
    version = platform.python_version()
    old = sys.version_info < OLDEST_PYTHON
    yield Finding(
        "problem" if old else "ok",
        "python",
        f"{version} on {platform.platform()} ({sys.executable})",
        "whet needs Python 3.11 or newer" if old else "",
    )
    encoding = locale.getpreferredencoding(False)
    plain = encoding.lower().replace("-", "") != "utf8"
    yield Finding(
        "problem" if plain else "ok",
        "encoding",
        encoding,
        "texts that are not ASCII may fail to be written: set PYTHONUTF8=1" if plain else "",
    )


def _requirements() -> dict[str, list[Requirement]]:
    """What whet asks for, by extra; under "" what it cannot do without."""
    found: dict[str, list[Requirement]] = {"": []}
    try:
        texts = metadata.requires("whet") or []
    except metadata.PackageNotFoundError:
        return found
    for text in texts:
        requirement = Requirement(text)
        extra = text.partition("extra ==")[2].strip().strip("'\")")
        found.setdefault(extra, []).append(requirement)
    return found


def _version(requirement: Requirement) -> str | None:
    try:
        return metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return None


def _package(requirement: Requirement) -> Finding:
    version = _version(requirement)
    if version is None:
        return Finding("problem", requirement.name, "not installed", f"pip install '{_plain(requirement)}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("problem", requirement.name, version, f"whet needs {_plain(requirement)}: install that")
    return Finding("ok", requirement.name, version)


def _extra(name: str, wanted: list[Requirement]) -> Finding:
    versions = {_plain(each): _version(each) for each in wanted}
    absent = [requirement for requirement, version in versions.items() if version is None]
    if absent:
        return Finding("note", name, "not installed", f"{pip_install(name)} if you want it")
    wrong = [each for each in wanted if not each.specifier.contains(versions[_plain(each)] or "", prereleases=True)]
    shown = ", ".join(f"{each.name} {versions[_plain(each)]}" for each in wanted)
    return Finding("note" if wrong else "ok", name, shown, f"whet knows {_plain(wrong[0])}" if wrong else "")


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _engines(requirements: dict[str, list[Requirement]]) -> Iterator[Finding]:
    """Those that a config can name. One with an extra of its name runs where that is installed."""
    for what, names in (
        ("rollout.engine.name", ROLLOUT_ENGINES.names()),
        ("engine.name", ENGINES.names()),
        ("cluster.backend", get_args(ClusterConfig.model_fields["backend"].annotation)),
    ):
        for name in names:
            absent = [_plain(each) for each in requirements.get(name, []) if _version(each) is None]
            if absent:
                why = f"cannot run: {', '.join(absent)} is not installed"
                yield Finding("note", f"{what}={name}", why, pip_install(name))
            elif name in ROLLOUT_ENGINES and ROLLOUT_ENGINES[name].marks.get("compiles") and _compiler() is None:
                why = "runs, several times slower than it could: no C++ compiler"
                yield Finding("note", f"{what}={name}", why, "install g++ or clang++, or set CXX")
            else:
                yield Finding("ok", f"{what}={name}", "can run")


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _processor() -> Iterator[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    few = usable is not None and threads < usable
    advice = f"torch leaves {usable - threads} of them idle: unset OMP_NUM_THREADS" if few and usable else ""
    yield Finding("note" if few else "ok", "processors", f"{usable}, torch uses {threads} threads", advice)
    spins = spinning()
    if spins and "ACTIVE" not in spins:
        yield Finding("ok", "threads", f"give the processor back soon while they wait ({spins})")
    else:
        slow = f"beside other work two may be ten times slower than one: unset {POLICY}"
        yield Finding("note", "threads", f"hold the processor while they wait ({spins or 'as OpenMP comes'})", slow)
    capability = torch.backends.cpu.get_cpu_capability()
    has_bfloat16 = _flags() & {"avx512_bf16", "amx_bf16", "bf16"}
    products = f"bfloat16 products by {', '.join(sorted(has_bfloat16))}" if has_bfloat16 else "no bfloat16 products"
    advice = "" if has_bfloat16 else "on this processor model.dtype=float32 is usually faster"
    yield Finding("ok" if has_bfloat16 else "note", "instructions", f"{capability}, {products}", advice)
    found = _compiler()
    advice = "" if found else "kernels and compiled engines need one: install g++ or clang++"
    yield Finding("ok" if found else "note", "C++ compiler", found or "none", advice)


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def _memory() -> Iterator[Finding]:
    free, total = free_memory(), total_memory()
    if free is None:
        yield Finding("note", "memory", "this system does not say")
        return
    little = free.bytes < LITTLE_MEMORY
    found = f"{size(free.bytes)} free by {free.bound}" + (f", of {size(total)}" if total else "")
    yield Finding("problem" if little else "ok", "memory", found, "end other programs" if little else "")


def _gpus() -> Iterator[Finding]:
    import torch

    build = f"torch {torch.__version__}, built for " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Finding("ok", f"GPU {index}", f"{name}, {size(free)} of {size(total)} free ({build})")
    elif shutil.which("nvidia-smi"):
        advice = "install a torch that is built for the driver's CUDA: pytorch.org/get-started"
        yield Finding("note", "GPU", f"one is here, and torch cannot use it ({build})", advice)
    else:
        yield Finding("ok", "GPU", f"none; models run on the processor ({build})")


def _limits() -> Iterator[Finding]:
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = 0 <= files < FEW_FILES
        yield Finding("note" if few else "ok", "open files", str(files), f"ulimit -n {FEW_FILES}" if few else "")
    except ImportError:  # not on Windows
        pass
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        small = total <= SMALL_SHM
        advice = "other libraries' workers may need more: docker run --shm-size=1g" if small else ""
        yield Finding("note" if small else "ok", "/dev/shm", size(total), advice)


def _places(run_dir: Path) -> Iterator[Finding]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = {
        "runs": run_dir,
        "Hugging Face cache": Path(os.environ.get("HF_HOME") or cache / "huggingface"),
        "whet's cache": Path(os.environ.get("WHET_CACHE") or cache) / "whet",
        "temporary files": Path(tempfile.gettempdir()),
    }
    for what, path in places.items():
        path = path.expanduser().absolute()
        if not _writable(existing(path)):
            yield Finding("problem", what, f"{path} cannot be written to", _elsewhere(what))
            continue
        free = free_disk(path)
        little = free < LITTLE_DISK
        advice = f"make room, or {_elsewhere(what)}" if little else ""
        yield Finding("problem" if little else "ok", what, f"{path}, {size(free)} free", advice)


def _elsewhere(what: str) -> str:
    keys = {"runs": "trainer.run_dir", "Hugging Face cache": "HF_HOME", "whet's cache": "WHET_CACHE"}
    return f"choose another place with {keys.get(what, 'TMPDIR')}"


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
