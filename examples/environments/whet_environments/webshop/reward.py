# SPDX-License-Identifier: Apache-2.0
"""The reward of a purchase (Yao et al. 2022, WebShop, section 3).

    r = r_type (matched attributes + matched options + 1[price <= highest]) / (|attributes| + |options| + 1)

The purchase is a success where r is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import lru_cache

from whet.plugins.agents.tools.shipped import words
from whet_environments.webshop.catalogue import Goal, Product
from whet_environments.webshop.vocabulary import COLOURS

ALIKE = 85  # percent


def purchase_reward(bought: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """The reward of a product that is bought with the chosen options, from 0 to 1."""
    attributes = sum(has_attribute(bought, each) for each in goal.attributes)
    own = [colour_of(value) for value in chosen.values()]
    options = sum(any(ratio(value, colour_of(each)) > ALIKE for value in own) for each in goal.options.values())
    parts = attributes + options + (bought.price <= goal.highest_price)
    return type_reward(bought, goal.product) * parts / (len(goal.attributes) + len(goal.options) + 1)


def type_reward(bought: Product, wanted: Product) -> float:
    """1 for a product of the same type, 0.5 for another one, 0.1 and 0 where the titles share hardly a noun or none.

    The type is the same if the kind is equal, two levels of the category are shared, or more than 0.2 of the nouns of
    the wanted title are in the other one."""
    nouns = wanted.nouns()
    share = len({*nouns} & {*bought.nouns()}) / len(nouns) if nouns else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    levels = len({*bought.category} & {*wanted.category})
    return 1.0 if bought.query == wanted.query or levels >= 2 or share > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Whether an attribute is alike one of the product's, or a part of its title, features or description."""
    if any(ratio(each, attribute) > ALIKE for each in product.attributes):
        return True
    return any(attribute in text.lower() for text in (product.title, " ".join(product.features), product.description))


@lru_cache(65536)
def ratio(one: str, other: str) -> int:
    """The likeness of two sets of words in percent (thefuzz's token_set_ratio): the words that both have are compared
    with the same words and the rest of either set, and the likeliest of the three pairs counts."""
    first, second = {*words(one)}, {*words(other)}
    if not first or not second:
        return 0
    both = " ".join(sorted(first & second))
    left, right = (f"{both} {' '.join(sorted(rest))}".strip() for rest in (first - second, second - first))
    pairs = ((both, left), (both, right), (left, right)) if both else ((left, right),)
    return max(round(100 * SequenceMatcher(None, a, b, autojunk=False).ratio()) for a, b in pairs)


def colour_of(value: str) -> str:
    """The first colour, by the alphabet, that a value has in it; the value where it has none."""
    return next((each for each in COLOURS if each in value.lower()), value)
