# SPDX-License-Identifier: Apache-2.0
"""Tokens and seconds of a step: arithmetic and memory traffic over what this machine was just measured to do.

An estimate, good to a factor of two. A model's products are taken to reach `EFFICIENCY` of the rate of a bare one;
rewards and the work of environments are not in it, and validation only in the time of a whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whet.config.schema import SFTConfig, TrainConfig, TrainerConfig
from whet.planning.memory import ITEM_BYTES, Setup, decoded_together, head_size, inner_size, mini_batch, token_bytes
from whet.planning.outline import FLOAT32, Outline, Row

EFFICIENCY = 0.7  # of the products of a whole model, against one product again and again
CALLS_PER_LAYER, CALLS_BESIDE = 120, 150  # of a forward pass, in calls of a smallest operator
STATES, LOGITS = 16, 10  # numbers read and written for each hidden one of a layer, and for each logit, outside products
MEASURE_SECONDS = 0.15  # for each rate
LARGEST_MATRIX = 4096  # rows and columns that are measured at the most


@dataclass(frozen=True)
class Rates:
    """Work of this machine in a second."""

    decode_flops: float  # in products with as many rows as are decoded together
    train_flops: float  # in products with as many rows as a micro-batch has
    bytes: float  # read, from memory
    logits: float  # turned into probabilities and summed up
    calls: float  # of operators on next to nothing


@dataclass(frozen=True)
class Speed:
    """The size and the time of a step."""

    tokens: Mapping[str, int]  # prompt, response
    seconds: Mapping[str, float]  # by phase
    validation: float = 0.0  # seconds of one; 0 where there is none

    def whole(self, trainer: TrainerConfig, steps: int, first_step: int = 0, step: float | None = None) -> float:
        """Seconds of a run from `first_step` on, validations included; `step` is what one has taken."""
        every = trainer.val_freq if trainer.val_freq > 0 else steps
        validations = -(-steps // every) - first_step // every + (trainer.val_before_train and first_step == 0)
        each = sum(self.seconds.values()) if step is None else step
        return (steps - first_step) * each + validations * self.validation


def plan_speed(
    setup: Setup, response_length: float | None = None, rates: Rates | None = None, num_val: int = 0
) -> Speed:
    """A step with responses of `response_length` tokens, by default the longest allowed ones, and a validation on
    `num_val` prompts or examples."""
    config, outlines = setup.config, setup.outlines
    response = setup.lengths.response if response_length is None else response_length
    if rates is None:
        rates = measure(setup)
    if isinstance(config, SFTConfig):
        rows = mini_batch(config, "actor", setup.lengths)
        seconds = {"update": _update(outlines["actor"], rows, rates)}
        held_out = [Row(number, 1, tokens - 1) for number, tokens in enumerate(setup.lengths.spread(num_val))]
        validation = _forward(outlines["actor"], held_out, rates) if held_out else 0.0
        return Speed({"all": sum(row.tokens for row in rows) * config.cluster.world_size}, seconds, validation)

    def answered(prompts: int, n: int) -> list[Row]:
        lengths = enumerate(setup.lengths.spread(prompts))
        return [row for number, tokens in lengths for row in [Row(number, tokens, round(response))] * n]

    def share(role: str, rows: list[Row]) -> list[Row]:
        return rows[: -(-len(rows) // config.cluster.processes_of(role))]

    rows = answered(config.data.train_batch_size, config.rollout.n)
    held_out = answered(num_val, config.trainer.validation.n)
    seconds = {"rollout": _rollout(config, outlines["actor"], share("rollout", rows), rates)}
    validation = _rollout(config, outlines["actor"], share("rollout", held_out), rates) if held_out else 0.0
    for role in setup.passes:
        model = outlines.get(role, outlines["actor"])  # the reference of an adapter is the actor without it
        seconds["columns"] = seconds.get("columns", 0.0) + _forward(model, share(role, rows), rates)
    for role in setup.objectives:
        epochs = config.critic.epochs if role == "critic" else config.actor.epochs
        seconds[f"{role} update"] = epochs * _update(outlines[role], share(role, rows), rates)
    prompts = sum(setup.lengths.spread(config.data.train_batch_size))
    return Speed({"prompt": prompts, "response": round(response) * len(rows)}, seconds, validation)


def _update(model: Outline, rows: list[Row], rates: Rates) -> float:
    """Backward is twice the forward; logits are computed once more in it, layers where activations are not kept. The
    optimizer reads weight, gradient and two moments and writes three of them."""
    once, head = _forward(model, rows, rates), 2 * model.head_weights * sum(row.response_tokens for row in rows)
    again = once if model.role.gradient_checkpointing else head / rates.train_flops / EFFICIENCY
    return 3 * once + again + 7 * model.gradient_bytes / rates.bytes


def _forward(model: Outline, rows: list[Row], rates: Rates) -> float:
    """Seconds of one pass over the rows: products, what reads and writes states between them, calls."""
    shape, tokens = model.config, sum(row.tokens for row in rows)
    sampled = sum(row.response_tokens for row in rows)
    if model.role.forward.packing and model.role.forward.share_prompts:
        tokens = sampled + sum({row.prompt: row.prompt_tokens for row in rows}.values())
    numbers = tokens * shape.num_hidden_layers * STATES * (shape.hidden_size + inner_size(shape) // 3)
    numbers += sampled * LOGITS * (shape.vocab_size if model.head_weights else 0)
    passes = -(-tokens // model.role.micro_batch_tokens(model.device_type))
    calls = passes * (shape.num_hidden_layers * CALLS_PER_LAYER + CALLS_BESIDE)
    products = _forward_flops(model, rows) / rates.train_flops / EFFICIENCY
    return products + FLOAT32 * numbers / rates.bytes + calls / rates.calls


def _forward_flops(model: Outline, rows: list[Row]) -> float:
    """A product with each weight is two operations; each pair of tokens costs two products of a head's size."""
    shares = model.role.forward.packing and model.role.forward.share_prompts
    prompts = {row.prompt: row.prompt_tokens for row in rows}.values() if shares else [r.prompt_tokens for r in rows]
    responses = sum(row.response_tokens for row in rows)
    pairs = sum(row.response_tokens * (row.prompt_tokens + row.response_tokens / 2) for row in rows)
    pairs += sum(prompt**2 / 2 for prompt in prompts)
    width = model.config.num_hidden_layers * model.config.num_attention_heads * head_size(model.config)
    products = model.layer_weights * (sum(prompts) + responses) + model.head_weights * responses
    return float(2 * products + 4 * width * pairs)


