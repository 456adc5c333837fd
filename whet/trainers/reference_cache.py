# SPDX-License-Identifier: Apache-2.0
"""A file of a reference model's log-probs: computed once, read by every run with the same examples and model."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet import serialization
from whet.data.preferences import Comparison
from whet.errors import StorageError

log = logging.getLogger(__name__)
Key = tuple[str, int]  # digest of an example, number of its response
CHANGE = "delete it, or set reference.file to another file"
BatchRows = Sequence[tuple[int, Comparison, int | None]]  # of `whet.trainers.preference.rows_of`


class ReferenceCache:
    """Log-probs of responses, one response behind the other in `values` [sum of `lengths`], and digests of the inputs
    that they were computed from."""

    def __init__(self, inputs: Mapping[str, str], keys: Sequence[Key], lengths: Sequence[int], values: Tensor) -> None:
        self.inputs, self._values = inputs, values
        if len(values) != sum(lengths):
            raise ValueError(f"{len(values)} log-probs of responses with {sum(lengths)} tokens")
        self._places = dict(zip(keys, zip(accumulate(lengths, initial=0), lengths, strict=False), strict=True))

    @classmethod
    def load(cls, path: Path, inputs: Mapping[str, str], rows: BatchRows) -> ReferenceCache:
        """Reads a file.  Raises: StorageError if it is damaged, has other inputs, or lacks one of `rows`."""
        try:
            saved = serialization.load(path)
            found = {str(name): str(digest) for name, digest in saved["inputs"].items()}
            pairs = map(str.split, saved["rows"].splitlines()) if "rows" in saved else saved["keys"]
            keys, lengths = [(str(one), int(other)) for one, other in pairs], torch.as_tensor(saved["lengths"])
            cache = cls(found, keys, [*map(operator.index, lengths.tolist())], saved["log_probs"])
        except (*serialization.MALFORMED, OSError) as error:
            raise StorageError(str(path), f"cannot be read ({error!r})", "a file of this run", "delete it") from error
        for name, digest in inputs.items():
            if found.get(name) != digest:
                raise StorageError(str(path), f"was computed from another {name} ({found.get(name)})", digest, CHANGE)
        if missing := {(each.digest, number) for _, each, number in rows if number is not None} - cache._places.keys():
            raise StorageError(str(path), f"lacks {len(missing)} responses that this run reads", "", CHANGE)
        log.info("the reference's log-probs of %d responses come from %s", len(cache._places), path)
        return cache

    @classmethod
    def make(
        cls, path: Path, inputs: Mapping[str, str], batches: Iterable[BatchRows], forward: Callable[[BatchRows], Tensor]
    ) -> ReferenceCache:
        """Computes the log-probs of the rows of all `batches` with `forward` ([B, R]), and writes the file."""
        keys, lengths, values = list[Key](), list[int](), [torch.zeros(0)]
        for rows in batches:
            found, sizes = forward(rows), [_length(example, number) for _, example, number in rows]
            values.append(found[torch.arange(found.shape[1]) < torch.tensor(sizes)[:, None]].float())
            keys += [(example.digest, number) for _, example, number in rows if number is not None]
            lengths += [size for size, (_, _, number) in zip(sizes, rows, strict=True) if number is not None]
        cache = cls(inputs, keys, lengths, torch.cat(values))
        path.parent.mkdir(parents=True, exist_ok=True)
        written = {"rows": "\n".join(f"{digest} {number}" for digest, number in keys), "lengths": torch.tensor(lengths)}
        serialization.save(path, {"inputs": dict(inputs), **written, "log_probs": cache._values})
        log.info("wrote the reference's log-probs of %d responses to %s", len(cache._places), path)
        return cache

    def column(self, rows: BatchRows) -> Tensor:
        """Returns the log-probs of these rows, padded to the longest response; 0 in empty rows.   [B, R]"""
        places = [(0, 0) if number is None else self._places[each.digest, number] for _, each, number in rows]
        starts, lengths = torch.from_numpy(np.array(places)).view(-1, 2, 1).unbind(1)  # numpy reads lists faster
        at = torch.arange(int(lengths.max()))
        found = torch.zeros(len(rows), len(at))
        is_real = at < lengths
        found[is_real] = self._values[(starts + at)[is_real]]
        return found


def _length(example: Comparison, number: int | None) -> int:
    """Counts the tokens of a response; 0 for an empty row."""
    return 0 if number is None else len(example.responses[number][0])


def digest_of_all(examples: Sequence[Comparison]) -> str:
    """The digest of the examples as a set, independent of their order and of repeats."""
    return hashlib.sha256("".join(sorted({each.digest for each in examples})).encode()).hexdigest()
