# SPDX-License-Identifier: Apache-2.0
"""The container files name versions, extras, files and commands that exist; nothing here needs a daemon."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.docs.pages import ROOT, Block, check_command
from tests.plugins.planner.test_scale import recipe
from whet.config import TrainConfig, load_config
from whet.config.cluster import processors_of
from whet.plugins.planner.first import bytes_of, host_bytes
from whet.plugins.planner.scale import places

DOCKERFILES = ["Dockerfile", "Dockerfile.gpu"]
JOBS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
# Of ray.io/v1 RayJob in KubeRay v1.7.0 (github.com/ray-project/kuberay, Apache-2.0, commit 59d663ae): the schema of
# helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml without status and descriptions, as JSON.
SCHEMA = ROOT / "tests" / "rayjob_schema.json.gz"


def arguments(name: str) -> dict[str, str]:
    """The defaults of a Dockerfile's ARGs."""
    return dict(re.findall(r"^ARG (\w+)=(.*)$", (ROOT / name).read_text(), re.MULTILINE))


def pinned(package: str) -> str:
    """The version of a package in constraints.txt."""
    return re.findall(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]


@pytest.fixture(params=JOBS, ids=[path.stem for path in JOBS])
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(request.param.read_text(encoding="utf-8"))
    return found


def closed(schema: Any) -> Any:
    """A schema of Kubernetes as JSON Schema, which refuses fields without a name; the server would drop them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        found.setdefault("additionalProperties", False)
    return found


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(closed(json.loads(gzip.decompress(SCHEMA.read_bytes()))))


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


def test_the_job_is_one_of_kuberays_schema(job: dict[str, Any], validator: Draft202012Validator) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert [error.json_path for error in validator.iter_errors(job)] == []
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned("ray")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec.rayClusterSpec.workerGroupSpecs.0.replica", 8),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replicas", "8"),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources.limit", {}),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.volumes.0.emptyDir", []),
        ("spec.shutdownAfterJobFinished", True),
    ],
)
def test_the_schema_refuses_slips(
    job: dict[str, Any], validator: Draft202012Validator, field: str, value: object
) -> None:
    *path, last = field.split(".")
    changed = json.loads(json.dumps(job))
    inner = changed
    for name in path:
        inner = inner[int(name) if name.isdecimal() else name]
    inner[last] = value
    [error] = validator.iter_errors(changed)
    assert error.json_path.removeprefix("$.").replace("[", ".").replace("]", "").startswith(".".join(path))


def test_the_pods_are_those_that_the_command_asks_for(job: dict[str, Any]) -> None:
    command = shlex.split(job["spec"]["entrypoint"])
    check_command(command, Block(JOBS[0], 1, "yaml", "", "", "", ""))
    assert command[:2] == ["whet", "train"]
    config = load_config(TrainConfig, command[2], command[3:], checked=False).config
    cluster = job["spec"]["rayClusterSpec"]
    pods, cpus = list[dict[str, Any]](), list[float]()
    for group in cluster["workerGroupSpecs"]:
        pods += [group["template"]["spec"]] * group["replicas"]
    assert config.cluster.backend == "ray" and len(pods) == config.cluster.nnodes
    for pod, gpus in zip(pods, config.cluster.gpus, strict=True):
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"] and resources["limits"].get("nvidia.com/gpu", 0) == gpus
        cpus.append(resources["limits"]["cpu"])
    assert all(number <= cpus[node] for node, number in processors_of(config.cluster.slots()).items())
    for each in (cluster["headGroupSpec"]["template"]["spec"], *pods):
        (container,) = each["containers"]
        assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in each["volumes"]]
        assert container["image"].rpartition("/")[2] == "whet:gpu"
        assert str(each["securityContext"]["runAsUser"]) == arguments("Dockerfile.gpu")["UID"]
    assert str(config.trainer.run_dir).startswith("/shared/")


def test_a_large_recipe_fits_into_its_nodes(tmp_path: Path) -> None:
    """The bytes that its ranks keep on the host, by the formulas of the plan, fit beside the memory of /dev/shm."""
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "qwen3_235b.yaml").read_text(encoding="utf-8"))
    command = shlex.split(job["spec"]["entrypoint"])
    config, shape = recipe("qwen3_235b_a22b_math_gspo", tmp_path, command[4:])
    pod = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    gib = {
        "limit": pod["containers"][0]["resources"]["limits"]["memory"],
        "shm": pod["volumes"][1]["emptyDir"]["sizeLimit"],
    }
    room = {name: int(value.removesuffix("Gi")) * 2**30 for name, value in gib.items()}
    assert host_bytes(config, shape) == round(shape["weights"] * 16 / 32 * 8) < 0.7 * (room["limit"] - room["shm"])
    assert bytes_of(config, shape, True, 131.0) < 131 * 2**30
    found = [*places(config)]
    assert [(each.pool, each.node, each.devices) for each in found[-2:]] == [
        ("sample", 7, tuple(range(8))),
        ("score", 8, ()),
    ]
