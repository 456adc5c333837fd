# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a Dockerfile in a clean Debian, without a daemon, and then commands in the result.

    python tests/dockerfile_in_root.py                             Dockerfile; then whet --help, doctor, quickstart
    python tests/dockerfile_in_root.py --build-arg EXTRAS=peft     other values of ARG
    python tests/dockerfile_in_root.py --run=doctor --run="train sums.yaml"       other words after the entrypoint

The root is made by debootstrap in a temporary folder (TMPDIR; about 4 GiB) and removed at the end. Every step has
namespaces of its own for mounts and processes: when it ends, by itself or by its deadline, nothing is left of either.
This needs root, debootstrap, the network, and of Python nothing but its standard library.

A proxy (http_proxy, https_proxy, no_proxy) is passed on. --host-pip also passes on how pip is configured on this
machine: variables PIP_*, /etc/pip.conf, /etc/xdg/pip/pip.conf, and the files and folders that these name; where they
name an index or links, the Dockerfile's defaults of ARG PIP_* do not count.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIRROR = "http://deb.debian.org/debian"
CHECKS = ("", "--version", "doctor", "quickstart")
BASE = re.compile(r"python:(\d+\.\d+)-slim-(\w+)")
PACKAGES = "ca-certificates,python3,python3-dev,python3-pip"  # what the image of Python has beside a bare Debian
PIP_FILES = (Path("/etc/pip.conf"), Path("/etc/xdg/pip/pip.conf"))
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class StepError(Exception):
    """A step of the Dockerfile, or a program that it needs on this machine, that cannot be carried out."""


@dataclass
class Image:
    """The settings of the steps so far, which Docker keeps beside the files."""

    root: Path
    build_args: Mapping[str, str]
    carried: Mapping[str, str] = field(default_factory=dict)  # variables of this machine
    folders: Sequence[Path] = ()  # folders of this machine that every step sees, read-only
    has_index: bool = False  # of this machine: defaults of ARG PIP_... do not count
    seconds: float = 1800  # deadline of a step
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=ENVIRONMENT.copy)
    user: str = "root"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def expand(self, text: str) -> str:
        """The text with ${NAME} and $NAME of ARG and ENV replaced, as in COPY, USER and WORKDIR."""
        known = {**self.arguments, **self.environment}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: known.get(found[1] or found[2], ""), text)

    def run(self, words: Sequence[str], *, is_build: bool) -> None:
        """Runs a program in the root as the image's user.  Raises: StepError where it fails or is late."""
        name, uid, gid, home = self.account()
        variables = {**self.carried, **(self.arguments if is_build else {}), **self.environment, "HOME": home}
        root, groups = shlex.quote(str(self.root)), "--init-groups" if name else "--clear-groups"
        script = [
            "set -e",
            f"mount --bind {root} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount --bind -o ro /sys {root}/sys",
            f"mount -t tmpfs -o size=64m,mode=1777 shm {root}/dev/shm",  # as large as Docker's
        ]
        for each in self.folders:
            source, target = shlex.quote(str(each)), shlex.quote(str(below(self.root, each)))
            script.append(f"mkdir -p {target} && mount --bind -o ro {source} {target}")
        script += [
            f"cd {root}",
            "pivot_root . mnt",
            "umount -l /mnt",
            f"cd {shlex.quote(self.folder)}",
            # Not exec: the first process of the namespace stays root's, since a change of user takes --kill-child away.
            f"setpriv --reuid {uid} --regid {gid} {groups} -- {shlex.join(words)}",
            "exit $?",
        ]
        call([*NAMESPACES, "sh", "-c", "\n".join(script)], variables, self.seconds)

    def account(self) -> tuple[str, str, str, str]:
        """Name, number, group and home folder of the user, by the root's own list."""
        for line in (self.root / "etc/passwd").read_text(encoding="utf-8").splitlines():
            name, _, uid, gid, _, home, _ = line.split(":")
            if self.user in (name, uid):
                return name, uid, gid, home
        if not self.user.isdigit():
            raise StepError(f"USER {self.user}: the image has no such user; make it with useradd before")
        return "", self.user, "0", "/"


