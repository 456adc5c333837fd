# SPDX-License-Identifier: Apache-2.0
"""`import whet`: the few names that users take from the package itself."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread

import whet
from tests.conftest import SMALL_RUN
from tests.first import first
from tests.raising import raises
from tests.tracking.test_runs import make_run
from whet import registry
from whet.cli.app import main
from whet.errors import ConfigError, DataError, RewardError, WhetError
from whet.version import DISTRIBUTION


def test_every_decorator_of_the_registry_can_be_taken_from_the_package() -> None:
    of_plugins = {"register_command", "register_part"}
    decorators = {name for name in vars(registry) if name.startswith("register_")} - of_plugins
    assert decorators == {name for name in vars(whet) if name.startswith("register_")}
    assert all(vars(whet)[name] == vars(registry)[name] for name in decorators)


def test_the_version_is_that_of_the_installed_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "whet/version.py"
    assert project["project"]["name"] == DISTRIBUTION == "whet-rl"
    try:
        assert version(DISTRIBUTION) == whet.__version__
    except PackageNotFoundError:
        pytest.skip("whet is on the path here, and not installed: pip install -e .")


def test_train_refuses_a_wrong_config_before_anything_is_loaded() -> None:
    with raises(ConfigError, "rollout.nn", found=re.compile(r"\(argument\)$"), change=re.compile(r"rollout\.n\?$")):
        whet.train("gsm8k", **{"rollout.nn": 8})  # type: ignore[arg-type]  # mypy spreads the mapping


def test_train_needs_no_files_and_no_reward_function_where_it_is_given_both() -> None:
    rows = [{"question": "1 + 1?", "answer": "2"}]
    with pytest.raises(ConfigError) as raised:
        whet.train("gsm8k", reward=lambda solution_str: 1.0, data=rows, **{"trainer.val_freq": 0})
    assert (raised.value.key, raised.value.found, raised.value.others) == ("model.path", None, ())


@pytest.mark.shipped
def test_every_extra_is_of_something_that_whet_uses() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "\n".join(file.read_text() for file in (root / "whet").rglob("*.py"))
    wanted = {name for name in extras if not name.startswith("dev") and name not in ("docs", "test")}
    assert wanted >= {"ray", "peft", "wandb"}
    imported = set(re.findall(r"^ *(?:import|from) ([\w.]+)", sources, re.MULTILINE))
    named = {part for module in imported for part in module.split(".")}
    for extra, package in (("video", "av"), ("verl", "tensordict")):  # their one package has another name
        named |= {extra} if package in imported else set()
    assert not [name for name in wanted if name.replace("-", "_") not in named]


def test_validation_data_may_be_handed_over_too(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    run = whet.train(
        reward=lambda solution_str: float(len(solution_str)),
        data=rows,
        val_data=rows[:2],
        **{**SMALL_RUN, "model.path": str(model_folder), "trainer.run_dir": str(tmp_path), "trainer.val_freq": 1},
        **{"trainer.total_steps": 1},
    )
    assert len(run.val_prompts) == 2
    assert ["val/reward" in record for record in run.history] == [True, True]


EXITING = '''import sys
import whet

def rows():
    sys.exit(0)
    yield {}

@whet.register_policy_loss("leaves_NAME")
def loss(log_probs, old_log_probs, advantages, response_mask, *, scale: float = 1.0):
    """Leaves."""
    sys.exit(0)

def callback(run, step, numbers):
    sys.exit(0)
'''


@pytest.mark.parametrize(
    ("key", "name"),
    [("data.train_files", "rows"), ("algorithm.policy_loss", "loss"), ("trainer.callbacks", "callback")],
)
def test_code_of_the_user_that_exits_is_a_mistake_from_python_too(
    key: str, name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.POLICY_LOSSES, "_live", dict(registry.POLICY_LOSSES._live))
    (tmp_path / "mine.py").write_text(EXITING.replace("NAME", name))
    target = f"{tmp_path}/mine.py:{name}"
    rows = None if key == "data.train_files" else [{"prompt": f"{number}+1=", "answer": "1"} for number in range(4)]
    numbers = {**SMALL_RUN, "model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run")}
    numbers |= {key: target if key == "algorithm.policy_loss" else [target], "trainer.total_steps": 1}
    place = re.compile(rf"^{name} at {tmp_path}/mine\.py:\d+$")
    with raises(WhetError, place, found=re.compile(r"sys\.exit\(0\)")):
        whet.train(reward=lambda solution_str: float(len(solution_str)), data=rows, **numbers)


def test_rows_handed_over_that_exit_are_a_mistake(model_folder: Path, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"prompt": "1+1=", "answer": "2"}
        raise SystemExit

    numbers = {**SMALL_RUN, "model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run")}
    place = re.compile(r"^rows at .*test_init\.py:\d+$")
    with raises(WhetError, place, found=re.compile(r"sys\.exit\(")):
        whet.train(reward=lambda solution_str: 1.0, data=rows(), **numbers)


def test_a_reward_of_unknown_form_is_named_by_its_argument(model_folder: Path, tmp_path: Path) -> None:
    numbers = {**SMALL_RUN, "model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run")}
    with pytest.raises(RewardError, match=r"^reward: .*<lambda>\(a, b, c\)"):
        whet.train(reward=lambda a, b, c: 1.0, data=[{"prompt": "1+1=", "answer": "2"}], **numbers)


ROWS = [{"prompt": f"{number}+1=", "response": str(number + 1), "answer": str(number + 1)} for number in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "sft"])
def test_python_prints_the_lines_of_the_command(
    command: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], additions: Any
) -> None:
    """Parameters and rows, estimated time, a line a step, where the time went, the end's table; numbers may differ."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = {"model.path": str(model_folder), "data.train_files": [str(rows)], "trainer.total_steps": 2}
    if command == "train":
        keys |= {**SMALL_RUN, "trainer.total_steps": 2, "trainer.logger": ["console"], "reward.function": "exact_match"}
    else:
        keys |= {"data.train_batch_size": 4, "data.max_length": 64}

    def lines() -> list[str]:
        shown = re.sub("run_[ab]", "run", capsys.readouterr().out)
        shown = re.sub(r"\d+(:\d+)*([.,]\d+)*( (ms|s|min|h)\b)?", "#", shown)
        found = [" ".join(line.split()) for line in shown.splitlines()]
        phases = [line for line in found if line.endswith("# #%")]  # these are in the order of their times
        return [line for line in found if line not in phases] + ["phases"] * bool(phases)

    logger = logging.getLogger("whet")
    before = (logger.level, list(logger.handlers))
    vars(whet)[command](**keys, **{"trainer.run_dir": str(tmp_path / "run_a")})
    from_python = lines()
    assert (logger.level, list(logger.handlers)) == before
    try:
        with pytest.raises(SystemExit) as exit_:
            words = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in keys.items()]
            main([command, *words, f"trainer.run_dir={tmp_path}/run_b"])
    finally:
        logger.setLevel(before[0])
        logger.handlers[:] = before[1]
    assert not exit_.value.code
    from_command = lines()
    assert from_python == from_command
    shown = "\n".join(from_command)
    assert "# k parameters" in shown and "run finished, # of # steps" in shown and "\nnext" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    first(
        1,
        [
            ({"data": 3}, r"^data\b.* int\b"),
            ({"data": "sums.jsonl"}, r"^data\b.*data\.train_files or data\.val_files"),
            ({"data": [3]}, r"^data: row 0\b.* int\b"),
            ({"data": [{"x": 1}]}, r"^data: row 0\b.*\bprompt\b.* x\b"),
            ({"data": ROWS, "val_data": 3}, r"^val_data\b.* int\b"),
            ({"data": ROWS, "val_data": [{"x": 1}]}, r"^val_data: row 0\b.*\bprompt\b"),
        ],
        others=pytest.mark.slow,
    ),
)
def test_errors_name_the_argument_that_has_the_rows(
    arguments: dict[str, Any], told: str, model_folder: Path, tmp_path: Path
) -> None:
    keys = {"model.path": str(model_folder), "trainer.run_dir": str(tmp_path / "run")}
    with pytest.raises(DataError, match=told):
        whet.train(reward=lambda solution_str: 1.0, **arguments, **SMALL_RUN, **keys)
    with pytest.raises(DataError, match=told):
        whet.sft(**arguments, **keys, **{"data.max_length": 64})
    if "val_data" not in arguments:
        with pytest.raises(DataError, match=told):
            lengths = {"data.max_prompt_length": 64, "data.max_response_length": 4}
            whet.evaluate(reward=lambda solution_str: 1.0, **arguments, **lengths, **{"model.path": str(model_folder)})


