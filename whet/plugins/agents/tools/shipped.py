# SPDX-License-Identifier: Apache-2.0
"""Shipped tools: a calculator, and a search in a corpus."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from whet.errors import ConfigError
from whet.options import Count
from whet.plugins.agents.shipped import calculate
from whet.registry import register_tool

_ALONE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Kana and Han


@register_tool("calculator")
def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and brackets, such as 12*(3+4)
    """
    return calculate(expression)


@register_tool("search")
class Search:
    """Searches a corpus by BM25. Each line of `corpus`, a .jsonl file, has `text` and may have `title`."""

    def __init__(self, *, corpus: str, top: Count = 3) -> None:
        self._index, self._top = _index(corpus), top

    @classmethod
    def prepare(cls, *, corpus: str, top: int) -> None:
        """Reads the corpus once, before the processes of episodes are forked."""
        _index(corpus)

    def search(self, query: str) -> str:
        """Searches the documents and returns the best ones.

        Args:
            query: a few words to look for
        """
        found = self._index.best(query, self._top)
        return "\n\n".join(found) or "nothing found; try other words"


class BM25:
    """Ranks documents by BM25 (Robertson and Zaragoza 2009), with Lucene's idf:

    sum over words of ln(1 + (N - n + .5) / (n + .5)) tf (k1 + 1) / (tf + k1 (1 - b + b length / mean length))."""

    def __init__(self, documents: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.documents = documents
        counts = [Counter(words(each)) for each in documents]
        mean = sum(each.total() for each in counts) / max(1, len(counts)) or 1.0
        self._weights: dict[str, list[tuple[int, float]]] = {}  # by word: document and weight
        for number, each in enumerate(counts):
            norm = k1 * (1 - b + b * each.total() / mean)
            for word, count in each.items():
                self._weights.setdefault(word, []).append((number, count * (k1 + 1) / (count + norm)))

    def scores(self, query: str) -> dict[int, float]:
        """Returns the scores of the documents that contain a word of the query, by index."""
        found = Counter[int]()
        for word in words(query):
            with_word = self._weights.get(word, [])
            idf = math.log(1 + (len(self.documents) - len(with_word) + 0.5) / (len(with_word) + 0.5))
            for number, weight in with_word:
                found[number] += idf * weight  # type: ignore[assignment]
        return dict(found)

    def best(self, query: str, top: int) -> list[str]:
        """Returns the documents with the highest scores; among equal scores, earlier documents."""
        scores = self.scores(query)
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in islice(ranked, top)]


def words(text: str) -> list[str]:
    """Splits a text into lower-case words. Each Chinese or Japanese character is a word, since they use no spaces."""
    return re.findall(rf"(?=\w)[{_ALONE}]|[^\W{_ALONE}]+", text.lower())


@cache
def _index(corpus: str) -> BM25:
    documents = []
    try:
        text = Path(corpus).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("corpus", f"{corpus} ({error})", "a .jsonl file", "correct it") from error
    lines = text.removesuffix("\n").split("\n")  # splitlines would split at U+2028 inside a JSON string too
    for number, line in enumerate(lines if text else [], start=1):
        try:
            row = json.loads(line)
            documents.append("\n".join(str(row[name]) for name in ("title", "text") if name == "text" or name in row))
        except (ValueError, KeyError, TypeError) as error:
            expected = "JSON with text, and maybe a title"
            raise ConfigError(f"corpus {corpus}, line {number}", f"{line[:60]!r}", expected, "correct it") from error
    return BM25(documents)
