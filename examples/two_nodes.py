# SPDX-License-Identifier: Apache-2.0
"""Simulates two machines on one: two network namespaces, each with an address and a Ray node, and a virtual cable.

    sudo .venv/bin/python examples/two_nodes.py whet train quickstart_two_nodes model.path=MODEL \\
        data.train_files=TRAIN.jsonl data.val_files=HELD_OUT.jsonl

The command runs on the first node and finds the cluster; its output is shown. When it ends, both nodes are removed.
Needs Linux, `ip` (iproute2) and permission to create namespaces. The exit status is that of the command.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HEAD, SECOND = "10.77.0.1", "10.77.0.2"
PORT = 6379
START_SECONDS = 120.0  # for Ray to start on a node


class TwoNodes:
    """The namespaces, the cable between them, and Ray in each.

    Raises: FileNotFoundError without an `ip` command, subprocess.CalledProcessError where it is not permitted."""

    def __init__(self, python_path: Sequence[Path] = (), token: str | None = None) -> None:
        self.token = secrets.token_hex(32) if token is None else token  # "": the nodes ask for none
        self.folder = Path(tempfile.mkdtemp(prefix="whet-ray-", dir="/tmp"))  # a socket's path has to be short
        self.python_path = python_path
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
        """Connects the nodes, and starts Ray on each node where it does not run."""
        self.connect("up")
        if not self.processes(HEAD, "gcs_server"):
            self.stop()
            self._ray(HEAD, "--head", f"--port={PORT}", f"--temp-dir={self.folder}", "--include-dashboard=false")
        if not self.processes(SECOND, "raylet/raylet"):
            self.end(SECOND)
            self._ray(SECOND, f"--address={HEAD}:{PORT}")

    def on_head(self, *command: str) -> list[str]:
        """Returns the command line that runs `command` on the first node; run it with `environment`."""
        return ["ip", "netns", "exec", self.names[HEAD], *command]

    def connect(self, state: str) -> None:
        """Connects (`state` "up") or cuts ("down") the cable."""
        self._ip("-n", self.names[SECOND], "link", "set", self.ends[SECOND], state)

    def processes(self, address: str, part: str = "") -> list[int]:
        """Returns the ids of a node's processes with `part` in their command line."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.names[address]], capture_output=True, text=True, check=True
        )
        return [pid for pid in map(int, listed.stdout.split()) if part in _command(pid)]

    def end(self, address: str, part: str = "") -> None:
        """Kills these processes."""
        for pid in self.processes(address, part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kills all processes of both nodes."""
        for address in self.names:
            self.end(address)

    def remove(self) -> None:
        """Stops and removes both nodes."""
        self.stop()
        for name in self.names.values():
            self._ip("netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process on a node."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = [*map(str, self.python_path), *filter(None, [own.get("PYTHONPATH")])]
        ray = {"RAY_ADDRESS": f"{HEAD}:{PORT}", "RAY_AUTH_MODE": "token" if self.token else "disabled"}
        ray |= {"RAY_AUTH_TOKEN": self.token} if self.token else {}
        return {**own, **ray, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}

    def _ray(self, address: str, *words: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        limits = ["--num-cpus=2", f"--object-store-memory={200 * 2**20}", "--disable-usage-stats"]
        command = ["ip", "netns", "exec", self.names[address], ray, "start", f"--node-ip-address={address}"]
        environment = {name: value for name, value in self.environment.items() if name != "RAY_ADDRESS"}
        subprocess.run(
            [*command, *words, *limits], check=True, capture_output=True, timeout=START_SECONDS, env=environment
        )

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


def main(command: Sequence[str]) -> int:
    """Runs `command` on the first of two nodes.  Returns its exit status."""
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        nodes = TwoNodes()
    except FileNotFoundError:
        print("there is no `ip` command: apt-get install iproute2", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"network namespaces are not permitted here: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    try:
        nodes.start()
        own = Path(sys.executable).parent / command[0]  # whet, from the environment of this Python
        words = [str(own) if own.exists() else command[0], *command[1:]]
        return subprocess.run(nodes.on_head(*words), env=nodes.environment, check=False).returncode
    finally:
        nodes.remove()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # then the nodes are removed, too
    sys.exit(main(sys.argv[1:]))
