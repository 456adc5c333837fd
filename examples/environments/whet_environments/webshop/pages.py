# SPDX-License-Identifier: Apache-2.0
"""The pages of the shop as a state machine: a state and an action give the next state, a state gives its page.

Search -> results (50 at most, `shop.a_page` a page) -> item (options; Description, Features, Reviews) -> Buy Now, the
end. The text environment and the web server both use it. A state is also the query of a web address (`to_query`,
`from_query`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args
from urllib.parse import parse_qs, urlencode

from whet_environments.webshop.catalogue import Catalogue, Goal
from whet_environments.webshop.reward import purchase_reward

MOST_QUERY = 200  # characters
ACTION = re.compile(rf"(search|click)\[([^\[\]]{{1,{MOST_QUERY}}})\]", re.IGNORECASE)
PageName = Literal["search", "results", "item", "description", "features", "reviews", "done"]
SUB_PAGES = ("Description", "Features", "Reviews")
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"


@dataclass(frozen=True)
class State:
    """The page that a shopper sees. `number` counts pages of results from 0; `options` are those chosen, by name."""

    page: PageName = "search"
    query: str = ""
    number: int = 0
    item: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def to_query(self) -> str:
        """The state as the query of a web address."""
        pairs = [("page", self.page), ("q", self.query), ("n", str(self.number)), ("item", self.item)]
        return urlencode([*pairs, *(("o", f"{name}:{value}") for name, value in self.options.items())])

    @classmethod
    def from_query(cls, query: str, shop: Catalogue) -> State:
        """The state of a query.  Raises: ValueError for one that has no page in the shop."""
        found = parse_qs(query, max_num_fields=20)
        page, number, item = (found.get(name, [""])[-1] for name in ("page", "n", "item"))
        product = shop.by_id.get(item)
        pairs = [each.partition(":") for each in found.get("o", ())]
        options = {name: value for name, _, value in pairs}
        is_known = page in get_args(PageName) and page != "done" and number.isascii() and number.isdigit()
        needs_item = page not in ("search", "results")
        if not is_known or (product is None) == needs_item or len(number) > 3:
            raise ValueError(f"no page of the shop has the address {query[:200]!r}")
        if any(product is None or value not in product.options.get(name, ()) for name, value in options.items()):
            raise ValueError(f"the product {item} does not have the options {options}")
        return cls(page, found.get("q", [""])[-1][:MOST_QUERY], int(number), item, options)  # type: ignore[arg-type]


START = State()
DONE = State(page="done")


@dataclass(frozen=True)
class Part:
    """A visible string of a page. `next_state` is where a button leads; `chosen` marks the option that is chosen."""

    kind: Literal["text", "title", "input", "button", "option", "product"]
    text: str
    next_state: State | None = None
    chosen: bool = False

    @property
    def name(self) -> str:
        """The name that `click[...]` has for it."""
        return self.text.lower()


def parts(shop: Catalogue, state: State) -> list[Part]:
    """The parts of a page in the order in which they are seen, without the instruction."""
    if state.page == "search":
        return [Part("input", "Search")]
    if state.page == "done":
        return [Part("text", "Thank you for shopping with us!")]
    back = Part("button", BACK, START)
    if state.page == "results":
        return [back, *_results(shop, state)]
    if state.page == "item":
        results = State("results", state.query, state.number)
        return [back, Part("button", PREVIOUS, results), *_item(shop, state)]
    product = shop.by_id[state.item]
    texts = {"description": (product.description,), "features": product.features, "reviews": (product.review,)}
    shown = [Part("text", each) for each in texts[state.page]]
    return [back, Part("button", PREVIOUS, replace(state, page="item")), *shown]


def _results(shop: Catalogue, state: State) -> list[Part]:
    found = shop.search(state.query)
    first = state.number * shop.a_page
    head = [Part("text", f"Page {state.number + 1} (Total results: {len(found)})")]
    if state.number:
        head.append(Part("button", PREVIOUS, replace(state, number=state.number - 1)))
    if first + shop.a_page < len(found):
        head.append(Part("button", NEXT, replace(state, number=state.number + 1)))
    for each in found[first : first + shop.a_page]:
        product = shop.by_id[each]
        head.append(Part("product", each, State("item", state.query, state.number, each)))
        head += [Part("title", product.title), Part("text", f"${product.price:.2f}")]
    return head


def _item(shop: Catalogue, state: State) -> list[Part]:
    product = shop.by_id[state.item]
    found = []
    for name, values in product.options.items():
        found.append(Part("text", name))
        for value in values:
            chosen = replace(state, options={**state.options, name: value})
            found.append(Part("option", value, chosen, chosen=state.options.get(name) == value))
    in_order = [state.options[name] for name in product.options if name in state.options]
    chosen_text = [Part("text", f"Chosen: {', '.join(in_order)}")] if in_order else []
    found += [*chosen_text, Part("title", product.title), Part("text", f"Price: ${product.price:.2f}")]
    found += [Part("button", each, replace(state, page=each.lower())) for each in SUB_PAGES]  # type: ignore[arg-type]
    return [*found, Part("button", BUY, DONE)]


def follow(shop: Catalogue, state: State, text: str) -> State | None:
    """The state after the last action in a text: `search[words]` or `click[name]`. None where the page has no such
    action."""
    found = ACTION.findall(text)
    if not found:
        return None
    verb, name = (part.lower().strip() for part in found[-1])
    if verb == "search":
        return State("results", name) if state.page == "search" and name else None
    return next((each.next_state for each in parts(shop, state) if each.next_state and each.name == name), None)


@dataclass
class Session:
    """A shopper with a goal: the state, and the reward after Buy Now."""

    shop: Catalogue
    goal: Goal
    state: State = START
    reward: float | None = None

    def act(self, text: str) -> bool:
        """Carries out the last action of a text.  Returns False, with no change, where the page does not have it."""
        following = follow(self.shop, self.state, text)
        if following is None:
            return False
        self.go(following)
        return True

    def go(self, following: State) -> None:
        """Shows a page; `DONE` buys the item of the present one."""
        if following == DONE:
            self.reward = purchase_reward(self.shop.by_id[self.state.item], self.goal, self.state.options)
        self.state = following

    def text(self) -> str:
        """The visible strings of the page."""
        shown = [each.text for each in parts(self.shop, self.state)]
        return " [SEP] ".join(("WebShop", "Instruction:", self.goal.instruction(), *shown))

    def buttons(self) -> list[str]:
        """The names that can be clicked."""
        return [each.name for each in parts(self.shop, self.state) if each.next_state is not None]
