# SPDX-License-Identifier: Apache-2.0
"""Credit for an episode or for each of its turns: estimators of advantages in the number game, with equal steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import games
from benchmarks.setting import Setting

TITLE = "Credit for turns"
NOTE = """\
`python examples/games.py number_game --seed SEED trainer.total_steps=80 algorithm.adv_estimator=...`: a game has ten
cards, each paid at once, and the number is the share of right cards in 256 held-out games. `grpo` pays every turn with
the sum of its episode. `segment_reinforce` and `step_reinforce` pay a turn with its return, the second less the mean of
the group: with gamma 0 the reward of the turn itself, with gamma 1 all later rewards too. `gigpo` adds both: the
episode, and the turns of a group that saw the same cards. All runs of a seed begin with one model, and none has the
entropy bonus of the recipe, with which both runs of `segment_reinforce` ended below 0 (LOG.md).
"""
OF_GAE = "`gae` has a critic, and reaches over the tokens of all turns, with the options of `sokoban_ppo`."
ESTIMATORS = {
    "grpo": None,  # not those of the recipe
    "gigpo": "{gamma: 0.0}",
    "segment_reinforce, gamma 1": "{gamma: 1.0}",
    "segment_reinforce, gamma 0": "{gamma: 0.0}",
    "step_reinforce, gamma 0": "{gamma: 0.0}",
    "gae": "{gamma: 0.99, lam: 0.95}",
}
CRITIC = ("critic.max_tokens_per_micro_batch=16384", "critic.warmup_steps=5", "critic.optim.lr=1e-3")  # of sokoban_ppo


def run(setting: Setting) -> dict[str, Any]:
    """The curve and the CPU seconds by estimator and seed."""
    return games.run_changed(setting, {label: ("number_game", changes(label)) for label in ESTIMATORS})


def changes(label: str) -> list[str]:
    """The changes to the recipe that an estimator takes."""
    options = ESTIMATORS[label]
    given = "~algorithm.adv_options" if options is None else f"algorithm.adv_options={options}"
    estimator = f"algorithm.adv_estimator={label.partition(',')[0]}"
    critic = CRITIC if label == "gae" else ()
    return ["trainer.total_steps=80", "algorithm.entropy_coef=0.0", estimator, given, *critic]


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    found = results["turn_credit"]
    return [*([OF_GAE, ""] if "gae" in found else []), *games.table(found, "estimator")] if found else []
