# SPDX-License-Identifier: Apache-2.0
"""An environment of your own: whet train ... environment.name=examples/extending/environment.py:Doubling

`whet env check examples/extending/environment.py:Doubling` checks it against the needs of training."""

import random

from whet.environments.protocol import Answer, Observation
from whet.types import Message, Prompt


class Doubling:
    """The model doubles a number in each of `rounds` turns; 1 / rounds for each right one."""

    def __init__(self, *, rounds: int = 2) -> None:
        self.rounds = self.left = rounds

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Asks for the double of a number that the seed draws."""
        self.number = random.Random(seed).randint(1, 9)
        return Observation(done=False, messages=(Message("user", f"{self.number}*2="),))

    def step(self, answer: Answer) -> Observation:
        """Pays the answer, and asks for the double of the right one."""
        if not self.left:
            raise RuntimeError("step was called after the end")
        self.left, self.number = self.left - 1, self.number * 2
        reward = float(answer.text.strip() == str(self.number)) / self.rounds
        if not self.left:
            return Observation(done=True, reward=reward)
        return Observation(done=False, reward=reward, messages=(Message("user", f"{self.number}*2="),))
