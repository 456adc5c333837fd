# SPDX-License-Identifier: Apache-2.0
"""Additions to the worker of vLLM 0.32 (--worker-extension-cls), loaded in its process; nothing of whet is imported.

- Weights: a transfer back end that loads them part by part into the live model. On a CPU linear layers compute with
  their own parameters: vLLM would pack a copy of them only once, and compute with it after an update too.
- Sampling: log-probs are log_softmax(logits / temperature) before penalties, bad words and cuts. A token is drawn with
  a random number that is a function of the request's key and the token's position in the response, as in
  whet/kernels/sampling.py. Penalties and bad words treat tokens of an earlier attempt as tokens of the response.
- Images and videos: pixel values are read from a file in shared memory when the tower encodes them; features are kept
  until the tower's weights change; rotary positions come with the request.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import whet_transfer
from safetensors import safe_open
from vllm import _custom_ops
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import utils as layer_utils
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalFlatField, MultiModalKwargsItem
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker import gpu_input_batch, gpu_model_runner

GREEDY = 1e-5  # temperatures below are greedy, as in vLLM
MASK = 2**64 - 1
TOWERS = ("visual.", "model.vision_model.", "model.connector.")  # names of Qwen-VL, then of SmolVLM
FEATURE_BYTES = 2**30  # of the host's memory, for features of images and videos


class Extension(whet_transfer.PlainExtension):
    """The base class that vLLM adds to its worker. Importing this module installs the additions."""

    model_runner: Any

    def replace_adapter(self, name: str, path: str) -> None:
        """Replaces the only adapter. Without `load_inplace` vLLM would keep the old adapter."""
        self.model_runner.add_lora(LoRARequest(name, 1, path, load_inplace=True))

    def num_encoded(self) -> int:
        """Returns the number of images and videos that the tower has encoded."""
        return FEATURES.num_encoded


# -- weights


class PartTransfer(whet_transfer.PlainTransfer):
    """Loads weights part by part; on a CPU directly into the live model."""

    def start_weight_update(self) -> None:
        """Starts an update of the weights; on a CPU they keep their layout."""
        if current_platform.is_cpu():
            self.came = set[str]()
        else:
            super().start_weight_update()

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Ends an update and drops outdated features.  Raises: ValueError if a weight of the model is missing."""
        if current_platform.is_cpu():
            self.own = {name for name, weight in self.model.named_parameters() if weight.numel()}
            self.require_all()
            _pack_experts(self.model)
        else:
            super().finish_weight_update()
        FEATURES.keep_for(self.model)


def _pack_experts(model: torch.nn.Module) -> None:
    """Packs experts for the CPU kernel again: vLLM packs only once, and an update writes the checkpoint's layout."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            continue
        config = experts.moe_config
        if experts._padded_intermediate_size(config) != config.intermediate_size_per_partition:
            raise ValueError(
                f"experts of intermediate size {config.intermediate_size_per_partition} are padded on a CPU, and "
                "cannot be updated in place"
            )
        weights: Any = module.w13_weight, module.w2_weight
        for weight in weights:
            weight.data.copy_(_custom_ops.cpu_prepack_moe_weight(weight.data.clone(), experts.isa))


def _plain_products() -> None:
    """Makes linear layers on a CPU compute with their parameters, instead of a packed copy."""
    packing = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch


# -- sampling


class KeyedSampler(Sampler):
    """Replaces vLLM's sampler by one with whet's log-probs and random numbers."""

    rows: Sequence[Any] = ()  # the requests of the batch, in the order of its rows; empty where vLLM warms up
    _temperature: torch.Tensor | None = None  # while log-probs of sampled tokens are computed

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *rest: Any, **more: Any) -> Any:
        """Samples tokens and their log-probs from logits [S, V]."""
        if len(self.rows) == len(logits) and any(_given(row, "sampled", 0) for row in self.rows):
            sampling_metadata = _with_earlier_tokens(sampling_metadata, self.rows)
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *rest, **more)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns log_softmax(logits / temperature); the temperature is 1 for greedy rows.   [S, V] -> [S, V]"""
        logits = logits.to(torch.float32)
        if self._temperature is not None:
            logits = logits / self._temperature.where(self._temperature >= GREEDY, 1.0)[:, None]
        return logits.log_softmax(-1)

    def sample(self, logits: torch.Tensor, sampling_metadata: Any, *rest: Any) -> Any:
        """Draws tokens [S]; each row has its own random number."""
        if sampling_metadata.all_greedy or len(self.rows) != len(logits):
            return super().sample(logits, sampling_metadata, *rest)
        greedy = None if sampling_metadata.all_random else self.greedy_sample(logits)
        temperature = sampling_metadata.temperature
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        for processor in sampling_metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logits = apply_top_k_top_p(logits, sampling_metadata.top_k, sampling_metadata.top_p)
        drawn = _draw(logits, torch.tensor([_number(row) for row in self.rows], device=logits.device))
        return (drawn if greedy is None else torch.where(temperature < GREEDY, greedy, drawn)), None


