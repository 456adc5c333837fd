# SPDX-License-Identifier: Apache-2.0
"""Two Ray nodes, each in a network namespace of this machine with an address of its own; then one fault after another.

What is killed and cut here is a process or a cable between the two: Ray and the driver know no more than they would of
two machines.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from examples.two_nodes import HEAD, PORT, SECOND, TwoNodes

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
NAMED_SECONDS = 10.0
DRIVER = """
import json, sys, time
from controller_workers import Actor
from whet.config.cluster import ClusterConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.errors import WhetError
from whet.batch import Batch
import torch

def say(**values):
    print(json.dumps(values), flush=True)

if __name__ == "__main__":
    cluster = ClusterConfig(backend="ray", address="{head}:{port}", nnodes=2, deadline_seconds={deadline})
    actor = launch_roles([WorkerSpec("actor", Actor)], cluster)["actor"]
    rows = Batch.of({{"value": torch.arange(9)}}, {{"name": list("abcdefghi")}})
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
        actor.say(name="too late")
    except WhetError as error:
        say(kind=type(error).__name__, said=str(error), seconds=time.monotonic() - began)
    actor.close()
    say(closed=True)
"""
REWARDS = """
import json, sys, time
from controller_workers import Actor
from whet.config.cluster import ClusterConfig
from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.errors import WhetError
from whet.roles.placed import PlacedRewards, RewardWorker
from whet.types import RewardItem

def say(**values):
    print(json.dumps(values), flush=True)

def shown(outcome):
    return [outcome.reward, outcome.parts["network"]] if "reward" in vars(outcome) else outcome.message

