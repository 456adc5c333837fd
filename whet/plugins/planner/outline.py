# SPDX-License-Identifier: Apache-2.0
"""Outlines: models as shapes without values, to count the bytes of weights, optimizer and passes from a config."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.engines.optim import optimizer_for, optimizers_of
from whet.engines.role import RoleSettings
from whet.errors import ModelError
from whet.kernels import attention
from whet.kernels.compact_adamw import CompactAdamW
from whet.models.attention import fits_one_call
from whet.models.encoders.base import body_of as vision_body
from whet.models.encoders.load import encoders_of
from whet.models.freeze import freeze
from whet.models.load import body_of, cast_weights, layers, outline, recompute_activations
from whet.models.lora import add_adapter
from whet.models.outputs import ForwardSettings, outputs_of
from whet.models.packing import Layout, layout
from whet.models.positions import position_ids
from whet.models.supported import support_of
from whet.options import as_list
from whet.plugins.planner.first import COMPILED, PLAIN, Kept, is_compiled

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in configs of models
FLOAT32 = 4  # bytes of a master weight, a gradient, a moment
VISION_SAVED = 1.25  # numbers that a tower saves for each in and out of its linear layers: 1.0 to 1.7 in four families
_PASSES: dict[Hashable, Counter[str]] = {}


@dataclass(frozen=True)
class RowLength:
    """The lengths of a row of a batch, in tokens."""

    prompt: int  # number of the prompt: rows of one group have the same
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> int:
        """The length of prompt and response."""
        return self.prompt_tokens + self.response_tokens


class Outline:
    """The model of a role, as shapes without values. Its properties are sizes in bytes and numbers of weights."""

    def __init__(self, role: RoleSettings, on_device: bool = False, media_share: float = 0.0) -> None:
        self.role, self._mode, self.media_share = role, FakeTensorMode(), media_share
        self.device_type = "accelerator" if on_device else "cpu"
        with torch.device("meta"):
            self.model: nn.Module = outline(
                role.model_path,
                is_value_model=role.is_value_model,
                is_reward_model=role.is_reward_model,
                trust_remote_code=role.trust_remote_code,
            )
        if not support_of(self.model).is_own:
            role = self.role = replace(role, engine=role.engine.model_copy(update={"packing": False}))
        self.model.train(role.optim is not None).requires_grad_(role.optim is not None)
        body: Any = self.model.body if role.is_value_model else self.model
        self.config = body.config.get_text_config()
        self.num_weights = sum(weight.numel() for weight in self.model.parameters())  # without an adapter's
        if role.optim is not None and role.optim.weight_rounding is not None:
            cast_weights(self.model, torch.bfloat16)
        freeze(self.model, role.freeze)
        if role.lora is not None:
            with torch.device("meta"):
                add_adapter(body, role.lora, 0, role.forward.dtype)
        self.encoders = encoders_of(self.model)
        self.vision_is_frozen = self.encoders is not None and self.encoders.is_frozen(self.model)
        _as_if_on_cpu(self.model, self._mode)
        if role.gradient_checkpointing:
            recompute_activations(self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in their training dtype, adapters included; tied weights count once."""
        return sum(weight.nbytes for weight in self.model.parameters())

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a sharding engine gathers at once, in the dtype of the computation: two layers, and all weights
        outside of layers."""
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers(body_of(self.model))]
        every = sum(weight.numel() for weight in self.model.parameters())
        return (every - sum(sizes) + 2 * max(sizes, default=0)) * self.role.forward.dtype.itemsize

    @property
    def is_adapted(self) -> bool:
        """True if only an adapter is trained."""
        return self.role.lora is not None

    @property
    def trained_share(self) -> float:
        """The number of trained parameters, adapters included, divided by the number of the model's parameters."""
        return self.gradient_bytes / FLOAT32 / self.num_weights

    @property
    def head_weights(self) -> int:
        """The number of weights of the output head; about 0 in a value or reward model."""
        has_head = not self.role.is_value_model and not self.role.is_reward_model
        return int(self.config.vocab_size * self.config.hidden_size) if has_head else 0

    @property
    def layer_weights(self) -> int:
        """The number of linear weights that process a token, without the output head. A mixture of experts counts its
        router, and as many experts of mean size as a token is routed to."""
        head = None if self.role.is_value_model else self.model.get_output_embeddings()  # type: ignore[operator]
        towers = {part for tower in self._towers for part in tower.modules()}
        linear = [each for each in _linear(self.model) if each is not head and each not in towers]
        dense = sum(each.weight.numel() for each in linear if min(each.weight.shape) > 1)
        number, used = self.experts
        if not number:
            return dense
        others = [each for each in self.model.modules() if not isinstance(each, nn.Linear) and each not in towers]
        weights = [weight for each in others for weight in each.parameters(recurse=False) if weight.dim() > 1]
        routers, experts = (
            sum(weight.numel() for weight in weights if weight.dim() == dims and len(weight) == number)
            for dims in (2, 3)
        )
        return dense + routers + experts * used // number

    @property
    def experts(self) -> tuple[int, int]:
        """The number of experts of a layer, and the number of experts for each token; 0 if the config lacks it."""
        number = next((found for name in EXPERTS if (found := getattr(self.config, name, None))), 0)
        return number, getattr(self.config, "num_experts_per_tok", 0) or 0

    @property
    def _towers(self) -> list[nn.Module]:
        modules = {} if self.encoders is None else dict(vision_body(self.model).named_modules())
        return [] if self.encoders is None else [modules[name] for name in self.encoders.towers if name in modules]

    @property
    def vision_weights(self) -> int:
        """The number of weights that process only images and videos; 0 in a text model."""
        return sum(weight.numel() for tower in self._towers for weight in tower.parameters())

    @property
    def patches_per_token(self) -> float:
        """The number of patches that form a token; 0 in a text model."""
        return 0.0 if self.encoders is None else max(each.patches_per_token for each in self.encoders.own)

    def patches(self, rows: Sequence[RowLength]) -> float:
        """Returns the number of patches of the rows' images and videos; a shared prompt counts once."""
        if self.encoders is None:
            return 0.0
        shares = self.role.forward.packing and self.role.forward.share_prompts
        # An example has one token as its prompt here: its media may be in all its tokens.
        lengths = [(row.prompt, row.prompt_tokens if row.prompt_tokens > 1 else row.tokens) for row in rows]
        prompts = list(dict(lengths).values()) if shares else [length for _, length in lengths]
        return self.media_share * sum(prompts) * self.patches_per_token

    def vision_bytes(self, rows: Sequence[RowLength]) -> int:
        """Returns the bytes that a vision tower saves for the backward pass: inputs and outputs of its linear layers,
        for each patch.

        It is an estimate, because the passes of a tower depend on its grids. 0 if the tower is frozen. With gradient
        checkpointing each layer saves only its input."""
        if self.encoders is None or self.vision_is_frozen:
            return 0
        inner = [layer for tower in self._towers for layer in layers(tower)]
        sizes = [sum(each.in_features + each.out_features for each in _linear(layer)) for layer in inner]
        numbers = sum(sizes)
        if self.role.gradient_checkpointing and inner:
            numbers = len(inner) * _linear(inner[0])[0].in_features + max(sizes)
        return round(VISION_SAVED * self.patches(rows) * numbers * self.role.forward.dtype.itemsize)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of trained weights."""
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad) * FLOAT32

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's state, found by an optimizer step on weights without values."""
        if self.role.optim is None:
            return 0
        states = list[object]()
        for optimizer in optimizers_of(optimizer_for(self.model, self.role.optim)):
            if isinstance(optimizer, CompactAdamW):  # its step depends on numbers, the shapes of its state do not
                weights = [weight for group in optimizer.param_groups for weight in group["params"]]
                empty = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in weights]
                states += [optimizer.begin(each) for each in empty]
                continue
            with self._mode:
                self._give_gradients()
                optimizer.step()
                self.model.zero_grad()
            states.append(dict(optimizer.state))
        return sum(value.nbytes for value in _tensors(states))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: the optimizer's state and the weights (with an adapter, only the adapter's)."""
        return self.moment_bytes + (self.gradient_bytes if self.is_adapted else self.weight_bytes)

    @property
    def kept(self) -> Kept:
        """The numbers of activations that a pass keeps for each token: fewer if layers are compiled."""
        role, dtype = self.role, self.role.forward.dtype
        compiles = self.device_type != "cpu" and is_compiled(role.engine.name, role.engine.options)
        is_known = fits_one_call(self.config, dtype) and not self.experts[0]
        return COMPILED if compiles and is_known and role.forward.packing else PLAIN

    @property
    def copy_bytes(self) -> int:
        """Bytes of the bfloat16 copies of float32 weights, which matrix products in bfloat16 read."""
        item = self.role.forward.dtype.itemsize
        wide = [weight for weight in self.model.parameters() if weight.dtype == torch.float32 and weight.dim() > 1]
        return item * sum(weight.numel() for weight in wide) if item < FLOAT32 else 0

    @property
    def logit_bytes(self) -> int:
        """Bytes of the logits of a chunk of tokens and their gradient; about 0 in a value or reward model."""
        return self.role.forward.chunk_tokens * self.config.vocab_size * self.kept.logit * bool(self.head_weights)

    def bytes_of_token(self, trains: bool = True) -> float:
        """Returns the bytes of a token's activations in a forward pass, and in a backward pass too if it `trains`."""
        shape, item = self.config, self.role.forward.dtype.itemsize
        sizes = shape.hidden_size, inner_size(shape), shape.num_hidden_layers * trains, item
        return self.kept.bytes_of_token(*sizes, recomputes=self.role.gradient_checkpointing or not trains)

    def update_bytes(self, rows: Sequence[RowLength], needs: frozenset[str], *, accumulates: bool) -> Counter[str]:
        """Returns the peak bytes of forward and backward of one micro-batch by kind, without weights and optimizer.

        It runs the pass on tensors without values, and uses formulas for compiled layers. `accumulates`: an earlier
        micro-batch has left gradients.  Raises: ModelError for a model whose passes depend on values."""
        role = self.role
        adapter = None if role.lora is None else repr(role.lora)
        model = (role.model_path, role.is_value_model, role.is_reward_model, adapter, tuple(role.freeze))
        rounding = None if role.optim is None else role.optim.weight_rounding
        how = rounding, role.gradient_checkpointing, role.forward, self.device_type, self.kept
        key = (model, how, tuple(rows), needs, accumulates)
        if key not in _PASSES:  # plans of a config and of its changes share passes
            try:
                run = self._compute if self.kept is COMPILED else self._run
                _PASSES[key] = run(rows, needs, accumulates)
            except RuntimeError as error:  # for instance an operator whose output shape depends on numbers
                found = f"cannot be planned without its numbers: {error}"
                raise ModelError(str(role.model_path), found, change="start the run without `whet plan`") from error
        return Counter(_PASSES[key]) + Counter({"vision activations": self.vision_bytes(rows)})

    def _compute(self, rows: Sequence[RowLength], _: frozenset[str], accumulates: bool) -> Counter[str]:
        activations = round(self.bytes_of_token() * tokens_of(rows, self.role.forward))
        gradients = self.gradient_bytes if accumulates else max(0, self.gradient_bytes - activations)
        found = {"activations": activations, "gradients": gradients, "logits": self.logit_bytes}
        return Counter({**found, "weights in bfloat16": self.copy_bytes})

    def _run(self, rows: Sequence[RowLength], needs: frozenset[str], accumulates: bool) -> Counter[str]:
        share, ends = self.role.forward.packing and self.role.forward.share_prompts, self.role.is_reward_model
        where = layout(columns(rows), share, ends=ends)
        shapes = {weight.shape for weight in self.model.parameters()}
        vocabulary = self.config.vocab_size

        def kind(tensor: torch.Tensor) -> str:
            if tensor.dim() == 2 and tensor.shape in shapes:
                return "gradients" if tensor.dtype == torch.float32 else "weights in bfloat16"
            return "logits" if tensor.dim() == 2 and tensor.shape[1] == vocabulary else "activations"

        counted, shape_only = TensorBytes(kind), self._without_numbers(where)
        with self._mode:
            self.model.zero_grad()
            if accumulates:
                self._give_gradients()
            with counted, _attention_of(self.device_type):
                outputs = outputs_of(self.model, shape_only, needs, self.role.forward)
                total = torch.stack([value.sum() for value in outputs.values()]).sum()
                total.backward()  # type: ignore[no-untyped-call]
        if accumulates:
            counted.peak["gradients"] += self.gradient_bytes
        return counted.peak + Counter(activations=_bytes(where))

    def _give_gradients(self) -> None:
        for weight in self.model.parameters():
            if weight.requires_grad:
                weight.grad = torch.empty_like(weight)

    def _without_numbers(self, where: Layout) -> Layout:
        def shapes_of(grid: Any) -> Any:
            tensors = {each.name: getattr(grid, each.name) for each in fields(grid)}
            shapes = {k: self._mode.from_tensor(v) for k, v in tensors.items() if isinstance(v, torch.Tensor)}
            return replace(grid, **shapes)

        # Masks are built without values, and only if attention reads them: one for a row of 1M tokens has 1 TiB.
        laid_out: Layout = replace(shapes_of(where), bunches=tuple(map(shapes_of, where.bunches)))
        if self.role.is_reward_model:
            vars(laid_out)["sampled_by_row"] = self._mode.from_tensor(where.sampled_by_row)
        return laid_out


