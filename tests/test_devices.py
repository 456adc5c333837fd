# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a pretend accelerator: the numbers of the host, nothing in the wrong place, and few waits."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SMALL_RUN
from tests.device_runs import train
from whet import devices

ROOT = Path(__file__).resolve().parents[1]
KL = {"algorithm.kl.where": "loss", "algorithm.kl.coef": 0.1}
SMALL = {
    **SMALL_RUN,
    "actor.optim.lr": 1e-3,
    "actor.engine.options.compile": False,  # no compiler knows the device
    "rollout.engine": {"name": "native", "options": {"kv_cache_bytes": 2**20, "compile": False}},
    "trainer.total_steps": 2,
}
CASES: dict[str, dict[str, Any]] = {
    # Several mini-batches and micro-batches; sampling and training take turns on the device.
    "turns": {"rollout.free_cache_engine": True, "actor.mini_batch_size": 2, "actor.max_tokens_per_micro_batch": 60},
    "adapter": {**KL, "model.lora.rank": 2, "rollout.free_cache_engine": True},
    "critic": {
        "algorithm.adv_estimator": "gae",
        "algorithm.kl.where": "reward",
        "actor.max_tokens_per_micro_batch": 60,
    },
}
SLOW: dict[str, dict[str, Any]] = {
    "padded": {"actor.engine.packing": False, "actor.max_tokens_per_micro_batch": 60, **KL},
    "bfloat16": {"model.dtype": "bfloat16", "actor.optim.weight_rounding": "stochastic", "actor.optim.lr": 1e-2},
    "rounded with its error": {"model.dtype": "bfloat16", "actor.optim.weight_rounding": "kahan"},
    "another dtype to sample in": {"rollout.dtype": "bfloat16", "rollout.free_cache_engine": True},
    "moments in int8": {"actor.optim.state_dtype": "int8"},
    "muon": {"actor.optim.name": "muon"},
    "cut and penalised": {"rollout.top_p": 0.8, "rollout.top_k": 5, "rollout.repetition_penalty": 1.2},
    "hf": {"rollout.engine": {"name": "hf"}, "rollout.top_p": 0.9},
    "sizes by the device's memory": {"rollout.engine": {"name": "native", "options": {"compile": False}}},
    "entropy, sequences": {"algorithm.policy_loss": "gspo", "algorithm.entropy_coef": 0.01},
}


def on_the_device(function: str, **arguments: Any) -> dict[str, Any]:
    """The result of the function in a process where torch.accelerator finds the pretend accelerator, and its log."""
    command = [sys.executable, "-m", "tests.pretend_gpu", f"tests.device_runs:{function}", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-9000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "output": done.stdout[-9000:]}


def both(cases: dict[str, dict[str, Any]], folder: Path, tmp: Path) -> dict[str, Any]:
    """Each case on the device and on the host."""
    values = {
        where: {
            name: {**SMALL, **each, "model.path": str(folder), "trainer.run_dir": str(tmp / where / name)}
            for name, each in cases.items()
        }
        for where in ("device", "host")
    }
    there = on_the_device("train_each", cases=values["device"])["result"]
    return {name: (there[name], train(values["host"][name])) for name in cases} | {"rules": there["rules"]}