if __name__ == "__main__":
    config = RewardConfig(function="graders.py:compute_score", num_workers=2, timeout_seconds=3.0)
    specs = [WorkerSpec("actor", Actor), WorkerSpec("reward", RewardWorker, (config, None, ModelConfig()))]
    pools = [("train", {{"roles": ["actor"]}}), ("judge", {{"roles": ["reward"]}})]
    for _ in range(10):  # Ray chooses the nodes, and the head is not to be ended
        cluster = ClusterConfig(
            backend="ray", address="{head}:{port}", nnodes=2, placement=dict(pools), deadline_seconds={deadline}
        )
        roles = launch_roles(specs, cluster)
        if roles["actor"].where() == ["{head}"]:
            break
        roles["actor"].close()
        pools.reverse()
    scorer = PlacedRewards(roles["reward"])
    answers = [str(i) for i in range(40)] + ["hang", "raise", "41"]
    pending = [scorer.submit_batch([RewardItem("s", text, text) for text in answers]) for _ in range(6)]
    say(scored=[[shown(each) for each in batch.result()] for batch in pending])
    late = scorer.submit_batch([RewardItem("s", sys.argv[1], "1")])
    say(ready=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        late.result()
    except WhetError as error:
        say(kind=type(error).__name__, said=str(error), seconds=time.monotonic() - began)
    roles["actor"].close()
    say(closed=True)
"""
ENVIRONMENTS = """
import json, sys, time
from controller_workers import Actor
from whet.config.cluster import ClusterConfig
from whet.config.environment import EnvironmentConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import WorkerSpec
from whet.environments.protocol import Answer
from whet.errors import WhetError
from whet.roles.placed import EnvironmentWorker, placed_hosts
from whet.types import Message, Prompt

def say(**values):
    print(json.dumps(values), flush=True)

def results(host, count):
    found = {{}}
    while len(found) < count:
        found.update(host.poll(1.0))
    return found

if __name__ == "__main__":
    config = EnvironmentConfig(name="worlds.py:World", step_seconds=3.0)
    specs = [WorkerSpec("actor", Actor), WorkerSpec("environment", EnvironmentWorker, (config,))]
    is_again = sys.argv[1] == "again"  # three ranks, two of them on the node that ends
    games = {{"roles": ["environment"], "processes": 3 if is_again else 1}}
    pools = [("train", {{"roles": ["actor"]}}), ("games", games)]
    for _ in range(10):  # Ray chooses the nodes, and the head is not to be ended
        cluster = ClusterConfig(
            backend="ray", address="{head}:{port}", nnodes=2, placement=dict(pools), deadline_seconds={deadline}
        )
        roles = launch_roles(specs, cluster)
        if roles["actor"].where() == ["{head}"]:
            break
        roles["actor"].close()
        pools.reverse()
    host = placed_hosts(roles["environment"], config)[""]
    prompt = Prompt("0:0", 0, (Message("user", "?"),), (1,), "s", None)
    names = [str(number) for number in range(20)]
    for name in names:
        host.start(name, prompt, 0)
    results(host, 20)
    for name in names:
        host.step(name, Answer("hang" if name == "7" else name))
    found = results(host, 20)
    said = [found[name] for name in names]
    say(stepped=[each.fields["network"] if "done" in vars(each) else each.message for each in said])
    asked = names if is_again else ["0"]
    for name in asked:
        host.step(name, Answer(sys.argv[1]))
    say(ready=True)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        found = results(host, len(asked))
        said = [found[name] for name in asked]
        say(stepped=[each.fields["network"] if "done" in vars(each) else each.message for each in said])
    except WhetError as error:
        say(kind=type(error).__name__, said=str(error), seconds=time.monotonic() - began)
    roles["actor"].close()
    say(closed=True)
"""
WORLDS = """
import os, time
from whet.environments.protocol import Observation
class World:
    def reset(self, prompt, seed): return Observation(False)
    def step(self, answer):
        if answer.text == "hang": time.sleep(1000)
        if answer.text == "again": time.sleep(2)  # until the node has ended
        return Observation(False, fields={"network": int(os.readlink("/proc/self/ns/net")[5:-1])})
"""
GRADERS = """
import os, time
def compute_score(solution_str, ground_truth):
    if solution_str == "hang": time.sleep(1000)
    if solution_str == "raise": raise ValueError("no")
    if solution_str == "fatal": os._exit(3)
    return {"reward": float(solution_str), "network": int(os.readlink("/proc/self/ns/net")[5:-1])}
"""


def run(nodes: TwoNodes, mode: str, deadline: float = 60, driver: str = DRIVER) -> subprocess.Popen[str]:
    """A driver on the head's node that has launched a group over both, and is at work as `mode` says."""
    path = nodes.folder / "driver.py"
    path.write_text(driver.format(head=HEAD, port=PORT, deadline=deadline))
    (nodes.folder / "graders.py").write_text(GRADERS)
    (nodes.folder / "worlds.py").write_text(WORLDS)
    return subprocess.Popen(
        nodes.on_head(sys.executable, str(path), mode),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(nodes.folder / "driver.log").open("w"),
        text=True,
        env=nodes.environment,
        cwd=nodes.folder,
    )


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    try:
        nodes = TwoNodes([HERE, HERE.parents[1]])
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
    """The next message of the driver. Between its lines Ray may write about a node that an earlier test killed."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError("the driver has ended")


def go_on(driver: subprocess.Popen[str], line: str = "") -> None:
    assert driver.stdin is not None
    driver.stdin.write(f"{line}\n")
    driver.stdin.flush()


def launched(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """The driver's report about its group, once it works."""
    found = heard(driver)
    assert found["total"] == [36] * 9  # a collective between the nodes
    assert sorted(found["addresses"]) == [HEAD, SECOND]
    assert heard(driver) == {"ready": True}
    return found


def finished(driver: subprocess.Popen[str]) -> None:
    assert heard(driver) == {"closed": True}
    assert driver.wait(timeout=60) == 0


def test_a_group_over_two_nodes_ends_with_its_driver(nodes: TwoNodes) -> None:
    with run(nodes, "call") as driver:
        pids = launched(driver)["pids"]
        assert {pid for address in (HEAD, SECOND) for pid in nodes.processes(address)} >= set(pids)
        driver.kill()  # `ip` has become it
    until = time.monotonic() + 30
    while left := set(pids) & {*nodes.processes(HEAD), *nodes.processes(SECOND)}:
        assert time.monotonic() < until, f"{left} outlive their driver"
        time.sleep(0.1)


def test_nodes_without_a_token(nodes: TwoNodes) -> None:
    """RAY_AUTH_MODE=disabled on every machine, the other way of docs/cluster.md."""
    token, nodes.token = nodes.token, ""
    nodes.stop()
    try:
        nodes.start()
        with run(nodes, "idle") as driver:
            launched(driver)
            driver.kill()
    finally:
        nodes.token = token
        nodes.stop()


def test_the_doctor_looks_at_every_node(nodes: TwoNodes) -> None:
    command = nodes.on_head(sys.executable, "-m", "whet", "doctor", "--cluster")
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
        f"ok files {nodes.folder}, the folder of runs",
        "ok network connects to every other node",
    ):
        assert lines.count(line) == 2, (line, lines)


