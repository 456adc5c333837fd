# SPDX-License-Identifier: Apache-2.0
"""`whet compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="an output folder of whet eval, or a file of scored responses", exists=True),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="the same for the model to compare with A", exists=True)],
    metric: Annotated[str, typer.Option(help="accuracy, reward, or the name of a reward part")] = "accuracy",
    other_prompts: Annotated[
        bool, typer.Option("--other-prompts", help="accept different prompt texts for the same data rows")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="random seed of the resampling")] = 0,
) -> None:
    """Test whether two evaluations differ significantly.

    The validation files of a run (rollouts/validation_*.jsonl) can be compared too."""
    from whet.cli.tables import Cell, interval, table
    from whet.evaluation.answers import read_answers
    from whet.evaluation.compare import compare as run
    from whet.evaluation.compare import shown, shown_p
    from whet.tracking.console import shared_console

    found = run(read_answers(a), read_answers(b), metric=metric, other_prompts=other_prompts, seed=seed)
    rows: list[list[Cell]] = []
    for source, each in [*list(found.items())[1:], ("all", found["all"])]:
        better, p_value = each.difference, shown_p(each.p_value).removeprefix("= ")
        means = [shown(each.a.value, metric), shown(each.b.value, metric)]
        difference = interval(*(shown(number, metric) for number in (better.value, better.low, better.high)))
        rows.append(
            [source, str(each.num_prompts), *means, difference, p_value, str(each.a_better), str(each.b_better)]
        )
    console, whole = shared_console(), found["all"]
    console.print(table(("data source", "prompts", "A", "B", "B - A", "p", "A only", "B only"), rows))
    console.print(f"A: {a}, {whole.n[0]} responses a prompt\nB: {b}, {whole.n[1]} responses a prompt", soft_wrap=True)
    console.print("A only, B only: number of prompts on which that model scored higher", style="dim", soft_wrap=True)
    console.print(whole.verdict(), style="bold", soft_wrap=True)
