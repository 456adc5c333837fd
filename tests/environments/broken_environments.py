# SPDX-License-Identifier: Apache-2.0
"""Environments with a fault each, and the check of `whet env check` that finds it."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from whet.data.media import image
from whet.environments.protocol import Answer, Observation
from whet.environments.running import Context
from whet.types import Media, Message, Prompt

FAULTS: dict[str, str] = {}  # the name of the check by that of the class


def caught_by(check: str) -> Callable[[type[Any]], type[Any]]:
    """Notes the check that finds the fault of a class."""

    def note(kind: type[Any]) -> type[Any]:
        FAULTS[kind.__name__] = check
        return kind

    return note


def said(text: object, reward: float = 0.0, **more: Any) -> Observation:
    """An observation of a message."""
    return Observation(done=False, messages=(Message("user", str(text)),), reward=reward, **more)


class Right:
    """Three rounds of guessing a number, without a fault."""

    closed = 0

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Draws the number."""
        self.draws, self.left = random.Random(seed), 3
        return self.look()

    def look(self) -> Observation:
        """Shows a number."""
        return said(self.draws.randrange(1000))

    def step(self, answer: Answer) -> Observation:
        """Ends in the third round."""
        if not self.left:
            raise RuntimeError("it is over")
        self.left -= 1
        return self.look() if self.left else Observation(done=True, reward=float(answer.text == "1"))

    def close(self) -> None:
        """Counts."""
        self.closed += 1


class RightAndAsync(Right):
    """The same with coroutines."""

    async def reset(self, prompt: Prompt, seed: int) -> Observation:  # type: ignore[override]
        """Draws the number."""
        return super().reset(prompt, seed)

    async def step(self, answer: Answer) -> Observation:  # type: ignore[override]
        """Ends in the third round."""
        return super().step(answer)

    async def close(self) -> None:  # type: ignore[override]
        """Counts."""
        super().close()


class RightAndDelegates(Right):
    """The same with sub-agents, in two rounds of a step and in reset."""

    async def reset(self, prompt: Prompt, seed: int, context: Context) -> Observation:  # type: ignore[override]
        """Draws the number."""
        await context.run(f"Seed {seed}.", "worker")
        return super().reset(prompt, seed)

    async def step(self, answer: Answer, context: Context) -> Observation:  # type: ignore[override]
        """Ends in the third round."""
        results = await asyncio.gather(context.run("one", "worker"), context.run("two", "worker"))
        assert [result.num_turns for result in results] == [1, 1] and (await context.run("three", "other")).text
        return super().step(answer)


class RightAndShort:
    """The short form."""

    def __init__(self, prompt: Prompt, *, rounds: int = 2) -> None:
        self.left = rounds

    def step(self, answer: str) -> Observation:
        """Ends after its rounds, and stays there."""
        self.left -= 1
        return said(self.left) if self.left > 0 else Observation(done=True)


@caught_by("same seed")
class Unseeded(Right):
    """Draws from a generator without a seed."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Ignores the seed."""
        self.draws, self.left = random.Random(), 3
        return self.look()


@caught_by("same seed")
class SeededByHash(Right):
    """Makes its seed from the hash of a text, which each process salts."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Hashes."""
        return super().reset(prompt, hash(f"map {seed}"))


@caught_by("same seed")
class Clock(Right):
    """Tells the time."""

    def look(self) -> Observation:
        """Shows nanoseconds."""
        return said(time.perf_counter_ns())


@caught_by("same seed")
class UnseededPicture(Right):
    """Shows another picture each time, under the same text."""

    def look(self) -> Observation:
        """Draws a pixel."""
        pixel = np.frombuffer(os.urandom(3), np.uint8).reshape(1, 1, 3)
        return said("<image>", media=(image(pixel),))


@caught_by("same seed")
class UnseededPlayer(Right):
    """Draws who plays from a generator without a seed; the messages are the same."""

    def look(self) -> Observation:
        """Draws a player."""
        return said("?", player=str(random.SystemRandom().random()))


@caught_by("beside another")
class GlobalGenerator(Right):
    """Seeds and reads the generator of the process."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Seeds it."""
        random.seed(seed)
        self.left = 3
        return self.look()

    def look(self) -> Observation:
        """Draws from it."""
        return said(random.randrange(1000))


