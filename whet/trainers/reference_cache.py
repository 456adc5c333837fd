# SPDX-License-Identifier: Apache-2.0
"""A file of a reference model's log-probs: computed once, read by every run with the same examples and model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

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
    """Log-probs of responses, a tensor [R] for each, and digests of the inputs that they were computed from."""

    def __init__(self, inputs: Mapping[str, str], log_probs: Mapping[Key, Tensor]) -> None:
        self.inputs, self._log_probs = inputs, log_probs

    @classmethod
    def load(cls, path: Path, inputs: Mapping[str, str], rows: BatchRows) -> ReferenceCache:
        """Reads a file.  Raises: StorageError if it is damaged, has other inputs, or lacks one of `rows`."""
        try:
            saved = serialization.load(path)
            found = {str(name): str(digest) for name, digest in saved["inputs"].items()}
            parts = saved["log_probs"].split(saved["lengths"])
            keys = [(str(digest), int(number)) for digest, number in saved["keys"]]
            log_probs = dict(zip(keys, parts, strict=True))
        except (*serialization.MALFORMED, OSError) as error:
            raise StorageError(str(path), f"cannot be read ({error!r})", "a file of this run", "delete it") from error
        for name, digest in inputs.items():
            if found.get(name) != digest:
                raise StorageError(str(path), f"was computed from another {name} ({found.get(name)})", digest, CHANGE)
        if missing := {(each.digest, number) for _, each, number in rows if number is not None} - log_probs.keys():
            raise StorageError(str(path), f"lacks {len(missing)} responses that this run reads", "", CHANGE)
        log.info("the reference's log-probs of %d responses come from %s", len(keys), path)
        return cls(found, log_probs)

    @classmethod
    def make(
        cls, path: Path, inputs: Mapping[str, str], batches: Iterable[BatchRows], forward: Callable[[BatchRows], Tensor]
    ) -> ReferenceCache:
        """Computes the log-probs of the rows of all `batches` with `forward` ([B, R]), and writes the file."""
        log_probs: dict[Key, Tensor] = {}
        for rows in batches:
            for (_, example, number), row in zip(rows, forward(rows), strict=True):
                if number is None:
                    continue
                log_probs[example.digest, number] = row[: len(example.responses[number][0])].float().clone()
        values = torch.cat([*log_probs.values(), torch.zeros(0)])
        lengths = [len(each) for each in log_probs.values()]
        path.parent.mkdir(parents=True, exist_ok=True)
        keys = [list(each) for each in log_probs]
        serialization.save(path, {"inputs": dict(inputs), "keys": keys, "lengths": lengths, "log_probs": values})
        log.info("wrote the reference's log-probs of %d responses to %s", len(keys), path)
        return cls(inputs, log_probs)

    def column(self, rows: BatchRows, width: int) -> Tensor:
        """Returns the log-probs of these rows, padded to `width`; 0 in empty rows.   [B, R]"""
        found = torch.zeros(len(rows), width)
        for row, (_, example, number) in zip(found, rows, strict=True):
            if number is not None:
                values = self._log_probs[example.digest, number]
                row[: len(values)] = values
        return found


def digest_of_all(examples: Sequence[Comparison]) -> str:
    """The digest of the examples as a set, independent of their order and of repeats."""
    return hashlib.sha256("".join(sorted({each.digest for each in examples})).encode()).hexdigest()
