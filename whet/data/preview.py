# SPDX-License-Identifier: Apache-2.0
"""Shows rows as the model reads them, for `whet data`: token ids, loss mask, text of each token, length statistics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import files
from whet.config.schema import ExamplesConfig, GenerateConfig, RunConfig, WholeConfig
from whet.data.load import TRAIN, VAL, EntryCounts, Loaded, load_items
from whet.data.loader import OrderLoader, run_steps
from whet.data.media import images
from whet.data.pixels import png
from whet.data.samplers import make_loader, order_of
from whet.errors import DataError
from whet.types import Example, Media, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOW = 4  # earlier tokens decoded together with a token: gives correct spaces, and characters of several tokens
NO_LIMIT = 2**31
SIDE = 128  # of a thumbnail, in pixels
Item = Prompt | Example


@dataclass(frozen=True)
class PreviewRow:
    """A row as `whet data` prints it. `mask` is the loss mask; it is None for a prompt."""

    title: str
    token_ids: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Media, ...] = ()


@dataclass(frozen=True)
class Preview:
    """Statistics of a data set, and the rows to show."""

    parts: tuple[EntryCounts, ...]
    lengths: list[int]  # in tokens, of all rows, also of rows over the limit
    limit: int
    limit_key: str
    over_limit: str  # treatment of rows over the limit: cut, dropped, an error
    data_sources: Counter[str]
    num_unanswered: int
    rows: list[PreviewRow]
    notes: list[str] = field(default_factory=list)  # of all rows together

    @property
    def num_over(self) -> int:
        """The number of rows over the limit."""
        return sum(length > self.limit for length in self.lengths)


def preview(
    config: WholeConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_rows: int,
    index: int | None = None,
    validation: bool = False,
    drawn: bool = False,
) -> Preview:
    """Reads the data of a config and chooses rows: the first ones; the row with number `index`; or with `drawn` the
    first ones in the order of the run."""
    is_supervised = isinstance(config, ExamplesConfig)
    trains, data, with_answers = "trainer" in config, config.data, True
    key = TRAIN if trains and not validation else VAL
    where, seed = {} if trains and validation else data.filter, (config["trainer"] if trains else config)["seed"]
    if isinstance(config, GenerateConfig):
        key, data, with_answers = config.source_key, data.model_copy(update={"val_files": config.sources}), False
    limit_name, what = ("max_length", "example") if is_supervised else ("max_prompt_length", "row")
    limit: int = config.data[limit_name]

    def loaded(**changes: int) -> Loaded[Any]:
        changed = data.model_copy(update=changes)
        return load_items(changed, tokenizer, key, where=where, seed=seed, with_answers=with_answers)

    whole = loaded(**{limit_name: NO_LIMIT})
    chosen = _numbered(whole.items)
    if index is not None:
        last = chosen[-1][0]
        chosen = [(number, item) for number, item in chosen if number == index]
        if not chosen:
            raise DataError("--index", index, f"the number of one {what}, from 0 to {last}")
    if drawn and isinstance(config, RunConfig):
        chosen = _drawn(config, loaded(), seed, num_rows)
    prompts = [item for item in whole.items if isinstance(item, Prompt)]
    over = config.data["overlong" if is_supervised else "overlong_prompts"]
    return Preview(
        parts=whole.parts,
        lengths=[item.num_tokens for item in whole.items],
        limit=limit,
        limit_key=f"data.{limit_name}",
        over_limit={"truncate": "cut", "drop": "dropped", "error": "an error"}[over],
        data_sources=Counter(prompt.data_source for prompt in prompts),
        num_unanswered=with_answers * sum(prompt.ground_truth is None for prompt in prompts),
        rows=[row for number, item in chosen[:num_rows] for row in _shown(number, item, limit)],
        notes=[] if prompts else type(whole.items[0]).notes(whole.items),
    )


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Returns the text of each token. Of a character with several tokens, only the last has the text."""
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
    """Joins adjacent texts that have the same mask value."""
    joined = groupby(zip(mask, values, strict=True), key=lambda pair: pair[0])
    return [(value, "".join(text for _, text in run)) for value, run in joined]


def shortened(text: str, media: Sequence[Media]) -> str:
    """Replaces each sequence of equal media tokens in the text by one token and the count."""
    for pad in {piece for each in media if each.tokens for piece, times in each.tokens.text if times > 1}:
        text = re.sub(f"(?:{re.escape(pad)}){{2,}}", lambda run, pad=pad: f"{pad}×{len(run[0]) // len(pad)}", text)  # type: ignore[misc]
    return text


def thumbnail(media: Media, path: Path) -> None:
    """Writes a picture of a media; of a video, frames side by side. Each is at most SIDE pixels high and wide.

    Raises: DataError."""
    from PIL import Image

    small = images(media)
    for each in small:
        each.thumbnail((SIDE, SIDE))
    strip = Image.new("RGB", (sum(each.width for each in small), max(each.height for each in small)))
    for place, each in enumerate(small):
        strip.paste(each, (sum(before.width for before in small[:place]), 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, png(strip))


def percentile(ordered: Sequence[int], share: float) -> int:
    """Returns the smallest of the sorted numbers such that at least the fraction `share` of them is not larger."""
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def histogram(lengths: Sequence[int], bins: int = 10) -> list[tuple[int, int, int]]:
    """Counts lengths in bins of equal width. A bin is (lowest value, highest value, count)."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // bins))
    counts = Counter((length - low) // width for length in lengths)
    return [(low + i * width, low + (i + 1) * width - 1, counts[i]) for i in range(-(-(high - low + 1) // width))]


def _drawn(config: RunConfig, loaded: Loaded[Any], seed: int, count: int) -> list[tuple[int, Item]]:
    """Returns the first `count` items in the order of the run, with their numbers."""
    if isinstance(config, ExamplesConfig):
        order = order_of(loaded, seed=seed, shuffle=config.data.shuffle)
        numbered = _numbered(loaded.items)
        return OrderLoader(numbered, seed=seed, shuffle=config.data.shuffle, order=order).take(count)
    batch = config.data.train_batch_size
    steps = run_steps(config.trainer, len(loaded.items), batch)
    return _numbered(make_loader(config.data, loaded, seed=seed, total_draws=steps * batch).take(count))


def _numbered(items: Sequence[Item]) -> list[tuple[int, Item]]:
    return [(item.index if isinstance(item, Prompt) else place, item) for place, item in enumerate(items)]


def _shown(number: int, item: Item, limit: int) -> list[PreviewRow]:
    """Returns the printable rows of an item: several if the item has several texts."""
    if isinstance(item, Prompt):
        answers = {"ground truth": item.ground_truth, "data source": item.data_source}
        return [PreviewRow(f"row {number}", item.token_ids, None, {**answers, **item.extra_info}, item.media)]
    rows = [(f"example {number}{name}", ids[:limit], mask[:limit]) for name, (ids, mask) in item.texts().items()]
    return [PreviewRow(*row, item.facts(), item.media) for row in rows]
