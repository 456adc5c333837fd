# SPDX-License-Identifier: Apache-2.0
"""The inputs of all competitors: a model folder, prompts, and the length of each response."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VOWELS = frozenset("aeiou")


@dataclass(frozen=True)
class Answers:
    """Prompts with several answers each; an answer is as long as the fixed seed says, whatever the model would like."""

    prompts: int
    n: int
    shortest: int  # tokens
    longest: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer, the answers to one prompt side by side. One is always the longest."""
        draw = random.Random(0)
        lengths = [draw.randint(self.shortest, self.longest) for _ in range(self.prompts * self.n)]
        lengths[draw.randrange(len(lengths))] = self.longest
        return lengths


@dataclass(frozen=True)
class Workload:
    """The model and the prompts, on disk and in memory."""

    model: Path
    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]

    def requests(self, answers: Answers) -> list[tuple[Sequence[int], int]]:
        """Prompt and length of each answer."""
        prompts = [ids for ids in self.token_ids[: answers.prompts] for _ in range(answers.n)]
        return list(zip(prompts, answers.lengths, strict=True))

    def prompt_lengths(self, answers: Answers) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) for ids in self.token_ids[: answers.prompts]]


def make_workload(folder: Path, *, size: str, num_layers: int, vocab_size: int, prompts: int) -> Workload:
    """Writes a random Qwen3 model; the prompts are of 16 to 64 tokens of its tokenizer."""
    from transformers import AutoTokenizer

    from whet.plugins.lessons.init_model import SAMPLE_TEXT, init_model

    model = init_model(folder / "model", "qwen3", size, num_layers=num_layers, vocab_size=vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = random.Random(0)
    words = SAMPLE_TEXT.split()
    texts: list[str] = []
    for _ in range(prompts):
        wanted, text = draw.randint(16, 60), draw.choice(words)
        while len(tokenizer(text).input_ids) < wanted:
            text += " " + draw.choice(words)
        texts.append(text)
    return Workload(model, texts, [tokenizer(text).input_ids for text in texts])


def score(text: str) -> float:
    """A reward that costs nothing and differs between answers: the share of vowels."""
    return sum(letter in VOWELS for letter in text) / max(1, len(text))
