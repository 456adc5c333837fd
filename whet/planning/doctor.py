# SPDX-License-Identifier: Apache-2.0
"""`whet doctor`: checks the machine, the installation and the nodes of a Ray cluster, without loading a model."""

from __future__ import annotations

import locale
import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from packaging.requirements import Requirement

from whet import devices
from whet.compiled import cache_folder, compiler
from whet.config.schema import ClusterConfig, RunConfig, TrainConfig
from whet.errors import CHECKOUT, ConfigError, RegistryError, pip_install
from whet.planning.machine import existing, free_disk, free_memory, total_memory
from whet.planning.units import size
from whet.registry import ENGINES, ROLLOUT_ENGINES
from whet.rollout.build import check_engine
from whet.threads import POLICY, spinning
from whet.version import DISTRIBUTION

if TYPE_CHECKING:
    from whet.controller.ray.survey import NodeReport

OLDEST_PYTHON = (3, 11)
FEW_FILES, SMALL_SHM, LITTLE_DISK, LITTLE_MEMORY = 1024, 64 * 2**20, 2**30, 2**30
PACKAGES = ("whet", "torch", "transformers", "ray", "numpy")
APART_SECONDS = 1.0


@dataclass(frozen=True)
class Finding:
    """The result of a check. `advice`, if any, says what to change."""

    what: str
    found: str
    advice: str = ""
    is_problem: bool = False  # with advice: True if runs need the change, False for a note

    @property
    def status(self) -> Literal["ok", "note", "problem"]:
        """The severity: ok, note or problem."""
        return "ok" if not self.advice else "problem" if self.is_problem else "note"


def examine(run_dir: Path) -> dict[str, list[Finding]]:
    """Runs all checks.  Returns the findings by section."""
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
        yield Finding("whet", f"{metadata.version(DISTRIBUTION)} in {folder}")
    except metadata.PackageNotFoundError:
        advice = f"its requirements cannot be checked: pip install -e {shlex.quote(str(CHECKOUT))}"
        yield Finding("whet", f"{folder}, not installed", advice)
    with suppress(metadata.PackageNotFoundError):
        other = f"the distribution whet {metadata.version('whet')}, which may replace files of {DISTRIBUTION}"
        advice = "PyPI's whet is another project (and was our name): pip uninstall whet, then install this one again"
        yield Finding("other whet", other, advice)
    found = f"{platform.python_version()} on {platform.platform()} ({sys.executable})"
    old = "whet needs Python 3.11 or newer" if sys.version_info < OLDEST_PYTHON else ""
    yield Finding("python", found, old, is_problem=True)
    encoding = locale.getpreferredencoding(False)
    plain = "writing text that is not ASCII may fail: set PYTHONUTF8=1"
    is_plain = encoding.lower().replace("-", "") != "utf8"
    yield Finding("encoding", encoding, plain if is_plain else "", is_problem=True)


def _requirements() -> dict[str, list[Requirement]]:
    """Returns the packages that whet requires, by extra; the key "" has the packages of every installation."""
    found: dict[str, list[Requirement]] = {"": []}
    try:
        texts = metadata.requires(DISTRIBUTION) or []
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
    version, plain = _version(requirement), _plain(requirement)
    if version is None:
        return Finding(requirement.name, "not installed", f"pip install '{plain}'", is_problem=True)
    fits = requirement.specifier.contains(version, prereleases=True)
    return Finding(requirement.name, version, "" if fits else f"whet needs {plain}: install that", is_problem=True)


