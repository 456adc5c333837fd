# SPDX-License-Identifier: Apache-2.0
"""A simple, slow rollout engine: transformers' forward and cache, left padding; a batch runs until all rows end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from whet.kernels.sampling import SamplingState, is_stop, likeliest, sample
from whet.models.attention import NAME
from whet.models.encoders.load import encoders_of
from whet.models.general import cache_argument, forward
from whet.models.positions import position_ids, rotary_positions
from whet.models.supported import support_of
from whet.registry import register_rollout
from whet.rollout.in_process import Done, InProcessEngine, LiveRequest, LoadTokenizer
from whet.rollout.protocol import Request
from whet.rollout.requirements import Decoding, RolloutBytes
from whet.types import FinishReason


@dataclass
class PaddedRows:
    """Rows that are sampled together, padded on the left. Tokens after the end of a row are ignored."""

    rows: list[LiveRequest]
    sampling: SamplingState
    tokens: torch.Tensor  # [S, T] of the responses
    log_probs: torch.Tensor  # [S, T]
    counts: torch.Tensor  # [S] tokens of the responses so far
    going_on: torch.Tensor  # [S] bool, the rows that have not ended
    ids: torch.Tensor  # [S, L] inputs of the next forward
    positions: torch.Tensor  # of `ids`, [S, L] or [3, S, L]
    mask: torch.Tensor  # [S, number of all tokens fed so far and of `ids`]
    cache: Any  # None before the first forward, and for a model without cache, for which `ids` has all tokens
    seen: Mapping[str, Any]  # arguments of the next forward for media in `ids`
    found: dict[int, str] = field(default_factory=dict)  # the stop string that ended each row

    @classmethod
    def of(cls, rows: list[LiveRequest], module: PreTrainedModel) -> PaddedRows:
        """Makes a batch of requests, a row each. A row starts, or continues after the tokens that the request has."""
        device, requests = module.device, [each.request for each in rows]
        fed = [[*each.request.prompt_ids, *each.tokens] for each in rows]
        width, media = max(map(len, fed)), [each for request in requests for each in request.media]
        encoders = encoders_of(module) if media else None
        rotary = [rotary_positions(request.prompt_ids, request.media, request.opening) for request in requests]
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in fed], device=device)
        positions = position_ids(mask, rotary if any(each is not None for each in rotary) else None)
        longest = max(request.params.max_new_tokens for request in requests)
        ids = torch.tensor([[0] * (width - len(row)) + row for row in fed], device=device)

        def filled(values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([[*row, *[0] * (longest - len(row))] for row in values], dtype=dtype, device=device)

        return cls(
            rows=rows,
            sampling=SamplingState.of(requests, module.config.get_text_config().vocab_size, device),
            tokens=filled([each.tokens for each in rows], torch.int64),
            log_probs=filled([each.log_probs for each in rows], torch.float32),
            counts=torch.tensor([len(each.tokens) for each in rows], device=device),
            going_on=torch.ones(len(rows), dtype=torch.bool, device=device),
            ids=ids,
            positions=positions if positions.dim() == 2 else positions.transpose(0, 1),
            mask=mask,
            cache=None,
            seen={} if encoders is None else {**encoders.encode(module, media), **encoders.types(ids)},
        )

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Samples the next token of every row.  Returns [S] bool, True for a stop token."""
        rows = torch.arange(len(self.rows), device=logits.device)
        generated = self.tokens[:, : max(1, int(self.counts.max()))]
        chosen, log_probs = sample(logits, self.sampling, self.counts, generated)
        if self.sampling.num_likeliest:
            for row, told in enumerate(likeliest(logits, self.sampling)):
                if self.going_on[row]:
                    self.rows[row].tell(told)
        at = self.counts.clamp(max=self.tokens.shape[1] - 1)
        self.tokens[rows, at] = torch.where(self.going_on, chosen, self.tokens[rows, at])
        self.log_probs[rows, at] = torch.where(self.going_on, log_probs, self.log_probs[rows, at])
        self.counts += self.going_on
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        ids, positions = chosen[:, None], self.positions[..., -1:] + 1
        if self.cache is None:
            self.ids, self.positions = torch.cat([self.ids, ids], 1), torch.cat([self.positions, positions], -1)
        else:
            self.ids, self.positions, self.seen = ids, positions, {}
        return is_stop(chosen, self.sampling.stop_ids)

    def read(self) -> None:
        """Copies the tokens and log-probs sampled so far from the tensors into the unfinished requests of `rows`."""
        columns = self.going_on.tolist(), self.counts.tolist(), self.tokens.tolist(), self.log_probs.tolist()
        for each, going_on, count, tokens, log_probs in zip(self.rows, *columns, strict=True):
            if going_on:
                each.tokens, each.log_probs = tokens[:count], log_probs[:count]


