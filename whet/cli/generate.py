# SPDX-License-Identifier: Apache-2.0
"""`whet generate`."""

from __future__ import annotations

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe


def generate(words: RecipeAndOverrides = None, config_name: ConfigName = None) -> None:
    """Sample completions for a file of prompts, as JSON lines.

    The same command continues an interrupted run."""
    from whet.config import GenerateConfig, load_config

    loaded = load_config(GenerateConfig, *split_recipe(words, config_name))

    from whet.evaluation.generate import generate as run
    from whet.tracking.long_phases import LongPhases

    with LongPhases().watch():
        done = run(loaded.config)
    if done.num_found:
        typer.echo(f"{done.num_found} completions were in the file already")
    written = f"{done.num_written} completions, {done.num_tokens} tokens"
    typer.echo(f"wrote {written} in {done.seconds:.1f} s, to {done.output}")
