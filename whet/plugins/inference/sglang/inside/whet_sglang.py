# SPDX-License-Identifier: Apache-2.0
"""Starts an SGLang 0.5.23 server with additions; nothing of whet is imported. The processes that the server spawns
import this file too, as their main module, so all of them have the additions.

- Sampling: a token is drawn with a random number that is a function of the request's key and the token's position in
  the response, as in whet/kernels/sampling.py. SGLang counts positions from the start of the prompt, so `_seed` in
  sglang/engine.py subtracts the prompt from the seed. Without this file SGLang uses seeds only in deterministic mode.
- Rules: a request brings allowed tokens, bad words and penalties. Log-probs are computed before these are applied.
- Ends: a response ends only at the request's stop_token_ids, not at end tokens of the model's configuration.
- Versions: every piece of a streamed reply has the weight versions of its tokens, not only the last piece.
- Images and videos: pixel values are read from files in shared memory, positions come with the request. Patch tokens
  are never sampled; log-probs are over all tokens. Features stay cached until the tower's weights change.
- Weights: /update_weights_from_tensor accepts whet's parts: paths of files, or handles of accelerator memory.
- Progress: /server_info has the number of tokens of each unfinished request that were sent."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers import sampler
from sglang.srt.managers import mm_schedule, scheduler
from sglang.srt.managers.schedule_batch import (
    FINISH_MATCHED_TOKEN,
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
    Req,
)
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.weight_versions import compute_weight_version_spans
from whet_weight_parts import weights_in

PATCHES = json.loads(os.environ.get("WHET_PATCHES", "[]"))  # token ids; none where the model reads text alone
_parsed = lru_cache(1024)(json.loads)
GOLDEN, FIRST, SECOND = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def signed(number: int) -> int:
    """Converts a 64-bit number to a signed int64 of torch."""
    return number - 2**64 if number >= 2**63 else number


def numbers(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns random numbers in [0, 1): splitmix64's hash of seed and position.   [S], [S] -> [S]"""
    x = seeds.to(torch.int64) + (positions.to(torch.int64) + 1) * signed(GOLDEN)
    x = (x ^ _shifted(x, 30)) * signed(FIRST)
    x = (x ^ _shifted(x, 27)) * signed(SECOND)
    return _shifted(x ^ _shifted(x, 31), 40).to(torch.float32) * 2.0**-24


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts bits to the right, and fills with zeros.   [S] -> [S]"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws for each row the first token whose cumulative probability exceeds the random number.   [S, V] -> [S, 1]"""
    cumulated = probs.cumsum(-1)
    tokens = torch.searchsorted(cumulated, numbers(seeds, positions)[:, None] * cumulated[:, -1:], right=True)
    last = torch.where(probs > 0, torch.arange(probs.shape[1], device=probs.device), 0).amax(-1, keepdim=True)
    return torch.minimum(tokens, last)


def draw_logs(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Does the same as `draw`, from log-probs."""
    return draw(log_probs.float().exp(), seeds, positions)


def draw_some(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor,
    positions: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Draws from the tokens that remain after min-p, top-k and top-p, in this order.   [S, V] -> [S]"""
    if need_min_p_sampling:
        probs = probs.where(probs >= probs.amax(-1, keepdim=True) * min_ps[:, None], 0.0)
    ordered, tokens = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.where(ranks < top_ks[:, None], 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered.where(ordered.cumsum(-1) - ordered < top_ps[:, None], 0.0)
    left = torch.zeros_like(probs).scatter_(1, tokens, ordered)
    return draw(left, sampling_seed, positions).view(-1).to(torch.int32)


def ends(self: Any, new_tokens: list[int]) -> bool:
    """Ends a request at the first new token that is in its stop_token_ids."""
    for index, token in enumerate(new_tokens):
        if token in (self.sampling_params.stop_token_ids or ()):
            self.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            self.finished_len = len(self.output_ids) - len(new_tokens) + index + 1
            return True
    return False


def _give_seeds() -> None:
    plain = SamplingBatchInfo.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        found = plain(cls, batch, *rest, **more)
        seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
        seeds = [random.getrandbits(63) if seed is None else seed for seed in seeds]
        found.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(found.temperatures.device)
        return found

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)


def _tell_versions() -> None:
    accumulator = output_streamer._GenerationStreamAccumulator
    plain = accumulator.accept

    def accept(self: Any, *, req: Any) -> None:
        plain(self, req=req)
        length = len(req.output_ids_through_stop)
        if self.weight_versions and self.weight_versions[-1] is None and self.rids[-1] == req.rid:
            events, version = req.weight_version_events, self.current_weight_version
            self.weight_versions[-1] = compute_weight_version_spans(events, version, length)

    accumulator.accept = accept


def _tell_progress() -> None:
    plain = scheduler.Scheduler.get_internal_state

    def get_internal_state(self: Any, request: Any) -> Any:
        found = plain(self, request)
        running = [*self.collect_inflight_reqs(), *self.waiting_queue]
        found.internal_state["whet_sent"] = {req.rid: req.send_token_offset for req in running}
        return found

    scheduler.Scheduler.get_internal_state = get_internal_state


def media_of(given: dict[str, Any], token_ids: list[int]) -> MultimodalProcessorOutput:
    """Returns the media of a request, with pixel values read from their files, and its rotary positions."""
    items = []
    for each in given["whet"]:
        pixels = load_file(each["path"])
        feature = next(name for name in pixels if name.startswith("pixel_values"))
        item = MultimodalDataItem(
            modality=Modality[each["kind"].upper()],
            feature=pixels.pop(feature),
            offsets=[(run[0], run[-1]) for run in _runs(each["places"])],
            # times one by one: SGLang's towers would let all times of a video attend to each other
            model_specific_data={
                name: grid.new_tensor([[1, *grid[0, 1:]]] * grid[0, 0]) for name, grid in pixels.items()
            },
        )
        item.set_hash(int(each["digest"][:15], 16))
        items.append(item)
    positions = torch.tensor(given["positions"])
    return MultimodalProcessorOutput(
        input_ids=token_ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(token_ids, items),
        mm_items=items,
        mrope_positions=positions,
        mrope_position_delta=positions.max().add(1 - positions.shape[1]).view(1, 1),
    )


def _runs(places: list[int]) -> list[list[int]]:
    """Groups token positions into runs of consecutive positions."""
    return [[place for _, place in run] for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0])]


