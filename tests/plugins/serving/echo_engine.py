# SPDX-License-Identifier: Apache-2.0
"""A rollout engine that repeats the user's message, in place of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from whet.rollout.in_process import Done, InProcessEngine, LiveRequest, LoadTokenizer
from whet.rollout.protocol import Request

STUCK_SECONDS = 6.0  # between the first and the second token of a text that begins with "stuck"
SLOW_SECONDS = 0.1  # of a token of a text that begins with "slow"
USER, END = "<|im_start|>user\n", "<|im_end|>"


class EchoEngine(InProcessEngine[LiveRequest]):
    """Says the last user message, or all of a prompt without a chat. "die" ends it."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 256,
        load_tokenizer: LoadTokenizer | None = None,
    ) -> None:
        super().__init__(dtype, max_batch_size, load_tokenizer, keep_cache=False)
        assert load_tokenizer is not None
        self.tokenizer = load_tokenizer()

    @property
    def _num_running(self) -> int:
        return min(len(self.unfinished), self.max_batch_size)

    def _use(self, module: PreTrainedModel) -> None:
        pass

    def _take(self, request: Request) -> LiveRequest:
        return LiveRequest(request, [], [])

    def _step(self, module: PreTrainedModel) -> list[Done[LiveRequest]]:
        done: list[Done[LiveRequest]] = []
        for live in list(self.unfinished.values())[: self.max_batch_size]:
            said = self.tokenizer.decode(live.request.prompt_ids).rpartition(USER)[2].partition(END)[0]
            if said == "die":
                raise RuntimeError("the last word was said")
            if said.startswith("slow"):
                time.sleep(SLOW_SECONDS)
            if said.startswith("stuck") and len(live.tokens) == 1:
                time.sleep(STUCK_SECONDS)
            script = [*self.tokenizer.encode(said), self.tokenizer.eos_token_id]
            live.tokens.append(script[len(live.tokens)])
            live.log_probs.append(-len(live.tokens) / 4)
            stops = self.stops_of(live.request)
            found = stops.found(live.tokens[-1], torch.tensor(live.tokens)) if stops else None
            if found is not None or live.tokens[-1] in live.request.params.stop_token_ids:
                done.append((live, "stop", found))
            elif len(live.tokens) == live.request.params.max_new_tokens:
                done.append((live, "length", None))
        return done

    def _read(self) -> None:
        pass

    def _drop(self, live: Sequence[LiveRequest]) -> None:
        pass

    def _forget(self) -> None:
        pass