@pytest.mark.parametrize("command", [whet.sft, whet.train_reward, whet.evaluate, whet.generate])
def test_every_command_refuses_a_wrong_config_before_anything_is_loaded(command: Any) -> None:
    with raises(ConfigError, "model.pat", found=re.compile(r"\(argument\)$"), change=re.compile(r"model\.path\?$")):
        command(**{"model.pat": "m"})


@pytest.mark.parametrize(
    ("command", "named"),
    [(whet.sft, "data.train_files"), (whet.evaluate, "data.val_files"), (whet.generate, "data.val_files")],
)
def test_rows_stand_in_for_files(command: Any, named: str, model_folder: Path) -> None:
    with raises(ConfigError, named, found=[]):
        command(**{"model.path": str(model_folder)})
    with pytest.raises(ConfigError) as raised:
        command(data=[{"prompt": "1+1=", "answer": "2"}])
    assert named not in [error.key for error in (raised.value, *raised.value.others)]


@pytest.mark.slow
def test_a_model_goes_from_examples_to_an_export_in_python(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1), "answer": str(number + 1)} for number in range(4)]
    run = whet.sft(
        data=rows,
        val_data=rows[:2],
        **{
            "model.path": str(model_folder),
            "data.train_batch_size": 4,
            "data.max_length": 64,
            "trainer.total_steps": 2,
            "trainer.val_freq": 1,
            "trainer.run_dir": str(tmp_path / "run"),
        },
    )
    losses = [each["val/loss"] for each in run.history if "val/loss" in each]
    assert len(losses) == 3  # before the first step too
    assert repr(run) == f"<SFTRun in {tmp_path / 'run'}, step 2 of 2, val/loss={losses[-1]:.4g}>"
    exported = whet.export(run.run_dir, tmp_path / "exported")
    assert exported == tmp_path / "exported" and (exported / "config.json").is_file()

    short = {"model.path": str(exported), "data.max_response_length": 3, "data.max_prompt_length": 64}
    lines = whet.generate(data=rows, **short, **{"rollout.n": 2})
    assert [line["index"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]
    found = whet.evaluate(data=rows, reward=lambda solution_str: float(len(solution_str) > 0), **short)
    assert repr(found).startswith("Evaluation(4 prompts x 1, mean@1=1 (0.3976 to 1), ")
    shown = capsys.readouterr().out
    assert "\n8 completions, " in shown and "mean@1" in shown


def test_plot_returns_a_figure_that_a_notebook_shows(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", *({"step": n, "val/accuracy": n / 4, "odd": 1.0} for n in range(4)))
    two = make_run(tmp_path / "two", *({"step": n, "val/accuracy": 1.0, "actor/entropy": 2.0} for n in range(2)))
    figure = whet.plot([one, str(two)], ["val/*", "actor/entropy"], output=tmp_path / "deep/two.png")
    accuracy, entropy = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["val/accuracy", "actor/entropy"]
    assert [line.get_ydata().tolist() for line in accuracy.lines] == [[0, 0.25, 0.5, 0.75], [1, 1]]
    assert [len(line.get_ydata()) for line in entropy.lines] == [0, 2]
    assert imread(tmp_path / "deep/two.png").shape[:2] == (675, 1500)
    assert imread(io.BytesIO(figure._repr_png_())).shape[:2] == (360, 800)
    (single,) = whet.plot(tmp_path / "one", "odd").axes  # and not the main ones
    assert single.get_title(loc="left") == "odd"
    run = SimpleNamespace(run_dir=one)  # as `whet.train` returns one
    assert whet.plot(run).axes[0].lines[0].get_ydata().tolist() == [0, 0.25, 0.5, 0.75]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"runs": "nowhere"}, r"^runs: nowhere\b"),
        ({"runs": [3]}, r"^runs=3; .*whet\.train"),
        ({"runs": []}, r"^runs: run is not set; "),
        ({"runs": "odd"}, r"^metrics: .* odd\b"),
        ({"runs": "odd", "metrics": "od"}, r"^metrics\b.*\bod\b.* odd\b"),
        ({"runs": "odd", "metrics": 3}, r"^metrics=3; .*'val/\*'"),
        ({"runs": "odd", "metrics": ["odd", 3]}, r"^metrics=\['odd', 3\]; "),
        ({"runs": "odd", "output": "x.svg"}, r"^output: x\.svg .*\.svg; .*\.png"),
    ],
)
def test_plot_names_the_argument_that_is_wrong(
    arguments: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("odd"), {"step": 1, "odd": 1.0})
    with pytest.raises(DataError, match=error):
        whet.plot(**arguments)