def below(root: Path, path: Path | str) -> Path:
    """The place of an absolute path of the image on this machine."""
    return root / str(path).lstrip("/")


def call(command: Sequence[str], variables: Mapping[str, str], seconds: float) -> None:
    """Runs a command with these variables alone.  Raises: StepError."""
    try:
        subprocess.run(command, env=variables, stdin=subprocess.DEVNULL, timeout=seconds, check=True)
    except subprocess.CalledProcessError as error:
        raise StepError(f"exit status {error.returncode}") from None
    except subprocess.TimeoutExpired:
        raise StepError(f"not done after {seconds:.0f} s; --seconds gives a step more") from None


def parse(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, each with its text; comments are dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    words = [line.split(maxsplit=1) for line in joined.splitlines()]
    return [(kind.upper(), text.strip()) for kind, text in words]


def bootstrap(image: Image, base: str, mirror: str) -> None:
    """FROM: a Debian with the Python of the official image, made by debootstrap.  Raises: StepError."""
    found = BASE.fullmatch(base)
    if found is None:
        raise StepError("only python:VERSION-slim-SUITE can be made by debootstrap")
    python, suite = found.groups()
    variables = {**image.environment, **image.carried, "DEBIAN_FRONTEND": "noninteractive"}
    make = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(image.root), mirror]
    call([*NAMESPACES, *make], variables, image.seconds)
    for name in ("resolv.conf", "hosts"):
        shutil.copyfile(f"/etc/{name}", image.root / "etc" / name)
    if not (image.root / "usr/bin" / f"python{python}").exists():
        raise StepError(f"Debian {suite} has another version of Python than {python}")
    (image.root / "usr/bin/python").symlink_to("python3")
    (image.root / "usr/lib" / f"python{python}" / "EXTERNALLY-MANAGED").unlink(missing_ok=True)


def carry_out(image: Image, kind: str, text: str, mirror: str) -> None:
    """Carries out one instruction.  Raises: StepError."""
    if kind == "FROM":
        bootstrap(image, image.expand(text), mirror)
    elif kind == "ARG":
        name, _, value = text.partition("=")
        if name in image.build_args or not (image.has_index and name.startswith("PIP_")):
            image.arguments[name] = image.build_args.get(name, value)
    elif kind == "ENV":
        image.environment |= dict(word.split("=", 1) for word in shlex.split(image.expand(text)))
    elif kind == "WORKDIR":
        image.folder = str(Path(image.folder, image.expand(text)))
        below(image.root, image.folder).mkdir(parents=True, exist_ok=True)
    elif kind == "COPY":
        copy(image, shlex.split(image.expand(text)))
    elif kind == "RUN":
        image.run(["/bin/sh", "-c", text], is_build=True)
    elif kind == "USER":
        image.user = image.expand(text)
    elif kind in ("ENTRYPOINT", "CMD"):
        words = re.findall(r'"([^"]*)"', text) if text.startswith("[") else ["/bin/sh", "-c", text]
        setattr(image, {"ENTRYPOINT": "entrypoint", "CMD": "command"}[kind], words)
    else:
        raise StepError(f"this instruction is not known here; add it to {Path(__file__).name}")


def copy(image: Image, words: Sequence[str]) -> None:
    """Carries out COPY: files, or the content of a folder, without names in .dockerignore at any depth (`**/NAME`)."""
    *sources, target = words
    if any(word.startswith("--") for word in words):
        raise StepError("options of COPY are not known here; give the owner with chown in a RUN")
    ignored = re.findall(r"^\*\*/(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    place = below(image.root, Path(image.folder, target))
    if target.endswith("/"):
        place.mkdir(parents=True, exist_ok=True)
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns(*ignored), dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, place)


