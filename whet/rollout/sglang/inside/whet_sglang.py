# SPDX-License-Identifier: Apache-2.0
"""The start of an SGLang 0.5.23 server with additions; nothing of whet is imported. The processes that the server
spawns import this file too, as their main module, so the additions are in all of them.

- Sampling: a token is drawn with a random number that is a function of the request's key and the token's place, as in
  whet/rollout/sampling.py. SGLang hands seed and position of the token to its draw, which it otherwise does only with
  kernels for deterministic inference; the client takes the prompt's length off the seed.
- Ends: a response ends at its stop_token_ids alone, not at those of the folder's configuration too.
- Versions: every piece of a streamed answer tells the weight versions of its tokens, not only the last one.
- Progress: /server_info tells how many tokens of each unfinished request were sent.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req
from sglang.srt.managers.scheduler_components import output_streamer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.weight_versions import compute_weight_version_spans

GOLDEN, FIRST, SECOND = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def signed(number: int) -> int:
    """The 64-bit number as torch's int64 has it."""
    return number - 2**64 if number >= 2**63 else number


def numbers(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Random numbers in [0, 1): splitmix64's hash of seed and position.   [S], [S] -> [S]"""
    x = seeds.to(torch.int64) + (positions.to(torch.int64) + 1) * signed(GOLDEN)
    x = (x ^ _shifted(x, 30)) * signed(FIRST)
    x = (x ^ _shifted(x, 27)) * signed(SECOND)
    return _shifted(x ^ _shifted(x, 31), 40).to(torch.float32) * 2.0**-24


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts to the right, with zeros from the left.   [S] -> [S]"""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The token of each row where its cumulated probability first exceeds its number.   [S, V] -> [S, 1]"""
    cumulated = probs.cumsum(-1)
    tokens = torch.searchsorted(cumulated, numbers(seeds, positions)[:, None] * cumulated[:, -1:], right=True)
    last = torch.where(probs > 0, torch.arange(probs.shape[1], device=probs.device), 0).amax(-1, keepdim=True)
    return torch.minimum(tokens, last)


def draw_logs(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws as `draw`, from log-probs."""
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
    """Draws among the tokens that min-p, top-k and top-p leave, in this order.   [S, V] -> [S]"""
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
    """Ends a request at the first new token among its stop_token_ids."""
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


sampler.multinomial_with_seed = draw_logs
sampler.top_k_top_p_min_p_sampling_from_probs_torch = draw_some
Req._check_token_based_finish = ends
_give_seeds()
_tell_versions()
_tell_progress()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