@caught_by("beside another")
class SharedState(Right):
    """Keeps its history in the class."""

    history: list[str] = []  # noqa: RUF012

    def look(self) -> Observation:
        """Shows how long it is."""
        self.history.append("look")
        return said(len(self.history))


@caught_by("starts")
class RaisesInReset(Right):
    """Fails before the first turn."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Divides by zero."""
        return said(1 // 0)


@caught_by("starts")
class HasNoStep:
    """Begins an episode that cannot go on."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        return said("Begin.")


@caught_by("observations")
class ResetsToText(Right):
    """Its first observation is text."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return "Begin."


@caught_by("starts")
class DiesInReset(Right):
    """Ends its process."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Exits."""
        os._exit(3)


@caught_by("deadline")
class HangsInStep(Right):
    """Never returns."""

    def step(self, answer: Answer) -> Observation:
        """Sleeps."""
        time.sleep(1000)
        return super().step(answer)


@caught_by("after the end")
class PaysAfterTheEnd(Right):
    """Pays for each further step."""

    def step(self, answer: Answer) -> Observation:
        """Pays."""
        return super().step(answer) if self.left else Observation(done=True, reward=1.0)


@caught_by("after the end")
class GoesOnAfterTheEnd(Right):
    """Begins again by itself."""

    def step(self, answer: Answer) -> Observation:
        """Begins again."""
        self.left = self.left or 4
        return super().step(answer)


@caught_by("close")
class ClosesOnce(Right):
    """Raises in the second close."""

    def close(self) -> None:
        """Forgets its generator."""
        del self.draws


@caught_by("answers")
class ReadsTheFirstLetter(Right):
    """Raises for an empty answer."""

    def step(self, answer: Answer) -> Observation:
        """Reads it."""
        return super().step(answer) if answer.text[0] else said("?")


@caught_by("answers")
class DiesOfANullByte(Right):
    """Ends its process for one answer."""

    def step(self, answer: Answer) -> Observation:
        """Exits."""
        if "\x00" in answer.text:
            os._exit(9)
        return super().step(answer)


@caught_by("answers")
class SlowExpression(Right):
    """Searches with a regular expression that takes exponential time."""

    def step(self, answer: Answer) -> Observation:
        """Searches."""
        re.search(r"(\(+)+\)", answer.text)
        return super().step(answer)


@caught_by("rewards")
class PaysNobody(Right):
    """The name of a player is wrong at the end."""

    def look(self) -> Observation:
        return said("?", player=("white", "black")[self.left % 2])

    def step(self, answer: Answer) -> Observation:
        found = super().step(answer)
        return Observation(done=True, rewards={"wite": 1.0, "black": -1.0}) if found.done else found


@caught_by("rewards")
class NotANumber(Right):
    """Pays nan."""

    def look(self) -> Observation:
        """Divides nothing by nothing."""
        return said("?", reward=float("nan"))


@caught_by("observations")
class ReturnsText(Right):
    """Returns text in place of an observation."""

    def look(self) -> Any:
        """Returns text."""
        return "Guess!"


@caught_by("observations")
class KeepsAnObject(Right):
    """Puts an object that cannot be pickled into its fields."""

    def look(self) -> Observation:
        """Adds a function."""
        return said("?", fields={"function": lambda: None})


@caught_by("observation size")
class TellsTooMuch(Right):
    """Repeats everything."""

    def look(self) -> Observation:
        """Says a lot."""
        return said("Guess! " * 20_000)


@caught_by("observation size")
class ShowsTooMuch(Right):
    """Shows a large picture."""

    def look(self) -> Observation:
        """17 MiB."""
        return said("<image>", media=(Media("image", "0", bytes(17 * 2**20)),))


@caught_by("prompt")
class ChangesThePrompt(Right):
    """Writes into the prompt, which the episodes of a group share."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Notes the seed."""
        prompt.extra_info["seed"] = seed  # type: ignore[index]
        return super().reset(prompt, seed)


@caught_by("starts")
class GivesTasksForEver(Right):
    """Never ends its reset."""

    async def reset(self, prompt: Prompt, seed: int, context: Context) -> Observation:  # type: ignore[override]
        """Asks."""
        while True:
            await context.run("?", "worker")


@caught_by("restores")
class LosesItsPlaceInACopy(Right):
    """A copy begins its draws again."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the generator out."""
        return {name: value for name, value in vars(self).items() if name != "draws"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes another one."""
        vars(self).update(state, draws=random.Random(7))
