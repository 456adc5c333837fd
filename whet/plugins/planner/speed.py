# SPDX-License-Identifier: Apache-2.0
"""Estimates tokens and seconds of a step: arithmetic and memory traffic, divided by rates measured on this machine.

The estimate is right within a factor of two. It assumes that matrix products in a model reach `EFFICIENCY` of the rate
of a single product. It leaves out rewards and environments; only a whole run includes validation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from whet.batch import Batch
from whet.config.schema import TrainConfig, TrainerConfig
from whet.models.caches import attention_heads, head_size, token_bytes
from whet.planning.planner import Setup
from whet.plugins.planner.memory import ITEM_BYTES, decoded_together, mini_batch, outlines_of
from whet.plugins.planner.outline import FLOAT32, Outline, RowLength, inner_size

EFFICIENCY = 0.7  # rate of the products of a whole model, relative to one product repeated
CALLS_PER_LAYER, CALLS_BESIDE = 120, 150  # overhead of a forward pass in operator calls, for each layer and in addition
STATES, LOGITS = 16, 10  # numbers read and written outside products: for each hidden state of a layer, for each logit
MEASURE_SECONDS = 0.15  # to measure each rate
LARGEST_MATRIX = 4096  # most rows and columns of a measured product


@dataclass(frozen=True)
class Rates:
    """The measured rates of this machine, per second."""

    decode_flops: float  # operations, in products with one row for each sequence decoded together
    train_flops: float  # operations, in products with one row for each token of a micro-batch
    bytes: float  # bytes read from memory
    logits: float  # logits converted to probabilities and summed
    calls: float  # operator calls on tiny tensors


@dataclass(frozen=True)
class Speed:
    """The tokens and seconds of a step, and the seconds of a validation."""

    tokens: Mapping[str, int]  # prompt, response
    seconds: Mapping[str, float]  # by phase
    validation: float = 0.0  # seconds of one validation; 0 without validation

    def whole(self, trainer: TrainerConfig, steps: int, first_step: int = 0, step: float | None = None) -> float:
        """Returns the seconds of a run from `first_step` on, with validations; `step` is a step's measured seconds."""
        every = trainer.val_freq if trainer.val_freq > 0 else steps
        validations = -(-steps // every) - first_step // every + (trainer.val_before_train and first_step == 0)
        each = sum(self.seconds.values()) if step is None else step
        return (steps - first_step) * each + validations * self.validation


def plan_speed(
    setup: Setup, response_length: float | None = None, rates: Rates | None = None, num_val: int = 0
) -> Speed:
    """Estimates the time of a step with responses of `response_length` tokens (default: the limit), and of a validation
    on `num_val` prompts or examples."""
    config, outlines = setup.config, outlines_of(setup)
    response = setup.lengths.response if response_length is None else response_length
    if rates is None:
        rates = measure(setup)
    if config.trains_on == "examples":
        rows = mini_batch(config, "actor", setup.lengths)
        seconds = {"update": _update(outlines["actor"], rows, rates)}
        held_out = [RowLength(number, 1, tokens - 1) for number, tokens in enumerate(setup.lengths.spread(num_val))]
        held_out *= config.rows_an_example
        validation = _forward(outlines["actor"], held_out, rates) if held_out else 0.0
        return Speed({"all": sum(row.tokens for row in rows) * config.cluster.devices}, seconds, validation)

    def rows_of(prompts: int, n: int) -> list[RowLength]:
        lengths = enumerate(setup.lengths.spread(prompts))
        return [row for number, tokens in lengths for row in [RowLength(number, tokens, round(response))] * n]

    def of_rank(role: str, rows: list[RowLength]) -> list[RowLength]:
        return rows[: -(-len(rows) // config.cluster.processes_of(role))]

    rows = rows_of(config.data.train_batch_size, config.rollout.n)
    held_out = rows_of(num_val, config.trainer.validation.n)
    seconds = {"rollout": _rollout(config, outlines["actor"], of_rank("rollout", rows), rates)}
    validation = _rollout(config, outlines["actor"], of_rank("rollout", held_out), rates) if held_out else 0.0
    for role in setup.passes:
        model = outlines.get(role, outlines["actor"])  # the reference of an adapter is the actor without it
        seconds["columns"] = seconds.get("columns", 0.0) + _forward(model, of_rank(role, rows), rates)
    for role in setup.objectives:
        epochs = config.critic.epochs if role == "critic" else config.actor.epochs
        seconds[f"{role} update"] = epochs * _update(outlines[role], of_rank(role, rows), rates)
    prompts = sum(setup.lengths.spread(config.data.train_batch_size))
    return Speed({"prompt": prompts, "response": round(response) * len(rows)}, seconds, validation)


def training_flops(model: Outline, batch: Batch) -> float:
    """Returns the FLOPs of the forward and backward pass of an update, without recomputation. 0.0 for a mixture of
    experts if its config lacks the number of experts for each token."""
    number, used = model.experts
    if number and not used:
        return 0.0
    mask, width = batch["attention_mask"], batch["response_mask"].shape[1]
    lengths = zip(mask[:, :-width].sum(1).tolist(), mask[:, -width:].sum(1).tolist(), strict=True)
    prompts = batch["uid"].tolist() if "uid" in batch else range(len(batch))
    rows = [RowLength(prompt, *each) for prompt, each in zip(prompts, lengths, strict=True)]
    return (2 if model.is_adapted else 3) * _forward_flops(model, rows)


def _update(model: Outline, rows: list[RowLength], rates: Rates) -> float:
    """Returns the seconds of an update. The backward pass costs two forward passes, and recomputes logits, or all with
    gradient checkpointing. The optimizer reads weight, gradient and two moments; it writes all but the gradient."""
    once, head = _forward(model, rows, rates), 2 * model.head_weights * sum(row.response_tokens for row in rows)
    again = once if model.role.gradient_checkpointing else head / rates.train_flops / EFFICIENCY
    return 3 * once + again + 7 * model.gradient_bytes / rates.bytes


def _forward(model: Outline, rows: list[RowLength], rates: Rates) -> float:
    """Returns the seconds of a forward pass: matrix products, other memory traffic, and operator calls."""
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


def _forward_flops(model: Outline, rows: list[RowLength]) -> float:
    """Returns the FLOPs of a forward pass: two for each weight and token, and in attention two products of head size
    for each pair of tokens."""
    shares = model.role.forward.packing and model.role.forward.share_prompts
    prompts = {row.prompt: row.prompt_tokens for row in rows}.values() if shares else [r.prompt_tokens for r in rows]
    responses = sum(row.response_tokens for row in rows)
    pairs = sum(row.response_tokens * (row.prompt_tokens + row.response_tokens / 2) for row in rows)
    pairs += sum(prompt**2 / 2 for prompt in prompts)
    width = model.config.num_hidden_layers * attention_heads(model.config) * head_size(model.config)
    products = model.layer_weights * (sum(prompts) + responses) + model.head_weights * responses
    return float(2 * products + 4 * width * pairs + 2 * model.vision_weights * model.patches(rows))


def _rollout(config: TrainConfig, model: Outline, rows: list[RowLength], rates: Rates) -> float:
    """Returns the seconds of sampling: one prefill of all prompts, then one decode step for each response token. A
    decode step takes the longer of arithmetic and memory traffic, plus operator calls and sampling."""
    together = min(decoded_together(config), len(rows))
    prompts = {row.prompt: row.prompt_tokens for row in rows}
    response = rows[0].response_tokens
    vision = model.vision_weights * model.media_share * model.patches_per_token
    prefill = 2 * (model.layer_weights + vision) * sum(prompts.values()) / rates.train_flops / EFFICIENCY
    weights = model.layer_weights + model.head_weights
    context = sum(prompts.values()) / len(prompts) + response / 2
    arithmetic = 2 * weights * together / rates.decode_flops / EFFICIENCY
    per_item = ITEM_BYTES[config.rollout.dtype]
    traffic = (weights * per_item + together * context * token_bytes(model.config, per_item)) / rates.bytes
    calls = (model.config.num_hidden_layers * CALLS_PER_LAYER + CALLS_BESIDE) / rates.calls
    sampling = together * model.config.vocab_size / rates.logits
    rounds = -(-len(rows) // together)
    return prefill + rounds * response * (max(arithmetic, traffic) + calls + sampling)


def measure(setup: Setup, seconds: float = MEASURE_SECONDS) -> Rates:
    """Measures the rates of this machine with the model's sizes and dtypes; each measurement takes `seconds`."""
    config, model = setup.config, outlines_of(setup)["actor"].config
    train = getattr(torch, config.model.dtype)
    decode, together = train, 64
    if config.trains_on == "prompts":
        decode, together = getattr(torch, config.rollout.dtype), decoded_together(config)
    size = min(model.hidden_size, LARGEST_MATRIX), min(inner_size(model), LARGEST_MATRIX)
    tokens = min(setup.roles["actor"].micro_batch_tokens(outlines_of(setup)["actor"].device_type), 2048)
    small, large, logits = torch.ones(1), torch.ones(2**24), torch.randn(min(together, 64), model.vocab_size)
    return Rates(
        decode_flops=_product(together, *size, decode, seconds),
        train_flops=_product(tokens, *size, train, seconds),
        bytes=2 * large.nbytes / _seconds(large.clone, seconds),
        logits=logits.numel() / _seconds(lambda: logits.log_softmax(-1).exp().cumsum(-1), seconds),
        calls=1 / _seconds(lambda: small.add(1), seconds),
    )


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, seconds: float) -> float:
    """Measures the rate of a matrix product, in operations per second."""
    left, right = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
    return 2 * rows * inner * columns / _seconds(lambda: torch.nn.functional.linear(left, right), seconds)


@torch.no_grad()
def _seconds(run: Callable[[], object], least: float) -> float:
    """Measures the mean seconds of a call, over at least `least` seconds after a first call."""
    run()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < least:
        run()
        calls += 1
    return (time.perf_counter() - start) / calls
