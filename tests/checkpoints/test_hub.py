# SPDX-License-Identifier: Apache-2.0
"""Uploads to the hub, against a server on this machine that speaks its API."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import whet
from tests.checkpoints.hub_server import TOKEN, Hub, running_hub
from whet.checkpoints.hub import Uploads

ROWS = [{"prompt": "1+1=", "response": "2"}]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def run_dir(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"data.max_length": 64, "data.train_batch_size": 1, "trainer.total_steps": 1}
    folder = tmp_path_factory.mktemp("hub") / "run"
    whet.sft(data=ROWS, **{"model.path": str(model_folder), "trainer.run_dir": str(folder)}, **settings)
    return folder


def whet_command(hub_url: str, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its settings once, when it is imported."""
    settings = {"HF_ENDPOINT": hub_url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **settings, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "whet", *words], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_an_exported_folder_is_uploaded_byte_by_byte(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = whet_command(hub.url, "export", str(run_dir), str(out), "--hub", "me/model", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"wrote {out}", f"uploaded it to {hub.url}/me/model"]
    written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert hub.files["me/model"] == written
    assert "model.safetensors" in written and hub.private == {"me/model": True}


@pytest.mark.slow
def test_a_failed_upload_says_why_and_how_to_go_on(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = whet_command(hub.url, "export", str(run_dir), str(out), "--hub", "me/model", token="hf_wrong")
    assert done.returncode == 2
    assert "401" in done.stderr and f"hf upload me/model {out}" in done.stderr
    assert (out / "model.safetensors").is_file()  # nothing is lost


@pytest.mark.slow
def test_a_run_uploads_its_checkpoints_and_its_model(hub: Hub, model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "response": "2"}\n')
    words = [
        *("sft", f"model.path={model_folder}", f"data.train_files={data}", "data.max_length=64"),
        *("data.train_batch_size=1", "trainer.total_epochs=2", "trainer.save_freq=1"),
        *(f"trainer.run_dir={tmp_path / 'run'}", "trainer.hub_repo=me/run"),
    ]
    done = whet_command(hub.url, *words)
    assert done.returncode == 0, done.stderr
    files = hub.files["me/run"]
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"global_step_{step}"
        own = {f"checkpoints/{folder.name}/{path.relative_to(folder)}": path for path in folder.rglob("*")}
        whole = {name: path.read_bytes() for name, path in own.items() if path.is_file()}
        assert {name: files[name] for name in whole} == whole
    exported = whet.export(tmp_path / "run", tmp_path / "out")
    assert files["model.safetensors"] == (exported / "model.safetensors").read_bytes()
    assert hub.private == {"me/run": True}


def test_a_hub_that_hangs_keeps_no_program_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads that wait behind it are not begun."""
    begun, ends, before = list[Path](), threading.Event(), set(threading.enumerate())

    def hangs(folder: Path, repo: str, **options: object) -> None:
        begun.append(folder)
        ends.wait(10.0)

    monkeypatch.setattr("whet.checkpoints.hub.upload", hangs)
    monkeypatch.setattr("whet.checkpoints.hub.CLOSE_SECONDS", 0.05)
    uploads = Uploads("me/run")
    for step in (1, 2):
        uploads.checkpoint(Path(f"global_step_{step}"))
    uploads.close()
    own = set(threading.enumerate()) - before
    assert own and all(each.daemon for each in own)
    ends.set()
    for each in own:
        each.join(10.0)
    assert begun == [Path("global_step_1")]


@pytest.mark.slow
def test_a_hub_that_fails_ends_no_run(model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "response": "2"}\n')
    words = [
        *("sft", f"model.path={model_folder}", f"data.train_files={data}", "data.max_length=64"),
        *("data.train_batch_size=1", f"trainer.run_dir={tmp_path / 'run'}", "trainer.hub_repo=me/run"),
    ]
    done = whet_command("http://127.0.0.1:9", *words)
    assert done.returncode == 0
    [step, model] = [each for each in (done.stdout + done.stderr).splitlines() if "http://127.0.0.1:9/me/run" in each]
    assert "global_step_1" in step and "/model: " in model
