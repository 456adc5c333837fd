# SPDX-License-Identifier: Apache-2.0
"""The shop as an environment of text: pages, searches and clicks."""

from __future__ import annotations

import random
import re

from whet.options import Count, NonNegative, Number
from whet.registry import register_environment
from whet_environments.game import Context, Game, Outcome
from whet_environments.webshop.catalogue import catalogue
from whet_environments.webshop.reward import purchase_reward

ACTION = re.compile(r"(search|click)\[([^\[\]]{1,200})\]", re.IGNORECASE)
A_PAGE = 10
SUB_PAGES = ("description", "features", "reviews")


@register_environment("webshop", pure=True)
class WebShop(Game):
    """Buys the product of an instruction. The answer has `search[words]` or `click[name]`; the last one counts."""

    rules = "You shop in a web shop. Answer with search[words] on the search page, or click[name of a button]."

    def __init__(
        self,
        *,
        num_products: Count = 10_000,
        catalogue_seed: Number = 0,
        max_steps: Count = 15,
        context: Context = "append",
        format_penalty: NonNegative = 0.0,
        max_tokens: Count | None = None,
    ) -> None:
        super().__init__(max_steps=max_steps, encoding="words", context=context, max_tokens=max_tokens)
        self._shop, self._penalty = catalogue(num_products, catalogue_seed), format_penalty

    def begin(self, draws: random.Random) -> None:
        """Draws the goal and opens the search page."""
        self.goal, self.is_won = self._shop.goal(draws), False
        self._to_search()

    def play(self, text: str) -> Outcome:
        """Plays the last action of a text; one that the page does not have changes nothing."""
        found = ACTION.findall(text)
        verb, name = (part.lower().strip() for part in found[-1]) if found else ("", "")
        if verb == "search" and self._page == "search" and name:
            self._found, self._number, self._page = self._shop.search(name), 0, "results"
        elif verb == "click" and name in self._buttons():
            if name == "buy now":
                return self._buy()
            self._click(name)
        else:
            return -self._penalty, False, "That is not possible here."
        return 0.0, False, ""

    def board(self) -> str:
        """The visible strings of the page."""
        return " [SEP] ".join((f"Instruction: {self.goal.instruction()}", *self._texts(), *self._shown()))

    def best(self) -> str:
        """The next action of a shopper that knows the product."""
        if self._page == "search":
            return f"search[{self.goal.product.title.lower()}]"
        if self._page == "results":
            shown = self.goal.product.id in self._on_page()
            return f"click[{self.goal.product.id if shown else 'next >'}]"
        missing = [each for name, each in self.goal.options.items() if self._chosen.get(name) != each]
        return f"click[{missing[0] if missing else 'buy now'}]" if self._page == "item" else "click[< prev]"

    def choices(self) -> list[str]:
        """The actions of the page."""
        clicks = [f"click[{name}]" for name in self._buttons()]
        return [self.best(), *clicks] if self._page == "search" else clicks

    def _to_search(self) -> None:
        self._page, self._found, self._number, self._item = "search", list[str](), 0, ""
        self._chosen: dict[str, str] = {}

    def _on_page(self) -> list[str]:
        return self._found[self._number * A_PAGE : (self._number + 1) * A_PAGE]

    def _buttons(self) -> list[str]:
        if self._page == "search":
            return []
        if self._page == "results":
            before = ["< prev"] if self._number else []
            after = ["next >"] if (self._number + 1) * A_PAGE < len(self._found) else []
            return ["back to search", *before, *after, *self._on_page()]
        if self._page in SUB_PAGES:
            return ["back to search", "< prev"]
        values = [value for each in self._shop.by_id[self._item].options.values() for value in each]
        return ["back to search", "< prev", *values, *SUB_PAGES, "buy now"]

    def _shown(self) -> list[str]:
        return ["Search"] if self._page == "search" else [each for each in self._buttons() if each not in self._found]

    def _texts(self) -> list[str]:
        if self._page == "search":
            return []
        if self._page == "results":
            shown = [self._shop.by_id[each] for each in self._on_page()]
            products = [f"{each.id} [SEP] {each.title} [SEP] ${each.price:.2f}" for each in shown]
            return [f"Page {self._number + 1} (Total results: {len(self._found)})", *products]
        item = self._shop.by_id[self._item]
        sub_page = {"description": item.description, "features": "; ".join(item.features), "reviews": item.review}
        if self._page in sub_page:
            return [sub_page[self._page]]
        chosen = [f"{name}: {self._chosen.get(name, 'not chosen')}" for name in item.options]
        return [item.title, f"Price: ${item.price:.2f}", *chosen]

    def _click(self, name: str) -> None:
        if name == "back to search":
            self._to_search()
        elif name == "< prev" and self._page in SUB_PAGES:
            self._page = "item"
        elif name == "< prev" and self._page == "item":
            self._page, self._chosen = "results", {}
        elif name in ("< prev", "next >"):
            self._number += 1 if name == "next >" else -1
        elif self._page == "results":
            self._page, self._item, self._chosen = "item", name, {}
        elif name in SUB_PAGES:
            self._page = name
        else:
            options = self._shop.by_id[self._item].options
            self._chosen[next(key for key, values in options.items() if name in values)] = name

    def _buy(self) -> Outcome:
        reward = purchase_reward(self._shop.by_id[self._item], self.goal, self._chosen)
        self.is_won = reward == 1.0
        return reward, True, f"You bought it. Reward: {reward:.3f}"
