# SPDX-License-Identifier: Apache-2.0
"""The caller's code on a node: in place where it is the same there, unpacked where it is not."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from whet.controller.ray.user_code import UserCode

ROOT = Path(__file__).parents[2]
LOOK = """
import json, os, pickle, sys
pickle.load(open(sys.argv[1], "rb")).install()
import beside, below.module
print(json.dumps([beside.__file__, below.module.__file__, os.getcwd(), os.environ.get("HF_HOME")]))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with files of the user's code and other files."""
    folder = tmp_path / "project"
    files = (
        "beside.py",
        "lib/below/__init__.py",
        "lib/below/module.py",
        ".venv/hidden.py",
        "env/pyvenv.cfg",
        "env/no.py",
    )
    for name in (*files, "weights.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setattr(sys, "path", [str(folder / "lib"), "", *sys.path])
    return folder


def settled(code: UserCode, tmp_path: Path) -> list[str]:
    """The modules found by another process, started in another folder, and their places."""
    (tmp_path / "code.pickle").write_bytes(pickle.dumps(code))
    command = [sys.executable, "-c", LOOK, str(tmp_path / "code.pickle")]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HOME"}
    done = subprocess.run(
        command, cwd="/", env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def files_of(code: UserCode) -> list[Path]:
    """The files in the archive of the code."""
    return [Path("/", name) for name in zipfile.ZipFile(io.BytesIO(code.archive)).namelist()]


def test_only_the_users_python_files_travel(project: Path) -> None:
    code = UserCode.of_this_process()
    files = files_of(code)
    inside = [file.relative_to(project).as_posix() for file in files if file.is_relative_to(project)]
    assert sorted(inside) == ["beside.py", "lib/below/__init__.py", "lib/below/module.py"]
    assert not [file for file in files if "site-packages" in file.parts]


def test_what_a_node_has_is_used_in_place(project: Path, tmp_path: Path) -> None:
    beside, module, folder, home = settled(UserCode.of_this_process(), tmp_path)
    assert (beside, module) == (str(project / "beside.py"), str(project / "lib" / "below" / "module.py"))
    assert (folder, home) == (str(project), "/models")


@pytest.mark.parametrize("change", ["changed", "missing"])
def test_what_a_node_has_not_is_unpacked(project: Path, tmp_path: Path, change: str) -> None:
    code = UserCode.of_this_process()
    if change == "changed":
        (project / "beside.py").write_text("raise RuntimeError('an older version')")
    else:
        project.rename(tmp_path / "elsewhere")
    beside, module, folder, _ = settled(code, tmp_path)
    root = beside.removesuffix(str(project / "beside.py"))
    assert root.startswith("/tmp/whet-code-")
    assert (module, folder) == (f"{root}{project}/lib/below/module.py", f"{root}{project}")


def test_settings_of_libraries_travel_and_others_do_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "SGLANG_LOG_MS": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCH_LOGS": "recompiles",
        "WHET_VLLM_PYTHON": "/opt/vllm/bin/python",
    }
    kept = {"CUDA_VISIBLE_DEVICES": "3", "LD_LIBRARY_PATH": "/opt", "MY_TOKEN": "secret"}
    for name, value in (sent | kept).items():
        monkeypatch.setenv(name, value)
    environment = UserCode.of_this_process().environment
    assert {name: environment.get(name) for name in sent | kept} == sent | dict.fromkeys(kept)


def test_a_folder_of_everything_is_not_sent(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("whet.controller.ray.user_code.MAX_FILES", 2)
    assert not files_of(UserCode.of_this_process())
    [record] = [each for each in caplog.records if each.name.endswith("user_code")]
    assert record.levelno == logging.WARNING and str(project) in map(str, record.args or ())
