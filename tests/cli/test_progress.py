# SPDX-License-Identifier: Apache-2.0
"""Commands that may take more than two seconds announce their phases, with counts where there are any."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from whet.cli.app import main
from whet.phases import counted, watching
from whet.plugins.serving import server
from whet.tracking import console as progress


class Seen:
    """The phases that a command announced, each with its last count."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[int, int] | None] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self.phases.setdefault(name, None)
        yield
        self._open.pop()

    def count(self, done: int, total: int, note: str) -> None:
        self.phases[self._open[-1]] = done, total


def phases_of(*arguments: str) -> dict[str, tuple[int, int] | None]:
    seen = Seen()
    with watching(seen.phase, seen.count), pytest.raises(SystemExit):
        main(arguments)
    return seen.phases


@pytest.mark.slow
def test_plan_counts_the_settings_that_it_tries_and_doctor_says_that_it_checks(
    model_folder: Path, tmp_path: Path
) -> None:
    given = ["quickstart", f"model.path={model_folder}", f"trainer.run_dir={tmp_path / 'run'}", "rollout.n=2"]
    found = phases_of("plan", *given, "--device-memory", "0.01")
    done, total = found["settings that reduce memory"] or (0, 0)
    assert next(iter(found)) == "planning" and done == total > 1
    assert next(iter(phases_of("doctor", *given))) == "checking"


def test_models_are_made_exported_and_served(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert phases_of("init-model", str(tmp_path / "model"), "--size", "nano") == {"making the model": None}
    assert phases_of("export", str(tmp_path / "nothing"), str(tmp_path / "out")) == {"exporting": None}
    monkeypatch.setattr(server._Server, "run", lambda self, bound: self._engine.stop())
    assert next(iter(phases_of("serve", str(model_folder), "--port", "0"))) == "loading the model"


def test_a_check_of_a_reward_counts_its_parts() -> None:
    done, total = phases_of("check-reward", "exact_match", "--timeout", "5")["checking"] or (0, 0)
    assert done == total > 5


@pytest.mark.slow
def test_certificates_are_counted() -> None:
    done, total = phases_of("algorithms", "certify")["certificates"] or (0, 0)
    assert done == total > 50


def test_the_work_of_a_command_is_drawn_on_a_terminal_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr(progress, "shared_console", lambda: console)
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.0)
    shown = progress.LongPhases
    made: list[progress.LongPhases] = []
    monkeypatch.setattr(progress, "LongPhases", lambda *given: made.append(shown(*given)) or made[0])
    with progress.long_phase("planning"):
        counted(3, 8)
        made[0].refresh()
    assert "planning" in written.getvalue() and "3/8" in written.getvalue()