@pytest.mark.slow
def test_a_run_that_is_overwritten_leaves_nothing_of_the_earlier_one(model_folder: Path, tmp_path: Path) -> None:
    def train(steps: int, resume: str) -> list[dict[str, float]]:
        rows = [{"prompt": "1+1=", "response": "2"}]
        run = whet.sft(
            data=rows,
            **{
                "model.path": str(model_folder),
                "data.train_batch_size": 1,
                "data.max_length": 64,
                "trainer.total_steps": steps,
                "trainer.run_dir": str(tmp_path / "run"),
                "trainer.resume": resume,
            },
        )
        return run.history

    first = train(3, "auto")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with raises(WhetError, change=re.compile(r"trainer\.resume=overwrite")):
        train(2, "never")
    second = train(2, "overwrite")
    assert [each["step"] for each in second] == [1, 2]
    assert [each["sft/loss"] for each in second] == [each["sft/loss"] for each in first[:2]]
    saved = {each.name for each in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {"global_step_1", "global_step_2"}
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert [each["step"] for each in train(3, "auto")] == [1, 2, 3]


def test_a_function_and_the_key_that_it_stands_for_are_not_both_given() -> None:
    with raises(ConfigError, "reward.function", found=re.compile("reward=")):
        whet.train(reward=len, data=[{"prompt": "1"}], **{"reward.function": "math"})
    with raises(ConfigError, "data.train_files", found=re.compile("data=")):
        whet.train(data=[{"prompt": "1"}], **{"data.train_files": "a.jsonl"})


def test_export_takes_a_run_and_names_its_argument() -> None:
    with raises(DataError, "checkpoint", found=5):
        whet.export(5, "out")  # type: ignore[arg-type]


NAMES = ("api", "errors", "manifests", "moved", "options", "registry", "targets", "version")
FIRST = {"whet", *(f"whet.{name}" for name in NAMES)}
SERVER = {"whet.processes", "whet.processes.frames", "whet.processes.template"}


@pytest.mark.parametrize(("module", "own"), [("whet", FIRST), ("whet.processes.template", FIRST | SERVER)])
def test_an_import_and_the_start_of_a_child_load_little(module: str, own: set[str]) -> None:
    """The server of child processes imports little too; each further module takes time at the start of all."""
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name for name in done.stdout.split() if not name.startswith("_")}
    names = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert names - own <= {"annotated_types", "typing_extensions"}
    assert {name for name in loaded if name.startswith("whet")} == own


