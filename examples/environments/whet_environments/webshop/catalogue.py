# SPDX-License-Identifier: Apache-2.0
"""The products of the shop, made from a seed, and the search in them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from whet.environments.tools.shipped import BM25

MOST_FOUND = 50
TREE = {
    "clothing": {"tops": ("shirt", "sweater", "jacket"), "shoes": ("sneakers", "boots", "sandals")},
    "home": {"furniture": ("desk", "bookcase", "sofa"), "lighting": ("lamp", "lantern", "chandelier")},
    "electronics": {"audio": ("headphones", "speaker", "microphone"), "power": ("charger", "battery", "cable")},
    "grocery": {"drinks": ("coffee", "tea", "juice"), "snacks": ("cookies", "crackers", "popcorn")},
}
ATTRIBUTES = {
    "clothing": ("machine wash", "long lasting", "slim fit", "water resistant", "hand made", "light weight"),
    "home": ("easy assemble", "solid wood", "space saving", "easy clean", "eco friendly", "heavy duty"),
    "electronics": ("fast charging", "high quality", "noise cancelling", "easy carry", "long range", "shock proof"),
    "grocery": ("gluten free", "sugar free", "non gmo", "low sodium", "plant based", "fat free"),
}
OPTIONS = {
    "clothing": {"color": ("red", "blue", "black", "white", "green"), "size": ("small", "medium", "large")},
    "home": {"color": ("brown", "black", "white", "grey"), "style": ("modern", "rustic", "classic")},
    "electronics": {"color": ("black", "white", "silver"), "length": ("3 feet", "6 feet", "10 feet")},
    "grocery": {"flavor": ("vanilla", "lemon", "ginger", "cocoa"), "pack": ("single", "6 pack", "12 pack")},
}
USES = ("travel", "office", "garden", "kitchen", "school", "camping", "winter", "summer", "guests", "parties")
SYLLABLES = (
    "al",
    "bor",
    "cen",
    "dul",
    "ek",
    "fam",
    "gor",
    "hin",
    "jul",
    "kos",
    "lum",
    "mer",
    "nor",
    "pel",
    "rud",
    "tav",
)


@dataclass(frozen=True)
class Product:
    """A product; `query` is the search that its kind answers to."""

    id: str
    title: str
    category: tuple[str, str, str]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float
    description: str
    features: tuple[str, ...]
    review: str

    @property
    def query(self) -> str:
        """The name of the kind."""
        return self.category[-1]


@dataclass(frozen=True)
class Goal:
    """A product to buy, with the options and the highest price that count."""

    product: Product
    attributes: tuple[str, ...]
    options: dict[str, str]
    highest_price: float

    def instruction(self) -> str:
        """The goal in words."""
        options = ", and ".join(f"{name}: {value}" for name, value in self.options.items())
        use = self.product.title.split(" for ")[-1]
        return (
            f"Find me {', '.join(self.attributes)} {self.product.query} for {use} with {options}, "
            f"and price lower than {self.highest_price:.2f} dollars"
        )


class Catalogue:
    """The products of a seed, with an index of their texts."""

    def __init__(self, num_products: int, seed: int) -> None:
        draws = random.Random(seed)
        self.products = [_product(number, draws) for number in range(num_products)]
        self.by_id = {each.id: each for each in self.products}
        self._index = BM25([f"{each.title} {' '.join(each.attributes)} {each.description}" for each in self.products])

    def search(self, query: str) -> list[str]:
        """The ids of the best 50 products; of equal ones the first."""
        scores = self._index.scores(query)
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self.products[number].id for number in ranked[:MOST_FOUND]]

    def goal(self, draws: random.Random) -> Goal:
        """A goal that its own product meets; its price limit is the larger of two of the next four multiples of 10."""
        product = draws.choice(self.products)
        attributes = tuple(draws.sample(product.attributes, draws.randint(1, len(product.attributes))))
        options = {name: draws.choice(values) for name, values in product.options.items()}
        first = int(product.price // 10) * 10 + 10
        highest = max(draws.sample([first + 10 * more for more in range(4)], 2))
        return Goal(product, attributes, options, float(highest))


@cache
def catalogue(num_products: int, seed: int) -> Catalogue:
    """The catalogue of a seed, built once in a process."""
    return Catalogue(num_products, seed)


def _product(number: int, draws: random.Random) -> Product:
    top = draws.choice(list(TREE))
    middle = draws.choice(list(TREE[top]))
    kind = draws.choice(TREE[top][middle])
    attributes = tuple(draws.sample(ATTRIBUTES[top], draws.randint(2, 4)))
    brand = "".join(draws.sample(SYLLABLES, 3)).capitalize()
    use = draws.choice(USES)
    options = {name: tuple(draws.sample(all_, draws.randint(2, len(all_)))) for name, all_ in OPTIONS[top].items()}
    return Product(
        id=f"b{number:06d}",
        title=f"{brand} {attributes[0]} {kind} for {use}",
        category=(top, middle, kind),
        attributes=attributes,
        options=options,
        price=draws.randint(500, 15000) / 100,
        description=f"A {kind} by {brand}, made for {use}.",
        features=attributes,
        review=f"{draws.randint(1, 5)} of 5 stars",
    )
