# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: its parts, the results of a part that is cut off, and its message without an accelerator."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Outcome, Part
from benchmarks.workers import card, card_models, card_step
from docs.generate import gpu as page

ROOT = Path(__file__).parents[2]
WHERE = {"card": "Card 1", "commit": "abc", "torch": "2.11", "memory": "1 GiB"}


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_so_and_is_content() -> None:
    before = gpu.PAGE.read_bytes(), gpu.FILE.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, gpu.NONE_HERE + "\n")
    assert (gpu.PAGE.read_bytes(), gpu.FILE.read_bytes()) == before


def test_a_part_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["speed", "fast"]) == 2
    assert "fast" in capsys.readouterr().err.partition(";")[0]


WRITES = """
import json, sys
for turn, rate in enumerate((1.0, 2.0)):
    with open('FIGURES', 'a') as file: file.write(json.dumps({'part': 'sample', 'rate': rate, 'turns': turn}) + '\\n')
print('FOLDER', flush=True)
"""


def state_of(pid: str) -> str:
    """The letter of a process's state; empty where it is gone."""
    file = Path("/proc", pid, "stat")
    return file.read_text().rpartition(")")[2].split()[0] if file.exists() else ""


@pytest.mark.slow
def test_parts_are_run_and_cut_off_and_keep_what_they_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    well = gpu.run("one", Part("", 60.0, ("-c", WRITES), figure="one"))
    assert (well.ended, well.output, well.figures["sample"]) == ("ok", "FOLDER\n", {"rate": 2.0, "turns": 1})
    assert well.figures["one"]["seconds"] == round(well.seconds, 1)
    failed = gpu.run("two", Part("", 60.0, ("-c", "import sys; print('said'); sys.exit('why')"), figure="two"))
    assert (failed.ended, failed.output, failed.figures) == ("failed with 1", "said\nwhy\n", {})
    slow = WRITES + "import subprocess as s, time; print(s.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    cut = gpu.run("three", Part("", 4.0, ("-c", slow), figure="three"))
    first, below = cut.output.splitlines()
    assert (cut.ended, first, cut.seconds < 30) == ("cut off", "FOLDER", True)
    assert state_of(below) in ("", "Z")  # its own processes end with it
    assert cut.figures == {"sample": {"rate": 2.0, "turns": 1}}
    monkeypatch.delenv("WHET_ELSEWHERE", raising=False)
    assert gpu.run("four", Part("", 9.0, ("-c", "1"), python="WHET_ELSEWHERE")).ended.startswith("not run")
    monkeypatch.setenv("WHET_ELSEWHERE", sys.executable)
    assert gpu.run("four", Part("", 9.0, ("-c", "1"), python="WHET_ELSEWHERE")).ended == "ok"


def test_a_newer_figure_takes_the_place_of_the_same_part_on_the_same_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "FILE", tmp_path / "gpu.jsonl")
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    old = [
        {"part": "sample:0.5b", "card": name, "commit": "old", "torch": "2", "tokens_per_second": 1} for name in "AB"
    ]
    gpu.FILE.write_text("".join(json.dumps(each) + "\n" for each in old))
    gpu.PAGE.write_text("# Mine\n<!-- figures -->\nold\n<!-- end of figures -->\nalso mine\n")
    figures = {
        "sample:0.5b": {"tokens_per_second": 2500.4, "top": ["a"]},
        "update:0.5b": {"mfu": 0.5, "first_seconds": 3},
    }
    gpu.keep(Outcome("speed", 1.0, "cut off", "", figures), {**WHERE, "card": "A"})
    assert gpu.page.records(gpu.FILE) == [
        old[1],
        {"part": "sample:0.5b", "card": "A", "commit": "abc", "torch": "2.11", "tokens_per_second": 2500.4},
        {"part": "update:0.5b", "card": "A", "commit": "abc", "torch": "2.11", "mfu": 0.5, "first_seconds": 3},
    ]
    lines = gpu.PAGE.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Mine", "also mine") and "old" not in lines
    assert "| work | B | A | aim |" in lines
    assert "| 512 requests, 0.5B, tokens/s | 1 | 2,500 | 80,000 |" in lines
    assert "| update, 0.5B, MFU | not measured | 50.0 % | 35 % |" in lines
    assert "- A: commit abc, torch 2.11" in lines and "- B: commit old, torch 2" in lines


