# SPDX-License-Identifier: Apache-2.0
"""The first answer of `whet plan` against the traced plans of docs/fits.md, and how soon it is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import fits
from whet.config import TrainConfig, load_config
from whet.plugins.planner import first
from whet.plugins.planner.first import CARDS, bytes_of, first_answer

TRACED = fits.read(Path(fits.PAGE).read_text(encoding="utf-8"))


def model(folder: Path, size: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fits.shape(size)))
    return folder


def config_of(folder: Path, **changes: object) -> TrainConfig:
    values = {**fits.COMMON, "model.path": str(folder), "reward.function": "math", **changes}
    return load_config(TrainConfig, None, values, given={"data"}, checked=False).config


@pytest.mark.parametrize("size", fits.SIZES)
def test_formulas_are_within_a_fifth_of_traced_plans(size: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", size)
    shape = first.shape_of(str(folder))
    assert shape is not None
    for card in fits.SHOWN:
        for (name, changes), cell in zip(fits.COLUMNS.items(), TRACED[str(card)][size], strict=True):
            needed = bytes_of(config_of(folder, **changes), shape, True, CARDS[card]) / 2**30
            if cell == "-":
                assert needed > 0.8 * CARDS[card], (name, card, needed)
            else:
                assert abs(needed / float(cell.split()[0]) - 1) < 0.2, (name, card, needed, cell)
    needed = bytes_of(config_of(folder, **fits.HOST), shape, False) / 2**30
    assert abs(needed / float(TRACED["host"][size][0].split()[0]) - 1) < 0.2


def test_it_says_whether_it_fits_on_which_card_and_what_helps(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", "8B")
    eight = {"cluster.processes": 8, "model.gradient_checkpointing": False, "rollout.free_cache_engine": False}
    said, settings, where = first_answer(config_of(folder, **eight), 80.0, None)
    assert "of 80 GiB" in said and "does not fit" in said and "docs/fits.md" in where
    listed = [(each.partition("=")[0], float(re.findall(r"([\d.]+) GiB", each)[0])) for each in settings.split(", ")]
    assert "actor.engine.name" in listed[0][0] and len(listed) == 3
    assert [left for _, left in listed] == sorted(left for _, left in listed)
    assert listed[-1][1] < float(re.findall(r"([\d.]+) GiB", said)[0])
    said, *_ = first_answer(config_of(folder, **fits.ADAPTER), 80.0, None)
    shape = first.shape_of(str(folder))
    assert shape is not None
    adapter = config_of(folder, **fits.ADAPTER)
    needed = {card: bytes_of(adapter, shape, True, gib) / 2**30 for card, gib in CARDS.items()}
    card = next(card for card, gib in CARDS.items() if needed[card] <= gib)
    assert float(re.findall(r"([\d.]+) GiB", said)[0]) == pytest.approx(
        bytes_of(adapter, shape, True, 80) / 2**30, abs=0.06
    )
    assert "it fits" in said and "smaller model" not in said and f"has {card} GB" in said
    assert "24.0 GiB" not in said and not list(first_answer(config_of(tmp_path / "nowhere"), 80.0, None))


@pytest.mark.parametrize(
    "changed",
    [{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}, {"num_key_value_heads": 16}, {}],
)
def test_weights_are_counted_as_transformers_makes_them(changed: dict[str, int], tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = "qwen3_moe" if "num_experts" in changed else "qwen3"
    (tmp_path / "config.json").write_text(json.dumps({**fits.shape("0.6B"), "model_type": kind, **changed}))
    shape = first.shape_of(str(tmp_path))
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert shape is not None and shape["weights"] == pytest.approx(made.num_parameters(), rel=0.01)


def test_it_is_there_within_two_seconds_of_the_processor(tmp_path: Path) -> None:
    """Processor time, so that other work on the machine does not count; one of three runs."""
    folder = model(tmp_path / "model", "8B")
    command = [sys.executable, "-m", "whet", "plan", "gsm8k", f"model.path={folder}", "--device-memory", "80"]

    def used() -> float:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            assert "GiB" in process.stdout.readline()
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            process.kill()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    assert any(used() < 2.0 for _ in range(3))


@pytest.mark.parametrize(("flags", "on_host"), [("avx2", "float32"), ("avx512_bf16 avx512f", "bfloat16")])
def test_dtype_auto_is_that_of_the_machine_that_is_planned_for(
    flags: str, on_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first, "instruction_set", lambda: flags)
    folder = model(tmp_path / "model", "0.6B")
    shape = first.shape_of(str(folder))
    assert shape is not None
    needed = {
        (name, device): bytes_of(config_of(folder, **{"model.dtype": name, "rollout.dtype": name}), shape, device)
        for name in ("auto", "float32", "bfloat16")
        for device in (True, False)
    }
    assert needed["auto", True] == needed["bfloat16", True] != needed["float32", True]
    assert needed["auto", False] == needed[on_host, False] and len(set(needed.values())) == 4
