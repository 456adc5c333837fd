# SPDX-License-Identifier: Apache-2.0
"""`whet eval`."""

from __future__ import annotations

from typing import Any

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe


def evaluate(words: RecipeAndOverrides = None, config_name: ConfigName = None) -> None:
    """Measure how many held-out prompts a model answers right."""
    from whet.config import EvalConfig, load_config

    loaded = load_config(EvalConfig, *split_recipe(words, config_name))

    from whet.evaluation.evaluate import evaluate as run

    evaluation = run(loaded.config)
    for name, value in evaluation.summary().items():
        typer.echo(f"{name:<22}{_shown(value)}")
    if loaded.config.output is None:
        typer.echo("with output=DIR every answer is written to DIR/answers.jsonl")
    else:
        typer.echo(f"wrote {loaded.config.output}/answers.jsonl and summary.json")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
