# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from whet.cli.app import main
from whet.errors import ConfigError

COMMANDS = [
    *(
        "train",
        "sft",
        "eval",
        "init-model",
        "plan",
        "doctor",
        "config",
        "data",
        "algorithms",
        "export",
        "quickstart",
        "compare",
        "lm-eval",
    ),
]


def whet(*arguments: str) -> int:
    """Runs the command in this process and returns its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def test_help_is_a_table_of_contents(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert whet("--help") == 0
    rows = [line.strip("│ ").split("  ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    listed = {row[0]: row[1].strip() for row in rows if row[0] in COMMANDS}
    assert sorted(listed) == sorted(COMMANDS)
    assert all(sentence.endswith(".") for sentence in listed.values())  # each fits on its one line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert whet(command, "--help") == 0
    assert f"Usage: whet {command}" in capsys.readouterr().out


def test_a_mistake_is_one_block_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("train", "gsm8k", "rollout.temprature=1") == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "ConfigError: unknown key rollout.temprature (command line); did you mean rollout.temperature?\n"
    )
    assert captured.out == ""


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debug_shows_the_traceback(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "gsm8k", "rollout.temprature=1"]
    if how == "flag":
        arguments.insert(1, "--debug")
    else:
        monkeypatch.setenv("WHET_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(arguments)


def test_values_that_do_not_go_together_stop_a_run_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules));"
        "from whet.cli.app import main; main(['train', 'gsm8k', 'model.path=owner/name'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (run.returncode, run.stdout) == (2, "False\n")
    assert run.stderr.startswith("ConfigError: data.train_files is empty")


def test_python_m_whet_is_whet() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "whet", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0 and "Usage: whet" in run.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["config", "train", "gsm8k"], ["algorithms"]])
def test_what_answers_at_once_does(arguments: list[str]) -> None:
    """In under a second, in a cold process; those that a busy machine held up are started again."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "whet", *arguments], capture_output=True, timeout=60, check=True)
        return time.perf_counter() - start

    assert any(seconds() < 1.0 for _ in range(10))
