# SPDX-License-Identifier: Apache-2.0
"""Texts for a reward model with another vocabulary: its own chat template and tokenizer encode each conversation.

The model reads the text of a conversation and returns one score. Numbers of single tokens (values, log-probs) have no
counterpart in another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.data.chat import encode_rendered, render_chat
from whet.errors import EngineError
from whet.models.load import context_length, load_tokenizer
from whet.models.positions import position_ids
from whet.types import Trajectory

KEPT = 4  # number of tokenizers that stay loaded


@dataclass(frozen=True)
class TextReader:
    """Encodes conversations for the reward model at `path`: its tokenizer, chat template and context length."""

    path: str
    tokenizer: PreTrainedTokenizerBase
    longest: int

    def encode(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Encodes whole conversations.  Raises: DataError, EngineError if one has media or too many tokens."""
        texts = []
        for each in trajectories:
            messages = (*each.prompt.messages, *each.messages)
            if each.prompt.media or any(turn.media for turn in each.turns):
                change = "use a reward function, such as llm_judge, or rows of text alone"
                raise EngineError(f"trajectory {each.uid}", "has images, videos or audio", "text", change)
            texts.append(render_chat(self.tokenizer, messages, add_generation_prompt=False))
        found = encode_rendered(self.tokenizer, texts)
        for each, ids in zip(trajectories, found, strict=True):
            if len(ids) > self.longest:
                expected = f"at most {self.longest}, the positions of the reward model at {self.path}"
                change = "lower data.max_prompt_length or data.max_response_length"
                raise EngineError(f"trajectory {each.uid}: tokens", len(ids), expected, change)
        return found


@lru_cache(KEPT)
def text_reader(path: str, trusted: bool, policy: PreTrainedTokenizerBase) -> TextReader | None:
    """Returns a reward model's text reader; None if its vocabulary has the policy's token ids, so that it reads ids.

    Raises: ModelError."""
    tokenizer = load_tokenizer(path, path, trust_remote_code=trusted)
    theirs = tokenizer.get_vocab()
    if all(theirs.get(token) == number for token, number in policy.get_vocab().items()):
        return None
    return TextReader(path, tokenizer, context_length(path, trust_remote_code=trusted))


def text_batch(batch: Batch, trajectories: Sequence[Trajectory], reader: TextReader) -> Batch:
    """Encodes conversations as a batch to score. A row of `batch` with a token in `response_mask` becomes the whole
    conversation of its trajectory; the last token is its response. Other rows become empty and get no score."""
    read = batch["response_mask"].bool().any(1).tolist()
    owners = [trajectories[number] for number in batch["trajectory_uid"].tolist()]
    encoded = iter(reader.encode([each for each, is_read in zip(owners, read, strict=True) if is_read]))
    return rows_of([next(encoded) if is_read else [] for is_read in read])


def rows_of(texts: Sequence[Sequence[int]]) -> Batch:
    """Makes a batch of encoded texts to score. The last token of a text is its response. Empty texts get no score."""
    rows = [ids or [0, 0] for ids in texts]
    width = max(map(len, rows))
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Batch.of(
        {
            "input_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
            "attention_mask": mask,
            "position_ids": position_ids(mask),
            "response_mask": torch.tensor([[int(bool(ids))] for ids in texts]),
        }
    )
