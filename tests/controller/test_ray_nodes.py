# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes, each in a network namespace of this machine with an address of its own; then one fault after another.

What is killed and cut here is a process or a cable between the two: Ray and the driver know no more than they would of
two machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
HEAD, SECOND = "10.77.0.1", "10.77.0.2"
PORT = 6379
NAMED_SECONDS = 10.0
DRIVER = """
import json, sys, time
from controller_workers import Actor
from whet.config.cluster import ClusterConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.errors import WhetError
from whet.protocol import DataProto
import torch

def say(**values):
    print(json.dumps(values), flush=True)

if __name__ == "__main__":
    cluster = ClusterConfig(backend="ray", address="{head}:{port}", nnodes=2, deadline_seconds={deadline})
    actor = launch_roles([WorkerSpec("actor", Actor)], cluster)["actor"]
    rows = DataProto.from_dict({{"value": torch.arange(9)}}, {{"name": list("abcdefghi")}})
    total = actor.total(rows)["total"].tolist()
    say(total=total, pids=[pid for pid, _ in actor.process()], addresses=actor.where())
    if sys.argv[1] == "call":
        call = actor.start("weak_link", 1, "sleep")
    say(ready=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        if sys.argv[1] == "call":
            call.result()
        time.sleep(float(sys.stdin.readline()))
        actor.zero(name="too late")
    except WhetError as error:
        say(kind=type(error).__name__, said=str(error), seconds=time.monotonic() - began)
    actor.close()
    say(closed=True)
"""


