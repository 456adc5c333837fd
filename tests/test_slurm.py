# SPDX-License-Identifier: Apache-2.0
"""The launcher of examples/slurm under a real Slurm, started for the test on one node."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "examples" / "slurm" / "train.sbatch"
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))), reason="needs Slurm: apt-get install slurm-wlm"
)
Command = Callable[..., str]
SERVERS = ("slurmctld", "slurmd")
STEPS = 40


def until(holds: Callable[[], bool], seconds: float) -> None:
    late = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < late
        time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Command]:
    """Runs a command of Slurm, with a controller and a node of its own."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in (one, other)]
    folder, user = tmp_path / "slurm", os.environ.get("USER", "root")
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    names = {"host": socket.gethostname().partition(".")[0], "cpus": os.cpu_count(), "user": user}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, ports=ports, **names))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "SLURM_CONF": f"{folder / 'slurm.conf'}", "PATH": path, "PYTHONPATH": f"{ROOT}"}
    with (folder / "said").open("w") as said:
        servers = [subprocess.Popen([name, "-D"], env=environment, stdout=said, stderr=said) for name in SERVERS]

    def run(*words: str) -> str:
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout

    try:
        until(lambda: " idle " in subprocess.run(["sinfo"], env=environment, capture_output=True, text=True).stdout, 60)
        yield run
        run("scancel", f"--user={user}")
        until(lambda: not run("squeue", "--noheader").strip(), 60)
    finally:
        for server in reversed(servers):
            server.terminate()
            server.wait(30)


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_told_to_stop_goes_on_where_it_was(slurm: Command, model_folder: Path, tmp_path: Path) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(8)))
    keys = {
        "model.path": model_folder,
        "model.dtype": "float32",
        "data.train_files": f"[{rows}]",
        "data.apply_chat_template": "false",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 4,
        "rollout.n": 2,
        "reward.function": "exact_match",
        "reward.num_workers": 0,
        "trainer.total_steps": STEPS,
        "trainer.val_freq": 0,
        "trainer.save_freq": STEPS,
        "trainer.run_dir": run,
        "trainer.logger": "[jsonl]",
    }
    words = [f"{name}={value}" for name, value in keys.items()]
    sizes = ["--nodes=1", "--gpus-per-node=0", f"--output={tmp_path / 'job.txt'}"]
    job = slurm("sbatch", "--parsable", *sizes, f"{LAUNCHER}", *words).strip()

    def steps() -> list[int]:
        file = run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def shown() -> dict[str, str]:
        return dict(word.partition("=")[::2] for word in slurm("scontrol", "show", "job", job).split())

    until(lambda: len(steps()) > 2, 240)
    slurm("scancel", "--batch", "--signal=USR1", job)
    until(lambda: (shown()["Restarts"], shown()["JobState"]) == ("1", "PENDING"), 120)
    stopped = steps()[-1]
    assert 2 < stopped < STEPS and (run / "checkpoints" / f"global_step_{stopped}").is_dir()
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # in place of two minutes later
    until(lambda: shown()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 400)
    assert shown()["JobState"] == "COMPLETED", (tmp_path / "job.txt").read_text()
    assert steps() == list(range(1, STEPS + 1))
