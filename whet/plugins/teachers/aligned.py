# SPDX-License-Identifier: Apache-2.0
"""A teacher with another vocabulary than its student, compared at the places where tokens of both begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from whet.batch import Batch
from whet.config.distill import DistillConfig
from whet.data.preferences import Comparison
from whet.data.supervised import SupervisedExample
from whet.data.written import warn_once
from whet.errors import ConfigError, DataError
from whet.models.load import context_length, load_tokenizer
from whet.plugins.teachers.vocabularies import Alignment, ByteVocabulary
from whet.registry import register_part
from whet.trainers.distill import TEXTS
from whet.trainers.preference import to_batch


@register_part("aligned_teachers")
def aligned_teachers(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, ByteTeacher]:
    """Returns the teachers, aligned with the student's `tokenizer`, by data source.

    Raises: ConfigError for a teacher without a token of text in common; DataError, ModelError."""
    found, trusted, student = dict[str, ByteTeacher](), config.model.trust_remote_code, ByteVocabulary.of(tokenizer)
    for source, path in config.teachers.items():
        teacher = ByteVocabulary.of(load_tokenizer(path, path, trust_remote_code=trusted))
        found[source] = ByteTeacher(Alignment(student, teacher, context_length(path, trust_remote_code=trusted)))
        if not found[source].alignment.common:
            raise ConfigError(f"teachers.{source}", path, "a teacher with tokens of the bytes of the student's", TEXTS)
    return found


@dataclass(frozen=True)
class ByteTeacher:
    """A teacher whose tokens are aligned with the student's by bytes."""

    alignment: Alignment

    @cached_property
    def size(self) -> int:
        """The number of tokens that both vocabularies have."""
        return len(self.alignment.pairs)

    def check(self, example: SupervisedExample, number: int) -> None:
        """Checks that the teacher can read a row of the data.  Raises: DataError."""
        try:
            self.alignment.read(example.input_ids)
        except DataError as error:
            raise DataError(f"example {number}: {error.key}", error.found, error.expected, error.change) from error
        if example.media:
            change = "unset alignment"
            raise DataError(f"example {number}", "images or videos", "text alone, for alignment=bytes", change)

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor]:
        """The teacher's tokens that both vocabularies have [M], and the student's token of each teacher's token [V]."""
        theirs, own = torch.tensor([*self.alignment.pairs]), torch.tensor([*self.alignment.pairs.values()])
        return theirs, torch.zeros(int(theirs.max()) + 1, dtype=torch.long).index_put((theirs,), own)

    def outcomes(
        self, batch: Batch, top_k: int, ask: Callable[[Batch, Tensor], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Asks for the distributions of the teacher's own batch. `ask` takes the batch and the ids of tokens [M], and
        returns `teacher_ids` and `teacher_outcomes` of the `top_k` most probable of these tokens at each position.

        Returns `teacher_ids` [B, R, K] in the student's ids, `teacher_outcomes` [B, R, K + 1], K = `top_k`, and a
        `response_mask` [B, R] that leaves out places where no token of the teacher begins, and rows that the teacher
        cannot read (logged once)."""
        masks = batch["response_mask"]
        found = {
            "teacher_ids": torch.zeros(*masks.shape, top_k, dtype=torch.long),
            "teacher_outcomes": torch.zeros(*masks.shape, top_k + 1),
            "response_mask": torch.zeros_like(masks),
        }
        real, left = batch["attention_mask"].bool(), batch["input_ids"].shape[1] - masks.shape[1]
        rows, places = list[Comparison](), list[tuple[int, list[int], list[int]]]()
        for row, ids in enumerate(batch["input_ids"]):
            try:
                tokens, at = self.alignment.read(ids[real[row]].tolist())
            except DataError:  # of a response that the student sampled: the data were read at the start
                warn_once("a teacher cannot read some sampled responses, which are not trained on (distill/aligned)")
                continue
            begin = int(real[row, :left].sum())
            sampled = (masks[row].nonzero()[:, 0] + begin).tolist()
            own = [place for place in sampled if place in at]
            if own:
                first = at[own[0]]
                asked = {at[place] - first for place in own}
                mask = tuple(int(place in asked) for place in range(len(tokens) - first))
                rows.append(Comparison(tuple(tokens[:first]), ((tuple(tokens[first:]), mask),), (1.0,)))
                places.append((row, [place - begin for place in own], [at[place] - first for place in own]))
        if rows:
            among, own_ids = self.shared
            answers = ask(to_batch(rows, self.alignment.teacher.pad_id, "label", 1), among)
            for number, (row, own, theirs) in enumerate(places):
                found["teacher_ids"][row, own] = own_ids[answers["teacher_ids"][number, theirs]]
                found["teacher_outcomes"][row, own] = answers["teacher_outcomes"][number, theirs].float()
                found["response_mask"][row, own] = 1
        return found
