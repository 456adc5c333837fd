# SPDX-License-Identifier: Apache-2.0
"""The commands as Python functions: they take rows and functions as arguments, and print like the command line.

A config is given as in `whet.train("gsm8k", **{"model.path": "my_model", "rollout.n": 8})`: a recipe by name or path,
and overrides, which are dotted keys or whole sections as mappings (`rollout={"n": 8}`). Each function raises
ConfigError before anything is loaded. Importing this module does not load torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, DataError, RewardError, WhetError, no_exit
from whet.registry import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from whet.evaluation.evaluate import Evaluation
    from whet.trainers.frame import Frame
    from whet.trainers.run import Run
    from whet.trainers.sft import SFTRun
    from whet.trainers.train_reward import RewardTrainingRun
    from whet.types import Prompt

Rows = Sequence[Mapping[str, Any]]
Recipe = str | Path | None
STANDS_FOR = {"reward": "reward.function", "data": "data.train_files", "val_data": "data.val_files"}


@no_exit()
def run(trainer: str, recipe: Recipe = None, **arguments: object) -> Any:
    """Trains as the command of a trainer does and returns the finished run.

    `trainer` is a registered name, `package.module:function` or `path/file.py:function`. Arguments that the trainer's
    signature names (data=, ...) go to the trainer; the others are overrides."""
    from whet.config.commands import schema_of
    from whet.registry import trainer_of
    from whet.threads import yield_soon

    entry = trainer_of(trainer)
    given = {name: arguments.pop(name) for name in entry.options if name in arguments}
    config = _config(schema_of(entry.name), recipe, arguments, **given)
    yield_soon()
    with _lines(config), _argument("reward", RewardError if given.get("reward") is not None else ()):
        return entry.load()(config, **given)  # loads torch, so the config is checked before


def train(
    recipe: Recipe = None,
    *,
    reward: Callable[..., Any] | None = None,
    data: Iterable[Mapping[str, Any] | Prompt] | None = None,
    val_data: Iterable[Mapping[str, Any] | Prompt] | None = None,
    **overrides: Any,
) -> Run:
    """Trains as `whet train` does, and returns the finished run.

    `reward`, `data` and `val_data` (rows or prompts) replace `reward.function`, `data.train_files` and
    `data.val_files`."""
    made: Run = run("train", recipe, reward=reward, data=data, val_data=val_data, **overrides)
    return made


def sft(
    recipe: Recipe = None,
    *,
    data: Rows | None = None,
    val_data: Rows | None = None,
    callbacks: Sequence[Callable[[SFTRun], None]] = (),
    **overrides: Any,
) -> SFTRun:
    """Trains on examples as `whet sft` does and returns the finished run; `callbacks` get it after every step."""
    made: SFTRun = run("sft", recipe, data=data, val_data=val_data, callbacks=callbacks, **overrides)
    return made


def train_reward(
    recipe: Recipe = None, *, data: Rows | None = None, val_data: Rows | None = None, **overrides: Any
) -> RewardTrainingRun:
    """Trains a reward model on preference pairs as `whet train-reward` does and returns the finished run."""
    made: RewardTrainingRun = run("train-reward", recipe, data=data, val_data=val_data, **overrides)
    return made


@no_exit()
def evaluate(
    recipe: Recipe = None, *, reward: Callable[..., Any] | None = None, data: Rows | None = None, **overrides: Any
) -> Evaluation:
    """Evaluates a model as `whet eval` does, prints its tables, and returns the metrics and the scored responses.

    `reward` and `data` replace `reward.function` and `data.val_files`."""
    from whet.cli.evaluate import evaluated
    from whet.config import EvalConfig

    config = _config(EvalConfig, recipe, overrides, reward=reward, data=data)
    with _lines(), _argument("reward", RewardError if reward is not None else ()):
        return evaluated(config, reward=reward, data=data)


@no_exit()
def generate(recipe: Recipe = None, *, data: Rows | None = None, **overrides: Any) -> list[dict[str, Any]]:
    """Samples responses as `whet generate` does, and returns the lines of its file, in the order of the prompts.

    `data` replaces `input`. Without `output` no file is kept."""
    from whet.cli.evaluate import generated
    from whet.config import GenerateConfig

    with TemporaryDirectory(prefix="whet-generate-") as folder:
        kept = overrides if "output" in overrides else {**overrides, "output": f"{folder}/completions.jsonl"}
        config = _config(GenerateConfig, recipe, kept, data=data)
        with _lines():
            done = generated(config, data=data, is_kept=kept is overrides)
        return [json.loads(line) for line in done.output.read_text(encoding="utf-8").split("\n")[:-1]]


@no_exit()
def export(
    checkpoint: str | Path | Frame,
    out: str | Path,
    *,
    adapter: bool = False,
    base: str | None = None,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    hub: str | None = None,
    private: bool = False,
) -> Path:
    """Exports the model of a checkpoint, or of a run's newest checkpoint, as a Hugging Face folder.  Returns `out`.
    `checkpoint` is a folder, or the run that `whet.train` returned.

    `adapter` writes only the trained adapter, in peft's format; `base` is the path of its base model, if it has moved;
    `dtype` is the dtype of the written weights, by default the dtype of the rollout, or float32 without a rollout. The
    folder is uploaded to the repository `hub` (owner/name), which is created if it is missing."""
    from whet.checkpoints.export import export as write

    with _argument("checkpoint"):
        folder = _run_folder(checkpoint)
    written = write(folder, Path(out), adapter=adapter, base=base, dtype=dtype, trust_remote_code=trust_remote_code)
    if hub is not None:
        from whet.checkpoints.hub import upload

        upload(written, hub, private=private)
    return written


@no_exit()
def plot(
    runs: str | Path | Frame | Sequence[str | Path | Frame],
    metrics: str | Sequence[str] | None = None,
    *,
    output: str | Path | None = None,
) -> Figure:
    """Draws metrics of one or several runs as `whet plot` does.  Returns the matplotlib figure, which notebooks show.

    `runs` are folders of runs, folders with runs, or the runs that `whet.train`, `whet.run`, ... returned. `metrics`
    are names and patterns (`val/*`), by default the main ones. `output` is a PNG file to write as well.  Raises:
    DataError naming the argument."""
    given = list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    with _argument("runs"):
        folders = [_run_folder(each) for each in given]
    names = [metrics] if isinstance(metrics, str) else metrics
    if names is not None and not (isinstance(names, Sequence) and all(isinstance(each, str) for each in names)):
        raise DataError("metrics", metrics, "names or patterns of metrics, such as 'val/*'", "pass a list of them")
    figure: Figure = PARTS["plot"].load()(folders, names, None if output is None else Path(output))
    return figure


def _run_folder(made: Any) -> Path:
    if isinstance(made, str | Path):
        return Path(made)
    try:
        return Path(made.run_dir)
    except AttributeError:
        raise DataError("", made, "a run's folder, or the result of whet.train", "name a run") from None


@contextmanager
def _argument(name: str, kind: type[WhetError] | tuple[()] = DataError) -> Iterator[None]:
    """Adds the name of the argument to errors of the class `kind`."""
    try:
        yield
    except kind as error:
        raise error.at(name) from error


def _config(schema: Any, recipe: Recipe, overrides: Mapping[str, Any], **objects: object) -> Any:
    from whet.config import load_config

    given = {name for name, value in objects.items() if value is not None}
    for name in given.intersection(STANDS_FOR):
        section, _, field = STANDS_FOR[name].partition(".")
        if STANDS_FOR[name] in overrides or (isinstance(found := overrides.get(section), Mapping) and field in found):
            found, key = f"given beside the argument {name}=", STANDS_FOR[name]
            raise ConfigError(key, found, "only one of the two", "leave one out")
    return load_config(schema, recipe, overrides, given=given).config


@contextmanager
def _lines(config: Any = None) -> Iterator[None]:
    """Prints log records of the block like a command; for a training run also its progress, and a table at its end."""
    from whet.cli.app import CONSOLE
    from whet.cli.train import shown

    logger = logging.getLogger("whet")
    level, has_console = logger.level, CONSOLE in logger.handlers
    logger.setLevel(level or logging.INFO)
    logger.addHandler(CONSOLE)  # has no effect if it is already added
    try:
        with shown(config) if config is not None else nullcontext():
            yield
    finally:
        logger.setLevel(level)
        if not has_console:
            logger.removeHandler(CONSOLE)
