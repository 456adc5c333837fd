# SPDX-License-Identifier: Apache-2.0
"""Any change to a file of a run's folder: a resume and an export work, or end with an error that has the finding and
the remedy, and no file outside of the folder is written or copied."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.conftest import score
from whet import serialization
from whet.checkpoints import checkpoint
from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.errors import CheckpointError, WhetError
from whet.trainers.build import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
Damage = Callable[[Path, random.Random], None]
SECRET = b'{"step": 1, "mine": "alone"}\n'


def content(change: Callable[[bytes, random.Random], bytes]) -> Damage:
    return lambda path, draw: path.write_bytes(change(path.read_bytes(), draw)) and None


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data or b" ")
    for _ in range(3):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Damage] = {
    "cut": content(lambda data, draw: data[: draw.randrange(len(data) + 1)]),
    "emptied": content(lambda data, draw: b""),
    "garbage": content(lambda data, draw: draw.randbytes(200)),
    "bits flipped": content(flipped),
    "zeros": content(lambda data, draw: bytes(len(data))),
    "a list": content(lambda data, draw: b"[1, null]\n"),
    "an object": content(lambda data, draw: b"{}\n"),
    "odd values": content(lambda data, draw: b'{"step": "one", "score": [], "rollouts": 3, "model": null}\n'),
    "a number": content(lambda data, draw: b"7\n"),
    "deep": content(lambda data, draw: b'{"step":' * 9999),
    "removed": lambda path, draw: path.unlink(),
    "a folder": folder,
}


def outcome(config: TrainConfig, additions: Rows, out: Path) -> str | None:
    """Returns how an export or a resume ends that a user would call a bug; None where there is none."""
    run_dir = Path(str(config.trainer.run_dir))
    for attempt in (lambda: export(run_dir, out), lambda: train(config, reward=score, data=additions)):
        try:
            attempt()
        except WhetError as error:
            if not any(mark in str(error) for mark in ("; ", ", or ", "expected")):
                return f"no advice: {error}"
        except Exception as error:
            return repr(error)
    return None


def try_all(
    name: str,
    damage: Damage,
    finished: Path,
    config: TrainConfig,
    additions: Rows,
    tmp_path: Path,
    forged: bool = False,
) -> None:
    """Damages one file after another, each in a new copy of the run; `forged` makes the manifest anew afterwards."""
    newest = finished / "checkpoints" / "global_step_4"
    files = [path for path in newest.rglob("*") if not forged or path.name != "manifest.json"]
    if not forged:
        others = [newest.with_name("global_step_3") / name for name in ("trainer.json", "manifest.json")]
        files += [*finished.iterdir(), *others, finished / "rollouts" / "step_000004.jsonl"]
    wrong, outside = [], tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    for path in sorted(path for path in files if path.is_file()):
        run_dir = shutil.copytree(finished, tmp_path / "run")
        damage(run_dir / path.relative_to(finished), random.Random(f"{name} {path.name}"))
        if forged:
            copy = run_dir / newest.relative_to(finished)
            (copy / "manifest.json").unlink()
            checkpoint._write_manifest(copy)
        found = outcome(config, additions, tmp_path / "exported" / f"from {path.name}")
        if found is not None:
            wrong.append(f"{path.relative_to(finished)}: {found}")
        shutil.rmtree(run_dir)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": SECRET}
    exported = [path for path in (tmp_path / "exported").rglob("*") if path.is_file()]
    assert not [path for path in exported if path.read_bytes() == SECRET]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def resumed(train_config: MakeConfig) -> TrainConfig:
    """The config with which the finished run goes on for one step."""
    settings = {"actor.mini_batch_size": 2, "actor.optim.lr": 1e-6, "trainer.save_freq": 1, "trainer.save_limit": None}
    return train_config({**settings, "trainer.total_steps": 5})


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file(name: str, finished: Path, resumed: TrainConfig, additions: Rows, tmp_path: Path) -> None:
    try_all(name, DAMAGES[name], finished, resumed, additions, tmp_path, forged=False)


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "a folder"])
def test_a_damaged_file_that_the_manifest_knows(
    name: str, finished: Path, resumed: TrainConfig, additions: Rows, tmp_path: Path
) -> None:
    """Damage from before the manifest, or an attempt to look whole."""
    try_all(name, DAMAGES[name], finished, resumed, additions, tmp_path, forged=True)


@pytest.mark.parametrize("target", ["secret", "nothing"])
@pytest.mark.parametrize("forged", [False, True])
def test_a_link_in_the_place_of_a_file(
    target: str, forged: bool, finished: Path, resumed: TrainConfig, additions: Rows, tmp_path: Path
) -> None:
    def plant(path: Path, draw: random.Random) -> None:
        path.unlink()
        path.symlink_to(tmp_path / "outside" / target)

    try_all("link", plant, finished, resumed, additions, tmp_path, forged=forged)


STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": lambda state: {name: value for name, value in state.items() if name != "model"},
    "no weights": lambda state: state | {"model": {}},
    "a list of weights": lambda state: state | {"model": [*state["model"].values()]},
    "weights of text": lambda state: state | {"model": dict.fromkeys(state["model"], "text")},
    "one weight of text": lambda state: state | {"model": state["model"] | {next(iter(state["model"])): "text"}},
    "one weight of numbers": lambda state: state | {"model": state["model"] | {next(iter(state["model"])): [1.0]}},
    "text": lambda state: "text",
    "a list": lambda state: [state],
    "nothing": lambda state: None,
    "steps of text": lambda state: state | {"steps_done": "many"},
    "a fraction of a step": lambda state: state | {"skipped": 0.5},
    "no steps": lambda state: {name: value for name, value in state.items() if name != "steps_done"},
    "no optimizer": lambda state: {name: value for name, value in state.items() if name != "optimizer"},
    "an optimizer of text": lambda state: state | {"optimizer": "text"},
    "groups of text": lambda state: state | {"optimizer": state["optimizer"] | {"param_groups": "text"}},
    "a state of text": lambda state: state | {"optimizer": state["optimizer"] | {"state": {0: {"exp_avg": "text"}}}},
    "a rate of text": lambda state: state | {"optimizer": with_group(state["optimizer"], "betas", ["a", "b"])},
    "an origin of text": lambda state: state | {"start": "text"},
    "an origin without a path": lambda state: state | {"start": {"lora": {}}},
}


def with_group(optimizer: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    return optimizer | {"param_groups": [group | {name: value} for group in optimizer["param_groups"]]}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_lies(name: str, finished: Path, resumed: TrainConfig, additions: Rows, tmp_path: Path) -> None:
    run_dir = shutil.copytree(finished, tmp_path / "run")
    newest = run_dir / "checkpoints" / "global_step_4"
    serialization.save(newest / "actor.state", STATES[name](serialization.load(newest / "actor.state")))
    (newest / "manifest.json").unlink()
    checkpoint._write_manifest(newest)
    assert outcome(resumed, additions, tmp_path / "exported") is None
    if name in ("no model", "text", "nothing", "an optimizer of text"):
        with pytest.raises(CheckpointError, match=r"global_step_4/actor\.state"):
            train(resumed, reward=score, data=additions)


VALUES = ("text", [], {}, 5, None, [1, "x"], {"actor/grad_norm": "text"}, {"actor/grad_norm": ["1", "2"]})


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_saved_run_that_lies(
    value: object, finished: Path, resumed: TrainConfig, additions: Rows, tmp_path: Path
) -> None:
    """Each value of trainer.json, one after the other, and each value in it."""
    path = finished / "checkpoints" / "global_step_4" / "trainer.json"
    saved, wrong = json.loads(path.read_text()), []
    places = [(name,) for name in saved] + [
        (name, inner) for name, each in saved.items() if isinstance(each, dict) for inner in each
    ]
    for number, place in enumerate(places):
        changed = copy.deepcopy(saved)
        inner = changed
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
        run_dir = shutil.copytree(finished, tmp_path / "run")
        newest = run_dir / "checkpoints" / "global_step_4"
        (newest / "trainer.json").write_text(json.dumps(changed))
        (newest / "manifest.json").unlink()
        checkpoint._write_manifest(newest)
        found = outcome(resumed, additions, tmp_path / f"exported {number}")
        if found is not None:
            wrong.append(f"{place}: {found}")
        shutil.rmtree(run_dir)
    assert not wrong, "\n".join(wrong)
