# SPDX-License-Identifier: Apache-2.0
"""Converts the SDK's rows and losses to a batch and an objective of whet's training engines.

A loss is a weighted sum over tokens, so that chunks of a batch add up and clients choose the divisor. The SDK sends one
batch in several requests, so a number that depends on the whole batch has to come from the client. With weight 1/N
on each of N tokens, `cross_entropy` has the gradient of `whet sft`, and a policy loss has the gradient of `whet train`,
bit for bit, since rows have the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from whet.algorithms.calls import Bound, PolicyLoss
from whet.batch import Batch
from whet.columns import COLUMNS, POLICY_OUTPUTS
from whet.engines.protocol import Columns
from whet.errors import DataError, RegistryError, did_you_mean
from whet.metrics import Metrics
from whet.models.positions import position_ids
from whet.plugins.serving.tinker.wire import Datum
from whet.registry import AGGREGATIONS, POLICY_LOSSES, PREFERENCE_LOSSES, Entry, Registry
from whet.trainers.objectives import LossObjective

Floats = npt.NDArray[np.float32]
OWN = "whet:"  # before the name of a loss of whet that the SDK has too
CROSS_ENTROPY, AGGREGATION, SHORT = "cross_entropy", "aggregation", "trained_logprobs_only"
TARGETS, WEIGHTS, LOG_PROBS = "target_tokens", "weights", "logprobs"
COMPARISONS = "num_comparisons"  # divisor of preference losses
OF_COMPARISONS = {"label", "scores", "reference_point", "mean_log_ratio"}  # inputs of preference losses, [B]
DIVISORS = ("num_tokens", "num_sequences", "fixed_length")  # of aggregations, for the whole batch
# Columns that no input of a client may replace.
RESERVED = {
    "input_ids", "attention_mask", "position_ids", "response_mask", "loss_mask", "row", "picked", "picked_weights",
    "token_weights", "log_probs",
}  # fmt: skip
MOST_PADDED = 2**26  # numbers of a column, padded: one long row makes all rows wide
MOST_TABLE = 2**30  # log-probs of a row over the vocabulary, for targets that are not the next tokens
MASKS = (WEIGHTS, "mask", "sequence_ratio_mask")  # inputs that are 0 on tokens that are not trained
# Losses of the SDK: a loss of whet, its options, and how options of the SDK change them.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "importance_sampling": ("ppo_clip", {"clip_ratio_low": 1.0, "clip_ratio_high": 1e30}),  # never clipped
    "ppo": ("ppo_clip", {}),
    "cispo": ("cispo", {"bounds": "absolute", "clip_ratio_low": 0.8, "clip_ratio_high": 1.2}),
    "dro": ("dro", {}),
    "gspo": ("gspo", {}),
}
RELATIVE = ("ppo_clip", "gspo")  # their bounds are distances from 1, the SDK's thresholds are bounds


def objective_of(name: str, options: Mapping[str, float | str], *, is_picked: bool) -> SumObjective:
    """Builds the objective of the loss `name` with its options; `is_picked`: see SumObjective.  Raises: RegistryError,
    ConfigError, DataError."""
    given = dict(options)
    given.pop(SHORT, None)
    own, fixed = NAMED.get(name, (name.removeprefix(OWN), {}))
    if own in PREFERENCE_LOSSES:
        return _comparisons(own, given, is_picked=is_picked)
    aggregation = str(given.pop(AGGREGATION, "token-sum"))
    common: dict[str, Any] = {"aggregation": aggregation, "is_picked": is_picked}
    common |= _divisors(registered(AGGREGATIONS, aggregation), given)
    if name == CROSS_ENTROPY:
        if given:
            raise DataError(f"loss {name!r}", f"has no option {min(given)!r}", change="leave it out")
        return SumObjective(loss_name=name, **common)
    if name in NAMED:
        for key, end in (("clip_low_threshold", "clip_ratio_low"), ("clip_high_threshold", "clip_ratio_high")):
            if key in given:
                bound = number_of(key, given.pop(key))
                given[end] = bound if own not in RELATIVE else (1 - bound if end == "clip_ratio_low" else bound - 1)
    bound_loss = _bound(registered(POLICY_LOSSES, own), {**fixed, **given})
    return SumObjective(own, bound_loss.options, bound=bound_loss, **common)


def registered(registry: Registry, name: str) -> Entry:
    """Returns the entry of a registered name. A client may not name code by its location, which the registry would
    load.  Raises: RegistryError."""
    if name not in registry:
        names = registry.names()
        change = did_you_mean(name, names, "correct the name")
        raise RegistryError(registry.kind, name, f"one of {', '.join(names)}", change)
    return registry[name]


def number_of(key: str, value: float | str) -> float:
    """Converts the value of an option to a number.  Raises: DataError."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(key, value, "a number") from error


