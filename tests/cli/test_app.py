# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.first import first
from tests.raising import raises
from whet import __version__ as whet_version, registry
from whet.cli.app import main
from whet.errors import ConfigError, RegistryError
from whet.threads import SPINS

COMMANDS = [
    *(
        "train",
        "sft",
        "eval",
        "generate",
        "select",
        "distill",
        "init-model",
        "plan",
        "doctor",
        "config",
        "data",
        "algorithms",
        "rewards",
        "export",
        "runs",
        "plot",
        "show",
        "serve",
        "view",
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


@pytest.mark.shipped
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
    assert re.fullmatch("ConfigError: rollout.temprature: .*command line.* rollout.temperature.\n", captured.err)
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "gsm8k"], "whet trian: .*'train'"),
        (["xyzzy"], "whet xyzzy: .*`whet --help`"),
        (["play"], "whet play: .* pip install -e ./examples/environments"),
    ],
)
def test_an_unknown_command_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "entry_points", dict)
    assert whet(*words) == 2
    assert re.match(f"RegistryError: {message}", capsys.readouterr().err)


def test_an_installed_package_adds_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hello_command.py").write_text(
        "from whet.errors import ConfigError\n\n\ndef main(words):\n    if not words:\n"
        "        raise ConfigError('no name; give one')\n    print('hello', *words)\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "entry_points", lambda: {"whet.command": {"hello": "hello_command:main"}})
    assert whet("hello", "big", "--world") == 3
    assert capsys.readouterr().out == "hello big --world\n"
    assert whet("hello") == 2
    assert capsys.readouterr().err == "ConfigError: no name; give one\n"
    assert whet("hallo") == 2
    assert "did you mean 'hello'?" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["import sys\nsys.exit(0)\n", "def rows():\n    raise SystemExit\n"])
def test_code_of_the_user_that_exits_is_a_mistake(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], qwen25_folder: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert whet("data", f"model.path={qwen25_folder}", f"data.train_files={tmp_path}/mine.py:rows") == 2
    assert re.search(rf"{tmp_path}/mine\.py:2: .*sys\.exit\(", capsys.readouterr().err)


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debug_shows_the_traceback(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "gsm8k", "rollout.temprature=1"]
    if how == "flag":
        arguments.insert(1, "--debug")
    else:
        monkeypatch.setenv("WHET_DEBUG", "1")
    with pytest.raises(ConfigError):
        main(arguments)


def test_debug_may_come_before_a_trainer_in_a_file() -> None:
    with raises(RegistryError, re.compile("mine.py$")):
        main(["--debug", "no/mine.py:fit"])


@pytest.mark.slow
def test_values_that_do_not_go_together_stop_a_run_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules));"
        "from whet.cli.app import main; main(['train', 'gsm8k', 'model.path=owner/name'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (run.returncode, run.stdout) == (2, "False\n")
    assert run.stderr.startswith("ConfigError: data.train_files=[]; ")


def test_python_m_whet_is_whet() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "whet", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0 and "Usage: whet" in run.stdout


@pytest.mark.parametrize(
    "arguments", first(1, [["--help"], ["config", "train", "gsm8k"], ["algorithms"]], others=pytest.mark.slow)
)
def test_what_answers_at_once_does(arguments: list[str]) -> None:
    """Commands that answer at once take under a second, or on a slow machine at most four times the import of their
    libraries, in a cold process; a command that a busy machine held up is started again."""

    def seconds(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], capture_output=True, timeout=60, check=True)
        return time.perf_counter() - start

    imports = "import hydra, pydantic, rich.console, typer"
    spent = (seconds("-m", "whet", *arguments) for _ in range(10))
    assert any(each < 1.0 or each < 4 * seconds("-c", imports) for each in spent)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("--version") == 0
    assert capsys.readouterr().out == f"whet {whet_version}\n"


@pytest.mark.parametrize("command", [[], *([each] for each in COMMANDS), ["algorithms", "show"]])
def test_h_is_help_and_a_flag_has_no_type(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert whet(*command, "-h") == 0
    out = capsys.readouterr().out
    assert f"Usage: {' '.join(['whet', *command])}" in out and "<bool>" not in out and "-h" in out
    assert "list[" not in out


def test_choices_are_not_broken_inside_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert whet("init-model", "-h") == 0
    shown = [line[24:45].strip() for line in capsys.readouterr().out.splitlines()]
    assert shown[9:11] == ["<qwen2.5 | qwen3 |", "qwen3_moe | llama |"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("whet comp", ["compare"]),
        ("whet train rollout.top", ["rollout.top_p=", "rollout.top_k="]),
        ("whet eval gsm8k_e", ["gsm8k_eval"]),
        ("whet generate chunk", ["chunk_size="]),
    ],
)
def test_the_shell_completes_commands_recipes_and_keys(words: str, completed: list[str], tmp_path: Path) -> None:
    variables = {"_WHET_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    run = subprocess.run(
        [sys.executable, "-m", "whet"], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == completed


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_waiting_threads_yield_unless_the_user_says_otherwise(given: dict[str, str]) -> None:
    code = (
        "import atexit, os; from whet.cli.app import main;"
        "names = ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT', 'KMP_BLOCKTIME');"
        "atexit.register(lambda: print([os.environ.get(name) for name in names]));"
        "main(['--version'])"
    )
    bare = {name: value for name, value in os.environ.items() if name not in (*SPINS, "OMP_WAIT_POLICY")}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**bare, **given}, capture_output=True, text=True, timeout=60, check=True
    )
    expected = [given.get("OMP_WAIT_POLICY"), given.get("GOMP_SPINCOUNT"), None] if given else [None, "10000", "1"]
    assert run.stdout.splitlines()[-1] == str(expected)


def test_a_word_that_the_locale_cannot_read_is_told_with_what_to_set() -> None:
    """The C locale without Python's UTF-8 mode reads the bytes of é as two halves of surrogate pairs."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["config", "train", "quickstart", "data.prompt_key=é"]
    command = [sys.executable, "-m", "whet", *words]
    ended = subprocess.run(command, env=os.environ | plain, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "PYTHONUTF8=1" in ended.stderr and "surrogate" not in ended.stderr
