# SPDX-License-Identifier: Apache-2.0
"""The dtype that `auto` stands for: by instructions of processors, accelerators, nodes, and the run that is resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.raising import raises
from whet import devices
from whet.config import TrainConfig, load_config
from whet.config.commands import commands, schema_of
from whet.config.compose import flatten, folders
from whet.errors import ConfigError
from whet.planning.dtypes import choose, with_dtypes
from whet.trainers.build import train
from whet.trainers.frame import with_named_dtypes

Rows = list[dict[str, str]]
SetMachine = Callable[..., None]


@pytest.fixture
def set_machine(monkeypatch: pytest.MonkeyPatch) -> SetMachine:
    """Sets the processor's features as listed by Linux, the subset that torch's kernels use, and accelerators."""

    def make(features: str = "avx2", capability: str = "AVX512", accelerators: int = 0, **environment: str) -> None:
        monkeypatch.setattr(devices, "instruction_set", lambda: f"flags : fpu {features}")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(devices, "count", lambda: accelerators)
        monkeypatch.setattr(devices, "accelerates_bfloat16", lambda: True)
        for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return make


def loaded(**overrides: Any) -> TrainConfig:
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(TrainConfig, None, {"model.path": "m", **values}, given={"data", "reward"}).config


def dtypes(config: Any) -> tuple[str, str]:
    return config.model.dtype, config.rollout.dtype


@pytest.mark.parametrize(
    ("features", "capability", "limit", "expected"),
    [
        ("avx2", "AVX2", "", []),
        ("avx2 avx512f avx512_vnni", "AVX512", "", []),  # AVX-512 alone
        ("avx512f avx512_bf16", "AVX512", "", ["avx512_bf16"]),
        ("avx512f avx512_bf16 amx_bf16", "AVX512", "", ["amx_bf16", "avx512_bf16"]),
        ("avx512f avx512_bf16", "AVX2", "", []),  # ATEN_CPU_CAPABILITY=avx2
        ("avx512f avx512_bf16", "DEFAULT", "", []),
        ("avx512f avx512_bf16", "AVX512", "AVX2", []),
        ("avx512f avx512_bf16", "AVX512", "avx512_core", []),  # oneDNN reads it in any case
        ("avx512f avx512_bf16", "AVX512", "AVX512_CORE_VNNI", []),
        ("avx512f avx512_bf16", "AVX512", "AVX512_CORE_BF16", ["avx512_bf16"]),
        ("avx512f avx512_bf16", "AVX512", "ALL", ["avx512_bf16"]),
        ("asimd sve bf16", "SVE256", "", ["bf16"]),  # Arm
        ("asimd bf16", "DEFAULT", "", ["bf16"]),
        ("asimd sve", "SVE256", "", []),
    ],
)
def test_instructions_are_those_that_torch_uses(
    features: str, capability: str, limit: str, expected: Sequence[str], set_machine: SetMachine
) -> None:
    set_machine(features, capability, **({"ONEDNN_MAX_CPU_ISA": limit} if limit else {}))
    assert devices.bfloat16_instructions() == expected


def test_the_older_name_of_the_limit_holds_too(set_machine: SetMachine) -> None:
    set_machine("avx512_bf16", DNNL_MAX_CPU_ISA="AVX2")
    assert devices.bfloat16_instructions() == []


@pytest.mark.parametrize(("machine", "expected"), [("avx2", "float32"), ("avx512_bf16", "bfloat16")])
def test_auto_is_the_machines_own_in_every_command(machine: str, expected: str, set_machine: SetMachine) -> None:
    set_machine(machine)
    for schema in map(schema_of, commands()):
        config = schema()
        named: Any = with_dtypes(config)
        assert {each.dtype for _, each in named.sections() if "dtype" in each} == {expected}, schema
        assert {each.dtype for _, each in config.sections() if "dtype" in each} == {"auto"}, schema


def test_every_recipe_leaves_the_choice_to_the_machine() -> None:
    for path in (path for folder in folders() for path in folder.rglob("*.yaml")):
        assert not [key for key, _ in flatten(yaml.safe_load(path.read_text())) if key.endswith(".dtype")], path


@pytest.mark.parametrize(
    ("processes", "accelerators", "expected"), [(1, 1, "bfloat16"), (2, 1, "float32"), (2, 2, "bfloat16")]
)
def test_accelerators_count_where_each_process_has_one(
    processes: int, accelerators: int, expected: str, set_machine: SetMachine
) -> None:
    """With fewer than processes a run computes on the host."""
    set_machine("avx2", accelerators=accelerators)
    assert dtypes(with_dtypes(loaded(cluster__processes=processes))) == (expected, expected)
    assert choose("auto", "--dtype") == "bfloat16"  # this process alone


def test_an_accelerator_without_instructions_for_it_trains_in_float32(
    set_machine: SetMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_machine("avx512_bf16", accelerators=1)
    monkeypatch.setattr(devices, "accelerates_bfloat16", lambda: False)
    assert dtypes(with_dtypes(loaded())) == ("float32", "float32")


@pytest.mark.parametrize(
    ("nodes", "gpus", "expected"),
    [
        ({"10.0.0.1": ["avx512_bf16"], "10.0.0.2": []}, 0, "float32"),
        ({"10.0.0.1": ["avx512_bf16"], "10.0.0.2": ["amx_bf16"]}, 0, "bfloat16"),
        ({}, 0, "float32"),  # a cluster that the run starts: this machine
        ({"10.0.0.1": []}, 1, "bfloat16"),  # the nodes' accelerators, which the driver may lack
    ],
)
def test_one_node_without_instructions_decides_for_all_ranks(
    nodes: dict[str, list[str]], gpus: int, expected: str, set_machine: SetMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.controller.ray import survey

    set_machine("avx2")
    monkeypatch.setattr(survey, "bfloat16_by_node", lambda cluster: nodes)
    config = loaded(cluster__backend="ray", cluster__n_gpus_per_node=gpus)
    assert dtypes(with_dtypes(config)) == (expected, expected)


def test_what_is_named_stays_and_the_sampler_follows_the_model(set_machine: SetMachine) -> None:
    set_machine("avx512_bf16")
    assert dtypes(with_dtypes(loaded(model__dtype="float32"))) == ("float32", "float32")
    assert dtypes(with_dtypes(loaded(rollout__dtype="float32"))) == ("bfloat16", "float32")
    assert dtypes(with_dtypes(loaded(model__dtype="float32", rollout__dtype="bfloat16"))) == ("float32", "bfloat16")
    assert dtypes(with_dtypes(loaded(rollout__dtype=None))) == ("bfloat16", "bfloat16")  # configs of older versions


def test_bfloat16_without_instructions_is_warned_of_and_what_is_chosen_is_said(
    set_machine: SetMachine, caplog: pytest.LogCaptureFixture
) -> None:
    def told(level: int) -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno == level]
        caplog.clear()
        return found

    caplog.set_level("INFO", logger="whet")
    set_machine("avx2")
    assert dtypes(with_dtypes(loaded(model__dtype="bfloat16"))) == ("bfloat16", "bfloat16")
    [line] = told(logging.WARNING)
    assert "model.dtype=bfloat16" in line and "rollout" not in line
    with_dtypes(loaded(model__dtype="float32", rollout__dtype="bfloat16"))
    assert ["rollout.dtype=bfloat16" in each for each in told(logging.WARNING)] == [True]
    with_dtypes(loaded())
    assert (["float32" in each for each in told(logging.INFO)], told(logging.WARNING)) == ([True], [])
    set_machine("avx512_bf16")
    with_dtypes(loaded(model__dtype="bfloat16"))
    assert not told(logging.WARNING)


@pytest.mark.slow
def test_a_plan_for_accelerators_elsewhere_is_in_bfloat16(set_machine: SetMachine, model_folder: Path) -> None:
    from whet.plugins.planner.forecast import forecast_of

    set_machine("avx2")
    config = loaded(model__path=str(model_folder), data__max_prompt_length=16, data__max_response_length=8)
    assert dtypes(forecast_of(config).setup.config) == ("float32", "float32")
    elsewhere = forecast_of(config, device_gib=80).setup
    assert dtypes(elsewhere.config) == ("bfloat16", "bfloat16") and elsewhere.roles["actor"].dtype == "bfloat16"


def test_a_resumed_run_keeps_its_dtype_on_another_machine(
    set_machine: SetMachine, model_folder: Path, tmp_path: Path, additions: Rows
) -> None:
    def start(folder: str, **more: Any) -> str:
        small: dict[str, Any] = {"data.apply_chat_template": False, "data.train_batch_size": 2}
        small |= {"data.max_prompt_length": 16, "data.max_response_length": 4}
        small |= {"rollout.n": 2, "reward.num_workers": 0, "trainer.val_freq": -1, "trainer.logger": ["jsonl"]}
        small |= {"model.path": str(model_folder), "trainer.run_dir": str(tmp_path / folder)}
        config = load_config(TrainConfig, None, small | more, given={"data", "reward"}).config
        train(config, data=additions, reward=lambda solution_str: float(len(solution_str)))
        return str(yaml.safe_load((tmp_path / folder / "config.yaml").read_text())["model"]["dtype"])

    set_machine("avx2")
    assert start("run", **{"trainer.total_steps": 1}) == "float32"
    set_machine("avx512_bf16")
    assert start("run", **{"trainer.total_steps": 2}) == "float32"
    last = str(tmp_path / "run" / "checkpoints" / "global_step_2")
    assert start("from", **{"trainer.total_steps": 3, "trainer.resume": last}) == "float32"
    fresh = loaded(model__path=str(model_folder), trainer__run_dir=str(tmp_path / "run"), trainer__resume="overwrite")
    assert with_named_dtypes(fresh).model.dtype == "bfloat16"


def test_weights_kept_in_bfloat16_need_a_machine_that_multiplies_it(set_machine: SetMachine, tmp_path: Path) -> None:
    config = loaded(actor__optim__weight_rounding="kahan", trainer__run_dir=str(tmp_path / "run"))
    set_machine("avx512_bf16")
    assert with_named_dtypes(config).model.dtype == "bfloat16"
    set_machine("avx2")
    with raises(ConfigError, "actor.optim.weight_rounding", found="kahan"):
        with_named_dtypes(config)