def _extra(name: str, wanted: list[Requirement]) -> Finding:
    versions = {each.name: _version(each) or "" for each in wanted}
    if not all(versions.values()):
        return Finding(name, "not installed", f"optional: {pip_install(name)}")
    wrong = [each for each in wanted if not each.specifier.contains(versions[each.name], prereleases=True)]
    shown = ", ".join(f"{each} {version}" for each, version in versions.items())
    return Finding(name, shown, f"whet is tested with {_plain(wrong[0])}: install that" if wrong else "")


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _engines(requirements: dict[str, list[Requirement]]) -> Iterator[Finding]:
    """Checks the engines that a config can name. If an extra has the engine's name, the engine needs that extra."""
    for what, names in (
        ("rollout.engine.name", ROLLOUT_ENGINES.names()),
        ("engine.name", ENGINES.names()),
        ("cluster.backend", get_args(ClusterConfig.model_fields["backend"].annotation)),
    ):
        for name in names:
            absent = [_plain(each) for each in requirements.get(name, []) if _version(each) is None]
            shipped = ROLLOUT_ENGINES.shipped.get(name)
            if absent:
                yield Finding(f"{what}={name}", f"cannot run: {', '.join(absent)} is not installed", pip_install(name))
            elif shipped and shipped.marks.get("compiles") and compiler() is None:
                why = "can run, but several times slower: there is no C++ compiler"
                yield Finding(f"{what}={name}", why, "install g++ or clang++, or set CXX")
            elif why := _problem(what, name):
                yield Finding(f"{what}={name}", f"cannot run: {why.partition('; ')[0]}", why.partition("; ")[2])
            else:
                yield Finding(f"{what}={name}", "can run")


def _problem(key: str, name: str) -> str:
    """Returns the error text with which an engine with default options refuses to start; "" if it starts."""
    try:
        if key == "engine.name":
            ENGINES[name]  # imported, if it comes from an installed package
        elif key == "rollout.engine.name":
            check_engine(TrainConfig.model_validate({"rollout": {"engine": {"name": name}}}))
    except (ConfigError, RegistryError) as error:
        return str(error)
    return ""


def _processor() -> Iterator[Finding]:
    import torch

    usable, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    idle = f"torch does not use {usable - threads} of them: unset OMP_NUM_THREADS" if threads < usable else ""
    yield Finding("processors", f"{usable}, torch uses {threads} threads", idle)
    spins = spinning()
    if spins and "ACTIVE" not in spins:
        yield Finding("threads", f"waiting threads release the processor soon ({spins})")
    else:
        slow = f"with other programs running, two threads may be ten times slower than one: unset {POLICY}"
        yield Finding("threads", f"waiting threads keep the processor busy ({spins or 'the default of OpenMP'})", slow)
    found = ", ".join(devices.bfloat16_instructions())
    products = f"bfloat16 by {found}" if found else "no bfloat16 instructions: model.dtype=auto is float32"
    yield Finding("instructions", f"{torch.backends.cpu.get_cpu_capability()}, {products}")
    path = compiler()
    advice = "" if path else "kernels and compile=true need a C++ compiler: install g++ or clang++"
    yield Finding("C++ compiler", path or "none", advice)


def _memory() -> Iterator[Finding]:
    free, total = free_memory(), total_memory()
    if free is None:
        yield Finding("memory", "unknown: this system does not report it")
    else:
        found = f"{size(free.bytes)} free by {free.bound}" + (f", of {size(total)}" if total else "")
        yield Finding("memory", found, "close other programs" if free.bytes < LITTLE_MEMORY else "", is_problem=True)


def _gpus() -> Iterator[Finding]:
    import torch

    device, cuda = devices.here(), torch.version.cuda
    build = f"torch {torch.__version__}" + (f", built for CUDA {cuda}" if cuda else "")
    if device != devices.HOST:
        module = torch.get_device_module(device)
        for index in range(devices.count()):
            free, total = torch.accelerator.get_memory_info(index)
            name = module.get_device_name(index) if hasattr(module, "get_device_name") else device.type
            yield Finding(f"GPU {index}", f"{name}, {size(free)} of {size(total)} free ({build})")
    elif shutil.which("nvidia-smi"):
        advice = "install a build of torch for the driver's CUDA version: pytorch.org/get-started"
        yield Finding("GPU", f"there is one, but torch cannot use it ({build})", advice)
    else:
        yield Finding("GPU", f"none; models run on the processor ({build})")


def _limits() -> Iterator[Finding]:
    files, shared = resource.getrlimit(resource.RLIMIT_NOFILE)[0], Path("/dev/shm")
    yield Finding("open files", str(files), f"ulimit -n {FEW_FILES}" if 0 <= files < FEW_FILES else "")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total
        advice = "workers of other libraries may need more: docker run --shm-size=1g"
        yield Finding("/dev/shm", size(total), advice if total <= SMALL_SHM else "")


