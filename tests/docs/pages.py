# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of a page, and the way in which a test runs each.

    ```python                    run; the blocks of a page share their names and a temporary folder
    ```bash                      run: lines of whet commands in this process, anything else by bash
    ```LANGUAGE title="NAME"     written to the file NAME of that folder, for the blocks behind it
    ```python title="whet/..."   a piece of that file, to the letter; also of examples/
    ```yaml                      a recipe of `whet train`, for the loader and for the JSON Schema
    ```json                      read, an object a line where it is no whole
    ```text title="output"       stands in what the block before it printed; ... is for whatever differs
    ```text                      prose

A comment on the line before a block says otherwise, and why:
    <!-- slow: REASON -->     run in the slow tests, checked in the fast ones
    <!-- check: REASON -->    never run: configs are composed, arguments parsed, targets and extras looked up
    <!-- skip: REASON -->     none of these
    <!-- recipe: COMMAND -->  of another command than train
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from click import Context
from typer.main import get_command

from whet.cli.app import app, main
from whet.cli.arguments import split_recipe
from whet.cli.train import members
from whet.config import load_config, problems
from whet.config.commands import commands, schema_of
from whet.config.load import json_schema
from whet.config.section import Section
from whet.errors import ConfigError

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?[^\n`]*$")
MARKER = re.compile(r"^ *<!-- (?P<kind>slow|check|skip|recipe): (?P<reason>.+) -->$")
PIECES = ("whet/", "examples/")  # titles of blocks that are pieces of files
LANGUAGES = {"python", "bash", "yaml", "json", "jinja", "text"}
SCHEMAS = {each: schema_of(each) for each in commands()}
SHELL = set("|;&<>$`(){}*#")
DEADLINE_SECONDS = 280


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, its fence and marker, and its text."""

    page: Path
    line: int
    language: str
    title: str
    kind: str  # of the marker; empty without one
    reason: str
    code: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """The blocks of a page, in order; `text`, if given, replaces the page's own."""
    found: list[Block] = []
    lines = (page.read_text(encoding="utf-8") if text is None else text).splitlines()
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is not None:
            end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
            marker = MARKER.match(lines[number - 1]) if number else None
            kind, reason = (marker["kind"], marker["reason"]) if marker else ("", "")
            code = "".join(line.removeprefix(fence["indent"]) + "\n" for line in lines[number + 1 : end])
            found.append(Block(page, number + 1, fence["language"], fence["title"] or "", kind, reason, code))
            number = end
        number += 1
    return found


class Reader:
    """A reader who follows a page, in a folder of their own, block by block."""

    def __init__(self, folder: Path, *, slow: bool = False) -> None:
        self.folder, self.slow = folder, slow
        self.names: dict[str, Any] = {"__name__": "page"}
        self.printed: str | None = None  # by the block before; None where it was not run
        self.failed = False
        bin_folder = folder / ".bin"
        bin_folder.mkdir()
        (bin_folder / "whet").write_text(f'#!/bin/sh\nexec {sys.executable} -m whet "$@"\n')
        (bin_folder / "whet").chmod(0o755)
        (bin_folder / "python").symlink_to(sys.executable)
        # make quickstart, in an environment that is there
        (bin_folder / "make").write_text('#!/bin/sh\nexec whet "$@"\n')
        (bin_folder / "make").chmod(0o755)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").touch()
        paths = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.environment = {**os.environ, **paths}

    def read(self, block: Block) -> None:
        """Carries out a block.  Raises: AssertionError with its place."""
        assert block.language in LANGUAGES, f"{block.place}: a fence says one of {', '.join(sorted(LANGUAGES))}"
        if block.kind == "skip":
            self.printed = None
            return
        if block.title.startswith(PIECES):
            assert block.code in (ROOT / block.title).read_text(), f"{block.place} is not in {block.title} any more"
            return
        if block.title and block.language != "text":
            (self.folder / block.title).write_text(block.code, encoding="utf-8")
        if block.title and block.language in ("python", "bash"):
            self.failed = False
            self._look_through(block)
            return
        if block.kind == "check" or (block.kind == "slow" and not self.slow):
            self.printed = None
            self._check(block)
            return
        if block.language in ("python", "bash"):
            self.failed = False
            run = self._run_python if block.language == "python" else self._run_bash
            self.printed = run(block)
        elif block.language == "yaml":
            self._load(block)
        elif block.language == "json":
            _read_json(block)
        elif block.title == "output" and self.printed is not None:
            self._compare(block)

    def check_exit(self, block: Block, after: Block | None) -> None:
        """A command fails exactly if the page shows its error, or findings, below it."""
        shown = (
            after is not None
            and after.title == "output"
            and re.search(r"^\w+Error: |^findings +\d", after.code, re.MULTILINE)
        )
        assert self.failed == bool(shown), f"{block.place} {'failed' if self.failed else 'passed'}:\n{self.printed}"

    def _run_python(self, block: Block) -> str:
        with _captured() as printed:
            exec(compile(block.code, f"{block.place}", "exec"), self.names)
        return printed.getvalue()

    def _run_bash(self, block: Block) -> str:
        if _is_plain(block.code):
            with _captured() as printed:
                for each in logical_lines(block.code):
                    try:
                        main(shlex.split(each)[1:])
                    except SystemExit as ended:
                        self.failed = self.failed or ended.code not in (0, None)
            return printed.getvalue()
        done = subprocess.run(
            ["bash", "-c", block.code],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        self.failed = done.returncode != 0
        return done.stdout

    def _load(self, block: Block) -> None:
        file = self.folder / (block.title or "recipe.yaml")
        file.write_text(block.code, encoding="utf-8")
        schema = SCHEMAS[block.reason if block.kind == "recipe" else "train"]
        loaded = load_config(schema, file, checked=False)
        assert any(source != "default" for source in loaded.sources.values()), f"{block.place} sets nothing"
        validator(schema).validate(yaml.safe_load(block.code))

    def _compare(self, block: Block) -> None:
        assert self.printed is not None
        wanted = ".*?".join(re.escape(part) for part in block.code.rstrip("\n").split("..."))
        said = "\n".join(line.rstrip() for line in self.printed.splitlines())
        assert re.search(wanted, said, re.DOTALL), f"{block.place} shows\n{block.code}\nbut this was printed:\n{said}"

    def _check(self, block: Block) -> None:
        if block.language == "python" or (block.kind == "slow" and not _is_plain(block.code)):
            self._look_through(block)
        elif block.language == "bash":
            for each in logical_lines(block.code):
                check_command(shlex.split(each, comments=True), block)

    @staticmethod
    def _look_through(block: Block) -> None:
        if block.language == "python":
            compile(block.code, block.place, "exec")
        else:
            subprocess.run(["bash", "-n", "-c", block.code], check=True)


@cache
def validator(schema: type[Section]) -> jsonschema.Draft7Validator:
    """The validator that an editor runs on a recipe."""
    return jsonschema.Draft7Validator(json_schema(schema))


def check_command(words: list[str], block: Block) -> None:
    """That a command could be run: its config composes, its arguments parse, its target or extra exists."""
    while words and "=" in words[0]:
        words = words[1:]  # a variable for this command
    match words:
        case [
            "whet",
            "train" | "sft" | "distill" | "preference" | "train-reward" | "eval" | "generate" as command,
            *rest,
        ]:
            schema = SCHEMAS[command]
            recipe, overrides = split_recipe([w for w in rest if w not in ("--dry-run", "-m")], None)
            for each in [run.overrides for run in members(overrides)] if "-m" in rest else [overrides]:
                loaded = load_config(schema, recipe, each, checked=False)
                wrong = [each for each in problems(loaded.config) if not _is_not_here(each)]
                assert not wrong, f"{block.place}: {wrong}"
        case ["whet", command, *rest]:
            group = get_command(app)
            there = group.get_command(Context(group), command)  # type: ignore[attr-defined]
            assert there is not None, f"{block.place}: there is no `whet {command}`"
            _, found, _ = group.resolve_command(Context(group), [command])  # type: ignore[attr-defined]
            found.make_context(command, rest)
        case ["make", *targets]:
            there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            asked = {each for each in targets if "=" not in each}
            assert asked <= there, f"{block.place}: no target {asked - there}"
        case [pip, "install", *rest] if pip.rpartition("/")[2] == "pip":
            pyproject = (ROOT / "pyproject.toml").read_text()
            for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(rest)):
                assert all(re.search(rf"^{name} = \[", pyproject, re.MULTILINE) for name in extra.split(",")), extra
        case ["python" | "python3", "-m", "venv", _]:
            pass
        case _:
            raise AssertionError(f"{block.place}: {shlex.join(words)} cannot be checked; mark the block skip")


def _is_not_here(error: ConfigError) -> bool:
    """Tells whether a path of the reader's is missing, or a library that is theirs to install."""
    is_folder = error.key in ("model.path", "trainer.resume") and isinstance(error.found, str)
    return is_folder or str(Path.cwd()) in str(error.found) or "run pip install" in error.change


def logical_lines(code: str) -> list[str]:
    """Commands, one a line, without comments and with continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", code)
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _is_plain(code: str) -> bool:
    """Whether all that it says is `whet ...`, without anything for a shell to do."""
    lines = logical_lines(code)
    unquoted = [re.sub(r"'[^']*'|\"[^\"]*\"", "", line) for line in lines]
    return all(line.split()[0] == "whet" for line in lines) and not SHELL & set("".join(unquoted))


@contextlib.contextmanager
def _captured() -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


def _read_json(block: Block) -> None:
    try:
        json.loads(block.code)
    except ValueError:
        for line in block.code.splitlines():
            json.loads(line)
