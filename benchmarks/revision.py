# SPDX-License-Identifier: Apache-2.0
"""Two commits on one machine: the files of each in a folder of its own, and `whet` run from there by its commands."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.competitor import ROOT

WORKING_TREE = "working tree"
# Whatever recipes and defaults of a commit say: no checkpoints, and the dtype that every processor multiplies.
SAME = ("trainer.save_freq=0", "model.dtype=float32", "rollout.dtype=float32")
DEADLINE_SECONDS = 600.0  # of one command
KIBIBYTE = 1024  # the unit in which Linux counts resident memory
LINES_SHOWN = 15  # of the output of a command that failed


class CommandError(Exception):
    """A command of `whet` that did not end as it should, with the end of its output."""


@dataclass(frozen=True)
class Revision:
    """The files of one commit, and its names for the parts of a command line."""

    name: str
    tree: Path
    renamed_keys: Mapping[str, str] = field(default_factory=dict)

    def command(self, words: Sequence[str]) -> list[str]:
        """The process arguments of `whet WORDS`, config keys renamed."""
        return [sys.executable, "-m", "whet", *(renamed(word, self.renamed_keys) for word in words)]

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of a process that imports this tree's whet; offline, with so many threads."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.tree),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, words: Sequence[str], folder: Path, threads: int = 1) -> subprocess.Popen[bytes]:
        """Starts `whet WORDS` in `folder`, where its output goes to the end of the file `log`."""
        return self.python(self.command(words)[1:], folder, threads)

    def python(self, words: Sequence[str], folder: Path, threads: int = 1) -> subprocess.Popen[bytes]:
        """Starts Python with these arguments, as `start` does."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=self.environment(threads),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def whet(self, words: Sequence[str], folder: Path, threads: int = 1) -> None:
        """Runs `whet WORDS` in `folder` to its end.  Raises: CommandError."""
        finish(self.start(words, folder, threads), folder)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for a command that `Revision.start` started in `folder`.  Raises: CommandError where it fails."""
    try:
        status: int | str = process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        status = f"no end within {DEADLINE_SECONDS:.0f} s"
    if status != 0:
        said = (folder / "log").read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        raise CommandError("\n".join([f"exit status: {status}; the end of {folder / 'log'}:", *said]))


@dataclass(frozen=True)
class Used:
    """The resources that a process used: its peak of resident memory, and processor seconds of all its threads."""

    peak_bytes: int
    cpu_seconds: float


def finish_measured(process: subprocess.Popen[bytes], folder: Path) -> Used:
    """Waits for a command as `finish` does."""
    timer = threading.Timer(DEADLINE_SECONDS, process.kill)
    timer.start()
    _, status, usage = os.wait4(process.pid, 0)
    timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    finish(process, folder)
    return Used(usage.ru_maxrss * KIBIBYTE, usage.ru_utime + usage.ru_stime)


def renamed(word: str, keys: Mapping[str, str]) -> str:
    """A word of the command line with its config key, or the section that the key lies in, under its new name."""
    key, equals, value = word.partition("=")
    for old, new in keys.items():
        if equals and (key == old or key.startswith(old + ".")):
            return f"{new}{key.removeprefix(old)}={value}"
    return word


def check_out(what: str, folder: Path, renamed_keys: Mapping[str, str] | None = None) -> Revision:
    """The files of a commit, unpacked into `folder`; of a folder, or the working tree, where they lie.

    Raises: SystemExit for a commit that is not in this clone.
    """
    keys = renamed_keys or {}
    if what == WORKING_TREE or Path(what).is_dir():
        return Revision(what, ROOT if what == WORKING_TREE else Path(what).resolve(), keys)
    packed = subprocess.run(["git", "archive", "--format=tar", what], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        said = packed.stderr.decode().strip()
        raise SystemExit(f"{what} is no commit of this clone ({said}); fetch it, or name another commit or a folder")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return Revision(what, folder, keys)


def write_additions(folder: Path) -> None:
    """Additions of numbers below 20: train.jsonl and held_out.jsonl, examples.jsonl to imitate, pairs.jsonl of a right
    and a wrong answer, and calls.jsonl, whose answers ask the calculator."""
    pairs = [(a, b) for a in range(20) for b in range(20)]
    random.Random(0).shuffle(pairs)
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    held_out, train = problems[:48], problems[48:]
    folder.mkdir(parents=True, exist_ok=True)
    write = _writer(folder)
    write("train", train)
    write("held_out", held_out)
    write("examples", [{"prompt": row["prompt"], "response": row["answer"]} for row in train])
    chosen = [(row["prompt"], row["answer"]) for row in train]
    write("pairs", [{"prompt": prompt, "chosen": one, "rejected": str(int(one) + 1)} for prompt, one in chosen])
    write("calls", [{"prompt": row["prompt"], "response": f"<calc>{row['prompt'][:-1]}</calc>"} for row in train])


def _writer(folder: Path) -> Callable[[str, list[dict[str, str]]], None]:
    def write(name: str, rows: list[dict[str, str]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write
