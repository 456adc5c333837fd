# SPDX-License-Identifier: Apache-2.0
"""The least time that a phase can take on a machine: its arithmetic, or its memory traffic, at the measured rate.

Only what has to be done is counted: no padding, no recomputation, no element-wise arithmetic. A multiplication with an
addition is 2 operations. Sizes are of bfloat16 where the benchmarks compute in it, of float32 where the optimizer does.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def attention_flops(self, context: int) -> int:
        """Scores and weighted values of one token that sees `context` tokens, itself included."""
        return 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * context

    @property
    def cached_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * BFLOAT16


@dataclass(frozen=True)
class Machine:
    """What was measured: operations and bytes a second, all cores together."""

    bfloat16_flops: float
    float32_flops: float
    bytes_per_second: float


@dataclass(frozen=True)
class Work:
    """What has to be done: operations in bfloat16, and bytes through memory."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """The least time: arithmetic and traffic can run side by side."""
        return max(self.flops / machine.bfloat16_flops, self.bytes / machine.bytes_per_second)


def rollout(shape: Shape, prompts: Sequence[int], lengths: Sequence[int]) -> Work:
    """Each prompt read once, then `lengths` tokens sampled, the answers to one prompt side by side.

    The last sampled token is fed to nobody. Weights are read once a step of the longest answer, each token's keys and
    values once for every token after it.
    """
    n = len(lengths) // len(prompts)
    flops = bytes_ = 0
    for prompt in prompts:
        flops += 2 * shape.body_weights * prompt + sum(shape.attention_flops(1 + at) for at in range(prompt))
        flops += 2 * shape.head_weights
        bytes_ += prompt * shape.cached_bytes
    for row, length in enumerate(lengths):
        contexts = range(prompts[row // n] + 1, prompts[row // n] + length)
        flops += len(contexts) * 2 * (shape.body_weights + shape.head_weights)
        flops += sum(shape.attention_flops(context) for context in contexts)
        bytes_ += sum(contexts) * shape.cached_bytes
    weights = (shape.body_weights + shape.head_weights) * BFLOAT16
    return Work(flops, bytes_ + max(lengths) * weights)


def update(shape: Shape, prompts: Sequence[int], lengths: Sequence[int]) -> Work:
    """Forward, backward (twice the forward) and AdamW on rows of prompt and answer; logits of sampled tokens only.

    A matrix product reads its input and writes its output; AdamW reads weight, gradient, two moments and writes three.
    """
    n = len(lengths) // len(prompts)
    rows = [prompts[row // n] + length for row, length in enumerate(lengths)]
    tokens, sampled = sum(rows), sum(lengths)
    flops = 3 * 2 * (shape.body_weights * tokens + shape.head_weights * sampled)
    flops += 3 * sum(shape.attention_flops(1) * row * (row + 1) // 2 for row in rows)
    activations = shape.activations * tokens + (shape.hidden_size + shape.vocab_size) * sampled
    optimizer = 7 * (shape.body_weights + shape.head_weights) * FLOAT32
    return Work(flops, 3 * activations * BFLOAT16 + optimizer)
