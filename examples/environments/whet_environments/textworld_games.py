# SPDX-License-Identifier: Apache-2.0
"""Text adventures that TextWorld generates from a seed: rooms, doors, keys, food, and commands in plain words.

pip install './examples/environments[textworld]'
whet env play textworld --option game=treasure_hunter --seed 1
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.options import Count, NonNegative
from whet.registry import register_environment
from whet.types import Message, Prompt

try:  # here, not in `reset`: the processes of episodes are forked from one that has it loaded
    import textworld
    import textworld.challenges
except ImportError:
    textworld = None

INSTALL = "pip install './examples/environments[textworld]'"
# The settings of TextWorld's challenges that `settings` changes.
GAMES: Mapping[str, Mapping[str, Any]] = {
    "coin_collector": {"level": 5},
    "treasure_hunter": {"level": 5},
    "simple": {"rewards": "dense", "goal": "brief", "test": False},
    "cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "open": False,
        "cook": False,
        "cut": False,
        "drop": False,
        "split": None,
    },
}
ANSWER = re.compile(r"<answer>([^<]*)</answer>")
COMMAND = re.compile(r"[A-Za-z][A-Za-z' -]{0,99}")  # no full stop: it ends a command, and another may follow
AFTER = re.compile(
    r"(\n>[^\n]*|\n\s*\*\*\* The End \*\*\*.*)\Z", re.DOTALL
)  # the status line; what the interpreter asks
MOST_READ = 20_000  # characters of an answer


@register_environment("textworld")
class TextWorldGames:
    """A text adventure of TextWorld: an answer is a command, such as `<answer>open door</answer>`; without the tag the
    last line is. The seed makes the game; a row of the data set may fix it by a field `seed`.

    `game` is coin_collector, treasure_hunter (both with a `level`), simple (a house and a meal; `rewards`, `goal`) or
    cooking (`recipe`, `go`, `open`, `cook`, `cut`, ...); `settings` has these, as in TextWorld's documentation.
    With `commands` each observation ends with the commands that the state admits. `reward` pays each point, or its
    share of all points. An answer that is no command of the game changes nothing and costs `format_penalty`. With
    `context=replace` each observation has the task, the room and the inventory. `folder` keeps compiled games, which
    take a second each. Fields: `success`, `score` (the share of the points).
    """

    def __init__(
        self,
        *,
        game: Literal["coin_collector", "treasure_hunter", "simple", "cooking"] = "coin_collector",
        settings: Mapping[str, Any] | None = None,
        commands: bool = False,
        reward: Literal["points", "share"] = "share",
        format_penalty: NonNegative = 0.0,
        max_steps: Count = 50,
        context: Literal["append", "replace"] = "append",
        max_tokens: Count | None = None,
        folder: str | None = None,
    ) -> None:
        if textworld is None:
            raise ConfigError("package textworld", "not installed", change=f"run {INSTALL}")
        if unknown := [name for name in settings or {} if name not in GAMES[game]]:
            raise ConfigError(
                "environment.options.settings",
                unknown[0],
                f"settings of {game}: {', '.join(GAMES[game])}",
                "correct it",
            )
        self.game, self.settings = game, {**GAMES[game], **(settings or {})}
        self.shows_commands, self.pays, self.format_penalty = commands, reward, format_penalty
        self.max_steps, self.context, self.max_tokens, self.folder = max_steps, context, max_tokens, folder
        self.env: Any = None
        self.own_folder: Path | None = None
        self.is_over = True

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Generates a game, or takes it from `folder`, and begins."""
        own = prompt.extra_info.get("seed")
        if own is not None and not isinstance(own, int):
            raise ValueError(f"the row's field seed is {own!r}; expected a whole number that names the game")
        self.close()
        infos = ("admissible_commands", "description", "facts", "feedback", "inventory", "max_score", "objective")
        wanted = textworld.EnvInfos(**dict.fromkeys((*infos, "lost", "score", "verbs", "won"), True))
        with warnings.catch_warnings():  # the interpreter says of every game of TextWorld that it does not know it
            warnings.simplefilter("ignore")
            self.env = textworld.start(str(self._file((seed if own is None else own) % 2**31)), wanted)
        self.state = self.env.reset()
        self.steps_left, self.is_over, self.score = self.max_steps, False, 0
        return self._observe("", 0.0, is_first=True)

    def step(self, answer: Answer) -> Observation:
        """Gives a command to the game.  Raises: RuntimeError after the end."""
        if self.is_over:
            raise RuntimeError("step was called after the end of the game, or before reset; call reset first")
        command = read_command(answer.text[-MOST_READ:], self.state.verbs)
        reward, said, is_done = 0.0 - self.format_penalty, "That is no command of this game.", False
        if command is not None:
            self.state, score, is_done = self.env.step(command)
            gained, self.score = score - self.score, score
            reward = gained / self._points() if self.pays == "share" else float(gained)
            said = cleaned(self.state.feedback)
        self.steps_left -= 1
        is_truncated = not is_done and self.steps_left == 0
        self.is_over = is_done or is_truncated
        return self._observe(said, reward, is_done=is_done, is_truncated=is_truncated)

    def close(self) -> None:
        """Ends the interpreter and removes the game, unless `folder` keeps it."""
        if self.env is not None:
            self.env.close()
            self.env = None
        if self.own_folder is not None:
            shutil.rmtree(self.own_folder, ignore_errors=True)
            self.own_folder = None

    def choices(self) -> list[str]:
        """The commands that the state admits."""
        return [f"<answer>{command}</answer>" for command in self.state.admissible_commands]

    def _observe(
        self, said: str, reward: float, *, is_first: bool = False, is_done: bool = False, is_truncated: bool = False
    ) -> Observation:
        parts = [said]
        if is_first or self.context == "replace":
            how = f"Answer with a command in <answer></answer>. Verbs: {', '.join(self.state.verbs)}."
            room = cleaned(self.state.description)
            parts = [self.state.objective, how, said, *([] if said == room else [room]), self.state.inventory]
        if self.shows_commands:
            parts.append("Commands: " + "; ".join(self.state.admissible_commands))
        state = "\n".join(sorted(map(str, self.state.facts)))
        return Observation(
            done=is_done,
            truncated=is_truncated,
            messages=(Message("user", "\n\n".join(part.strip() for part in parts if part.strip())),),
            reward=reward,
            fields={"success": float(bool(self.state.won)), "score": self.score / self._points()},
            context=self.context,
            state_key=hashlib.sha256(state.encode()).hexdigest()[:16],
            max_tokens=self.max_tokens,
        )

    def _points(self) -> int:
        return max(1, self.state.max_score)

    def _file(self, seed: int) -> Path:
        """The compiled game of a seed."""
        if self.folder is None:
            self.own_folder = Path(tempfile.mkdtemp(prefix="whet-textworld-"))
            return self._compile(seed, self.own_folder)
        named = json.dumps([textworld.__version__, self.game, self.settings, seed], sort_keys=True)
        kept = Path(self.folder) / f"{self.game}-{hashlib.sha256(named.encode()).hexdigest()[:16]}"
        if not kept.is_dir():
            kept.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=kept.parent, prefix="unfinished-"))
            self._compile(seed, made)
            try:
                made.rename(kept)
            except OSError:  # another episode of the group was faster
                shutil.rmtree(made)
        return kept / "game.z8"

    def _compile(self, seed: int, folder: Path) -> Path:
        settings = dict(self.settings)
        if self.game == "cooking":
            settings["recipe_seed"] = seed if settings["take"] else 0
        textworld.g_rng.set_seed(seed)
        options = textworld.GameOptions()
        options.seeds, options.path = seed, str(folder / "game.z8")
        _, make, _ = textworld.challenges.CHALLENGES[f"tw-{self.game}"]
        return Path(textworld.generator.compile_game(make(settings, options), options))


def read_command(text: str, verbs: list[str]) -> str | None:
    """The command of an answer; None for text that does not begin with a verb of the game. Commands of the interpreter
    (save, undo, restart) are none, and no answer is two commands."""
    found = ANSWER.findall(text)
    lines = (found[-1] if found else text).strip().splitlines()
    command = " ".join(lines[-1].split()).lower() if lines and len(lines[-1]) <= MOST_READ else ""
    words = command.split()
    is_one = COMMAND.fullmatch(command) is not None and "then" not in words
    return command if is_one and words[0] in verbs else None


def cleaned(text: str) -> str:
    """The text of the game, without the status line and the interpreter's questions."""
    return re.sub(r"\n\s*\n+", "\n\n", AFTER.sub("", text)).strip()
