# SPDX-License-Identifier: Apache-2.0
"""A trainer in one file has a command, a config, a place in lists of runs, a resume and a Python function."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import whet
from docs.generate.config import reference
from tests.raising import raises
from whet import registry
from whet.cli.app import main
from whet.cli.runs import next_command
from whet.config import load_config
from whet.config.commands import commands, schema_of
from whet.errors import ConfigError, RegistryError
from whet.registry import trainer_of
from whet.tracking.runs import read_run

HERE = Path(__file__).parent
TOY, RECIPE = f"{HERE / 'toy_trainer.py'}:train_toy", str(HERE / "toy_trainer.yaml")
ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1), "weight": n / 2} for n in range(8)]


@pytest.fixture
def words(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recipe and overrides of a small run in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [RECIPE, f"model.path={model_folder}", "data.train_files=rows.jsonl", "trainer.run_dir=run"]


def command(*arguments: str) -> int:
    """Runs the command in this process and returns its exit status."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    return int(exit_.value.code or 0)


def losses(folder: str = "run") -> list[float]:
    return [json.loads(line)["toy/loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def test_its_command_trains_and_the_run_is_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(TOY, *words) == 0
    shown = capsys.readouterr().out
    assert "finished, 4 of 4 steps" in shown and "toy/loss" in shown and " trained on" in shown
    run = read_run(Path("run"))
    assert (run.command, run.best_metric, len(losses())) == (TOY, "-toy/loss", 4)
    assert command("runs", ".", "--json") == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["trainer"], listed["step"]) == (TOY, 4)
    assert command("export", "run", "exported") == 0 and Path("exported", "config.json").is_file()


def test_help_config_and_page_come_from_its_registration(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(TOY, "--help") == 0
    shown = capsys.readouterr().out
    assert "Imitate examples by their weights." in shown and "--dry-run" in shown and "--device-memory" not in shown
    assert command("config", TOY, RECIPE, "weights.lowest=0.5") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["highest:", "2.0", "#", f"{RECIPE}:8"] in lines and ["lowest:", "0.5", "#", "command", "line"] in lines
    assert command("config", TOY, "--schema") == 0
    assert json.loads(capsys.readouterr().out)["$defs"]["WeightsConfig"]["properties"].keys() == {"lowest", "highest"}
    page = reference([*commands(), TOY])
    assert f"## `whet {TOY}`" in page and "| `highest` | a number >= 0 | `1.0` |" in page
    assert page.startswith(reference().rstrip("\n"))


@pytest.mark.slow
def test_a_dry_run_and_a_plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(TOY, *words, "--dry-run") == 0
    assert "dry run: 8 examples to train on, 0 to validate on, 4 steps" in capsys.readouterr().out
    assert not Path("run").exists()
    assert command("plan", *words, "--for", TOY, "--json") == 0
    assert json.loads(capsys.readouterr().out)
    assert command("data", *words, "--for", TOY, "--rows", "1") == 0
    assert "example 0: " in capsys.readouterr().out


@pytest.mark.slow
def test_python_calls_it(model_folder: Path, tmp_path: Path) -> None:
    keys = {"model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run")}
    run = whet.run(TOY, RECIPE, data=ROWS, **keys)
    first, *_ = losses(str(tmp_path / "run"))
    assert run.step == 4 and run.history[0]["toy/loss"] == first
    half = [{**row, "weight": 0.5} for row in ROWS]
    kept = {"data.shuffle": False, "trainer.total_steps": 1, "optim.lr": 0.0}
    whole = whet.run(TOY, RECIPE, data=half, **{**keys, **kept, "trainer.run_dir": str(tmp_path / "whole")})
    sft = kept | {"data.train_batch_size": 2, "data.max_length": 32}
    sft |= {"data.apply_chat_template": False, "trainer.run_dir": str(tmp_path / "sft")}
    plain = whet.run("sft", data=ROWS, **{**keys, **sft})
    assert whole.history[0]["toy/loss"] == pytest.approx(plain.history[0]["sft/loss"] / 2)
    anchored = {"anchor_path": str(model_folder), "trainer.run_dir": str(tmp_path / "anchored")}
    compared = whet.run(TOY, RECIPE, data=ROWS, **{**keys, **anchored})
    assert compared.history[0]["toy/moved"] == 0.0 and abs(compared.history[3]["toy/moved"]) > 0.01
    assert losses(str(tmp_path / "anchored")) == losses(str(tmp_path / "run"))
    stopped = replace(read_run(tmp_path / "run"), state="stopped")
    assert next_command(stopped).startswith(f"call whet.run({TOY!r}")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_ended_early_goes_on(how: signal.Signals, words: list[str]) -> None:
    program = f"import os\n\ndef end(run):\n    if run.step == 2:\n        os.kill(os.getpid(), {int(how)})\n"
    Path("ends.py").write_text(program)
    start = [sys.executable, "-m", "whet", TOY, *words]
    ended = subprocess.run([*start, "trainer.callbacks=ends.py:end"], capture_output=True, text=True, check=False)
    assert ended.returncode == (143 if how == signal.SIGTERM else -how), ended.stderr
    assert read_run(Path("run")).state == ("stopped" if how == signal.SIGTERM else "killed")
    again = next_command(read_run(Path("run"))).split()
    assert again[1:] == [TOY, "run/config.yaml"]
    assert command(*again[1:], "trainer.callbacks=[]") == 0
    assert command(TOY, *words, "trainer.run_dir=whole") == 0
    assert losses() == losses("whole")


def test_another_trainer_or_other_code_does_not_go_on(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    source = (HERE / "toy_trainer.py").read_text().replace('register_trainer("toy"', 'register_trainer("mine"')
    Path("mine.py").write_text(source)
    assert command("mine.py:train_toy", *words, "trainer.total_steps=1") == 0
    capsys.readouterr()
    assert command("sft", *words[1:], "data.max_length=32", "trainer.total_steps=2") == 2
    assert f"whet {Path('mine.py').resolve()}:train_toy" in capsys.readouterr().err
    Path("mine.py").write_text(source.replace("clamp(", "clip("))
    assert command("mine.py:train_toy", *words, "trainer.total_steps=2") == 2
    assert "command, code in mine.py" in capsys.readouterr().err


def test_its_own_checks_are_those_of_the_config(words: list[str]) -> None:
    schema: Any = schema_of(TOY)
    with raises(ConfigError, "weights.lowest", found=3.0):
        whet.config.load_config(schema, words[0], [*words[1:], "weights.lowest=3"])
    assert schema.command == TOY


def test_an_installed_package_adds_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{train_toy.__module__}:train_toy" if (train_toy := trainer_of(TOY).load()) else ""
    monkeypatch.setitem(vars(registry.TRAINERS), "_installed", {"toys": target})
    assert command("toys", "--help") == 0
    assert "Imitate examples by their weights." in capsys.readouterr().out
    assert (trainer_of("toys").name, schema_of("toys").command) == ("toys", "toys")


def test_the_shipped_trainers_are_registered() -> None:
    assert commands() == ["train", "distill", "preference", "sft", "train-reward", "eval", "generate"]
    assert [schema_of(each).command for each in commands()] == commands()
    assert all(each.marked("setup") for each in registry.TRAINERS.shipped.values())


def test_a_function_without_a_config_is_no_trainer(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def train(config):\n    pass\n")
    with raises(RegistryError, found=re.compile("config")):
        schema_of(f"{tmp_path}/plain.py:train")


def test_a_trainer_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """Its config is written with the name that `SectionPlace` had."""
    text = (HERE / "toy_trainer.py").read_text().replace("SectionPlace", "Place")
    (tmp_path / "earlier.py").write_text(text.replace('register_trainer("toy"', 'register_trainer("earlier"'))
    schema: Any = schema_of(f"{tmp_path}/earlier.py:train_toy")
    with raises(ConfigError, "weights.lowest", found=2.0):
        load_config(schema, None, {"weights": {"lowest": 2.0, "highest": 1.0}})
