# SPDX-License-Identifier: Apache-2.0
"""The shop as an environment of text: pages, searches and clicks."""

from __future__ import annotations

import random
from collections.abc import Sequence

from whet.options import Count, NonNegative, Number
from whet.registry import register_environment
from whet_environments.game import Context, Encoding, Game, Outcome
from whet_environments.webshop import compact
from whet_environments.webshop.catalogue import catalogue
from whet_environments.webshop.pages import DONE, Session

RULES = "You shop in a web shop. Answer with search[words] on the search page, or click[name of a button]."


def not_possible(buttons: Sequence[str]) -> str:
    """The reply to an action that the page does not have; only the search page has no buttons."""
    return (
        f"That is not possible here. Answer with {', '.join(f'click[{each}]' for each in buttons) or 'search[words]'}."
    )


def bought(reward: float) -> str:
    """The last words of an episode."""
    return f"You bought it. Reward: {reward:.3f}"


@register_environment("webshop", pure=True)
class WebShop(Game):
    """Buys the product of an instruction. The answer has `search[words]` or `click[name]`; the last one counts.

    With `encoding=compact` pages are short and answers are words (`whet_environments.webshop.compact`)."""

    rules = RULES

    def __init__(
        self,
        *,
        num_products: Count = 10_000,
        catalogue_seed: Number = 0,
        products_a_page: Count = 10,
        max_steps: Count = 15,
        encoding: Encoding = "words",
        context: Context = "append",
        format_penalty: NonNegative = 0.0,
        max_tokens: Count | None = None,
    ) -> None:
        super().__init__(max_steps=max_steps, encoding=encoding, context=context, max_tokens=max_tokens)
        self._shop, self._penalty = catalogue(num_products, catalogue_seed, products_a_page), format_penalty

    def begin(self, draws: random.Random) -> None:
        """Draws the goal and opens the search page."""
        self.session, self.is_won = Session(self._shop, self._shop.goal(draws)), False

    def play(self, text: str) -> Outcome:
        """Plays the last action of a text; one that the page does not have changes nothing."""
        action = compact.read(self.session, text) if self.encoding == "compact" else text
        if not self.session.act(action):
            return 0.0 - self._penalty, False, not_possible(self.session.buttons())
        reward = self.session.reward
        if reward is None:
            return 0.0, False, ""
        self.is_won = reward == 1.0
        return reward, True, bought(reward)

    def board(self) -> str:
        """The visible strings of the page."""
        return compact.write(self.session) if self.encoding == "compact" else self.session.text()

    def numbers(self) -> dict[str, float]:
        """Whether the reward was 1, and whether something was bought."""
        return {**super().numbers(), "bought": float(self.session.state == DONE)}

    def best(self) -> str:
        """The next action of a shopper that knows the product; in compact encoding it searches for the goal's words."""
        goal, state = self.session.goal, self.session.state
        if state.page == "search":
            return self._search(goal.product.title if self.encoding == "words" else self._goal_words())
        if state.page == "results":
            is_shown = goal.product.id in self.session.buttons()
            return self._click(goal.product.id if is_shown else "next >" if self._has("next >") else "back to search")
        if state.page != "item" or state.item != goal.product.id:
            return self._click("< prev")
        missing = [value for name, value in goal.options.items() if state.options.get(name) != value]
        return self._click(missing[0] if missing else "buy now")

    def choices(self) -> list[str]:
        """The actions of the page; on the search page searches for the goal's words and for kinds of products."""
        if self.session.state.page != "search":
            names = compact.names(self.session).values() if self.encoding == "compact" else self.session.buttons()
            return [self._click(name) for name in names]
        kinds = sorted({each.query for each in self._shop.products})
        return [self.best(), *map(self._search, kinds)]

    def _goal_words(self) -> str:
        return " ".join((*self.session.goal.attributes, self.session.goal.product.query))

    def _has(self, name: str) -> bool:
        return name in self.session.buttons()

    def _search(self, words: str) -> str:
        return compact.answer(words) if self.encoding == "compact" else f"search[{words.lower()}]"

    def _click(self, name: str) -> str:
        if self.encoding == "words":
            return f"click[{name}]"
        return next(compact.answer(word) for word, own in compact.names(self.session).items() if own == name)
