# SPDX-License-Identifier: Apache-2.0
"""The web server of the shop, and the environment of text over it."""

from __future__ import annotations

import asyncio
import html
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from whet_environments.webshop.catalogue import catalogue
from whet_environments.webshop.client import LostServerError, WebShopServer, shop_reward
from whet_environments.webshop.environment import WebShop
from whet_environments.webshop.server import bind, running

from tests.raising import raises
from whet.environments.host import open_host
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.types import Failure, Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)
NAME = "whet_environments.webshop.client:WebShopServer"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(catalogue(200, 0)) as address:
        yield address


@pytest.fixture
def web(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, follow_redirects=True, trust_env=False) as client:
        yield client


def strings(page: str) -> list[str]:
    """The visible strings of a page of HTML."""
    body = page.partition("<body>")[2]
    return [html.unescape(text).strip() for text in re.findall(r">([^<]+)", body) if text.strip()]


def links(page: str) -> dict[str, str]:
    return {
        html.unescape(text).lower(): html.unescape(to)
        for to, text in re.findall(r'<a href="([^"]*)"[^>]*>([^<]*)', page)
    }


@pytest.mark.parametrize("seed", [0, 7])
def test_pages_in_a_browser_have_the_strings_of_the_environment(web: httpx.Client, seed: int) -> None:
    game = WebShop(num_products=200)
    game.reset(PROMPT, seed)
    page = web.get("/", params={"seed": seed})
    for _ in range(20):
        assert strings(page.text) == game.board().split(" [SEP] ")
        assert {"buy now", *links(page.text)} >= {*game.session.buttons()} >= {*links(page.text)}
        action = game.best()
        game.step(Answer(action))
        word = action[action.index("[") + 1 : -1]
        if action.startswith("search"):
            page = web.get(page.url.copy_merge_params({"page": "results", "n": 0, "q": word}))
        elif word == "buy now":
            to = re.search(r'action="(buy[^"]*)"', page.text)
            assert to is not None
            page = web.post(page.url.join(html.unescape(to[1])))
            break
        else:
            page = web.get(page.url.join(links(page.text)[word]))
    assert strings(page.text)[-1] == "Thank you for shopping with us!"
    assert web.get(page.url.join("reward")).json() == {"is_done": True, "reward": 1.0}
    assert asyncio.run(shop_reward(str(page.url), "", PROMPT, 5.0)) == 1.0
    again = web.get(page.url.join("./?page=search&n=0"))
    assert strings(again.text)[-1] == "Thank you for shopping with us!"  # an old page buys nothing more


def test_the_chosen_option_is_marked(web: httpx.Client) -> None:
    product = catalogue(200, 0).products[0]
    name, values = next(iter(product.options.items()))
    page = web.get("/?seed=1")
    page = web.get(page.url.copy_merge_params({"page": "item", "n": 0, "item": product.id, "o": f"{name}:{values[1]}"}))
    assert page.text.count('role="radio"') == sum(map(len, product.options.values()))
    assert re.findall(r'aria-checked="true">([^<]*)', page.text) == [values[1]]
    assert f"Chosen: {values[1]}" in strings(page.text)


def test_bad_requests_are_answered_with_the_reason(web: httpx.Client) -> None:
    session = web.post("/api/sessions", json={"seed": 0}).json()["id"]
    for answer, status, words in (
        (web.get("/?seed=-1"), 400, "-1"),
        (web.get("/nobody/"), 404, "no session has this id"),
        (web.get(f"/{session}/?page=item&n=0&item=b9"), 404, "page=item"),
        (web.post(f"/{session}/buy?page=results&n=0"), 400, "nothing can be bought"),
        (web.post("/api/sessions", json={"seed": "1"}), 400, "'1'"),
        (web.post("/api/sessions", content=b"[1]"), 400, "no JSON object"),
        (web.post("/api/sessions", content=b"x" * 300_000), 413, "200000 bytes"),
        (web.post(f"/api/sessions/{session}/actions", json={}), 400, "expected a text"),
    ):
        assert answer.status_code == status and words in answer.text


def test_text_over_the_server_is_text_in_the_process(url: str) -> None:
    async def play() -> None:
        here, there = WebShop(num_products=200, format_penalty=0.5), WebShopServer(url=url, format_penalty=0.5)
        one, two = here.reset(PROMPT, 4), await there.reset(PROMPT, 4)
        assert one == two
        for action in ["nonsense", *(None,) * 10]:
            action = action or here.best()
            one, two = here.step(Answer(action)), await there.step(Answer(action))
            assert one == two
            if one.done:
                break
        assert two.reward == 1.0
        with pytest.raises(RuntimeError, match="after the end"):
            await there.step(Answer("x"))
        await there.close()

    asyncio.run(play())


@pytest.mark.slow
def test_conformance(url: str) -> None:
    found = list(check(NAME, {"url": url}, Plan(PROMPT)))
    assert [each for each in found if each.is_ok is False] == []


@pytest.mark.slow
def test_a_server_that_dies_or_hangs_fails_the_episode_only() -> None:
    with running(catalogue(50, 0)) as address:
        host = open_host(NAME, {"url": address, "request_seconds": 1.0})
        host.start("a", PROMPT, 0)
        assert isinstance(first(host), Observation)
    host.step("a", Answer("search[lamp]"))  # the server has stopped
    outcome = first(host)
    assert isinstance(outcome, Failure) and "is lost" in outcome.message and "LostServerError" in outcome.message
    host.close("a")
    silent = socket.create_server(("127.0.0.1", 0))  # one that never answers
    quiet = open_host(NAME, {"url": f"http://127.0.0.1:{silent.getsockname()[1]}", "request_seconds": 0.3})
    quiet.start("b", PROMPT, 0)
    outcome = first(quiet)
    assert isinstance(outcome, Failure) and "no answer within 0.3 s" in outcome.message
    with running(catalogue(50, 0)) as address:  # the same process of environments goes on
        host.shutdown()
        other = open_host(NAME, {"url": address})
        other.start("c", PROMPT, 0)
        assert isinstance(first(other), Observation)
        other.shutdown()
    quiet.shutdown()
    silent.close()


def first(host: object) -> object:
    for _ in range(100):
        if results := host.poll(0.2):  # type: ignore[attr-defined]
            return results[0][1]
    raise AssertionError("no result")


def test_errors_of_options() -> None:
    with raises(ConfigError, "environment.options.url", found="127.0.0.1:80"):
        WebShopServer(url="127.0.0.1:80")
    with bind(0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with raises(ConfigError, "--port", found=re.compile(f"^{port} ")):
            bind(port)
    with pytest.raises(LostServerError):
        asyncio.run(shop_reward("http://127.0.0.1:1/abc/", "", PROMPT, 2.0))


def test_the_command_prints_its_address() -> None:
    command = [sys.executable, "-m", "whet_environments.webshop.server", "--products", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            answer = httpx.get(f"{address}/?seed=3", follow_redirects=True, trust_env=False, timeout=10)
            assert answer.status_code == 200 and "Find me" in answer.text
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert (process.wait(10), process.stderr.read()) == (0, "")  # Ctrl-C leaves no traceback