@register_rollout("hf", planned_by="whet.rollout.hf:HFEngine.planned_bytes")
class HFEngine(InProcessEngine[LiveRequest]):
    """Uses transformers' forward and cache; a batch runs until all rows end. Slow, but supports every language model.

    on_new_weights: running requests continue when weights change; they recompute their keys and values (recompute), or
        keep the old ones (keep).
    weight_delta: the actor's processes send only elements that changed since the last version; the result is exact.
        Sender and receiver each keep a copy of the weights in the host's memory.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 256,
        load_tokenizer: LoadTokenizer | None = None,
        *,
        on_new_weights: Literal["recompute", "keep"] = "recompute",
        weight_delta: bool = False,
    ) -> None:
        super().__init__(dtype, max_batch_size, load_tokenizer, on_new_weights == "keep")
        self.takes_delta = weight_delta
        self._batch: PaddedRows | None = None

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """Returns the bytes of the cache: one tensor for each layer, and a copy of one of them, by which it grows."""
        rows, lengths = decoding.rows, decoding.lengths
        longest = max(lengths.prompts) + lengths.response
        used = rows * (longest * decoding.token_bytes + decoding.sequence_bytes)
        used += used // decoding.layers
        return RolloutBytes(used, used, False, rows, sum(lengths.spread(rows)))

    @property
    def _num_running(self) -> int:
        return 0 if self._batch is None else int(self._batch.going_on.sum())

    def _use(self, module: PreTrainedModel) -> None:
        pass

    def _take(self, request: Request) -> LiveRequest:
        earlier = list(request.sampled_ids)
        return LiveRequest(request, earlier, [0.0] * len(earlier))

    def _step(self, module: PreTrainedModel) -> list[Done[LiveRequest]]:
        """Samples a token for each row of the batch. Without a batch, starts one with the oldest requests."""
        batch = self._batch = self._batch or PaddedRows.of(self._next(module), module)
        text = module.config.get_text_config()
        if text._attn_implementation == NAME:  # this attention needs whet's cache
            text._attn_implementation = "sdpa" if module._supports_sdpa else "eager"
            self._restore.callback(setattr, text, "_attn_implementation", NAME)
        name, support = cache_argument(module), support_of(module)
        out = forward(
            module,
            input_ids=batch.ids,
            attention_mask=batch.mask if support.pads_left else None,
            position_ids=batch.positions,
            use_cache=support.caches,
            logits_to_keep=1,
            **{name: batch.cache},
            **batch.seen,
        )
        batch.cache = out.get(name) if support.caches else None
        stopped = batch.going_on & batch.sample(out.logits[:, -1])
        for row in (batch.going_on & ~stopped).nonzero().squeeze(1).tolist():
            stops = self.stops_of(batch.rows[row].request)
            tokens = batch.tokens[row, : batch.counts[row]]
            if stops is not None and (string := stops.found(int(tokens[-1]), tokens)) is not None:
                batch.found[row], stopped[row] = string, True
        ended = batch.going_on & (stopped | (batch.counts >= batch.sampling.limits))
        if not bool(ended.any()):
            return []
        batch.read()
        batch.going_on &= ~ended
        if not bool(batch.going_on.any()):
            self._batch = None
        reasons: list[FinishReason] = ["stop" if stop else "length" for stop in stopped.tolist()]
        return [(batch.rows[row], reasons[row], batch.found.get(row)) for row in ended.nonzero().squeeze(1).tolist()]

    def _next(self, module: PreTrainedModel) -> list[LiveRequest]:
        """Returns the oldest requests for a batch; all of one length if left padding would change results."""
        oldest = list(self.unfinished.values())
        if not support_of(module).pads_left:
            lengths = [len(each.request.prompt_ids) + len(each.tokens) for each in oldest]
            oldest = [each for each, length in zip(oldest, lengths, strict=True) if length == lengths[0]]
        return oldest[: self.max_batch_size]

    def _read(self) -> None:
        if self._batch is not None:
            self._batch.read()

    def _drop(self, live: Sequence[LiveRequest]) -> None:
        if self._batch is not None:
            for row, each in enumerate(self._batch.rows):
                if each in live:
                    self._batch.going_on[row] = False
            if not bool(self._batch.going_on.any()):
                self._batch = None

    def _forget(self) -> None:
        self._batch = None
