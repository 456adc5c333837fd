# SPDX-License-Identifier: Apache-2.0
"""The reward of a purchase (Yao et al. 2022, WebShop)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from whet.environments.tools.shipped import words
from whet_environments.webshop.catalogue import TREE, USES, Goal, Product

ALIKE = 0.85
COLOURS = ("red", "blue", "black", "white", "green", "brown", "grey", "silver")
NOUNS = {kind for middle in TREE.values() for kinds in middle.values() for kind in kinds} | set(USES)


def purchase_reward(bought: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """r_type (attributes + options + 1[price <= highest]) / (|A| + |O| + 1), from 0 to 1."""
    attributes = sum(_has(bought, each) for each in goal.attributes)
    options = sum(any(_alike(_colour(each), _colour(own)) for own in chosen.values()) for each in goal.options.values())
    price = bought.price <= goal.highest_price
    return (
        type_reward(bought, goal.product)
        * (attributes + options + price)
        / (len(goal.attributes) + len(goal.options) + 1)
    )


def type_reward(bought: Product, wanted: Product) -> float:
    """1 for a product of the same type, 0.5 for another, less where the titles share few nouns."""
    nouns = NOUNS.intersection(words(wanted.title))
    share = len(nouns.intersection(words(bought.title))) / len(nouns)
    if share < 0.1:
        return 0.1 if share else 0.0
    levels = len(set(bought.category) & set(wanted.category))
    return 1.0 if bought.query == wanted.query or levels >= 2 or share > 0.2 else 0.5


def _has(product: Product, attribute: str) -> bool:
    text = " ".join((product.title, *product.features, product.description)).lower()
    return any(_alike(attribute, each) for each in product.attributes) or attribute in text


def _alike(one: str, other: str) -> bool:
    """Whether the ratio of the two sets of words is above 85 %; the words that both have come first."""
    first, second = set(words(one)), set(words(other))
    both = " ".join(sorted(first & second))
    left = f"{both} {' '.join(sorted(first - second))}".strip()
    right = f"{both} {' '.join(sorted(second - first))}".strip()
    pairs = ((both, left), (both, right), (left, right)) if both else ((left, right),)
    return any(SequenceMatcher(None, a, b, autojunk=False).ratio() > ALIKE for a, b in pairs)


def _colour(value: str) -> str:
    return next((each for each in COLOURS if each in words(value)), value)