@pytest.mark.parametrize("mode", ["call", "idle"])
def test_a_network_that_is_cut_is_named(nodes: TwoNodes, mode: str) -> None:
    with run(nodes, mode) as driver:
        rank = launched(driver)["addresses"].index(SECOND)
        nodes.connect("down")
        go_on(driver)
        if mode == "idle":
            go_on(driver, str(NAMED_SECONDS))
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        assert re.search(rf"node of actor rank {rank} on {SECOND}: .*\({SECOND}:", found["said"])
        assert "the machine or the network to it is down" in found["said"]
        assert found["seconds"] < NAMED_SECONDS + 1
        finished(driver)


def test_a_node_that_is_gone_is_named(nodes: TwoNodes) -> None:
    with run(nodes, "call") as driver:
        rank = launched(driver)["addresses"].index(SECOND)
        nodes.end(SECOND)  # everything there
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        assert f"actor rank {rank} on {SECOND}" in found["said"]
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)


def test_a_head_that_is_gone_is_named(nodes: TwoNodes) -> None:
    with run(nodes, "call") as driver:
        launched(driver)
        nodes.end(HEAD, "gcs_server")
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError"
        assert re.search(f"head of the Ray cluster: .*no process listens at {HEAD}:{PORT} any more", found["said"])
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)


def test_rewards_on_another_node(nodes: TwoNodes) -> None:
    """They are scored there, in order, and a bad answer fails alone; the end of the node ends the run."""
    with run(nodes, "hang", driver=REWARDS) as driver:
        scored = heard(driver)["scored"]
        assert len(scored) == 6
        network = str(Path(f"/proc/{nodes.processes(SECOND)[0]}/ns/net").readlink())
        for batch in scored:
            *first, hung, raised, last = batch
            assert [reward for reward, _ in (*first, last)] == [*range(40), 41.0]
            assert {f"net:[{where:.0f}]" for _, where in (*first, last)} == {network}
            assert hung == "timed out after 3 s" and raised.startswith("ValueError: no")
        assert heard(driver) == {"ready": True}
        nodes.end(SECOND)
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError" and f"on {SECOND}" in found["said"] and "reward" in found["said"]
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)


def test_episodes_of_a_lost_node_begin_again_elsewhere(nodes: TwoNodes) -> None:
    """Of three ranks two are on the second node; the actor and the third are on the head."""
    with run(nodes, "again", driver=ENVIRONMENTS) as driver:
        assert len([each for each in set(heard(driver)["stepped"]) if " 3 s" not in str(each)]) == 2
        assert heard(driver) == {"ready": True}
        nodes.end(SECOND)
        go_on(driver)
        head = str(Path(f"/proc/{nodes.processes(HEAD)[0]}/ns/net").readlink())
        stepped = heard(driver)["stepped"]
        stepped.pop(7)  # its step hangs again
        assert {f"net:[{where}]" for where in stepped} == {head} and len(stepped) == 19
        finished(driver)


def test_environments_on_another_node(nodes: TwoNodes) -> None:
    """Episodes step there, and one that hangs fails alone; the end of the node ends the run."""
    with run(nodes, "hang", driver=ENVIRONMENTS) as driver:
        stepped = heard(driver)["stepped"]
        network = str(Path(f"/proc/{nodes.processes(SECOND)[0]}/ns/net").readlink())
        assert re.match("step .* 3 s", stepped.pop(7))
        assert {f"net:[{where:.0f}]" for where in stepped} == {network} and len(stepped) == 19
        assert heard(driver) == {"ready": True}
        nodes.end(SECOND)
        go_on(driver)
        found = heard(driver)
        assert found["kind"] == "LostWorkerError" and f"on {SECOND}" in found["said"] and "environment" in found["said"]
        assert found["seconds"] < NAMED_SECONDS
        finished(driver)