def _draw(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Draws for each row the first token whose cumulative probability exceeds the row's number. [S, V], [S] -> [S]"""
    probs = logits.softmax(-1)
    cumulated = probs.cumsum(-1)
    tokens = torch.searchsorted(cumulated, numbers[:, None] * cumulated[:, -1:], right=True).squeeze(1)
    last = torch.where(probs > 0, torch.arange(probs.shape[1], device=probs.device), 0).amax(-1)
    return torch.minimum(tokens, last)


def _number(row: Any) -> float:
    """Returns a random number in [0, 1) for a request's next token: splitmix64's hash of key and position."""
    place = _given(row, "sampled", 0) + len(row.output_token_ids)
    key = _given(row, "key", None)
    x = ((random.getrandbits(64) if key is None else key) + (place + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) >> 40) * 2.0**-24


def _with_earlier_tokens(metadata: Any, rows: Sequence[Any]) -> Any:
    """Adds the tokens of an earlier attempt to the response tokens in the metadata. They arrive in the prompt."""
    if not metadata.output_token_ids:
        return metadata  # nothing reads them
    earlier = [row.prompt_token_ids[len(row.prompt_token_ids) - _given(row, "sampled", 0) :] for row in rows]
    together = [[*before, *after] for before, after in zip(earlier, metadata.output_token_ids, strict=True)]
    return replace(metadata, output_token_ids=together)


def _given(row: Any, name: str, default: Any) -> Any:
    """Returns an extra argument of a request's sampling parameters."""
    return (row.sampling_params.extra_args or {}).get(name, default)


def _key_the_sampler() -> None:
    """Installs KeyedSampler in the model runner, and passes it the requests of each batch."""
    gpu_model_runner.Sampler = KeyedSampler
    runner, batch = gpu_model_runner.GPUModelRunner, gpu_input_batch.InputBatch
    plain_sample, plain_add = runner._sample, batch.add_request

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampler.rows = [self.requests[name] for name in self.input_batch.req_ids]
        return plain_sample(self, *args, **kwargs)

    def add_request(self: Any, request: Any) -> Any:
        if request.sampling_params is not None and (words := _given(request, "bad_words", None)):
            request.sampling_params._bad_words_token_ids = words
        return plain_add(self, request)

    runner._sample, batch.add_request = sample, add_request


# -- images and videos


class FeatureCache:
    """LRU cache of the vision tower's outputs by digest. vLLM clears its own cache at each update."""

    def __init__(self) -> None:
        self.tower: list[int] | None = None  # the hash of each of its weights; None: those of the start
        self.num_encoded = 0
        self._found: OrderedDict[str, torch.Tensor] = OrderedDict()

    def keep_for(self, model: torch.nn.Module) -> None:
        """Drops all features if the weights of the tower have changed."""
        weights = [weight for name, weight in model.named_parameters() if name.startswith(TOWERS)]
        tower = torch.stack([torch.hash_tensor(weight) for weight in weights]).tolist() if weights else []
        if tower != self.tower:
            self._found.clear()
            self.tower = tower

    def find(self, name: str) -> torch.Tensor | None:
        """Returns the features of the image or video `name`, if the tower with its present weights computed them."""
        if (found := self._found.get(_digest(name))) is not None:
            self._found.move_to_end(_digest(name))
        return found

    def add(self, name: str, features: torch.Tensor) -> None:
        """Stores new features on the host. Media of vLLM's own warm-up have no digest, and are not stored."""
        if not (digest := _digest(name)):
            return
        self.num_encoded += 1
        self._found[digest] = features.detach().to("cpu", copy=True)
        while sum(each.nbytes for each in self._found.values()) > FEATURE_BYTES:
            self._found.popitem(last=False)


FEATURES = FeatureCache()


def _digest(name: str) -> str:
    return name.rpartition(" version ")[0]


def _read_media() -> None:
    """Changes the model runner: it uses positions that requests bring, and reads pixel values from their files if it
    lacks the features."""
    runner = gpu_model_runner.GPUModelRunner
    plain_batch, plain_positions = runner._batch_mm_inputs_from_scheduler, runner._init_mrope_positions
    plain_cache = runner._cache_encoder_output

    def batch(self: Any, *args: Any) -> Any:
        missing = []
        for name, (kind, item), place in zip(*plain_batch(self, *args), strict=True):
            if (found := FEATURES.find(name)) is None:
                missing.append((name, (kind, _with_pixels(item)), place))
            else:
                self.encoder_cache[name] = found.to(self.device)
        return tuple(map(list, zip(*missing, strict=True))) or ([], [], [])

    def cache(self: Any, name: str, output: torch.Tensor, *rest: Any) -> None:
        FEATURES.add(name, output)
        plain_cache(self, name, output, *rest)

    def positions(self: Any, request: Any) -> None:
        if (given := _given(request, "positions", None)) is None:
            plain_positions(self, request)
        else:
            found = request.mrope_positions = torch.tensor(given)
            request.mrope_position_delta = int(found.max()) + 1 - found.shape[1]

    runner._batch_mm_inputs_from_scheduler, runner._init_mrope_positions = batch, positions
    runner._cache_encoder_output = cache


def _with_pixels(item: Any) -> Any:
    """Reads the pixel values of an image or video from its file. Media of vLLM's own warm-up have no file."""
    if "whet_file" not in item:
        return item
    elements = {name: element for name, element in item.items() if name != "whet_file"}
    field = MultiModalFlatField(slices=[slice(None)])
    with safe_open(bytes(item["whet_file"].data.tolist()).decode(), "pt") as file:
        for name in set(file.keys()) - set(elements):
            value = file.get_tensor(name)  # tiles of SmolVLM come as a batch of one
            elements[name] = MultiModalFieldElem(data=value[0] if "num_patches" in elements else value, field=field)
    return MultiModalKwargsItem(elements)


if "whet" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("whet", PartTransfer)
    _plain_products()
    _key_the_sampler()
    _read_media()