def _bound(entry: Entry, given: Mapping[str, Any]) -> Bound:
    """Binds a loss to its options; a flag is a number in the SDK.  Raises: ConfigError."""
    options = {key: bool(each) if entry.takes.get(key) is bool else each for key, each in given.items()}
    return Bound(entry, entry.resolve_options(options, f"loss {entry.name!r}: "))


def _divisors(aggregation: Entry, given: dict[str, Any]) -> dict[str, Any]:
    """Moves the divisors of an aggregation from the options to arguments of SumObjective.  Raises: DataError."""
    found = dict[str, float]()
    for name in DIVISORS:
        if name not in aggregation.options:
            continue
        if name not in given:
            why = f"{aggregation.name} divides by {name}, and a request may be a part of the batch"
            change = f"set {name} in loss_fn_config, for the whole batch, or put the divisor into the weights"
            raise DataError(AGGREGATION, why, "token-sum, or a divisor", change)
        found[name] = _divisor(name, given.pop(name))
    length = {"fixed_length": int(found.pop("fixed_length"))} if "fixed_length" in found else {}
    return {"divisors": found, **length}


def _divisor(name: str, given: float | str) -> float:
    if not 1 <= (value := number_of(name, given)) < np.inf:
        raise DataError(name, value, "1 or more")
    return value


def _comparisons(name: str, given: dict[str, Any], *, is_picked: bool) -> ComparisonSum:
    """Builds the objective of a preference loss.  Raises: ConfigError, DataError."""
    if is_picked:
        raise DataError(
            TARGETS, "are not the next tokens", f"the next tokens, of which the loss {name!r} compares sums"
        )
    entry = PREFERENCE_LOSSES[name]
    block = {"pair": 2, "label": 1}.get(str(entry.marks.get("of", "pair")))
    if block is None:
        block = int(_divisor("list_size", given.pop("list_size", "unset")))
    divisor = _divisor(COMPARISONS, given.pop(COMPARISONS, 1.0))
    bound = _bound(entry, given)
    return ComparisonSum(name, bound.options, block=block, bound=bound, divisors={COMPARISONS: divisor})