def test_the_parts_without_a_name_have_eight_minutes_and_the_others_five_each() -> None:
    assert sum(part.seconds for part in gpu.PARTS.values()) == gpu.SECONDS == 480
    assert all(part.seconds >= 50 for part in gpu.PARTS.values())
    assert all(part.seconds <= 300 for part in gpu.ALONE.values()) and not gpu.PARTS.keys() & gpu.ALONE.keys()
    told = (ROOT / "docs" / "gpu.md").read_text()
    for name, part in {**gpu.PARTS, **gpu.ALONE}.items():
        assert f"| `{name}` | {part.seconds / 60:.1f} | {part.what} |" in told


def test_a_row_of_the_table_is_a_figure_of_a_part() -> None:
    parts = {word for part in (*gpu.PARTS.values(), *gpu.ALONE.values()) for word in part.arguments}
    parts |= {part.figure for part in (*gpu.PARTS.values(), *gpu.ALONE.values())}
    parts |= {f"vllm:{size}" for size in card_models.SHAPES}
    assert {figure.part for figure in page.FIGURES} <= parts


@pytest.mark.slow
def test_a_slow_part_is_cut_off_at_its_own_limit_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "keep", lambda outcome, where: None)
    monkeypatch.setattr(gpu, "place", lambda device: WHERE)
    monkeypatch.setattr(gpu.devices, "here", lambda: torch.device("meta"))
    slow, quick = Part("", 2.0, ("-c", "import time; time.sleep(60)")), Part("", 60.0, ("-c", "print('here')"))
    monkeypatch.setattr(gpu, "PARTS", {"slow": slow, "quick": quick})
    assert gpu.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  cut off") for line in lines) and any(line.startswith("  ok") for line in lines)
    assert "    here" in lines
    assert gpu.main(["quick"]) == 0


def test_the_tests_that_need_an_accelerator_are_there() -> None:
    """All that are skipped without one, by the names that pytest is given."""
    skipped = re.compile(r"@pytest\.mark\.skipif\(\s*not torch\.cuda\.is_available\(\)(?:.|\n)*?\ndef (test_\w+)")
    files = [*(ROOT / "tests").rglob("test_*.py")]
    found = {f"{file.relative_to(ROOT)}::{name}" for file in files for name in skipped.findall(file.read_text("utf-8"))}
    assert found == set(gpu.NEED_ACCELERATOR)


def test_the_work_is_the_same_for_all_engines() -> None:
    requests = card_models.workload("0.5b", 64)
    assert len(requests) == 512 and all(64 <= len(prompt) <= 256 for prompt, _ in requests)
    assert [prompt for prompt, _ in requests[:8]] == [requests[0][0]] * 8 and requests[8][0] != requests[0][0]
    assert min(length for _, length in requests) >= 64 and max(length for _, length in requests) <= 1024
    assert card_models.workload("0.5b", 64) == requests


@pytest.mark.slow
def test_whet_train_to_the_end_of_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host with the smallest model: a random one, its tokenizer, rows and the command."""
    monkeypatch.setenv("WHET_CARD_SIZE", "tiny")
    card_step.main(["start:cold"], tmp_path, tmp_path / "figures", 1)
    [line] = (tmp_path / "figures").read_text().splitlines()
    found = json.loads(line)
    assert found["part"] == "start:cold" and found["seconds"] > 1


@pytest.mark.slow
def test_the_card_worker_measures_turn_by_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, where the profiler of the device has nothing to see."""
    monkeypatch.setattr(card, "DTYPE", torch.float32)
    monkeypatch.setattr(card, "device_busy", lambda work: ([0.5], []))
    monkeypatch.setattr(card.torch.accelerator, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(card, "PROMPTS", {"tiny": 1})
    out = tmp_path / "figures"
    card.main(["sample:tiny", "update:tiny", "update:tiny:checkpoints", "log_probs:tiny"], out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert not [line for line in lines if "failed" in line]
    last = {line["part"]: line for line in lines}
    assert last["sample:tiny"]["turns"] == 3 and last["sample:tiny"]["busy"] == 0.5
    assert last["update:tiny"]["tokens_per_second"] > 0 and last["update:tiny:checkpoints"]["times_without"] > 0
    assert last["log_probs:tiny"]["tokens_per_second"] > 0
    seen = [line.get("turns") for line in lines if line["part"] == "sample:tiny"]
    assert seen == [None, 1, 2, 3, 3]  # each turn as soon as it is over
