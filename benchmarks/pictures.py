# SPDX-License-Identifier: Apache-2.0
"""Recipes whose models see, from random weights: three seeds of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import games
from benchmarks.setting import Setting

TITLE = "Learning from pictures"
NOTE = """\
`whet quickstart --images --seed SEED` (`vlm_quickstart`), `python examples/games.py sokoban_vision --seed SEED` and
`python examples/pictures.py NAME --seed SEED`: a model of about 1 M parameters, warmed up by imitation from random
weights, answers 256 held-out rows greedily, before and after RL. The number is the share of right answers, in Sokoban
of games won; CPU seconds are those of the whole command, in one thread, one run a core.
"""
NAMES = ("vlm_quickstart", "sokoban_vision", "two_images", "video_flashes")


def run(setting: Setting) -> dict[str, Any]:
    """The curve and the CPU seconds by recipe and seed."""
    return games.run(setting, NAMES)


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    return games.table(results["pictures"]) if results["pictures"] else []