@dataclass(frozen=True)
class SumObjective(LossObjective):
    """Sums a loss, given by name, over tokens. Keeps the log-probs that the loss read, by row of the batch (`seen`)."""

    name = "tinker"
    is_picked: bool = False  # targets are not the next tokens, or several a place
    divisors: Mapping[str, float] = field(default_factory=dict)  # in place of the counts of these rows
    seen: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    total_loss: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """Returns the model outputs that the loss reads: log-probs of the next tokens (of the whole vocabulary if
        `is_picked`: the targets are other tokens, or several), and the outputs that its function names."""
        own = frozenset() if self.loss_name == CROSS_ENTROPY else POLICY_OUTPUTS & {*self.function.columns}
        return own | {"vocab_log_probs" if self.is_picked else "log_probs"}

    def check(self, batch: Batch) -> None:
        """Checks that the rows have all columns of the loss. The loop computes some of them over all rows of a batch,
        of which a request may be a part.  Raises: DataError."""
        if self.loss_name == CROSS_ENTROPY:
            return
        of_batch = self.function.entry.marks.get("before", ())
        for name in self.function.columns:
            if name not in batch and name not in POLICY_OUTPUTS:
                asked = LOG_PROBS if name in ("old_log_probs", "rollout_log_probs") else name
                shown = "of all rows of a batch" if name in of_batch else "of each row"
                why, change = f"reads {name!r} {shown}, and a request has only its inputs", "add it to loss_fn_inputs"
                raise DataError(f"loss {self.loss_name!r}", why, f"the input {asked!r} in each row", change)

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Counts the trained tokens and the rows that have any; `divisors` replace these counts, unless they are 0."""
        own = super().counts(batch)
        return own | {name: torch.tensor(each) for name, each in self.divisors.items() if bool(own["num_tokens"])}

    def loss(self, outputs: Columns, batch: Columns, counts: Columns) -> tuple[torch.Tensor, Metrics]:
        """Returns the sum of the losses of these rows, and metrics.  Raises: RegistryError for a loss that is no loss
        per token."""
        log_probs = targets_of(outputs, batch)
        self.seen.update(zip(batch["row"].tolist(), log_probs.detach().cpu(), strict=True))
        if self.is_picked and self.loss_name != CROSS_ENTROPY:
            log_probs = log_probs.squeeze(-1)
        columns: Columns = {**batch, **outputs, "log_probs": log_probs}
        if self.loss_name == CROSS_ENTROPY and self.is_picked:
            total = self.aggregate(-(log_probs * batch["picked_weights"]).sum(-1), batch, counts)
        elif self.loss_name == CROSS_ENTROPY:
            total = self.total(PolicyLoss(-log_probs, None, {}, {}), batch, counts)
        else:
            total = self.summed(columns, counts)
        self.total_loss.append(total.detach())
        return total, Metrics()

    def summed(self, columns: Columns, counts: Columns) -> torch.Tensor:
        """Returns the sum of a registered loss.  Raises: RegistryError for a loss that is no loss per token."""
        found = self.call(columns)
        if found.per_token is None:
            what = "returns an aggregated loss, whose value depends on the rows of a request"
            raise RegistryError(f"loss {self.loss_name!r}", what, "a loss per token [B, R]")
        return self.total(found, columns, counts)


@dataclass(frozen=True)
class ComparisonSum(SumObjective):
    """Sums a preference loss over comparisons, each of `block` adjacent rows, and divides by `num_comparisons`."""

    block: int = 2
    kind = PREFERENCE_LOSSES

    def counts(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Returns the divisor, or 0 if no token is trained."""
        return {COMPARISONS: torch.tensor(self.divisors[COMPARISONS]) * batch["response_mask"].any()}

    def summed(self, columns: Columns, counts: Columns) -> torch.Tensor:
        """Returns these rows' part of the mean loss of the comparisons of the batch."""
        losses, _ = self.function({**columns, "uid": columns["row"] // self.block})
        return losses.sum() / counts[COMPARISONS].clamp(min=1)

    def check(self, batch: Batch) -> None:
        """Checks that a request has whole comparisons, with all columns of the loss, and that weights are a mask.
        Raises: DataError."""
        super().check(batch.with_columns(uid=batch["row"]))
        if len(batch) % self.block:
            expected = f"a multiple of {self.block}: the loss {self.loss_name!r} compares adjacent rows of a request"
            raise DataError("data", f"has {len(batch)} rows", expected, "send fewer comparisons in a call")
        weights = batch["token_weights"] if "token_weights" in batch else torch.full((1,), torch.nan)
        if not bool((weights == weights.bool()).all()):
            raise DataError(WEIGHTS, "are no mask", "1 on the tokens of the response, 0 on others")


def targets_of(outputs: Columns, batch: Columns) -> torch.Tensor:
    """Returns the log-probs of the targets: the next tokens [B, R], or the tokens in the column `picked` [B, R, K]."""
    if "picked" not in batch:
        found: torch.Tensor = outputs["log_probs"]
        return found
    return outputs["vocab_log_probs"].gather(-1, batch["picked"])


@dataclass(frozen=True)
class DatumRows:
    """The rows of a request as a batch. Position t of datum i is in column t + `starts[i]` of its row."""

    data: Sequence[Datum]
    batch: Batch
    starts: Sequence[int]
    is_picked: bool

    @classmethod
    def of(cls, data: Sequence[Datum], loss: str, vocab_size: int, context: int) -> DatumRows:
        """Arranges `data` as a batch. For the loss `cross_entropy` the prompt of a row is its first token, as in `whet
        sft`. For a policy loss it is all tokens before the first trained one; rows can share it.  Raises: DataError."""
        masks = [trained(datum, number, loss, vocab_size, context) for number, datum in enumerate(data)]
        targets = [datum.inputs[TARGETS] for datum in data]
        if len({target.shape[1:] for target in targets}) > 1:
            raise DataError(TARGETS, "are of several widths", "as many targets a token in all rows", "pad them")
        is_picked = not all(_are_next(*each, loss) for each in zip(data, masks, targets, strict=True))
        firsts = [int(mask.argmax()) if loss != CROSS_ENTROPY else 0 for mask in masks]
        widest = max(firsts)
        width = widest + 1 + max(len(mask) - first for mask, first in zip(masks, firsts, strict=True))
        _check_size(data, targets, width, vocab_size if is_picked else 1)
        ids, real = np.zeros((len(data), width), np.int64), np.zeros((len(data), width), np.int64)
        for row, (datum, first, target) in enumerate(zip(data, firsts, targets, strict=True)):
            here = slice(widest - first, widest - first + len(datum.tokens) + 1)
            ids[row, here] = [*datum.tokens, 0 if is_picked else target[-1]]
            real[row, here] = 1
        starts = [-first for first in firsts]
        shape = len(data), width - widest - 1

        def column(parts: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
            whole = np.zeros((*shape, *parts[0].shape[1:]), parts[0].dtype)
            for row, (part, first) in enumerate(zip(parts, firsts, strict=True)):
                whole[row, : len(part) - first] = part[first:]
            return torch.from_numpy(whole)

        attention_mask = torch.from_numpy(real)
        found = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": attention_mask,
            "position_ids": position_ids(attention_mask),
            "response_mask": column([mask.astype(np.int64) for mask in masks]),
            "row": torch.arange(len(data)),
        }
        if is_picked:
            found["picked"] = column([each.reshape(len(each), -1).astype(np.int64) for each in targets])
        return cls(data, Batch.of({**found, **_inputs(data, loss, is_picked, column)}), starts, is_picked)

    def with_all_places(self) -> Batch:
        """Returns the batch with a response mask of 1 at every position, for a forward pass without a loss."""
        width = self.batch["response_mask"].shape[1]
        ends = torch.tensor([len(each.tokens) + start for each, start in zip(self.data, self.starts, strict=True)])
        return self.batch.with_columns(response_mask=(torch.arange(width) < ends[:, None]).long())

    def outputs(self, seen: Mapping[int, torch.Tensor]) -> list[Floats]:
        """Returns the log-probs of each datum in the shape of its targets, from `seen` by row, or else 0."""
        found = list[Floats]()
        for row, (datum, start) in enumerate(zip(self.data, self.starts, strict=True)):
            shape = datum.inputs[TARGETS].shape
            own = np.zeros((shape[0], int(np.prod(shape[1:], dtype=int))), np.float32)
            if row in seen:
                known = seen[row].float().numpy().reshape(len(seen[row]), -1)
                own[-start:] = known[: len(own) + start]
            found.append(own.reshape(shape))
        return found


def _check_size(data: Sequence[Datum], targets: Sequence[npt.NDArray[Any]], width: int, vocab_size: int) -> None:
    """Raises: DataError for rows that become far larger in memory than they were sent."""
    cells = len(data) * width * max(int(np.prod(target.shape[1:], dtype=int)) for target in targets)
    if cells > MOST_PADDED:
        expected = f"at most {MOST_PADDED:,} in a request"
        raise DataError("data", f"has {cells:,} targets when padded to {width} tokens", expected, "send fewer rows")
    table = max(len(each.tokens) for each in data) * vocab_size
    if vocab_size > 1 and table > MOST_TABLE:
        found = f"are not the next tokens, and need {table:,} log-probs of the vocabulary"
        raise DataError(TARGETS, found, f"at most {MOST_TABLE:,} in a row", "send shorter rows")


def _inputs(data: Sequence[Datum], loss: str, is_picked: bool, column: Any) -> dict[str, torch.Tensor]:
    """Converts inputs to columns with whet's names.  Raises: DataError if rows have different inputs."""
    given = [datum.inputs.keys() - {TARGETS, *MASKS[1:]} for datum in data]
    if taken := set[str]().union(*given) & RESERVED:
        raise DataError(
            f"input {min(taken)!r}", "is a column of the server", "another name", "rename it or leave it out"
        )
    if missing := set[str]().union(*given) - given[0].intersection(*given):
        raise DataError(f"input {min(missing)!r}", "is not in all rows", "the same inputs in each row")
    parts = {name: [np.asarray(each.inputs[name], np.float32) for each in data] for name in given[0]}
    if loss == CROSS_ENTROPY and is_picked:
        width = max(datum.inputs[TARGETS].reshape(len(datum.tokens), -1).shape[1] for datum in data)
        whole = parts.get(WEIGHTS) or [np.ones(datum.inputs[TARGETS].shape, np.float32) for datum in data]
        return {"picked_weights": column([each.reshape(len(each), width) for each in whole])}
    columns = {
        name: torch.from_numpy(np.stack(each).reshape(-1)) if is_of_row(name, loss) else column(each)
        for name, each in parts.items()
        if is_of_row(name, loss) or all(one.ndim == 1 for one in each)
    }
    if WEIGHTS in columns:
        columns["token_weights"] = columns.pop(WEIGHTS)
    if LOG_PROBS in columns:
        sampled = columns.pop(LOG_PROBS)
        columns = {"old_log_probs": sampled, "rollout_log_probs": sampled, **columns}
    return columns


def is_of_row(name: str, loss: str) -> bool:
    """Tells whether an input is one number for a row, by the table of columns."""
    if name in OF_COMPARISONS:
        return loss.removeprefix(OWN) in PREFERENCE_LOSSES
    return name in COLUMNS and COLUMNS[name].shape == "B"


def trained(datum: Datum, number: int, loss: str, vocab_size: int, context: int) -> npt.NDArray[np.bool_]:
    """Returns the mask [n] of trained positions, where the weight is not 0. Without weights it is all positions, or for
    a policy loss where an advantage or a sampled log-prob is not 0.  Raises: DataError for an invalid datum."""
    where, size = f"datum {number}", len(datum.tokens)
    if not 0 < size <= context:
        raise DataError(f"{where}: tokens", size, f"1 to {context}, which the model reads", "shorten it")
    targets = datum.inputs.get(TARGETS)
    if targets is None or targets.dtype.kind != "i":
        raise DataError(f"{where}: {TARGETS}", None if targets is None else "are no integers", "an int64 tensor")
    for name, each in datum.inputs.items():
        if is_of_row(name, loss):
            if each.shape != (1,):
                raise DataError(f"{where}: {name}", f"has shape {list(each.shape)}", "one number for the whole row")
            continue
        if each.ndim not in (1, 2) or len(each) != size or (name == WEIGHTS and each.shape != targets.shape):
            raise DataError(f"{where}: {name}", f"has shape {list(each.shape)}", f"one for each of {size} tokens")
    if targets.ndim == 2 and loss != CROSS_ENTROPY:
        raise DataError(f"{where}: {TARGETS}", "are several for a token", f"one for the loss {loss!r}")
    for name, ids in (("tokens", datum.tokens), (TARGETS, targets)):
        if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
            raise DataError(f"{where}: {name}", f"{ids.min()} to {ids.max()}", f"token ids from 0 to {vocab_size - 1}")
    given = [datum.inputs[name] for name in MASKS if name in datum.inputs]
    if not given and loss != CROSS_ENTROPY:
        sampled = [np.abs(each) for name, each in datum.inputs.items() if name in ("advantages", LOG_PROBS)]
        given = [sum(sampled, np.zeros(size))]
    mask = np.ones(size, bool)
    for each in given:
        mask &= (np.asarray(each).reshape(size, -1) != 0).any(1)
    return mask


def _are_next(datum: Datum, mask: npt.NDArray[np.bool_], targets: npt.NDArray[Any], loss: str) -> bool:
    """Tells whether the targets are the next tokens; for a policy loss, only at trained positions."""
    read = mask[:-1] | (loss == CROSS_ENTROPY)
    return targets.ndim == 1 and bool(((targets[:-1] == datum.tokens[1:]) | ~read).all())