def _places(run_dir: Path) -> Iterator[Finding]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = {
        "runs": ("trainer.run_dir", run_dir),
        "Hugging Face cache": ("HF_HOME", Path(os.environ.get("HF_HOME") or cache / "huggingface")),
        "whet's cache": ("WHET_CACHE", cache_folder()),
        "temporary files": ("TMPDIR", Path(tempfile.gettempdir())),
    }
    for what, (key, path) in places.items():
        path, elsewhere = path.expanduser().absolute(), f"set {key} to another folder"
        if _writable(existing(path)):
            free = free_disk(path)
            advice = f"free disk space, or {elsewhere}" if free < LITTLE_DISK else ""
            yield Finding(what, f"{path}, {size(free)} free", advice, is_problem=True)
        else:
            yield Finding(what, f"{path} is not writable", elsewhere, is_problem=True)


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def examine_cluster(config: RunConfig, run_dir: Path) -> dict[str, list[Finding]]:
    """Checks the Ray cluster of the config.  Returns the findings by section: the cluster, and each node."""
    try:
        from whet.controller.ray.survey import survey, versions
    except ModuleNotFoundError:
        return {"cluster": [Finding("Ray", "not installed", pip_install("ray"), is_problem=True)]}
    place = existing(run_dir.expanduser().absolute())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".whet-doctor-") as marker:
        paths = {marker.name: f"{place}, the folder of runs"}
        model = config.model.path
        if model is not None and Path(model).expanduser().is_dir():
            paths[str(Path(model).expanduser().resolve())] = f"model.path={model}"
        try:
            address, reports = survey(config.cluster, PACKAGES, list(paths))
        except ConfigError as error:
            return {"cluster": [Finding("Ray", "not reached", str(error), is_problem=True)]}
    alive = [report for report in reports if report.node.is_alive]
    wanted = config.cluster.nnodes
    few = f"cluster.nnodes={wanted}: add nodes with ray start --address={address}" if len(alive) < wanted else ""
    count = Finding("nodes", f"{len(alive)} at {address}", few, is_problem=True)
    here = versions(PACKAGES)
    sections = {"cluster": [count]}
    for report in reports:
        sections.setdefault(f"node {report.node.address}", []).extend(of_node(report, here, list(paths.values())))
    return sections


def of_node(report: NodeReport, here: Mapping[str, str], paths: list[str]) -> Iterator[Finding]:
    """Yields the findings of one node. Its versions are compared with `here`; `paths` are files that it should see."""
    if report.failure:
        is_alive = report.node.is_alive
        advice = "read the log of its raylet" if is_alive else "`ray status` may have the reason"
        yield Finding("node", report.failure, advice, is_problem=is_alive)
        return
    yield Finding("resources", str(report.node))
    for name, wanted in here.items():
        found, advice = report.versions.get(name), f"this machine has {wanted}: install the same version"
        if found is None:
            found, advice = "not installed", f"install {name} {wanted}, as on this machine"
        yield Finding(name, found, "" if found == wanted else advice, is_problem=True)
    folder, free = report.temporary
    advice = "free disk space" if free < LITTLE_DISK else ""
    yield Finding("disk", f"{folder}, {size(free)} free", advice, is_problem=True)
    for path, seen in zip(paths, report.seen, strict=True):
        advice = "" if seen else "put it on a file system that all nodes have under this path"
        yield Finding("files", path if seen else f"{path}: not found", advice, is_problem=True)
    apart = "times in logs will not match: synchronise it by NTP" if abs(report.clock_seconds) > APART_SECONDS else ""
    yield Finding("clock", f"{report.clock_seconds:+.3f} s relative to this machine", apart)
    for address, why in report.unreached.items():
        advice = "open all ports between the nodes: workers use any free port"
        yield Finding("network", f"no connection to {address}: {why}", advice, is_problem=True)
    if not report.unreached:
        yield Finding("network", "connects to every other node")