def _rollout(config: TrainConfig, model: Outline, rows: list[Row], rates: Rates) -> float:
    """Prompts at once, answers token by token: each decode step takes the longest of arithmetic, of reading weights and
    cache, and of calling the operators, then samples."""
    dtype, together = config.rollout.dtype or config.model.dtype, min(decoded_together(config), len(rows))
    prompts = {row.prompt: row.prompt_tokens for row in rows}
    response = rows[0].response_tokens
    prefill = 2 * model.layer_weights * sum(prompts.values()) / rates.train_flops / EFFICIENCY
    weights = model.layer_weights + model.head_weights
    context = sum(prompts.values()) / len(prompts) + response / 2
    arithmetic = 2 * weights * together / rates.decode_flops / EFFICIENCY
    traffic = (weights * ITEM_BYTES[dtype] + together * context * token_bytes(model.config, dtype)) / rates.bytes
    calls = (model.config.num_hidden_layers * CALLS_PER_LAYER + CALLS_BESIDE) / rates.calls
    sampling = together * model.config.vocab_size / rates.logits
    rounds = -(-len(rows) // together)
    return prefill + rounds * response * (max(arithmetic, traffic) + calls + sampling)


def measure(setup: Setup, seconds: float = MEASURE_SECONDS) -> Rates:
    """Measures this machine with this model's sizes and dtypes, for `seconds` each rate."""
    config, model = setup.config, setup.outlines["actor"].config
    train = getattr(torch, config.model.dtype)
    decode, together = train, 64
    if isinstance(config, TrainConfig):
        decode, together = getattr(torch, config.rollout.dtype or config.model.dtype), decoded_together(config)
    size = min(model.hidden_size, LARGEST_MATRIX), min(inner_size(model), LARGEST_MATRIX)
    tokens = min(setup.roles["actor"].micro_batch_tokens(setup.outlines["actor"].device_type), 2048)
    small, large, logits = torch.ones(1), torch.ones(2**24), torch.randn(min(together, 64), model.vocab_size)
    return Rates(
        decode_flops=_product(together, *size, decode, seconds),
        train_flops=_product(tokens, *size, train, seconds),
        bytes=2 * large.nbytes / _seconds(large.clone, seconds),
        logits=logits.numel() / _seconds(lambda: logits.log_softmax(-1).exp().cumsum(-1), seconds),
        calls=1 / _seconds(lambda: small.add(1), seconds),
    )


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, seconds: float) -> float:
    """Operations a second."""
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
    return 2 * rows * inner * columns / _seconds(lambda: torch.nn.functional.linear(left, right), seconds)


@torch.no_grad()
def _seconds(run: Callable[[], Any], least: float) -> float:
    """Measures a call: the mean over at least so many seconds after a first one."""
    run()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < least:
        run()
        calls += 1
    return (time.perf_counter() - start) / calls
