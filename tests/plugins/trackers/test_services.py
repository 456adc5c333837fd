# SPDX-License-Identifier: Apache-2.0
"""Every service with its own library: killed, resumed, and read back with the library."""

from __future__ import annotations

import csv
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peers.peer import interpreter
from tests.plugins.trackers.services_worker import rows, value

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "services_worker.py"
NAME = "critic/score/mean"
Curve = list[tuple[int, float]]
Told = dict[int, list[dict[str, Any]]]  # tables by step


def run_worker(folder: Path, service: str, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """The output of a process that logs to the service; the arguments may have it killed."""
    python = interpreter("WHET_TRACKIO_VENV", ".venv-trackio") if service == "trackio" else Path(sys.executable)
    settings = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    keep = {name: each for name, each in os.environ.items() if not name.startswith(("WANDB", "SWANLAB", "MLFLOW"))}
    done = subprocess.run(
        [str(python), str(WORKER), str(folder), service, *map(str, arguments)],
        env={**keep, "PYTHONPATH": str(WORKER.parents[3]), **(settings if environment is None else environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if "kill" in arguments else 0), done.stderr[-3000:]
    return done.stdout + done.stderr


def read_tensorboard(folder: Path) -> tuple[Curve, Told]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert "trainer" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    told: Told = {}
    for event in events.Tensors("generations/rollout/text_summary"):
        head, _, *lines = event.tensor_proto.string_val[0].decode().splitlines()
        columns = [title.strip() for title in head.strip("| ").split("|")]
        told[event.step] = [dict(zip(columns, line[2:-2].split(" | "), strict=True)) for line in lines]
    return [(event.step, event.value) for event in events.Scalars(NAME)], told


def read_wandb(folder: Path) -> tuple[Curve, Told]:
    """The newest folder of an offline run, which has it from the start, and the tables of all."""
    from wandb.proto.wandb_internal_pb2 import Record

    curve: Curve = []
    folders = sorted((folder / "wandb").glob("offline-run-*"))
    for block in _blocks(next(folders[-1].glob("*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(block)
        if record.WhichOneof("record_type") == "run":
            assert (record.run.project, record.run.display_name) == ("project", "sevens")
            assert json.loads({item.key: item.value_json for item in record.run.config.update}["rollout"])["n"] == 4
        if record.WhichOneof("record_type") == "history":
            numbers = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            curve += [(record.history.step.num, numbers[NAME])] if NAME in numbers else []
    told: Told = {}
    for path in (folder / "wandb").glob("offline-run-*/files/media/table/generations/*.json"):
        table = json.loads(path.read_text())
        step = int(path.name.split("_")[1])
        told[step] = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return curve, told


def _blocks(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_mlflow(folder: Path) -> tuple[Curve, Told]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    run_id = json.loads((folder / "trackers.json").read_text())["mlflow"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "sevens"
    assert run.data.params["rollout.n"] == "4"
    artifacts = folder / "mlflow" / "artifacts" / run_id / "artifacts"
    assert json.loads((artifacts / "config.json").read_text())["rollout"]["n"] == 4
    told = {int(path.stem[-6:]): list(csv.DictReader(path.open())) for path in (artifacts / "generations").iterdir()}
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, NAME)), told


def read_swanlab(folder: Path) -> tuple[Curve, Told]:
    """As with wandb."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    curve: Curve = []
    folders = sorted((folder / "swanlab").glob("run-*"))
    reader = DataStoreReader()
    reader.open(next(folders[-1].glob("*.swanlab")))
    for block in reader:
        record = Record()
        record.ParseFromString(block)
        if record.WhichOneof("record_type") == "start":
            assert (record.start.project, record.start.name) == ("project", "sevens")
        if record.WhichOneof("record_type") == "scalar" and record.scalar.key == NAME:
            curve.append((record.scalar.step, record.scalar.value.number))
    told: Told = {}
    for path in (folder / "swanlab").glob("run-*/media/echarts/*.json"):
        told[int(path.name[:3])] = json.loads(path.read_text())["rowData"]
    return curve, told


def read_trackio(folder: Path) -> tuple[Curve, Told]:
    curve: Curve = []
    told: Told = {}
    database = sqlite3.connect(folder / "trackio" / "project.db")
    for name, step, text in database.execute("select run_name, step, metrics from metrics order by step"):
        metrics = json.loads(text)
        assert name == "sevens"
        curve += [(step, metrics[NAME])] if NAME in metrics else []
        if "generations/rollout" in metrics:
            told[step] = metrics["generations/rollout"]["_value"]
    return curve, told


READERS: dict[str, Callable[[Path], tuple[Curve, Told]]] = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "swanlab": read_swanlab,
    "trackio": read_trackio,
}


@pytest.mark.parametrize("service", READERS)
def test_a_killed_run_goes_on_in_the_same_curve(service: str, tmp_path: Path) -> None:
    """Steps 0 to 6, a checkpoint after 3, a kill; then 4 to 9, of which 4 to 6 are taken again."""
    run_worker(tmp_path, service, -1, 6, "kill")
    first = json.loads((tmp_path / "trackers.json").read_text())
    run_worker(tmp_path, service, 3, 9)
    assert json.loads((tmp_path / "trackers.json").read_text()) == first
    curve, told = READERS[service](tmp_path)
    assert curve == [(step, value(step)) for step in range(10)]
    assert {4, 6, 8} <= told.keys() <= {0, 2, 4, 6, 8}
    for step, table in told.items():
        assert [each["prompt"] for each in table] == [row["prompt"] for row in rows(step)]
        assert [each["failure"] for each in table] == ["", "reward: late"]
        assert float(table[0]["reward"]) == 0.5 and table[0]["accuracy"] in ("", None)
        escaped = "&lt;b&gt;&#124;&#96;2&#96;<br>3, &quot;4&quot;&lt;/b&gt;"
        assert table[0]["response"] == (escaped if service == "tensorboard" else rows(step)[0]["response"])


@pytest.mark.parametrize("service", ["mlflow", "swanlab", "trackio", "wandb"])
def test_a_fresh_start_is_another_run(service: str, tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        run_worker(tmp_path, service, -1, 2)
        ids.append(json.loads((tmp_path / "trackers.json").read_text())[service])
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("service", "words"),
    [("wandb", "WANDB_API_KEY"), ("swanlab", "SWANLAB_API_KEY")],
)
def test_without_a_key_nobody_is_asked_for_one(service: str, words: str, tmp_path: Path) -> None:
    """On a terminal, where the libraries would ask."""
    master, terminal = os.openpty()
    keep = {name: each for name, each in os.environ.items() if not name.startswith(("WANDB", "SWANLAB"))}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), service, "-1", "2"],
        env={**keep, "PYTHONPATH": str(WORKER.parents[3]), "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")},
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(terminal)
    os.close(master)
    assert done.returncode == 1 and "ConfigError" in done.stderr and words in done.stderr
    assert f"{service.upper()}_MODE=offline" in done.stderr


def test_a_service_that_breaks_on_the_way_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from whet.tracking.service import TrackedRun, open_services

    [tracker] = open_services(["mlflow"], TrackedRun(tmp_path, "project", "sevens", {}))
    tracker.log(1, {NAME: value(1)})
    sqlite3.connect(tmp_path / "mlflow" / "mlflow.db").executescript("drop table metrics; drop table latest_metrics")
    for step in (2, 3):
        tracker.log(step, {NAME: value(step)})
    tracker.close()
    messages = [record.message for record in caplog.records if record.name == "whet.tracking.service"]
    assert len(messages) == 2 and "no such table: " in messages[0]
    assert messages[1].startswith("mlflow failed in ") and messages[1].endswith(" of 4 calls")
