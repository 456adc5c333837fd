# SPDX-License-Identifier: Apache-2.0
"""The command `whet lm-eval`."""

from __future__ import annotations

import typer

from whet.registry import register_command


@register_command(
    "lm-eval",
    panel="After training",
    settings={"allow_extra_args": True, "ignore_unknown_options": True},
    exits=True,
)
def lm_eval(context: typer.Context) -> None:
    """Run tasks of EleutherAI's lm-eval on whet's engines.

    All options are lm-eval's. `--model whet` is added; its model_args are path (a model, checkpoint or run), dtype,
    seed.

        whet lm-eval --model_args path=DIR --tasks gsm8k --limit 100
    """
    from whet.plugins.lm_eval.model import main

    main(context.args)
