# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: admit, prefill, grow, decode, finish, until no request waits or runs.

A request gives the same tokens alone and among others: every matrix product has at least 16 rows (kernels for fewer
rows round differently), and attention is computed token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from whet.config.schema import KV_CACHE_BYTES
from whet.devices import HOST, memory, moved
from whet.errors import EngineError
from whet.kernels.compiled_layers import compile_layers
from whet.kernels.log_probs import LogitForm
from whet.kernels.paged_attention import BLOCK_SIZE
from whet.kernels.tiles import tile_tokens, tiles_of
from whet.models.attention import NAME, PagedContext
from whet.models.batch_invariant import fix_tiles
from whet.models.caches import key_value_heads, sequence_bytes, token_bytes
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.experts import expert_modules
from whet.models.load import layers
from whet.models.routing import as_bytes, recording
from whet.options import Count
from whet.registry import register_rollout
from whet.rollout.in_process import Done, InProcessEngine, LoadTokenizer
from whet.rollout.native import scheduler
from whet.rollout.native.cache import BlockCache, Prefixes, blocks_for
from whet.rollout.native.columns import (
    MIN_ROWS,
    Columns,
    DeviceBatch,
    DeviceColumns,
    Forward,
    HostColumns,
    has_kernels,
    padded,
    rectangular,
)
from whet.rollout.native.running import RunningSlots
from whet.rollout.native.scheduler import PREFILL_TOKENS, ScheduledRequest, Scheduler, Stretch, by_tokens
from whet.rollout.native.states import End, PrefillFlow, held
from whet.rollout.protocol import Request
from whet.rollout.requirements import CacheRoom, Decoding, RolloutBytes
from whet.types import Media

LOGIT_BYTES = 24  # for each logit during sampling: itself, in float32, its probability and sums
SIZES = 256, 512, 768, 1024, 1536, 2048, 3072, 4096  # tokens of recorded batches
SHARE = 16  # tokens of a batch for each stretch that it has room for


