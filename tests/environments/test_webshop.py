# SPDX-License-Identifier: Apache-2.0
"""The shop of examples/environments: its catalogue, rewards, pages and the environment of text."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from whet_environments.webshop import vocabulary as v
from whet_environments.webshop.catalogue import Catalogue, Goal, Product, catalogue
from whet_environments.webshop.environment import WebShop
from whet_environments.webshop.pages import DONE, START, Session, State, follow, parts
from whet_environments.webshop.reward import colour_of, has_attribute, purchase_reward, ratio, type_reward

from whet.environments.protocol import Answer, Observation
from whet.plugins.agents.check import Plan, check
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)
LAMP = Product(
    id="b1",
    title="Albor premium solid wood lamp sconce for office, travel",  # nouns: albor, lamp, sconce, office, travel
    brand="Albor",
    category=("home", "lighting", "lamp"),
    attributes=("solid wood", "easy clean"),
    options={"color": ("black", "dark blue"), "style": ("modern", "rustic")},
    price=35.0,
    description="Premium lamp by Albor, made for office, travel. Heavy duty too.",
    features=("Solid wood lamp", "Easy clean lamp", "Ready hang"),
    review="4.0 of 5 stars: good",
)
GOAL = Goal(LAMP, ("solid wood",), {"color": "black", "style": "modern"}, 50.0)
CHOSEN = {"color": "black", "style": "modern"}
TEA = ("grocery", "drinks", "tea")


def other(title: str, category: tuple[str, str, str] = TEA, brand: str = "Ekfam") -> Product:
    return replace(LAMP, title=title, category=category, brand=brand)


def test_reward_by_hand() -> None:
    # 1 attribute, 2 options, 1 price: four parts
    assert purchase_reward(LAMP, GOAL, CHOSEN) == 1.0
    assert purchase_reward(LAMP, GOAL, {"color": "black"}) == 0.75
    assert purchase_reward(LAMP, GOAL, {"color": "dark blue", "style": "modern"}) == 0.75
    assert purchase_reward(replace(LAMP, price=50.0), GOAL, CHOSEN) == 1.0
    assert purchase_reward(replace(LAMP, price=50.01), GOAL, CHOSEN) == 0.75
    assert purchase_reward(replace(LAMP, price=60.0), GOAL, {"color": "black"}) == 0.5
    plain = replace(LAMP, attributes=("space saving",), title="Albor lamp", features=(), description="", price=60.0)
    assert purchase_reward(plain, GOAL, {}) == 0.0
    # half a type: of (1 + 2 + 1) / 4; the price alone is 1/4 of that
    tea = other("Ekfam solid wood tea for office")
    assert purchase_reward(tea, GOAL, CHOSEN) == 0.5
    assert purchase_reward(replace(tea, attributes=(), features=(), title="Ekfam tea for office"), GOAL, {}) == 0.125


def test_each_type_by_hand() -> None:
    assert LAMP.nouns() == ["albor", "lamp", "sconce", "office", "travel"]
    lamp, lighting = ("home", "lighting", "lamp"), ("home", "lighting", "lantern")
    desk = ("home", "furniture", "desk")
    # 1/5 of the nouns is no more than 0.2
    assert type_reward(other("Ekfam tea for office"), LAMP) == 0.5
    assert type_reward(other("Ekfam desk for office", desk), LAMP) == 0.5  # one level is shared
    assert type_reward(other("Ekfam lantern for office", lighting), LAMP) == 1.0  # two levels
    assert type_reward(other("Ekfam lamp", lamp), LAMP) == 1.0  # the kind
    assert type_reward(other("Ekfam tea for office, travel"), LAMP) == 1.0  # 2/5
    assert type_reward(other("Albor tea", brand="Albor"), LAMP) == 0.5  # a brand is a noun
    assert type_reward(other("Ekfam tea for picnic"), LAMP) == 0.0
    assert type_reward(other("Ekfam lantern for picnic", lighting), LAMP) == 0.0  # the nouns decide before the levels
    uses = "travel, office, garden, kitchen, school, camping, winter, summer, gym"
    long = replace(LAMP, title=f"Albor lamp for {uses}")
    assert len(long.nouns()) == 11
    assert type_reward(other("Ekfam tea for office"), long) == 0.1  # 1/11 of the nouns
    assert type_reward(other("Ekfam lamp", lamp), long) == 0.1  # of the same kind too
    assert type_reward(other("Ekfam tea for office, travel"), long) == 0.5  # 2/11
    assert purchase_reward(other("Ekfam tea for office"), replace(GOAL, product=long), CHOSEN) == pytest.approx(0.1)


def test_attributes_are_alike_or_in_the_text() -> None:
    assert has_attribute(LAMP, "easy clean") and has_attribute(LAMP, "clean easy")
    assert has_attribute(LAMP, "ready hang")  # in its features
    assert has_attribute(LAMP, "heavy duty")  # in its description
    assert not has_attribute(LAMP, "energy efficient")
    assert ratio("solid wood", "wood solid") == 100 and ratio("wood", "solid wood") == 100
    assert ratio("abcdefg", "abcdefh") == 86  # 2 x 6 / 14
    assert ratio("abcdef", "abcdeg") == 83  # 2 x 5 / 12
    assert ratio("", "wood") == 0
    assert ratio("3 feet", "6 feet") == 83  # "feet 3" and "feet 6": 2 x 5 / 12


def test_shades_of_a_colour_are_one_colour() -> None:
    assert (colour_of("dark blue"), colour_of("navy"), colour_of("6 feet")) == ("blue", "navy", "6 feet")
    blue = replace(GOAL, options={"color": "light blue"})
    assert purchase_reward(LAMP, blue, {"color": "dark blue"}) == 1.0
    assert purchase_reward(LAMP, blue, {"color": "black"}) == pytest.approx(2 / 3)


def test_the_catalogue_is_pinned() -> None:
    def digest(seed: int) -> str:
        return hashlib.sha256(repr(Catalogue(1000, seed).products).encode()).hexdigest()[:16]

    assert digest(0) == "f719297ddf5fecda"
    assert digest(1) != digest(0)


@pytest.mark.slow
def test_each_type_of_reward_occurs_among_10000_products() -> None:
    shop, draws = catalogue(10_000, 0), random.Random(0)
    assert len(shop.by_id) == 10_000
    types = Counter(type_reward(draws.choice(shop.products), shop.goal(draws).product) for _ in range(5000))
    assert set(types) == {0.0, 0.1, 0.5, 1.0} and min(types.values()) > 200 and types[1.0] < 1500


@pytest.mark.slow
def test_the_values_of_options_are_names_of_one_button_only() -> None:
    for product in catalogue(10_000, 0).products[:2000]:
        names = [
            part.name for part in parts(catalogue(10_000, 0), State("item", "lamp", 0, product.id)) if part.next_state
        ]
        assert len({*names}) == len(names)


def test_only_the_chosen_value_counts() -> None:
    for options in v.OPTIONS.values():
        values = [value for each in options.values() for value in each]
        assert max(ratio(one, two) for one, two in itertools.combinations(values, 2)) <= 85


def test_search_finds_50_ten_a_page() -> None:
    shop = catalogue(10_000, 0)
    session = Session(shop, shop.goal(random.Random(0)))
    assert session.act("search[lamp]") and session.text().count("[SEP] $") == 10
    pages = [session.text()]
    while session.act("click[Next >]"):
        pages.append(session.text())
    assert len(pages) == 5 and "Page 5 (Total results: 50)" in pages[4]
    assert "< prev" in session.buttons() and "next >" not in session.buttons()
    found = shop.search("lamp")
    assert len(found) == 50 and shop.search("qwertz") == ()
    assert all("lamp" in f"{shop.by_id[each].title} {shop.by_id[each].description}".lower() for each in found)
    assert session.act("click[< prev]") and session.text() == pages[3]
    assert session.act("click[back to search]") and session.state == START


def test_a_state_is_a_web_address() -> None:
    shop = catalogue(200, 0)
    product = shop.products[3]
    name, values = next(iter(product.options.items()))
    for state in (
        START,
        State("results", "a&b=c é", 2),
        State("item", "x", 1, product.id, {name: values[1]}),
        State("reviews", "", 0, product.id),
    ):
        assert State.from_query(state.to_query(), shop) == state
    for query in ("", "page=item&n=0", "page=done&n=0", "page=results&n=-1", "page=item&n=0&item=b9", "page=x&n=0"):
        with pytest.raises(ValueError, match=re.escape(repr(query))):
            State.from_query(query, shop)
    with pytest.raises(ValueError, match=f"{product.id}.*plaid"):
        State.from_query(f"page=item&n=0&item={product.id}&o={name}:plaid", shop)


def test_buttons_lead_where_they_say() -> None:
    shop = catalogue(200, 0)
    product = shop.products[3]
    item = State("item", "lamp", 1, product.id, {"color": "red"})
    assert follow(shop, item, "click[< prev]") == State("results", "lamp", 1)  # without the options
    assert follow(shop, item, "click[Features]") == replace(item, page="features")
    assert follow(shop, replace(item, page="features"), "click[< Prev]") == item
    assert follow(shop, item, "click[back to search]") == START
    assert follow(shop, item, "click[buy now]") == DONE
    assert follow(shop, item, "search[lamp]") is None  # there is no field on this page
    assert follow(shop, DONE, "click[buy now]") is None


def shop(**options: object) -> WebShop:
    return WebShop(**{"num_products": 200, "format_penalty": 0.25, **options})  # type: ignore[arg-type]


def play(game: WebShop, text: str) -> float:
    return game.step(Answer(text)).reward


def play_best(game: WebShop, seed: int) -> Observation:
    seen = game.reset(PROMPT, seed)
    while not seen.done and not seen.truncated:
        seen = game.step(Answer(game.best()))
    return seen


@pytest.mark.parametrize("encoding", ["words", "compact"])
def test_a_shopper_that_knows_the_goal_gets_1(encoding: str) -> None:
    game = shop(encoding=encoding)
    for seed in range(50):
        seen = play_best(game, seed)
        assert (seen.reward, seen.fields["success"], seen.fields["bought"]) == (1.0, 1.0, 1.0)


@pytest.mark.slow
def test_10000_products_end_to_end() -> None:
    game = shop(num_products=10_000)
    assert sum(play_best(game, seed).reward == 1.0 for seed in range(20)) == 20
    # one that reads only the instruction: its words are the query, and the first product within the price is bought
    rewards = [read_and_buy(game, seed) for seed in range(20)]
    assert sum(rewards) / 20 > 0.85 and sum(reward == 1.0 for reward in rewards) > 10


def read_and_buy(game: WebShop, seed: int) -> float:
    text = str(game.reset(PROMPT, seed).messages[0].content)
    words = text.partition("Find me ")[2].partition(", and price lower than ")
    limit, wanted = float(words[2].split()[0]), words[0].replace(", and", ",")
    play(game, f"search[{wanted}]")
    shown = game.board().split(" [SEP] ")
    prices = {shown[index - 2]: float(each[1:]) for index, each in enumerate(shown) if each.startswith("$")}
    play(game, f"click[{next((item for item, price in prices.items() if price <= limit), next(iter(prices)))}]")
    for value in (option.partition(": ")[2] for option in wanted.split(" with ")[-1].split(", ")):
        play(game, f"click[{value}]")
    return play(game, "click[buy now]")


def test_an_action_that_the_page_does_not_have_changes_nothing() -> None:
    game = shop()
    before = game.reset(PROMPT, 3).state_key
    for text in ("", "buy", "click[buy now]", "click[b000001]", "search[]"):
        assert play(game, text) == -0.25
        assert game.board() == before
    assert play(game, "I SEARCH[Lamp]") == 0.0
    assert "Page 1" in game.board()


def test_the_results_page_clears_the_options() -> None:
    game = shop()
    game.reset(PROMPT, 0)
    while "Price:" not in game.board():
        play(game, game.best())
    fresh = game.board()
    assert "Chosen" not in fresh
    play(game, game.best())
    assert f"Chosen: {next(iter(game.session.goal.options.values()))}" in game.board()
    play(game, "click[description]")
    assert game.session.goal.product.description in game.board()
    play(game, "click[< prev]")
    assert "Chosen" in game.board()
    play(game, "click[< prev]")
    play(game, game.best())
    assert game.board() == fresh


def test_compact_pages() -> None:
    game = shop(encoding="compact", products_a_page=2, context="replace")
    first = str(game.reset(PROMPT, 3).messages[0].content)
    goal = game.session.goal
    assert first == f" {goal.short()}\n search>"
    play(game, f" {goal.product.query}")
    lines = game.board().split("\n")
    assert [line[0] for line in lines] == [" ", "0", "1", " "] and lines[-1] == " back next"
    assert goal.product.query in lines[1]
    assert play(game, " buy") == -0.25 and play(game, "1") == 0.0
    product = game.session.shop.by_id[game.session.state.item]
    value = next(iter(product.options.values()))[0]
    play(game, f" {value}")
    assert f" {value}*" in game.board() and game.board().endswith("\n back prev buy")
    last = game.step(Answer(" buy"))
    assert last.done and last.reward == purchase_reward(product, goal, {next(iter(product.options)): value})


@pytest.mark.slow
def test_conformance() -> None:
    found = list(check("whet_environments.webshop.environment:WebShop", {"num_products": 100}, Plan(PROMPT)))
    assert [each for each in found if each.is_ok is False] == []
