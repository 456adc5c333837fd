# SPDX-License-Identifier: Apache-2.0
"""Rows as the model will see them, for `whet data`: ids, the mask, each token's own text, and how long rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from whet.config.schema import EvalConfig, SFTConfig, TrainConfig
from whet.data.load import TRAIN, VAL, Part, load_examples, load_prompts
from whet.data.loader import OrderLoader, steps_per_epoch
from whet.data.samplers import make_loader, order_of
from whet.errors import DataError
from whet.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 4  # tokens decoded before one whose text is asked for: spaces and letters of several tokens come out right
NO_LIMIT = 2**31
WITHOUT_LIMIT = {"max_prompt_length": NO_LIMIT}


@dataclass(frozen=True)
class Shown:
    """One row. `mask` is 1 where the loss is taken; None of a prompt, after which the policy writes."""

    title: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preview:
    """A data set at a glance, and the rows that were asked for."""

    parts: tuple[Part, ...]
    lengths: list[int]  # tokens, of all rows, those too that are over the limit
    limit: int
    limit_key: str
    over_limit: str  # what happens to those
    data_sources: Counter[str]
    num_unanswered: int
    rows: list[Shown]

    @property
    def num_over(self) -> int:
        """How many rows are longer than the limit."""
        return sum(length > self.limit for length in self.lengths)


def preview(
    config: TrainConfig | SFTConfig | EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_rows: int,
    index: int | None = None,
    validation: bool = False,
    drawn: bool = False,
) -> Preview:
    """What the data of a config is: its first rows, or that of number `index`, or with `drawn` the first of the run."""
    is_eval = isinstance(config, EvalConfig)
    key = VAL if validation or is_eval else TRAIN
    seed = config.seed if isinstance(config, EvalConfig) else config.trainer.seed
    where = config.data.filter if is_eval or not validation else {}
    if isinstance(config, SFTConfig):
        return _preview_examples(config, tokenizer, key, where, num_rows, index, drawn)
    data = config.data
    whole = load_prompts(data.model_copy(update=WITHOUT_LIMIT), tokenizer, key, where=where, seed=seed)
    chosen = [prompt for prompt in whole.items if index is None or prompt.index == index][:num_rows]
    if drawn and isinstance(config, TrainConfig):
        loaded = load_prompts(data, tokenizer, key, where=where, seed=seed)
        epoch_steps = steps_per_epoch(len(loaded.items), data.train_batch_size)
        steps = config.trainer.total_steps or config.trainer.total_epochs * epoch_steps
        chosen = make_loader(data, loaded, seed=seed, total_draws=steps * data.train_batch_size).take(num_rows)
    if index is not None and not chosen:
        raise DataError(f"there is no row {index}; expected 0 to {max(prompt.index for prompt in whole.items)}")
    return Preview(
        parts=whole.parts,
        lengths=[len(prompt.token_ids) for prompt in whole.items],
        limit=config.data.max_prompt_length,
        limit_key="data.max_prompt_length",
        over_limit="dropped" if config.data.overlong_prompts == "drop" else "an error",
        data_sources=Counter(prompt.data_source for prompt in whole.items),
        num_unanswered=sum(prompt.ground_truth is None for prompt in whole.items),
        rows=[_shown(prompt) for prompt in chosen],
    )


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. A character of several tokens belongs to the last of them."""
    texts, start, pending = [], 0, 0
    for end in range(1, len(ids) + 1):
        before = str(tokenizer.decode(list(ids[start : end - 1 - pending])))
        whole = str(tokenizer.decode(list(ids[start:end])))
        if whole.endswith("\ufffd") and pending < WINDOW and end < len(ids):
            texts.append("")
            pending += 1
            continue
        texts.append(whole[len(before) :])
        start, pending = max(start, end - WINDOW), 0
    return texts


def spans(values: Sequence[str], mask: Sequence[int]) -> list[tuple[int, str]]:
    """Texts joined as long as their mask is the same."""
    joined = groupby(zip(mask, values, strict=True), key=lambda pair: pair[0])
    return [(value, "".join(text for _, text in run)) for value, run in joined]


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest of the sorted numbers that at least this share of them does not exceed."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def histogram(lengths: Sequence[int], bins: int = 10) -> list[tuple[int, int, int]]:
    """Low, high and count of equally wide bins, both ends belonging to their bin."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // bins))
    counts = Counter((length - low) // width for length in lengths)
    return [(low + i * width, low + (i + 1) * width - 1, counts[i]) for i in range(-(-(high - low + 1) // width))]


def _preview_examples(
    config: SFTConfig,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    where: Mapping[str, Any],
    num_rows: int,
    index: int | None,
    drawn: bool,
) -> Preview:
    data, seed, limit = config.data, config.trainer.seed, config.data.max_length
    whole = load_examples(data.model_copy(update={"max_length": NO_LIMIT}), tokenizer, key, where=where, seed=seed)
    places = list(range(len(whole.items)) if index is None else range(index, index + 1))[:num_rows]
    items = whole.items
    if drawn:
        loaded = load_examples(data, tokenizer, key, where=where, seed=seed)
        order = order_of(loaded, seed=seed, shuffle=data.shuffle)
        items = loaded.items
        places = OrderLoader(range(len(items)), seed=seed, shuffle=data.shuffle, order=order).take(num_rows)
    if index is not None and index >= len(items):
        raise DataError(f"there is no example {index}; expected 0 to {len(items) - 1}")
    return Preview(
        parts=whole.parts,
        lengths=[len(example.input_ids) for example in whole.items],
        limit=limit,
        limit_key="data.max_length",
        over_limit={"truncate": "cut", "drop": "dropped", "error": "an error"}[data.overlong],
        data_sources=Counter(),
        num_unanswered=0,
        rows=[
            Shown(f"example {place}", items[place].input_ids[:limit], items[place].loss_mask[:limit])
            for place in places
        ],
    )


def _shown(prompt: Prompt) -> Shown:
    facts = {"ground truth": prompt.ground_truth, "data source": prompt.data_source}
    return Shown(f"row {prompt.index}", prompt.token_ids, None, {**facts, **prompt.extra_info})
