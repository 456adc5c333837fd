# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena for one or more players.

    pip install textarena
    python examples/textarena_games.py [STEPS]
    whet env play examples/textarena_games.py:Arena --option game=GuessTheNumber-v0 --option players=1

A run names it `environment.name=examples/textarena_games.py:Arena`. TextArena seeds and draws from the global generator
of `random`: each call has it to itself, and each episode runs in a process of its own. Some games need data of nltk.
"""

import random
import sys
from pathlib import Path

from whet.errors import ConfigError

try:  # here, not in `reset`: the processes of episodes are forked from one that has it loaded
    import textarena
except ImportError as error:
    what = f"this example needs TextArena ({error}): pip install textarena"
    raise (SystemExit if __name__ == "__main__" else ConfigError)(what) from error

from whet.environments.protocol import Observation
from whet.options import Count
from whet.types import Message


class Arena:
    """A game of TextArena; players are named by their numbers, and all of them are the model."""

    def __init__(self, *, game: str = "Nim-v0", players: Count = 2):
        self.game, self.players, self.draws = game, players, None

    def reset(self, prompt, seed):
        """Begins the game of a seed."""
        self.draws = random.Random(seed).getstate()
        self.env = self.alone(textarena.make, env_id=self.game)
        self.alone(self.env.reset, num_players=self.players, seed=seed % 2**31)
        self.is_over = False
        return self.observe()

    def step(self, answer):
        """Plays a turn; the last one pays all players."""
        if self.is_over:
            raise RuntimeError("step was called after the end of the game")
        self.is_over, _ = self.alone(self.env.step, answer.text[:2000])
        if not self.is_over:
            return self.observe()
        rewards = {self.name(player): float(reward) for player, reward in self.env.close()[0].items()}
        if self.players == 1:
            return Observation(True, reward=rewards[""])
        return Observation(True, rewards=rewards)

    def observe(self):
        """The text that the next player reads."""
        player, text = self.alone(self.env.get_observation)
        return Observation(False, (Message("user", str(text)),), player=self.name(player))

    def name(self, player):
        """The name of a player; a single one needs none."""
        return "" if self.players == 1 else str(player)

    def alone(self, call, *arguments, **named):
        """Calls with the global generator in the state of this game."""
        outer = random.getstate()
        random.setstate(self.draws)
        try:
            return call(*arguments, **named)
        finally:
            self.draws = random.getstate()
            random.setstate(outer)


def main(steps, run_dir=Path("runs/textarena")):
    """A few steps of self-play of a small model with random weights, which begins by not knowing a single move."""
    from whet.config import TrainConfig, load_config
    from whet.plugins.lessons.init_model import init_model
    from whet.plugins.lessons.quickstart import clear
    from whet.trainers.build import train

    lock = clear(run_dir)
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    init_model(run_dir / "model", "qwen3", "nano", alphabet=alphabet, num_layers=2, max_position_embeddings=2048)
    changes = {
        "model.path": str(run_dir / "model"),
        "environment.name": f"{__file__}:Arena",
        "environment.max_turns": 8,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 1200,
        "data.max_response_length": 600,
        "environment.max_turn_tokens": 8,
        "reward.function": None,
        "algorithm.filter.name": None,
        "trainer.run_dir": str(run_dir / "rl"),
        "trainer.total_steps": steps,
        "trainer.val_freq": 0,
    }
    config = load_config(TrainConfig, "quickstart", changes, given={"data"}).config
    history = train(config, data=[{"prompt": "Play.", "answer": ""}] * 64).history
    lock.close()
    print("rewards:", *(f"{record['critic/score/mean']:.3f}" for record in history if "critic/score/mean" in record))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