def pip_of_this_machine() -> tuple[dict[str, str], list[Path], list[Path], bool]:
    """pip's variables, the files and folders with which it is configured here, and whether they name an index."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    files = [file for file in PIP_FILES if file.exists()]
    told = " ".join([*map("=".join, variables.items()), *(file.read_text(encoding="utf-8") for file in files)])
    named = {Path(path) for path in re.findall(r"(?<![\w:/.])(?:file://)?(/[\w./+-]+)", told)}
    files += sorted(path for path in named if path.is_file())
    has_index = re.search(r"(?i)index[-_]url|find[-_]links", told) is not None
    return variables, files, sorted(path for path in named if path.is_dir()), has_index


def missing() -> str | None:
    """The missing requirements of this machine, as a sentence; None without any."""
    if os.geteuid() != 0:
        return "this needs root, for debootstrap and mounts; run it with sudo, or in a container with CAP_SYS_ADMIN"
    needed = ("debootstrap", "unshare", "mount", "pivot_root", "setpriv")
    absent = [name for name in needed if not shutil.which(name)]
    return f"{', '.join(absent)} not found; install debootstrap and util-linux (make debootstrap)" if absent else None


def mounted_below(root: Path, mounts: str) -> list[str]:
    """Places of /proc/mounts that lie in the root."""
    return [place for place in (line.split()[1] for line in mounts.splitlines()) if place.startswith(f"{root}/")]


def build_and_check(chosen: argparse.Namespace, root: Path) -> None:
    """Carries out all instructions, then the commands.  Raises: StepError, which names the step."""
    proxies = {name: os.environ[name] for name in PROXIES if name in os.environ}
    variables, files, folders, has_index = pip_of_this_machine() if chosen.host_pip else ({}, [], [], False)
    given = dict(each.split("=", 1) for each in chosen.build_arg)
    image = Image(root, given, {**proxies, **variables}, folders, has_index, chosen.seconds)
    steps = parse(Path(chosen.dockerfile).read_text(encoding="utf-8"))
    for number, (kind, text) in enumerate(steps, 1):
        with Told(f"step {number} of {len(steps)}: {kind} {text}"):
            carry_out(image, kind, text, chosen.mirror)
            for file in files if kind == "FROM" else ():
                below(root, file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, below(root, file))
    for words in chosen.run or CHECKS:
        command = [*image.entrypoint, *(shlex.split(words) or image.command)]
        with Told(f"as {image.user}: {shlex.join(command)}"):
            image.run(command, is_build=False)


class Told:
    """Prints the name of a step and its time; adds the name to an error."""

    def __init__(self, name: str) -> None:
        self.name, self.began = name, time.monotonic()

    def __enter__(self) -> None:
        sys.stdout.write(f"== {self.name}\n")
        sys.stdout.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StepError):
            raise StepError(f"{self.name}: {error}") from None
        sys.stdout.write(f"-- {time.monotonic() - self.began:.0f} s\n")
        sys.stdout.flush()


def main() -> int:
    """Runs the command line.  Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", nargs="?", default=str(ROOT / "Dockerfile"))
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="value of an ARG")
    parser.add_argument("--run", action="append", metavar="WORDS", help="words after the entrypoint; '' is CMD")
    parser.add_argument("--mirror", default=MIRROR, help=f"of Debian (default: {MIRROR})")
    parser.add_argument("--host-pip", action="store_true", help="use pip as it is configured on this machine")
    parser.add_argument("--seconds", type=float, default=1800, help="deadline of each step (default: 1800)")
    chosen = parser.parse_args()
    if lacking := missing():
        sys.exit(lacking)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the root is removed then, too
    root = Path(tempfile.mkdtemp(prefix="whet-image-"))
    root.chmod(0o755)
    try:
        build_and_check(chosen, root)
    except StepError as error:
        sys.exit(str(error))
    finally:
        if inside := mounted_below(root, Path("/proc/mounts").read_text(encoding="utf-8")):
            sys.exit(
                f"{root} is kept: {', '.join(inside)} is still mounted in it; unmount that, then remove the folder"
            )
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
