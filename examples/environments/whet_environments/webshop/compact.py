# SPDX-License-Identifier: Apache-2.0
"""The pages of the shop in few words, for small models: a goal, a page, and answers of a word or a few.

     easy clean lamp, black, modern, 40         the goal: attributes, kind, options, highest price
    0 solid wood, easy clean lamp 35            results: number, attributes, kind, price
    1 easy clean, mid century lamp 52
     back>

An answer is a query on the page of the search; elsewhere the number of a product, a value of an option, `next`, `prev`,
`back` or `buy`. In an item the value that is chosen has a `*`. Words begin with a
space on a page and in an answer, so that they are the same tokens in both.
"""

from __future__ import annotations

from whet_environments.webshop import vocabulary as v
from whet_environments.webshop.pages import BACK, BUY, NEXT, PREVIOUS, Part, Session, parts

WORDS = {BACK: "back", PREVIOUS: "prev", NEXT: "next", BUY: "buy"}


def write(session: Session) -> str:
    """The goal and the page."""
    lines, state = [f" {session.goal.short()}"], session.state
    shown = parts(session.shop, state)
    if state.page == "item":
        product = session.shop.by_id[state.item]
        lines.append(f" {product.short_title()} {product.price:.0f}")
        lines.append(
            " " + ", ".join(f"{each.text}*" if each.chosen else each.text for each in shown if each.kind == "option")
        )
    for number, each in enumerate(part for part in shown if part.kind == "product"):
        product = session.shop.by_id[each.text]
        lines.append(f"{number} {product.short_title()} {product.price:.0f}")
    words = [WORDS[each.text] for each in shown if each.text in WORDS] if state.page != "search" else ["search"]
    return "\n".join((*lines, "".join(f" {word}" for word in words)))


def answer(word: str) -> str:
    """The answer that is a word of the page, or a query."""
    return word if word.isdigit() else f" {word}"


def names(session: Session) -> dict[str, str]:
    """The answers that the page takes, with the names of the elements that they click."""
    shown = parts(session.shop, session.state)
    products = (part.name for part in shown if part.kind == "product")
    found = {str(number): name for number, name in enumerate(products)}
    return found | {_word(part): part.name for part in shown if part.kind == "option" or part.text in WORDS}


def read(session: Session, text: str) -> str:
    """The action of an answer, `search[words]` or `click[name]`; "" for one that the page does not take."""
    answer = text.strip().lower()
    if session.state.page == "search":
        return f"search[{answer}]"
    name = names(session).get(answer)
    return "" if name is None else f"click[{name}]"


def sample_texts() -> list[str]:
    """The words that pages and answers are made of, to train a tokenizer on."""
    tables = [name for top in v.TREE.values() for middle in top.values() for name in middle]
    tables += [each for values in (*v.ATTRIBUTES.values(), v.COLOURS, v.SHADES) for each in values]
    tables += [value for options in v.OPTIONS.values() for values in options.values() for value in values]
    return [f" {word}" for text in tables for word in text.split()] + [
        f" {word}" for word in (*WORDS.values(), "search")
    ]


def _word(part: Part) -> str:
    return WORDS.get(part.text, part.name)