@register_rollout(
    "native",
    compiles=True,
    planned_by="whet.rollout.native.engine:NativeEngine.planned_bytes",
    media_checked_by="whet.rollout.native.engine:NativeEngine.check_media",
)
class NativeEngine(InProcessEngine[ScheduledRequest]):
    """Continuous batching over a block KV cache, with the model's own modules and whet's attention.

    kv_cache_bytes: memory for keys and values; auto: on an accelerator the memory left by the run, else 1 GiB.
    compile: compiles the decode step: slower to start, faster to run. Unset: on an accelerator.
    on_new_weights: running requests continue when weights change; they recompute their keys and values (recompute), or
        keep the old ones (keep).
    routed_experts: for mixtures of experts on a CPU: reports the experts that computed each token, so that the trainer
        uses the same ones.
    batch_invariant: uses kernels with tiles of one shape, in the trainer too, so that a request has the same numbers in
        every batch, and its log-probs equal the trainer's. On an accelerator, in bfloat16.
    weight_delta: the actor's processes send only elements that changed since the last version; the result is exact.
        Sender and receiver each keep a copy of the weights in the host's memory.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 256,
        load_tokenizer: LoadTokenizer | None = None,
        cache_room: CacheRoom | None = None,
        *,
        kv_cache_bytes: Count | Literal["auto"] = "auto",
        compile: bool | None = None,  # noqa: A002  # the option's name
        on_new_weights: Literal["recompute", "keep"] = "recompute",
        batch_invariant: bool = False,
        routed_experts: bool = False,
        weight_delta: bool = False,
    ) -> None:
        super().__init__(dtype, max_batch_size, load_tokenizer, on_new_weights == "keep")
        if compile and batch_invariant:
            expected = "false, because batch_invariant=true needs operations that it fuses"
            raise EngineError("rollout.engine.options.compile", compile, expected, "unset one of them")
        self.kv_cache_bytes, self.compile_decode, self.fixed = kv_cache_bytes, compile, batch_invariant
        self._cache_room = CacheRoom() if cache_room is None else cache_room
        self.routed_experts, self.takes_delta = routed_experts, weight_delta
        self._routed: list[bytes] = []  # of the rows of the last pass
        self._form = LogitForm()
        self._columns: Columns = HostColumns()
        self._prompts: Prefill | None = None  # computes prompts by kernels, on an accelerator
        self._compiled: Forward | None = None  # the decode step
        self._cache: BlockCache | None = None
        self._prefixes: Prefixes | None = None  # in the cache
        self._scheduler: Scheduler | None = None  # while there are requests
        self._running: RunningSlots | None = None
        self._ended: list[Done[ScheduledRequest]] = []  # not given to the caller yet
        self._tower: tuple[int, object] | None = None  # version of the weights, and fingerprint of the vision tower

    @classmethod
    def planned_bytes(cls, decoding: Decoding, options: Mapping[str, Any]) -> RolloutBytes:
        """Returns the bytes of the cache, and of the part that completions fill; a prompt's samples share blocks."""
        rows, n, lengths = decoding.rows, decoding.n, decoding.lengths
        per_block, prompts = decoding.token_bytes * BLOCK_SIZE, lengths.spread(-(-rows // n))
        given, blocks = options["kv_cache_bytes"], 0
        cache = (KV_CACHE_BYTES if given == "auto" else given) // per_block * per_block
        for prompt in prompts:
            own = blocks_for(prompt + lengths.response) - prompt // BLOCK_SIZE
            blocks += blocks_for(prompt) + min(n, rows) * own
        states, written = held(decoding.most) * decoding.sequence_bytes, min(cache, blocks * per_block)
        tokens = min(sum(prompts), max(PREFILL_TOKENS, *lengths.prompts))
        smaller = {"kv_cache_bytes": max(2**26, written // 2)}
        return RolloutBytes(cache + states, written + states, True, len(prompts), tokens, smaller)

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys, values and states in memory."""
        return 0 if self._cache is None else self._cache.nbytes

    def sleep(self) -> None:
        """Frees the cache of keys and values, and moves the engine's own module off the device."""
        super().sleep()
        if self._cache is not None:
            self._cache.free()
        self._columns, self._prompts, self._cache = HostColumns(), None, None

    @property
    def _num_running(self) -> int:
        return 0 if self._scheduler is None else len(self._scheduler.running)

    def _use(self, module: PreTrainedModel) -> None:
        config = module.config.get_text_config()
        if config._attn_implementation != NAME:
            raise EngineError("attention of the loaded model", config._attn_implementation, NAME)
        if self.routed_experts and (module.device != HOST or self.compile_decode or not any(expert_modules(module))):
            expected = "false, but for a mixture of experts on a CPU, not compiled"
            raise EngineError("rollout.engine.options.routed_experts", True, expected, "unset it")
        self._form, self._tower = LogitForm.of(config), None
        self._compiled = None
        if self.fixed:
            fix_tiles(module, module.device, self.dtype)
        elif is_stepwise(module.device) and self.compile_decode is not False:
            compile_layers(layers(module))
        elif self.compile_decode:
            self._compiled = torch.compile(self._forward)
        self._columns, self._prompts, self._cache = HostColumns(), None, None

    def _take(self, request: Request) -> ScheduledRequest:
        if self._scheduler is None:
            self._scheduler = Scheduler(*self._require_cache(), self.max_batch_size)
        return self._scheduler.add(request)

    def _step(self, module: PreTrainedModel) -> list[Done[ScheduledRequest]]:
        """Prefills admitted requests, or decodes one token of every running request; then removes finished ones."""
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.cache, scheduler.prefixes = self._require_cache()
        if self._running is None:
            expected = list(self.unfinished.values())
            self._running = RunningSlots(self.vocab_size, self._columns_on(module), self.max_batch_size, expected)
        running = self._running
        if admitted := scheduler.admit():
            self._prefill(scheduler, admitted, running)
        elif len(running):
            blocks, preempted = scheduler.grow(running.without_room())
            running.extend(blocks)
            if preempted:
                self._read()
                running.remove(preempted)
            if len(running):
                routing = (lambda: self._routed) if self.routed_experts else None
                running.decode(self._compiled or self._forward, scheduler.cache, routing)
        self._finish(running)
        done, self._ended = self._ended, []
        if len(done) == len(self.unfinished):
            self._scheduler = self._running = None
        return done

    def _columns_on(self, module: PreTrainedModel) -> Columns:
        """Returns the columns of slots on the module's device; drops recorded steps if memory addresses changed."""
        return self._device_columns(module) if is_stepwise(module.device) else HostColumns()

    def _device_columns(self, module: PreTrainedModel) -> Columns:
        if not isinstance(self._columns, DeviceColumns):
            config = module.config.get_text_config()
            width = blocks_for(config.max_position_embeddings)
            self._columns = DeviceColumns(module.device, self.max_batch_size, width, fixed=self.fixed)
            self._prompts = Prefill.of(self._columns, config) if self._require_cache()[0].is_plain else None
        cache, _ = self._require_cache()
        self._columns.at([cache.keys, cache.values, *module.parameters(), *module.buffers()])
        return self._columns

    def _finish(self, running: RunningSlots) -> None:
        """Removes finished requests from the scheduler."""
        assert self._scheduler is not None
        for each in running.finish():
            live = each[0]
            is_mixed = self.keep_cache and bool(live.versions)
            self._scheduler.remove(live, keeps_cache=live.request.keeps_cache and not is_mixed)
            self._ended.append(each)

    def _read(self) -> None:
        if self._running is not None:
            self._running.read()
            self._finish(self._running)

    def _read_streaming(self, live: Sequence[ScheduledRequest]) -> None:
        if self._running is not None:
            self._running.read_newest(live)

    def _drop(self, live: Sequence[ScheduledRequest]) -> None:
        assert self._scheduler is not None
        ended = {each for each, _, _ in self._ended}
        self._ended = [each for each in self._ended if each[0] not in live]
        if self._running is not None:
            self._running.remove(live)
        for each in live:
            if each not in ended:
                self._scheduler.remove(each)

    def _forget_finished(self) -> None:
        if self._prefixes is not None:
            self._prefixes.clear()

    def _forget(self) -> None:
        if self._scheduler is not None:
            self._scheduler.forget()
        self._running = None

    def _before_new_weights(self, *, forget: bool) -> None:
        super()._before_new_weights(forget=forget)
        if self._running is not None:  # rows that keep their cache continue, perhaps at other addresses
            self._columns_on(self.policy.require())

    def _prefill(self, scheduler: Scheduler, admitted: Sequence[ScheduledRequest], running: RunningSlots) -> None:
        """Prefills new prompts and the tokens of resumed requests. Samples the first token of new requests."""
        prompts = [prompt for prompt in dict.fromkeys(each.prompt for each in admitted) if prompt.uncomputed]
        after = self._compute([Stretch(each.uncomputed, each.num_computed, each.blocks, each) for each in prompts])
        for prompt, (logits, end) in zip(prompts, after, strict=True):
            prompt.logits, prompt.end, prompt.uncomputed = logits, end, ()
        resumed, started = ([each for each in admitted if bool(each.tokens) == goes_on] for goes_on in (True, False))
        first_logits = [each.prompt.logits for each in started if each.prompt.logits is not None]
        states, ends = scheduler.cache.states, {each: each.prompt.end or {} for each in [*resumed, *started]}
        scheduler.copy_partial_blocks(started if states is None else [*resumed, *started])
        stretches = dict[ScheduledRequest, Stretch]()
        for each in resumed:  # states are known after the prompt; keys and values up to its last full block
            start = each.prompt.num_full * BLOCK_SIZE if states is None else len(each.prompt.token_ids)
            if ids := each.cached_ids[start:]:
                stretches[each] = Stretch(ids, start, each.blocks, each.prompt, end=each.prompt.end)
        for each, (_, end) in zip(stretches, self._compute([*stretches.values()]), strict=True):
            ends[each] = end or {}
        slots = running.add([*resumed, *started], [self.stops_of(each.request) for each in [*resumed, *started]])
        if states is not None:
            states.enter(slots, [*ends.values()])
        if started:
            routed = [each.prompt.routed for each in started] if self.routed_experts else None
            running.begin(torch.stack(first_logits), slots[len(resumed) :], routed)

    def _compute(self, stretches: Sequence[Stretch]) -> list[tuple[torch.Tensor, End | None]]:
        """Computes keys and values of stretches into their blocks.  Returns logits and states after each stretch."""
        batches = by_tokens(stretches) if self._prompts is None else in_parts(stretches)
        pairs = (pair for batch in batches for pair in zip(batch, self._compute_batch(batch), strict=True))
        return [after for stretch, after in pairs if stretch.is_last]

    def _compute_batch(self, stretches: Sequence[Stretch]) -> Iterator[tuple[torch.Tensor, End | None]]:
        device, cache = self.policy.require().device, self._require_cache()[0]
        if self._prompts is not None:
            logits = self._prompts.logits(self._forward, cache, stretches, self._seen(stretches))
            return zip(logits, repeat(None), strict=False)
        flow = None
        if cache.states is not None:
            flow = PrefillFlow([len(each.token_ids) for each in stretches], [each.end for each in stretches], device)
        ids = torch.tensor([token for stretch in stretches for token in stretch.token_ids])
        lengths = torch.tensor([len(stretch.token_ids) for stretch in stretches])
        starts = torch.tensor([stretch.start for stretch in stretches])
        ends = lengths.cumsum(0)
        rows = torch.arange(len(stretches), dtype=torch.int32).repeat_interleave(lengths)
        positions = torch.arange(len(ids)) - (ends - lengths - starts).repeat_interleave(lengths)
        last = F.pad(ends - 1, (0, max(0, MIN_ROWS - len(stretches))))
        rotary = positions
        if any(stretch.prompt.rotary is not None for stretch in stretches):
            rotary = torch.cat([stretch.rotary for stretch in stretches], 1)
        sizes = int(lengths.max()), int(positions.max()) + 1
        tables = rectangular([stretch.blocks for stretch in stretches])
        ids, rotary, rows, positions, tables, last = (
            moved(each, device) for each in (ids, rotary, rows, positions, tables, last)
        )
        inputs = padded(cache, ids, rotary, rows, positions, tables, *sizes, flow)
        logits = self._forward(*inputs, last, self._seen(stretches))[: len(stretches)]
        for stretch, routed in zip(stretches, self._routed, strict=False):
            if stretch.prompt.uncomputed:  # else these are tokens of a response
                stretch.prompt.routed = routed
        return zip(logits, repeat(None) if flow is None else flow.ends, strict=False)

    def _readable(self, request: Request) -> Encoders:
        encoders = super()._readable(request)
        self.check_media(encoders, request.media, f"request {request.uid}")
        return encoders

    @classmethod
    def check_media(cls, encoders: Encoders | None, media: Sequence[Media], whose: str) -> None:
        """Raises: EngineError for media that attend in both directions, which this causal cache cannot store."""
        if encoders is not None and encoders.both_ways:
            found = f"has {media[0].kind}s, whose tokens attend in both directions in {encoders.config.model_type}"
            change = "set rollout.engine.name=hf, or train on text alone"
            raise EngineError(whose, found, "a model whose media tokens attend only to earlier tokens", change)

    def _seen(self, stretches: Sequence[Stretch]) -> Mapping[str, Any]:
        """Returns the forward arguments for media in stretches. Each media is encoded once per version of the tower."""
        parts = [each for stretch in stretches if stretch.prompt.request.media for each in stretch.media]
        return self._encoded(parts) if parts else {}

    def _encoded(self, parts: Sequence[tuple[Media, slice]]) -> Mapping[str, Any]:
        module = self.policy.require()
        encoders = encoders_of(module)
        if encoders is None:
            return {}
        if self._tower is None or self._tower[0] != self.policy.version:
            self._tower = self.policy.version, encoders.fingerprint(module)
        features = encoders.features(module, [media for media, _ in parts], self._tower[1])
        return encoders.outputs([each.part(where) for each, (_, where) in zip(features, parts, strict=True)])

    def _forward(
        self,
        ids: torch.Tensor,
        rotary: torch.Tensor,
        paged: PagedContext,
        keep: torch.Tensor | None,
        seen: Mapping[str, Any],
    ) -> torch.Tensor:
        """Computes logits after each token, or after the tokens at `keep`: [T] -> [T, V]. `rotary` is [T] or [3, T]."""
        module = self.policy.require()
        # [1, T], or [3, 1, T]
        places = rotary[..., None, :]
        given = {"input_ids": ids[None], "position_ids": places, "use_cache": False, "paged": paged, **seen}
        if self.routed_experts:
            with recording(module) as chosen:
                out = module.base_model(**given)
            self._routed = as_bytes(chosen, keep)
        else:
            out = module.base_model(**given)
        hidden = out.last_hidden_state[0]
        return self._form(module.get_output_embeddings()(hidden if keep is None else hidden[keep]))

    def _budget(self, module: PreTrainedModel) -> int:
        """The number of bytes to allocate for the cache."""
        if self.kv_cache_bytes != "auto":
            return self.kv_cache_bytes
        use = memory(module.device)
        if use is None:
            return KV_CACHE_BYTES
        config, room = module.config.get_text_config(), self._cache_room
        longest = self.max_batch_size * config.max_position_embeddings * token_bytes(config, module.dtype.itemsize)
        sampling = self.max_batch_size * config.vocab_size * LOGIT_BYTES
        sampling += held(self.max_batch_size) * sequence_bytes(config)
        room = replace(room, most=min(room.most, longest))
        return room.bytes(use.free + use.held, use.allocated + sampling)

    def _require_cache(self) -> tuple[BlockCache, Prefixes]:
        if self._cache is None or self._prefixes is None:
            module = self.policy.require()
            config, budget, by_head = module.config.get_text_config(), self._budget(module), is_stepwise(module.device)
            options: dict[str, Any] = {"budget_bytes": budget, "by_head": by_head, "slots": self.max_batch_size}
            self._cache = BlockCache(config, dtype=module.dtype, device=module.device, **options)
            self._prefixes = Prefixes(self._cache)
        return self._cache, self._prefixes


def is_stepwise(device: torch.device) -> bool:
    """Tells whether the device is an accelerator: steps run asynchronously, and its kernels set the cache layout."""
    return device != HOST


class Prefill:
    """Computes batches of stretches on an accelerator, from memory at fixed addresses. Decode steps share `graphs`."""

    def __init__(self, columns: DeviceColumns, tile: int) -> None:
        self.graphs, self.device, self.tile = columns.graphs, columns.device, tile
        self._numbers = torch.zeros(sum(self._parts(SIZES[-1])), dtype=torch.int64, device=self.device)
        self._tables = torch.zeros_like(columns.tables[:1]).repeat(SIZES[-1] // SHARE, 1)

    @classmethod
    def of(cls, columns: DeviceColumns, config: Any) -> Prefill | None:
        """Returns the prefill for a model with this text config; None if the device has no kernels."""
        tile = tile_tokens(config.num_attention_heads, key_value_heads(config))
        return cls(columns, tile) if has_kernels(columns.device) else None

    def _parts(self, size: int) -> list[int]:
        """The lengths of a batch's inputs: ids, positions, slots, last tokens, and four numbers for each tile."""
        return [size, size, size, size // SHARE, 4 * (-(-size // self.tile) + size // SHARE)]

    def logits(
        self, forward: Forward, cache: BlockCache, stretches: Sequence[Stretch], seen: Mapping[str, Any]
    ) -> torch.Tensor:
        """Computes keys and values of at most SIZES[-1] tokens.  Returns the logits after each stretch [S, V]."""
        count, tables = len(stretches), rectangular([each.blocks for each in stretches])
        lengths = torch.tensor([len(each.token_ids) for each in stretches])
        starts, rows = torch.tensor([each.start for each in stretches]), torch.arange(count)
        ids = torch.tensor([token for each in stretches for token in each.token_ids])
        row, ends = rows.repeat_interleave(lengths), lengths.cumsum(0)
        positions = torch.arange(len(ids)) - (ends - lengths - starts)[row]
        slots = tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        size = next(each for each in SIZES if each >= max(len(ids), count * SHARE))
        padding, parts = (0, size - len(ids)), self._parts(size)
        tiles = tiles_of(lengths, rows, starts, self.tile, parts[-1] // 4)
        spare = cache.num_blocks * BLOCK_SIZE  # a block that belongs to nobody
        tokens = F.pad(ids, padding), F.pad(positions, padding), F.pad(slots, padding, value=spare)
        if tables.shape[1] > self._tables.shape[1]:
            self._tables = F.pad(self._tables, (0, tables.shape[1] - self._tables.shape[1]))
            self.graphs.forget()
        numbers = torch.cat([*tokens, F.pad(ends - 1, (0, size // SHARE - count)), tiles.flatten()])
        self._numbers[: sum(parts)] = moved(numbers, self.device)
        self._tables[:count, : tables.shape[1]] = moved(tables, self.device)
        axes = None
        if any(each.prompt.rotary is not None for each in stretches):
            axes = moved(F.pad(torch.cat([each.rotary for each in stretches], 1), padding), self.device)

        def step() -> torch.Tensor:
            ids, rotary, slots, last, tiles = self._numbers[: sum(parts)].split(parts)
            paged = DeviceBatch(cache.keys, cache.values, self._tables, slots, tiles.view(-1, 4), in_tiles=True)
            return forward(ids, rotary if axes is None else axes, paged, last, seen)

        found = self.graphs.run(("prefill", size), step) if axes is None and not seen else step()
        return found[:count].clone()  # a recorded step overwrites its result when it is replayed


def in_parts(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Groups stretches of prompt tokens into batches of a bounded number of tokens; longer stretches are cut."""
    step = scheduler.PREFILL_TOKENS
    parts = [
        Stretch(ids[at : at + step], each.start + at, each.blocks, each.prompt, at + step >= len(ids))
        for each in stretches
        for ids in [each.token_ids]
        for at in range(0, len(ids), step)
    ]
    return by_tokens(parts, step // SHARE)