@pytest.mark.slow
def test_a_step_does_without_tensordict_until_verls_form_asks_for_it(model_folder: Path, tmp_path: Path) -> None:
    """Importing it takes 2.5 CPU seconds in each process."""
    (tmp_path / "foreign.py").write_text(
        "def advantages(token_level_rewards, response_mask, index, batch=None, **kwargs):\n"
        "    assert batch['response_mask'].shape == response_mask.shape\n"
        "    assert batch.batch_size == response_mask.shape[:1]\n"
        "    return token_level_rewards * response_mask, token_level_rewards\n"
    )
    program = """
import sys
import whet
small = {small!r}
rows = [{{"prompt": "1+1=", "answer": "2"}}] * 4
whet.train(reward=lambda solution_str: float(len(solution_str)), data=rows, **small, **{{"trainer.run_dir": "own"}})
assert "tensordict" not in sys.modules
changes = {{"trainer.run_dir": "verl", "algorithm.adv_estimator": "foreign.py:advantages"}}
whet.train(reward=lambda solution_str: float(len(solution_str)), data=rows, **small, **changes)
assert "tensordict" in sys.modules
"""
    small = {**SMALL_RUN, "model.path": str(model_folder), "trainer.total_steps": 1}
    command = [sys.executable, "-c", program.format(small=small)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