@pytest.fixture(scope="module")
def runs(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return both(CASES, model_folder, tmp_path_factory.mktemp("runs"))


def check_equal(device: dict[str, Any], host: dict[str, Any]) -> None:
    """The same tokens; metrics and weights but for rounding."""
    assert all(each["actor/grad_norm"] > 1e-3 for each in host["metrics"])
    assert device["answers"] == host["answers"]
    for ours, theirs in zip(device["metrics"], host["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    assert device["weights"] == pytest.approx(host["weights"], rel=1e-5, abs=1e-7)


def check_near(device: dict[str, Any], host: dict[str, Any]) -> None:
    """Nearly the same first step, where rounding is coarse: one other token, and all that follows is another run."""
    for name in ("actor/grad_norm", "actor/entropy", "actor/pg_loss", "response_length/mean"):
        assert device["metrics"][0][name] == pytest.approx(host["metrics"][0][name], rel=0.05, abs=1e-2), name
    assert device["weights"] == pytest.approx(host["weights"], rel=0.02, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_gives_the_numbers_of_the_host(name: str, runs: Any) -> None:
    device, host = runs[name]
    check_equal(device, host)
    assert host["lies"][-1][0] == ["cpu"] and device["lies"][-1][0] == ["gpu:0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_once_a_pass_and_never_between_micro_batches(name: str, runs: Any) -> None:
    waits = runs[name][0]["waits"]
    assert len(waits["schedule"]) >= 2 and set(waits["schedule"]) == {0}
    assert set(waits["forward_backward"]) == {0} and set(waits["step"]) == {1}  # whether the step is finite
    assert set(waits["forward"]) == {1}  # for all outputs together
    assert max(waits["_step"]) <= 2  # where no step follows; one else, whatever the number of layers
    assert sum(waits["_step"]) <= len(waits["_step"])


@pytest.mark.slow
def test_a_step_on_the_device_has_the_most_memory_of_its_process(runs: Any) -> None:
    device, host = runs["critic"]
    assert len(device["timings"]) == 2 and all(
        step["system/driver/accelerator_gib"] == 3.0 for step in device["timings"]
    )
    assert not any("accelerator" in name for step in host["timings"] for name in step)


@pytest.mark.slow
def test_what_is_trained_leaves_the_device_while_answers_are_sampled(runs: Any) -> None:
    """The weights stay where the rollout samples from them; an adapter's it has a copy of."""
    first, there, second, back, *_ = runs["turns"][0]["lies"]
    assert first == [["gpu:0"], [], 0] and there[0] == ["gpu:0"]  # nothing was updated yet
    assert second == [["gpu:0"], ["cpu"], 0] and back == [["gpu:0"], ["gpu:0"], 0]
    first, there, second, back, *_ = runs["adapter"][0]["lies"]
    assert first[0] == ["cpu"] and second == [["cpu"], ["cpu"], 0] and back == [["gpu:0"], ["gpu:0"], 0]
    [last] = runs["critic"][0]["lies"]  # it takes no turns
    assert last[:2] == [["gpu:0"], ["gpu:0"]]


@pytest.mark.slow
def test_the_pretend_accelerator_is_one(runs: Any) -> None:
    """The pretend accelerator raises where devices mix, where host code reads it, and for shapes; values of an
    unfinished copy are NaN."""
    assert runs["rules"] == [["RuntimeError"] * 2 + ["TypeError", "RuntimeError"], True, [0, 2, 4, 6], [0, 1, 2]]


@pytest.mark.slow
def test_rollout_engines_keep_to_their_suite_on_the_device() -> None:
    """New weights between responses and in the middle of one, against the model's own forward."""
    chosen = "(weights_from_outside or weights_change) and model_folder and not short"
    found = on_the_device("suite", arguments=["tests/rollout/test_engines.py", "-k", chosen])
    assert found["result"] == 0, found["output"]


@pytest.mark.slow
def test_doctor_finds_an_accelerator_of_any_kind() -> None:
    assert on_the_device("doctor_gpus")["result"] == [["GPU 0", "gpu, 64.0 GiB of 80.0 GiB free"]]


@pytest.mark.slow
def test_all_kinds_of_runs(model_folder: Path, tmp_path: Path) -> None:
    found = both(SLOW, model_folder, tmp_path)
    for name in SLOW:
        device, host = found[name]
        is_coarse = any("bfloat16" in str(each) for each in SLOW[name].values()) or name in ("muon", "moments in int8")
        (check_near if is_coarse else check_equal)(device, host)
        assert set(device["waits"]["schedule"]) == {0}, name


def test_on_a_machine_without_an_accelerator_everything_is_the_host() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    tensor = torch.ones(3)
    assert devices.here() == devices.HOST and devices.count() == 0
    assert devices.moved(tensor, devices.HOST) is tensor
    assert devices.backends("cpu") == "gloo" and devices.backends("cuda") == "cpu:gloo,cuda:nccl"


def test_no_file_names_cuda_where_it_means_the_accelerator() -> None:
    """The exceptions belong to CUDA itself: its version in `whet doctor`, the builds of torch and torchvision in a
    server's environment, handles of its memory, ranges for its own profiler, the choice among its attention kernels,
    its graphs, FlashAttention, where Triton compiles, torch's module of it, whose word on bfloat16 has an argument, and
    names that Megatron-Core writes out."""
    inside = "plugins/inference/servers/inside"
    own = {"planning/doctor.py", "tracking/profile.py", "kernels/attention.py"}
    own |= {"kernels/varlen_attention.py", "kernels/log_probs.py", "rollout/native/columns.py"}
    own |= {"devices.py", "plugins/megatron/core.py"}
    allowed = own | {f"{inside}/sitecustomize.py", f"{inside}/whet_weight_parts.py"}
    named = {
        str(path.relative_to(ROOT / "whet"))
        for path in (ROOT / "whet").rglob("*.py")
        if re.search(r"\bcuda\b", path.read_text(encoding="utf-8"))
    }
    assert named <= allowed


PAGES = """
import resource, sys, torch
from whet import devices

if sys.argv[1] == "kept":
    devices.keep_freed_memory()
for turn in range(12):
    if turn == 6:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2**18) for _ in range(64)]  # 64 MiB
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages(*words: str, **variables: str) -> int:
    """Counts the pages that a process takes from the system for tensors as large as freed ones."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    told = [sys.executable, "-c", PAGES, *words]
    found = subprocess.run(told, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    fresh = 6 * 64 * 2**20 // resource.getpagesize()
    assert _pages("kept") < fresh / 20
    if _pages("plain") > fresh / 2:  # the machine's own settings keep nothing
        assert _pages("kept", MALLOC_TOP_PAD_="131072") > fresh / 2  # the user's settings stay
