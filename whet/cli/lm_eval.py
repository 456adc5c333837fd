# SPDX-License-Identifier: Apache-2.0
"""`whet lm-eval`."""

from __future__ import annotations

import typer


def lm_eval(context: typer.Context) -> None:
    """Run tasks of EleutherAI's lm-eval on whet's engines.

    All options are lm-eval's. `--model whet` is added; its model_args are path (a model, checkpoint or run), dtype,
    seed.

        whet lm-eval --model_args path=DIR --tasks gsm8k --limit 100
    """
    from whet.evaluation.lm_eval import main

    main(context.args)
