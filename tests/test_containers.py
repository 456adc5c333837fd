# SPDX-License-Identifier: Apache-2.0
"""The container files name versions, extras, files and commands that exist; nothing here needs a daemon."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT, Block, check_command

DOCKERFILES = ["Dockerfile", "Dockerfile.gpu"]
JOB = ROOT / "examples" / "kubernetes" / "rayjob.yaml"
# Fields of ray.io/v1 that the example has, as https://ray-project.github.io/kuberay/reference/api/ names them.
FIELDS = {
    "RayJobSpec": {
        "entrypoint",
        "backoffLimit",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "rayClusterSpec",
    },
    "RayClusterSpec": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "HeadGroupSpec": {"rayStartParams", "template"},
    "WorkerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}


def arguments(name: str) -> dict[str, str]:
    """The defaults of a Dockerfile's ARGs."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", (ROOT / name).read_text(), re.MULTILINE))


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    return re.findall(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture
def job() -> dict[str, Any]:
    return yaml.safe_load(JOB.read_text(encoding="utf-8"))


def test_the_versions_are_those_of_the_other_files() -> None:
    versions = arguments("Dockerfile.gpu")
    assert versions["TORCH"] == pinned("torch")
    assert f"vllm=={versions['VLLM']}\n" in (ROOT / "Makefile").read_text()
    page = (ROOT / "docs" / "containers.md").read_text()
    assert re.findall(r"^\| `([A-Z]+)` \| ([\d.]+) \|", page, re.MULTILINE) == [
        (name, versions[name]) for name in ("CUDA", "TORCH", "VLLM")
    ]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_extras_exist_and_are_told(name: str) -> None:
    extras = arguments(name)["EXTRAS"].split(",")
    known = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras) <= set(known)
    assert ", ".join(f"`{extra}`" for extra in extras) in (ROOT / "docs" / "containers.md").read_text()


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_build_gets_the_files_that_it_copies_and_no_others(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert all((ROOT / each).exists() for each in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored.index("*") < ignored.index("!whet")
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install -e '.[dev-services]'")
    found = subprocess.run([hadolint, "--no-color", ROOT / name], capture_output=True, text=True, check=False)
    assert not found.stdout and not found.returncode, found.stdout


def test_the_job_has_fields_of_kuberay(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for kind, found in zip(FIELDS, (job["spec"], cluster, head, workers), strict=True):
        assert set(found) == FIELDS[kind], kind
    assert cluster["rayVersion"] == pinned("ray")


def test_the_pods_are_those_that_the_command_asks_for(job: dict[str, Any]) -> None:
    command = shlex.split(job["spec"]["entrypoint"])
    check_command(command, Block(JOB, 1, "yaml", "", "", "", ""))
    settings = dict(word.split("=", 1) for word in command if "=" in word)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    assert settings["cluster.backend"] == "ray"
    assert workers["replicas"] == int(settings["cluster.nnodes"])
    for kind in ("requests", "limits"):
        gpus = pod["containers"][0]["resources"][kind]["nvidia.com/gpu"]
        assert gpus == int(settings["cluster.n_gpus_per_node"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    for each in (head, pod):
        (container,) = each["containers"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in each["volumes"]]
        assert container["image"].rpartition("/")[2] == "whet:gpu"
        assert str(each["securityContext"]["runAsUser"]) == arguments("Dockerfile.gpu")["UID"]
    assert settings["trainer.run_dir"].startswith("/shared/")
