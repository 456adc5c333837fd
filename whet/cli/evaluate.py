# SPDX-License-Identifier: Apache-2.0
"""`whet eval`, `whet compare`, `whet generate` and `whet select`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe
from whet.cli.tables import Cell, interval, table

if TYPE_CHECKING:
    from whet.config import EvalConfig, GenerateConfig
    from whet.evaluation.estimators import MeanEstimate
    from whet.evaluation.evaluate import Evaluation
    from whet.evaluation.generate import Generated


def evaluate(words: RecipeAndOverrides = None, config_name: ConfigName = None) -> None:
    """Evaluate a model on held-out prompts: accuracy, pass@k.

    RECIPE is gsm8k, math500, aime, or your own. model.path is a model folder, a checkpoint or the folder of a run."""
    from whet.config import EvalConfig, load_config

    config = load_config(EvalConfig, *split_recipe(words, config_name)).config

    evaluated(config)


def evaluated(config: EvalConfig, **objects: Any) -> Evaluation:
    """Evaluates a model and prints the tables of results."""
    from whet.evaluation.evaluate import evaluate as run
    from whet.tracking.console import LongPhases, shared_console

    with LongPhases().watch():
        evaluation = run(config, **objects)
    console = shared_console()
    for each in tables(evaluation):
        console.print(each)
    console.print(
        f"{evaluation.mean_response_tokens:.0f} tokens a response, {100 * evaluation.truncated:.1f} % of responses "
        f"truncated at data.max_response_length={config.data.max_response_length}, {evaluation.failures} failed",
        soft_wrap=True,
    )
    wrote = "set output=DIR to write every response to DIR/answers.jsonl"
    if config.output:
        wrote = f"wrote {config.output}/answers.jsonl and summary.json; `whet compare` compares two such folders"
    console.print(wrote, soft_wrap=True)
    return evaluation


def tables(evaluation: Evaluation) -> list[Table]:
    """Builds a table of the metrics over all n responses, with intervals, and for n > 1 a table of pass@k and maj@k."""
    by_source = evaluation.by_data_source
    rows = dict(by_source) if len(by_source) == 1 else {**by_source, "all": evaluation.metrics}
    n, metrics = evaluation.n, evaluation.metrics
    sources = [*{row["index"]: row["data_source"] for row in evaluation.answers}.values()]
    counts = {**Counter(sources), "all": len(sources)}
    whole = [f"mean@{n}", *([f"best@{n}", f"maj@{n}"] if n > 1 else [])]
    if any(found["reward"].value != found[f"mean@{n}"].value for found in rows.values()):
        whole.append("reward")
    shown = [name for name in whole if name in metrics]
    first = ([source, str(counts[source]), *_cells(found, shown)] for source, found in rows.items())
    tables = [table(["data source", "prompts", *shown], first)]
    if n == 1:
        return tables
    ks = [int(name.removeprefix("pass@")) for name in metrics if name.startswith("pass@")]
    second = []
    for source, found in rows.items():
        for kind, title in (("pass", "at least one correct: pass@k"), ("maj", "majority vote correct: maj@k")):
            if f"{kind}@{n}" in found:
                # The majority of one response is that response.
                values = [found.get(f"{kind}@{k}", found["pass@1"]).value for k in ks]
                second.append([source, title, *(f"{100 * value:.1f}" for value in values)])
    return [*tables, table(["data source", "of k responses", *map(str, ks)], second, left=(0, 1))]


def _cells(found: Mapping[str, MeanEstimate], names: list[str]) -> Iterator[str | Text]:
    """Yields the cells of a row, each with its 95 % interval: accuracies in percent, a reward as a number."""
    for name in names:
        estimate = found.get(name)
        if estimate is None:
            yield ""
            continue
        numbers = (estimate.value, estimate.low, estimate.high)
        is_reward = name == "reward"
        value, low, high = (f"{each:.3g}" if is_reward else f"{100 * each:.1f}" for each in numbers)
        yield interval(value, low, high, " to " if is_reward else "–")


def compare(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="an output folder of whet eval, or a file of scored responses", exists=True),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="the same for the model to compare with A", exists=True)],
    metric: Annotated[str, typer.Option(help="accuracy, reward, or the name of a reward part")] = "accuracy",
    other_prompts: Annotated[bool, typer.Option("--other-prompts", help="accept prompts with other texts")] = False,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the resampling")] = 0,
) -> None:
    """Test whether two evaluations differ significantly.

    The validation files of a run (rollouts/validation_*.jsonl) can be compared too."""
    from whet.evaluation.answers import read_answers
    from whet.evaluation.estimators import compare as run, shown, shown_p
    from whet.tracking.console import shared_console

    found = run(read_answers(a), read_answers(b), metric=metric, other_prompts=other_prompts, seed=seed)
    rows: list[list[Cell]] = []
    for source, each in [*list(found.items())[1:], ("all", found["all"])]:
        better, p_value = each.difference, shown_p(each.p_value).removeprefix("= ")
        means = [shown(each.a.value, metric), shown(each.b.value, metric)]
        difference = interval(*(shown(number, metric) for number in (better.value, better.low, better.high)))
        wins = [str(each.a_better), str(each.b_better)]
        rows.append([source, str(each.num_prompts), *means, difference, p_value, *wins])
    console, whole = shared_console(), found["all"]
    console.print(table(("data source", "prompts", "A", "B", "B - A", "p", "A only", "B only"), rows))
    console.print(f"A: {a}, {whole.n[0]} responses a prompt\nB: {b}, {whole.n[1]} responses a prompt", soft_wrap=True)
    console.print("A only, B only: number of prompts on which A, or B, scored higher", style="dim", soft_wrap=True)
    console.print(whole.verdict(), style="bold", soft_wrap=True)


def generate(words: RecipeAndOverrides = None, config_name: ConfigName = None) -> None:
    """Sample completions for a file of prompts, as JSON lines.

    After an interruption, the same command continues."""
    from whet.config import GenerateConfig, load_config

    generated(load_config(GenerateConfig, *split_recipe(words, config_name)).config)


def generated(config: GenerateConfig, *, is_kept: bool = True, **objects: Any) -> Generated:
    """Samples completions, and prints their number and the number of tokens."""
    from whet.evaluation.generate import generate as run
    from whet.tracking.console import LongPhases

    with LongPhases().watch():
        done = run(config, **objects)
    if done.num_found:
        typer.echo(f"{done.num_found} completions were in the file already")
    written = f"{done.num_written} completions, {done.num_tokens} tokens"
    took = f" in {done.seconds:.1f} s, to {done.output}" if is_kept else f", {done.seconds:.1f} s"
    typer.echo(f"{'wrote ' * is_kept}{written}{took}")
    return done


def select(
    samples: Annotated[Path, typer.Argument(metavar="FILE", help="the file of whet generate", exists=True)],
    words: RecipeAndOverrides = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="file of the rows, .jsonl")] = Path("selected.jsonl"),
    best_of: Annotated[
        int | None, typer.Option(min=1, help="keep the best of every N samples of a prompt; unset: of all")
    ] = None,
    min_score: Annotated[float, typer.Option(help="lowest score of a response to keep")] = -math.inf,
    config_name: ConfigName = None,
) -> None:
    """Keep the best of sampled responses, as rows for whet sft.

    Overrides are as for whet eval: model.path and data.* as for whet generate, and reward.* for the scores."""
    from whet.config import EvalConfig, load_config
    from whet.evaluation.select import select as run

    config = load_config(EvalConfig, *split_recipe(words, config_name)).config
    done = run(config, samples, output, best_of=best_of, min_score=min_score)
    typer.echo(
        f"wrote {done.num_rows} rows of {done.num_chosen} responses to {done.output}: {done.num_samples} samples of "
        f"{done.num_prompts} prompts, of which {done.num_empty} have no row; {done.num_cut} samples were cut off, "
        f"{done.num_failed} have no score"
    )