class TwoNodes:
    """The namespaces, the cable between them, and Ray in each."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="whet-ray-", dir="/tmp"))  # a socket's path has to be short
        self.names = {HEAD: f"whet-{os.getpid()}-a", SECOND: f"whet-{os.getpid()}-b"}
        self.ends = {HEAD: f"wv{os.getpid()}a", SECOND: f"wv{os.getpid()}b"}
        for name in self.names.values():
            self._ip("netns", "add", name)
        self._ip("link", "add", self.ends[HEAD], "type", "veth", "peer", "name", self.ends[SECOND])
        for address, name in self.names.items():
            self._ip("link", "set", self.ends[address], "netns", name)
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", self.ends[address])
            self._ip("-n", name, "link", "set", self.ends[address], "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    def start(self) -> None:
        """Whatever of the cluster is not there."""
        self.connect("up")
        if not self.processes(HEAD, "gcs_server"):
            self.stop()
            self._ray(HEAD, "--head", f"--port={PORT}", f"--temp-dir={self.folder}", "--include-dashboard=false")
        if not self.processes(SECOND, "raylet/raylet"):
            self.end(SECOND)
            self._ray(SECOND, f"--address={HEAD}:{PORT}")

    def run(self, mode: str, deadline: float = 60) -> subprocess.Popen[str]:
        """A driver on the head's node that has launched a group over both, and is at work as `mode` says."""
        path = self.folder / "driver.py"
        path.write_text(DRIVER.format(head=HEAD, port=PORT, deadline=deadline))
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[HEAD], sys.executable, str(path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "driver.log").open("w"),
            text=True,
            env=self.environment,
        )

    def connect(self, state: str) -> None:
        """The cable, up or down."""
        self._ip("-n", self.names[SECOND], "link", "set", self.ends[SECOND], state)

    def processes(self, address: str, part: str = "") -> list[int]:
        """Those of a node whose command has `part` in it."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[address]], capture_output=True, text=True, check=True
        )
        return [pid for pid in map(int, listed.stdout.split()) if part in _command(pid)]

    def end(self, address: str, part: str = "") -> None:
        """Kills them."""
        for pid in self.processes(address, part):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def stop(self) -> None:
        """Nothing runs any more."""
        for address in self.names:
            self.end(address)

    def remove(self) -> None:
        """Nothing is left."""
        self.stop()
        for name in self.names.values():
            self._ip("netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        return {**own, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}

    def _ray(self, address: str, *words: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        limits = ["--num-cpus=2", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats"]
        command = ["ip", "netns", "exec", self.names[address], ray, "start", f"--node-ip-address={address}"]
        subprocess.run([*command, *words, *limits], check=True, capture_output=True, timeout=120, env=self.environment)

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    try:
        nodes = TwoNodes()
    except FileNotFoundError:
        pytest.skip("there is no `ip` command: apt-get install iproute2")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    yield nodes
    nodes.remove()


@pytest.fixture
def nodes(two_nodes: TwoNodes) -> TwoNodes:
    """Both up."""
    two_nodes.start()
    return two_nodes


def heard(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """What the driver says next."""
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line, "the driver has ended"
    found: dict[str, Any] = json.loads(line)
    return found


def go_on(driver: subprocess.Popen[str], line: str = "") -> None:
    assert driver.stdin is not None
    driver.stdin.write(f"{line}\n")
    driver.stdin.flush()


def launched(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """What the driver says of its group, once it is at work."""
    found = heard(driver)
    assert found["total"] == [36] * 9  # a collective between the nodes
    assert sorted(found["addresses"]) == [HEAD, SECOND]
    assert heard(driver) == {"ready": True}
    return found


def finished(driver: subprocess.Popen[str]) -> None:
    assert heard(driver) == {"closed": True}
    assert driver.wait(timeout=60) == 0


def test_a_group_over_two_nodes_ends_with_its_driver(nodes: TwoNodes) -> None:
    with nodes.run("call") as driver:
        pids = launched(driver)["pids"]
        assert {pid for address in (HEAD, SECOND) for pid in nodes.processes(address)} >= set(pids)
        driver.kill()  # `ip` has become it
    until = time.monotonic() + 30
    while left := set(pids) & {*nodes.processes(HEAD), *nodes.processes(SECOND)}:
        assert time.monotonic() < until, f"{left} outlive their driver"
        time.sleep(0.1)


def test_the_doctor_looks_at_every_node(nodes: TwoNodes) -> None:
    command = ["ip", "netns", "exec", nodes.names[HEAD], sys.executable, "-m", "whet", "doctor", "--cluster"]
    command += [f"cluster.address={HEAD}:{PORT}", "cluster.nnodes=3", f"trainer.run_dir={nodes.folder / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=nodes.environment)
    assert done.returncode == 1, done.stderr
    _, _, said = done.stdout.partition("\ncluster\n")
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert (
        f"problem nodes 2 at {HEAD}:{PORT}; cluster.nnodes=3: add nodes with ray start --address={HEAD}:{PORT}" in lines
    )
    assert [line for line in lines if line.startswith("node ")] == [f"node {HEAD}", f"node {SECOND}"]
    for line in (
        "ok torch " + version("torch"),
        f"ok files {nodes.folder}, where runs are written",
        "ok network connects to every other node",
    ):
        assert lines.count(line) == 2, (line, lines)


@pytest.mark.parametrize("mode", ["call", "idle"])
def test_a_network_that_is_cut_is_named(nodes: TwoNodes, mode: str) -> None:
    with nodes.run(mode) as driver:
        rank = launched(driver)["addresses"].index(SECOND)
        nodes.connect("down")
        go_on(driver)
        if mode == "idle":
            go_on(driver, str(NAMED_SECONDS))
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        lost = f"the node of actor rank {rank} on {SECOND} is lost: {SECOND}:"
        assert lost in found["said"]
        assert "the machine is gone, or the network to it is cut" in found["said"]
        assert found["seconds"] < NAMED_SECONDS + 1
        finished(driver)


def test_a_node_that_is_gone_is_named(nodes: TwoNodes) -> None:
    with nodes.run("call") as driver:
        rank = launched(driver)["addresses"].index(SECOND)
        nodes.end(SECOND)  # everything there
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        assert f"actor rank {rank} on {SECOND}" in found["said"]
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)


def test_a_head_that_is_gone_is_named(nodes: TwoNodes) -> None:
    with nodes.run("call") as driver:
        launched(driver)
        nodes.end(HEAD, "gcs_server")
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        assert f"the head of the Ray cluster is lost: nobody listens at {HEAD}:{PORT} any more" in found["said"]
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)