def _read_media() -> None:
    from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration  # they import many models
    from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

    plain = QwenVLImageProcessor.process_mm_data_async

    async def process(self: Any, image_data: Any, input_text: Any, *args: Any, **kwargs: Any) -> Any:
        if image_data and isinstance(image_data[0], str) and image_data[0].startswith("{"):
            return media_of(json.loads(image_data[0]), list(input_text))
        return await plain(self, image_data, input_text, *args, **kwargs)

    QwenVLImageProcessor.process_mm_data_async = process
    Qwen2_5_VLForConditionalGeneration.get_image_feature = image_features


def image_features(model: Any, items: list[MultimodalDataItem]) -> torch.Tensor:
    """Computes the tower's features of Qwen2.5-VL's images. SGLang's own function needs patches of 14 pixels."""
    pixels = torch.cat([item.feature for item in items]).type(model.visual.dtype)
    features: torch.Tensor = model.visual(pixels, grid_thw=torch.cat([item.image_grid_thw for item in items]))
    return features


def _load_parts() -> None:
    """Makes the server load whet's parts of weights. Features stay cached if an update does not change the tower."""
    plain_load, plain_end = WeightUpdater.update_weights_from_tensor, WeightUpdater.end_weight_update
    tower: list[int] | None = None  # the hash of each of its weights; None: those of the start

    def load(self: Any, named_tensors: Any, load_format: str | None = None) -> Any:
        if load_format != "whet":
            return plain_load(self, named_tensors, load_format)
        if (why := weight_updater._unsupported_derived_weight_cache_error(self.get_model())) is not None:
            return False, why
        self._assert_weight_cache_inactive("update_weights_from_tensor")
        try:
            self.get_model().load_weights(weights_in(named_tensors))
        except Exception as error:  # any kind: an error raised here ends the server
            if self.tp_rank:  # nobody reads the reply of this rank
                raise
            return False, f"{type(error).__name__}: {error}"
        return True, "loaded"

    def end(self: Any, **options: Any) -> None:
        nonlocal tower
        plain_end(self, **options)
        weights = [weight for name, weight in self.get_model().named_parameters() if name.startswith("visual.")]
        new = torch.stack([torch.hash_tensor(weight) for weight in weights]).tolist() if weights else []
        if new != tower and mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()
        tower = new

    WeightUpdater.update_weights_from_tensor, WeightUpdater.end_weight_update = load, end


def constrained(logits: torch.Tensor, reqs: Sequence[Any]) -> torch.Tensor | None:
    """Returns the logits for sampling; None if they equal the model's. It applies allowed tokens, bad words and
    penalties as whet/kernels/sampling.py does, and forbids patch tokens.   [S, V] -> [S, V]"""
    rules = [(row, req, _rules(req)) for row, req in enumerate(reqs)] if len(reqs) == len(logits) else []
    if not PATCHES and not any(found for _, _, found in rules):
        return None
    logits = logits.index_fill(-1, torch.tensor(PATCHES, dtype=torch.int64, device=logits.device), -torch.inf)
    for row, req, found in rules:
        if found:
            tokens = [*req.origin_input_ids_unpadded, *req.output_ids]
            _constrain(logits[row], tokens[: found["prompt"]], tokens[found["prompt"] :], found)
    return logits


def _rules(req: Any) -> dict[str, Any]:
    rules: dict[str, Any] = _parsed((req.sampling_params.custom_params or {}).get("whet", "{}"))
    return rules


def _constrain(logits: torch.Tensor, prompt: list[int], sampled: list[int], rules: dict[str, Any]) -> None:
    """Applies the rules of one request to its row of logits, in place.   [V]"""
    if rules["allowed"] is not None:
        allowed = torch.tensor(rules["allowed"], device=logits.device)
        logits.copy_(torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed]))
    for *start, last in rules["bad_words"]:
        if sampled[len(sampled) - len(start) :] == start:
            logits[last] = -torch.inf
    if rules["repetition"] != 1:
        seen = torch.tensor([*{*prompt, *sampled}], device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / rules["repetition"], values * rules["repetition"])
    if rules["frequency"] or rules["presence"]:
        tokens, times = torch.tensor(sampled, dtype=torch.int64, device=logits.device).unique(return_counts=True)
        logits[tokens] -= rules["frequency"] * times + rules["presence"]


def _apply_rules() -> None:
    plain_run, plain, running = scheduler.Scheduler.run_batch, sampler.Sampler.forward, list[Any]()

    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        running[:] = batch.reqs
        return plain_run(self, batch, *args, **kwargs)

    def forward(self: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
        logits = out.next_token_logits
        if (changed := constrained(logits, running)) is None:
            return plain(self, out, *args, **kwargs)
        out.next_token_logits = changed
        return plain(self, out, *args, **{**kwargs, "logprob_logits": logits})

    scheduler.Scheduler.run_batch, sampler.Sampler.forward = run_batch, forward


sampler.multinomial_with_seed = draw_logs
sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_some
Req._check_token_based_finish = ends
_give_seeds()
_tell_versions()
_tell_progress()
_load_parts()
_apply_rules()
if PATCHES:
    _read_media()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
