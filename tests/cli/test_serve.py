# SPDX-License-Identifier: Apache-2.0
"""`whet serve` before it serves."""

from __future__ import annotations

import builtins
import json
import re
import socket
import sys
from pathlib import Path

import pytest

from whet.cli.app import main


def error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error output of a command."""
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *map(str, arguments)])
    printed = capsys.readouterr().err
    assert exit_.value.code == 2, printed
    return printed


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"ModelError: {tmp_path}/none" in error(capsys, tmp_path / "none", "--port", 0)
    (tmp_path / "empty").mkdir()
    assert f"CheckpointError: {tmp_path}/empty" in error(capsys, tmp_path / "empty", "--port", 0)


def test_a_port_that_is_taken(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = error(capsys, model_folder, "--port", port)
    assert re.search(rf"ConfigError: 127\.0\.0\.1:{port}: .*\(Address already in use\).*--port \(0: ", found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "nativ"], "nativ; .*'native'"),
        (["--option", "kv_cache_byte=3"], "--option.kv_cache_byte=3; .*'kv_cache_bytes'"),
        (["--option", "kv_cache_bytes=many"], "--option.kv_cache_bytes: many; .* whole number"),
        (["--option", "compile"], "--option: compile .*--option KEY=VALUE"),
        (["--option", "compile={"], "--option compile={: "),
        (["--tool-parser", "herms"], "herms; .*'hermes'"),
        (["--tool-parser", "none.py:mine"], r"none\.py: "),
        (["--follow"], "--follow"),
        (["--best"], "run.*--best"),
        (["--folder", "ck"], "--folder"),
        (["--tinker", "--best"], "--best"),
        (["--tinker", "--max-tokens", "5"], "--max-tokens"),
        (["--tinker", "--tool-parser", "hermes"], "--tool-parser"),
        (["--host", "999.1.1.1"], "999.1.1.1:0"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(message, error(capsys, model_folder, "--port", 0, *arguments))


def test_a_run_without_validation_has_no_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run" / "checkpoints" / "global_step_3"
    folder.mkdir(parents=True)
    (folder / "trainer.json").write_text(json.dumps({"step": 3}))
    (folder / "manifest.json").write_text("{}")
    assert "is damaged" in error(capsys, folder, "--port", 0)


def test_the_extra_that_is_not_installed(
    model_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return before(name, *rest, **more)  # type: ignore[arg-type]

    for name in [name for name in sys.modules if name.startswith(("whet.plugins.serving", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    found = error(capsys, model_folder)
    assert re.match(r"ConfigError: uvicorn: .* pip install .*\[serve\]'", found)


def test_too_little_memory_is_named(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = error(capsys, model_folder, "--port", 0, "--option", f"kv_cache_bytes={2**60}")
    assert re.search("EngineError: rollout engine: .*memory.*--max-running.*kv_cache_bytes", found)
