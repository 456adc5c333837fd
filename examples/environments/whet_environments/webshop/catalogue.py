# SPDX-License-Identifier: Apache-2.0
"""The products of the shop, made from a seed, the search in them, and the goals of shoppers."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from whet.plugins.agents.tools.shipped import BM25, words
from whet_environments.webshop import vocabulary as v

MOST_FOUND = 50
REMEMBERED = 4096  # searches whose results a catalogue keeps


@dataclass(frozen=True)
class Product:
    """A product; `category` goes from the widest level to the kind, `features` are the lines of its page Features."""

    id: str
    title: str
    brand: str
    category: tuple[str, str, str]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    description: str
    features: tuple[str, ...]
    review: str

    @property
    def query(self) -> str:
        """The search that its kind answers to: the name of the kind."""
        return self.category[-1]

    def nouns(self) -> list[str]:
        """The nouns of its title, the brand among them."""
        brand = self.brand.lower()
        return [word for word in words(self.title) if word in v.NOUNS or word == brand]

    def short_title(self) -> str:
        """Its attributes and its kind."""
        return f"{', '.join(self.attributes)} {self.query}"


@dataclass(frozen=True)
class Goal:
    """A product to buy, with the attributes, the options and the highest price that count."""

    product: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    highest_price: float

    def instruction(self) -> str:
        """The goal in words."""
        options = ", and ".join(f"{name}: {value}" for name, value in self.options.items())
        return (
            f"Find me {', '.join(self.attributes)} {self.product.query}{' with ' if options else ''}{options}, "
            f"and price lower than {self.highest_price:.2f} dollars"
        )

    def short(self) -> str:
        """The goal in few words: attributes, kind, values of options, highest price."""
        values = "".join(f", {value}" for value in self.options.values())
        return f"{', '.join(self.attributes)} {self.product.query}{values}, {self.highest_price:.0f}"


class Catalogue:
    """The products of a seed, with an index of their texts. Equal arguments make equal catalogues.

    `a_page` is the number of products on a page of results."""

    def __init__(self, num_products: int, seed: int, a_page: int = 10) -> None:
        self.a_page, draws = a_page, random.Random(seed)
        self.products = [_product(number, draws) for number in range(num_products)]
        self.by_id = {each.id: each for each in self.products}
        self._index = BM25([_text(each) for each in self.products])
        self.search = lru_cache(REMEMBERED)(self._search)

    def _search(self, query: str) -> tuple[str, ...]:
        """The ids of the best 50 products; of equal ones the first."""
        scores = self._index.scores(query)
        ranked = heapq.nsmallest(MOST_FOUND, scores, key=lambda number: (-scores[number], number))
        return tuple(self.products[number].id for number in ranked)

    def goal(self, draws: random.Random) -> Goal:
        """A goal that its own product meets; its price limit is the larger of two of the next four multiples of 10."""
        product = draws.choice(self.products)
        attributes = tuple(draws.sample(product.attributes, draws.randint(1, min(3, len(product.attributes)))))
        options = {name: draws.choice(values) for name, values in product.options.items()}
        first = int(product.price // 10) * 10 + 10
        highest = max(draws.sample([first + 10 * more for more in range(4)], 2))
        return Goal(product, attributes, options, float(highest))


@cache
def catalogue(num_products: int, seed: int, a_page: int = 10) -> Catalogue:
    """The catalogue of a seed, built once in a process."""
    return Catalogue(num_products, seed, a_page)


def _text(product: Product) -> str:
    options = " ".join(value for values in product.options.values() for value in values)
    return f"{product.title} {' '.join(product.features)} {product.description} {options}"


def _product(number: int, draws: random.Random) -> Product:
    top = draws.choice(list(v.TREE))
    middle = draws.choice(list(v.TREE[top]))
    kind = draws.choice(list(v.TREE[top][middle]))
    attributes = tuple(draws.sample(v.ATTRIBUTES[top], draws.randint(2, 5)))
    brand = "".join(draws.sample(v.SYLLABLES, 3)).capitalize()
    uses = draws.sample(v.USES, draws.randint(1, 7))
    options = _options(top, draws)
    title = _title(brand, attributes[: draws.randint(1, 2)], (kind, *v.TREE[top][middle][kind]), uses, draws)
    return Product(
        id=f"b{number:06d}",
        title=title,
        brand=brand,
        category=(top, middle, kind),
        attributes=attributes,
        options=options,
        price=draws.randint(500, 15000) / 100,
        description=f"{draws.choice(v.ADJECTIVES).capitalize()} {kind} by {brand}, made for {', '.join(uses)}.",
        features=tuple(f"{each.capitalize()} {kind}" for each in attributes),
        review=f"{draws.randint(10, 50) / 10} of 5 stars: {draws.choice(v.OPINIONS)}",
    )


def _title(
    brand: str, attributes: tuple[str, ...], names: tuple[str, ...], uses: list[str], draws: random.Random
) -> str:
    """[brand] [audience] [adjective] [attributes] [names of the kind] [extra] for [uses]: 3 to 15 nouns."""
    audience = " and ".join(draws.sample(v.AUDIENCES, draws.randint(0, 2)))
    shown = names[: draws.randint(1, len(names))]
    extra = draws.choice(v.EXTRAS) if draws.random() < 0.4 else ""
    middle = (audience, draws.choice(v.ADJECTIVES), *attributes, *shown, extra)
    return " ".join((brand, *(part for part in middle if part), "for", ", ".join(uses)))


def _options(top: str, draws: random.Random) -> dict[str, tuple[str, ...]]:
    """One option of the category, or both, each with two to five values."""
    found = {}
    for name in sorted(draws.sample(list(v.OPTIONS[top]), draws.randint(1, 2))):
        values = v.OPTIONS[top][name]
        drawn = draws.sample(values, draws.randint(2, min(5, len(values))))
        found[name] = tuple(draws.choice(v.SHADES) + each if name == "color" else each for each in drawn)
    return found
