# SPDX-License-Identifier: Apache-2.0
"""The least time that a phase can take on a machine: its arithmetic, or its memory traffic, at the measured rate.

Only what has to be done is counted: no padding, no recomputation, no prompt twice, no element-wise arithmetic. A
multiplication with an addition is 2 operations. Sizes are of bfloat16, the optimizer's of float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BFLOAT16, FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model, by the names of its config."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def body_weights(self) -> int:
        """Weights that every token is multiplied with: projections and MLP, not embedding and head."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads  # query and output, key and value
        return self.num_hidden_layers * self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Weights that a token is multiplied with to get its logits."""
        return self.hidden_size * self.vocab_size

    @property
    def activations(self) -> int:
        """Numbers that a token's matrix products read and write, all layers together."""
        attention = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = 4 * self.hidden_size + attention * self.head_dim + 3 * self.intermediate_size
        return self.num_hidden_layers * layer

    def attention_flops(self, pairs: int) -> int:
        """Scores and weighted values, where tokens see `pairs` tokens in all."""
        return 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * pairs

    @property
    def cached_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * BFLOAT16


@dataclass(frozen=True)
class Machine:
    """Measured speeds: operations and bytes a second, all cores together."""

    bfloat16_flops: float
    bytes_per_second: float


@dataclass(frozen=True)
class Work:
    """The work to be done: operations in bfloat16, and bytes through memory."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The least time: arithmetic and traffic can run side by side."""
        return max(self.flops / machine.bfloat16_flops, self.bytes / machine.bytes_per_second)


@dataclass(frozen=True)
class Reading:
    """The tokens that a model must read so that every sampled token gets its probability once.

    The answers to one prompt stand side by side and share it, the logits after it too. Nobody reads an answer's last
    token.
    """

    prompts: Sequence[int]  # tokens of each
    lengths: Sequence[int]  # tokens of each answer

    @property
    def contexts(self) -> Iterator[int]:
        """For each token that is read, how many tokens it sees, itself included."""
        for prompt in self.prompts:
            yield from range(1, prompt + 1)
        yield from self.answer_contexts

    @property
    def answer_contexts(self) -> Iterator[int]:
        """The contexts of response tokens only, which decoding reads one by one."""
        n = len(self.lengths) // len(self.prompts)
        for row, length in enumerate(self.lengths):
            prompt = self.prompts[row // n]
            yield from range(prompt + 1, prompt + length)

    @property
    def tokens(self) -> int:
        """Tokens that are read."""
        return sum(self.prompts) + self.logits - len(self.prompts)

    @property
    def logits(self) -> int:
        """Tokens after which something is sampled."""
        return len(self.prompts) + sum(self.lengths) - len(self.lengths)

    def flops(self, shape: Shape) -> int:
        """Operations of one forward pass."""
        products = 2 * (shape.body_weights * self.tokens + shape.head_weights * self.logits)
        return products + shape.attention_flops(sum(self.contexts))


def rollout(shape: Shape, reading: Reading) -> Work:
    """Each prompt read at once, answers token by token.

    Weights are read once a step of the longest answer, each token's keys and values once by every token that sees it.
    """
    weights = (shape.body_weights + shape.head_weights) * BFLOAT16
    cached = (sum(reading.prompts) + sum(reading.answer_contexts)) * shape.cached_bytes
    return Work(reading.flops(shape), cached + max(reading.lengths) * weights)


def update(shape: Shape, reading: Reading) -> Work:
    """Forward, backward (twice the forward) and AdamW.

    A matrix product reads its input and writes its output; AdamW reads weight, gradient, two moments and writes three.
    """
    activations = shape.activations * reading.tokens + (shape.hidden_size + shape.vocab_size) * reading.logits
    optimizer = 7 * (shape.body_weights + shape.head_weights) * FLOAT32
    return Work(3 * reading.flops(shape), 3 * activations * BFLOAT16 + optimizer)
