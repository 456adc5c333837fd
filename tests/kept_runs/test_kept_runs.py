# SPDX-License-Identifier: Apache-2.0
"""Runs of commit d55330f7 (make.py) go on as they did by the code of that commit, are exported, and are shown.

Weights are loaded and exported bit for bit. Numbers of further steps depend on the processor's kernels in their last
bits, so they are compared with a tolerance. Token ids are compared exactly: models are a layer, their learning rate and
AdamW's eps are large, and a token changes only where a random number lies within 1e-6 of the border of two tokens.
"""

from __future__ import annotations

import json
import math
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import load_file

from benchmarks.revision import renamed
from benchmarks.same_bits import read_weights
from tests.kept_runs.make import ARCHIVE, DIGESTS, EVAL, KEPT_STEP, LAST_STEP, RUNS
from whet.cli.app import main
from whet.plugins.viewer.records import Query, Records
from whet.tracking.console import shared_console

RENAMED: dict[
    str, str
] = {}  # config keys, metrics and fields of records, since that commit on purpose: old name -> new
# Fields of records by a pattern, and why they are not compared.
OTHER_VALUES = {
    "policy_digest": "of weights, whose last bits depend on the processor",
    "source": "the folder in which the run was made",
    "rollout/*_groups": "counted at a moment of the sampling thread",
}
SKIPPED = re.compile("|".join(name.replace("*", ".*") for name in OTHER_VALUES))
REL, ABS = 1e-3, 2e-5  # of numbers that a resumed run computes again
FAST = {"grpo"}
NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in RUNS]
BEST = {  # value of the metric that selects the best checkpoint, and its step
    "grpo": (4 / 6, 0),
    "ppo": (0.5625, 2),
    "lora": (0.625, 2),
    "async": (0.4375, 1),
    "tools": (0.5625, 2),
    "vision": (0.3125, 2),
    "sft": (4.034672737121582, 2),
    "reward": (0.3766552209854126, 2),
    "fsdp": (0.5, 2),
}
SHOWN = {  # a trajectory of step 2: uid, response, reward, turns, tokens
    "grpo": ("0:22:0", "pd7<tool_response>x667", 1.0, 1, 8),
    "ppo": ("0:0:2", "18dajx86", 1.0, 1, 8),
    "lora": ("0:0:2", "18dbhv4-", 1.0, 1, 8),
    "async": (
        "0:0:2",
        "18ddmw76q2:lsystemrp6wbyly<tool_call>bbe=+u8<calc>8<tool_response>=>.system26xa 0x/byp>)y2y1md*s+)))k",
        *(1.0, 1, 64),
    ),
    "tools": (
        "0:0:2",
        "<calc>5*7</calc> <calc>5*7</calc><|im_end|>35*7</calc></tool_call><calc>5n<|im_end|>",
        *(1.0, 2, 20),
    ),
    "vision": ("0:6:1", "4h?4", 1.0, 1, 4),
    "fsdp": ("0:0:2", "17k>iw76", 1.0, 1, 8),
}
PRINTED = {"tools": ["<calc>5*7</calc> <calc>5*7</calc>\n", " 35\n", "*7</calc></tool_call><calc>5n\n"]}  # its turns
WITH_TOKENS = {"grpo", "tools", "vision"}  # runs that logged each token
STATES = {name: "killed" if run.is_killed else "finished" for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive in a folder of its own, for tests that only read it."""
    return unpack(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def read_only(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes into the unpacked archive: paths in the configs of the runs are relative to it."""
    monkeypatch.chdir(unpacked)
    monkeypatch.setenv("COLUMNS", "200")
    shared_console.cache_clear()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Goes into an unpacked archive of the test's own."""
    monkeypatch.chdir(unpack(tmp_path))
    return tmp_path


def unpack(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as files:
        files.extractall(folder, filter="data")
    return folder


def whet(*words: str) -> None:
    """Runs a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main([renamed(word, RENAMED) for word in words])
    assert not ended.value.code, " ".join(words)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def differences(found: Any, expected: Any, where: str = "") -> Iterator[str]:
    """The places at which values differ: numbers with a point by more than the tolerance. Fields may be added."""
    if SKIPPED.fullmatch(where.rpartition(" ")[2]):
        return
    if isinstance(expected, float) and isinstance(found, float | int):
        if not math.isclose(found, expected, rel_tol=REL, abs_tol=ABS):
            yield f"{where}: {found}, expected {expected}"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for name, value in expected.items():
            yield from differences(found.get(RENAMED.get(name, name)), value, f"{where} {name}")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for number, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{where}:{number}")
    elif found != expected:
        yield f"{where}: {found!r}, expected {expected!r}"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_as_it_did_by_its_own_code(name: str, kept: Path) -> None:
    """By its config.yaml, which has every key of that time."""
    run_dir, expected = Path("runs", name), Path("expected", name)
    command = RUNS[name].words[0]
    whet(command, f"{run_dir}/config.yaml", f"trainer.run_dir={run_dir}", f"trainer.total_steps={LAST_STEP}")
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.jsonl"))
    wrong = [
        f"{file}{place}" for file in files for place in differences(records(run_dir / file), records(expected / file))
    ]
    assert not wrong, "\n".join(wrong)
    assert records(run_dir / "metrics.jsonl")[-1]["step"] == LAST_STEP
    whet("export", str(run_dir), "out", *(["--base", "models/text"] if name == "lora" else []))
    weights, theirs = load_file("out/model.safetensors"), load_file(expected / "exported" / "model.safetensors")
    torch.testing.assert_close(weights, theirs, rtol=REL, atol=1e-4)


@pytest.mark.slow
def test_the_command_that_began_a_run_continues_it(kept: Path) -> None:
    whet(*RUNS["grpo"].words, "trainer.run_dir=runs/grpo", "trainer.total_steps=3")
    [*_, last] = records(Path("runs/grpo/metrics.jsonl"))
    expected = records(Path("expected/grpo/metrics.jsonl"))[3]
    assert last["step"] == 3 and not [*differences(last, expected)]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("read_only")
def test_a_checkpoint_is_exported_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Of an adapter its own weights, since the sums of their products depend on the processor."""
    folder = Path("runs", name, "checkpoints", f"global_step_{KEPT_STEP}")
    is_adapter = name == "lora"
    whet("export", str(folder), str(tmp_path / "out"), *(["--adapter", "--base", "models/text"] if is_adapter else []))
    [file] = (tmp_path / "out").glob("*.safetensors")
    assert dict(read_weights(file)) == json.loads(DIGESTS.read_text())[name]


@pytest.mark.usefixtures("read_only")
def test_an_asynchronous_checkpoint_has_groups_that_were_begun() -> None:
    """Scored ones, and episodes in the middle of a response, which the resumed run above continues."""
    stream = json.loads(Path("runs/async/checkpoints/global_step_2/trainer.json").read_text())["rollouts"]["stream"]
    assert [(entry["step"], entry["is_kept"]) for entry in stream] == [(3, True)] * 4 + [(4, True)] * 2 + [
        (4, False)
    ] * 2
    assert [len(entry["samples"]) for entry in stream] == [4] * 6 + [0] * 2
    partial = [each["token_ids"] for entry in stream for each in entry["partial"].values()]
    assert [len(each) for each in partial] == [7] * 8, "of at most 64 tokens"


@pytest.mark.usefixtures("read_only")
def test_a_run_is_evaluated_as_by_its_own_code(tmp_path: Path) -> None:
    whet(*EVAL, f"output={tmp_path}")
    found, expected = tmp_path, Path("expected/eval")
    assert not [*differences(records(found / "answers.jsonl"), records(expected / "answers.jsonl"))]
    assert json.loads((found / "summary.json").read_text()) == json.loads((expected / "summary.json").read_text())


@pytest.mark.usefixtures("read_only")
def test_runs_are_listed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whet("runs", "runs", "--json")
    listed = {Path(each["path"]).name: each for each in json.loads(capsys.readouterr().out)}
    assert {name: each["state"] for name, each in listed.items()} == STATES
    assert {each["step"] for each in listed.values()} == {KEPT_STEP}
    assert {name: (each["best"], each["best_step"]) for name, each in listed.items()} == BEST
    whet("plot", "runs", "-m", "critic/score/mean", "-m", "sft/loss", "-o", str(tmp_path / "curves.png"))
    assert imread(tmp_path / "curves.png").std() > 0.01, "something is drawn"
    assert "of 9 runs" in capsys.readouterr().out


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("name", SHOWN)
def test_trajectories_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By `whet show`, and to the page of `whet view`."""
    uid, response, reward, turns, tokens = SHOWN[name]
    whet("show", f"runs/{name}", "--step", "2", "--limit", "100")
    printed = capsys.readouterr().out
    assert uid in printed and all(text in printed for text in PRINTED.get(name, [response]))
    found = Records(Path("runs", name))
    assert found.steps()["step"] == [1, 2]
    [row] = [each for each in found.page(Query(step=2), 0, 100)["rows"] if each["uid"] == uid]
    assert (row["response"], row["reward"], row["turns"], row["tokens"]) == (response, reward, turns, tokens)
    shown = found.trajectory("step", 2, row["line"])
    assert shown["record"]["response"] == response
    for media in shown["record"].get("media", []):
        assert found.media(media["digest"]).read_bytes()[1:4] == b"PNG"
    logged = ["".join(each["tokens"]) for each in shown["tokens"]]
    assert logged == ([response] if name in WITH_TOKENS else [])