@contextmanager
def _attention_of(device_type: str) -> Iterator[None]:
    """Makes attention in its block use the fused kernel for all rows, if `device_type` is not the CPU."""
    before = attention.SHORT
    attention.SHORT = before if device_type == "cpu" else 0
    try:
        yield
    finally:
        attention.SHORT = before


def _as_if_on_cpu(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces tensors on the meta device by fake tensors on the CPU, so that passes run as on the CPU."""
    made: dict[int, torch.Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                tensors[name] = made[id(tensor)]  # type: ignore[assignment]


def inner_size(model: Any) -> int:
    """Returns the inner size of a layer's MLP; the largest if layers differ."""
    size = model.to_dict().get("intermediate_size") or 4 * model.hidden_size
    return int(max(as_list(size)))


def tokens_of(rows: Sequence[RowLength], forward: ForwardSettings) -> int:
    """Returns the number of tokens of a micro-batch in a forward pass."""
    if not forward.packing:
        return len(rows) * max(row.tokens for row in rows)
    if not forward.share_prompts:
        return sum(row.tokens for row in rows)
    return sum(row.response_tokens for row in rows) + sum({row.prompt: row.prompt_tokens for row in rows}.values())


def columns(rows: Sequence[RowLength]) -> dict[str, torch.Tensor]:
    """Makes the columns of a batch with these lengths. All tokens of a prompt have its number as token id."""
    prompt_width, width = max(row.prompt_tokens for row in rows), max(row.response_tokens for row in rows)
    prompts = torch.tensor([row.prompt_tokens for row in rows])[:, None]
    responses = torch.tensor([row.response_tokens for row in rows])[:, None]
    padding = prompt_width - prompts
    real = torch.cat([torch.arange(prompt_width) >= padding, torch.arange(width) < responses], dim=1).long()
    return {
        "input_ids": torch.tensor([row.prompt for row in rows])[:, None] * real,
        "attention_mask": real,
        "position_ids": position_ids(real),
        "response_mask": real[:, prompt_width:],
    }


def _bytes(where: Layout) -> int:
    """Returns the bytes of all index and mask tensors of a layout."""
    values = [value for part in (where, *where.bunches) for value in vars(part).values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of storages created inside the block, current and peak, by `kind`.

    It works on real tensors, and on fake ones inside a FakeTensorMode. Temporary memory inside an operator does not
    count."""

    def __init__(self, kind: Callable[[torch.Tensor], str] = lambda tensor: "tensors") -> None:
        super().__init__()
        self._kind = kind
        self._alive: dict[int, tuple[str, int]] = {}
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()  # bytes by kind at the time of the largest total

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator and counts the storages that it created."""
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # the most frequent call
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        made = function(*args, **(kwargs or {}))
        if not isinstance(made, torch.Tensor | tuple | list):
            return made
        new = {each.untyped_storage()._cdata: each for each in _tensors(made)}
        new = {key: each for key, each in new.items() if key not in self._alive}
        if new:  # remove views of tensors from before the block
            for each in _tensors((args, kwargs)):
                new.pop(each.untyped_storage()._cdata, None)
            for key, each in new.items():
                self._count(key, each)
        return made

    def _count(self, key: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        kind, size = self._kind(tensor), storage.nbytes()
        self._alive[key] = kind, size
        self.now[kind] += size
        weakref.finalize(storage, self._forget, key)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()

    def _forget(self, key: int) -> None:
        kind, size = self._alive.pop(key)
        self.now[kind] -= size


def _linear(module: nn.Module) -> list[nn.Linear]:
    return [each for each in module.modules() if isinstance(each, nn.Linear)]


def _tensors(values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
