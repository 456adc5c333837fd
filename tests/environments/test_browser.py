# SPDX-License-Identifier: Apache-2.0
"""The environment `browser` of examples/environments."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from whet_environments.browser import chromium
from whet_environments.browser.actions import Action, read_action
from whet_environments.browser.chromium import find_chromium, is_allowed, processes_of
from whet_environments.browser.environment import Browser, BrowserError, exact_answer
from whet_environments.webshop.catalogue import catalogue
from whet_environments.webshop.environment import WebShop
from whet_environments.webshop.server import running

from tests.raising import raises
from whet.environments.host import EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.types import Failure, Message, Prompt

NAME = "whet_environments.browser.environment:Browser"
PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", "Lamp")


@cache
def absent() -> str:
    """Why there is no browser; "" where there is one."""
    try:
        find_chromium("")
    except ConfigError as error:
        return str(error)
    return ""


needs_chromium = pytest.mark.skipif(bool(absent()), reason=absent())


def test_actions() -> None:
    for text, action in {
        "click[3]": Action("click", "3", 3),
        "I think\nCLICK[ Buy Now ]": Action("click", "Buy Now"),
        "click[1] click[2]": Action("click", "2", 2),
        "type[2, red, lamp]": Action("type", "red, lamp", 2),
        "type[2,]": Action("type", "", 2),
        "search[lamp]": Action("search", "lamp"),
        "back[]": Action("back"),
        "I go\n back \n": Action("back"),
        "click[back to search]": Action("click", "back to search"),
        "stop[]": Action("stop"),
        "stop[42]": Action("stop", "42"),
    }.items():
        assert read_action(text) == action
    for text in ("", "back and forth", "click[]", "type[lamp]", "type[x, y]", "search[]", "click[1", "unclick[1]"):
        assert read_action(text) is None
    assert read_action("click[1] search[]") is None  # the last one counts


def test_without_chromium_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    if "playwright" in absent():
        pytest.skip(absent())
    key, change = "environment.options.chromium", re.compile("apt-get install")
    with raises(ConfigError, key, found="/nowhere/chromium", change=change):
        Browser(chromium="/nowhere/chromium")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with raises(ConfigError, key, found=re.compile("chromium, .*PATH"), change=change):
        Browser()
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    with raises(ConfigError, re.compile("playwright"), change=re.compile(r"examples/environments\[browser\]")):
        Browser()


def test_allowed_addresses() -> None:
    for url in ("http://127.0.0.1:80/x", "ws://127.0.0.1/", "data:text/html,x", "about:blank", "blob:http://a/1"):
        assert is_allowed(url, ["127.0.0.1"])
    for url in (
        "http://localhost/",
        "http://127.0.0.1@a.b/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "http://[x",
        "",
    ):
        assert not is_allowed(url, ["127.0.0.1"])


def test_the_answer_is_compared_in_any_case() -> None:
    assert exact_answer("", " lamp ", PROMPT, 1.0) == 1.0 and exact_answer("", "lamps", PROMPT, 1.0) == 0.0


@needs_chromium
def test_options_are_checked() -> None:
    with raises(ConfigError, "environment.options.scorer", found=re.compile("^nothing:here: ")):
        Browser(scorer="nothing:here")
    for url in ("http://example.org/", "file:///etc/passwd", "nowhere"):
        hosts, change = re.compile(r"127\.0\.0\.1"), re.compile("allowed_hosts")
        with raises(ConfigError, "url", found=url, expected=hosts, change=change):
            asyncio.run(Browser(url=url).reset(PROMPT, 0))


PAGES = {
    "/": """<title>x</title><style>.off{display:none}</style><script>var hidden = 1</script>
        <p>Hello <b>there</b></p><p class="off">unseen</p><p style="visibility:hidden">unseen</p>
        <a href="/two">Two</a> <label>Name <input name="name" value="Ada"></label>
        <input type="password" aria-label="Secret" value="s3"><input type="hidden" name="h" value="unseen">
        <select aria-label="Colour"><option>red</option><option selected>blue</option></select>
        <input type="radio" name="r" aria-label="yes" checked><input type="checkbox" aria-label="agree">
        <div role="button" onclick="document.getElementById('said').textContent='clicked'">Press</div><p id="said"></p>
        <button disabled>Off</button> <div style="position:relative"><button>Under</button>
        <span style="position:absolute;left:0;top:0;width:99%;height:99%">over</span></div>
        <button onclick="for (;;) {}">Loop</button> <a href="/outside">Outside</a> <a href="http://outside.invalid/">Away</a>
        <a href="/hang">Hang</a>""",
    "/two": "<p>Second</p><img src='http://outside.invalid/a.png'><a href='/'>One</a>",
    "/long": "<p>" + "word " * 1000 + "</p>",
}


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/hang":
            time.sleep(3)
        self.send_response(302 if path == "/outside" else 200)
        self.send_header("Content-Type", "text/html")
        if path == "/outside":
            self.send_header("Location", "http://outside.invalid/")
        self.end_headers()
        self.wfile.write(PAGES.get(path, "").encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of a test, which has no profile of a browser in the end."""
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(name)
        assert folders(Path(name)) == [] and processes_of(Path(name)) == []
        tempfile.tempdir = None


def folders(temporary: Path) -> list[Path]:
    return sorted(temporary.glob(f"{chromium.PREFIX}*"))


def text_of(seen: Observation) -> str:
    return str(seen.messages[0].content)


async def do(browser: Browser, action: str) -> str:
    return text_of(await browser.step(Answer(action)))


@needs_chromium
@pytest.mark.slow
def test_a_page_is_read_and_used(pages: str) -> None:
    async def play() -> None:
        browser = Browser(url=pages, format_penalty=0.5, max_steps=30)
        shown = text_of(await browser.reset(PROMPT, 0)).partition("\n\n")[2].split("\n")
        assert shown[:3] == ["Hello", "there", "[0 link] Two"]
        assert "unseen" not in "".join(shown) and "hidden" not in "".join(shown)
        assert shown[3:10] == [
            "Name",
            "[1 field: Name] Ada",
            "[2 field: Secret]",
            "[3 choice: Colour] red | blue*",
            "[4 radio] yes*",
            "[5 checkbox] agree",
            "[6 button] Press",
        ]
        assert "[1 field: Name] Bob, the\n" in await do(browser, "type[1, Bob, the]")
        assert "[3 choice: Colour] red* | blue\n" in await do(browser, "type[3, red]")
        assert "[5 checkbox] agree*" in await do(browser, "click[5]")
        assert "\nclicked\n" in await do(browser, "click[press]")
        for impossible in (
            "click[99]",
            "click[nothing]",
            "type[0, x]",
            "type[3, pink]",
            "click[off]",
            "click[under]",
            "back[]",
            "hello",
        ):
            seen = await browser.step(Answer(impossible))
            assert (impossible, seen.reward) == (impossible, -0.5)
            assert text_of(seen).startswith("That is not possible")
        assert await do(browser, "click[two]") == "Second\n[0 link] One"
        assert "Hello" in await do(browser, "back[]")
        end = await browser.step(Answer("stop[LAMP]"))
        assert (end.done, end.reward, end.fields["success"], end.fields["blocked"]) == (True, 1.0, 1.0, 1.0)
        with pytest.raises(RuntimeError, match="after the end"):
            await browser.step(Answer("back"))
        await browser.close()
        await browser.close()

    asyncio.run(play())


@needs_chromium
@pytest.mark.slow
def test_other_hosts_are_not_reached_and_slow_pages_are(pages: str) -> None:
    async def play() -> None:
        browser = Browser(url=f"{pages}/", max_steps=3)
        await browser.reset(PROMPT, 0)
        seen = await browser.step(Answer("click[away]"))
        assert "not allowed" in text_of(seen) and "Hello" in text_of(seen) and seen.fields["blocked"] == 1.0
        with pytest.raises(BrowserError, match="reached"):  # a redirect leaves the page
            await browser.step(Answer("click[outside]"))
        await browser.close()
        long = Browser(url=f"{pages}/long", max_steps=1, max_characters=100)
        assert text_of(await long.reset(PROMPT, 0)).endswith("(4899 more characters)")
        last = await long.step(Answer("click[0]"))
        assert (last.done, last.truncated, last.reward) == (False, True, 0.0)
        await long.close()
        slow = Browser(url=f"{pages}/", max_steps=1)
        await slow.reset(PROMPT, 0)
        assert (await slow.step(Answer("click[hang]"))).fields["blocked"] == 0.0
        assert slow._page.url.endswith("/hang")  # three seconds later
        await slow.close()

    asyncio.run(play())


@needs_chromium
@pytest.mark.slow
def test_the_shop_in_a_browser() -> None:
    async def play(url: str, seed: int) -> None:
        game, browser = (
            WebShop(num_products=200),
            Browser(url=f"{url}/?seed={{seed}}", scorer="whet_environments.webshop.client:shop_reward"),
        )
        game.reset(PROMPT, seed)
        shown = text_of(await browser.reset(PROMPT, seed))
        while True:
            assert game.session.goal.instruction() in shown
            names = [name for kind, name in browser._seen.names if kind != "field" and name != "search"]  # type: ignore[union-attr]
            assert names == game.session.buttons()
            action = game.best()
            shown = await do(browser, action)
            if game.step(Answer(action)).done:
                break
        end = await browser.step(Answer("stop[]"))
        assert (end.done, end.reward, end.fields["blocked"]) == (True, 1.0, 0.0)
        await browser.close()

    async def play_all(url: str) -> None:
        await asyncio.gather(*(play(url, seed) for seed in range(3)))

    with running(catalogue(200, 0)) as url:
        asyncio.run(play_all(url))


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(600)  # dozens of browsers
def test_conformance() -> None:
    found = list(check(NAME, {"num_products": 100, "max_steps": 3}, Plan(PROMPT, seconds=60.0)))
    assert [each for each in found if each.is_ok is False] == []


def wait(host: EnvironmentHost, uids: set[str]) -> dict[str, Observation | Failure]:
    found: dict[str, Observation | Failure] = {}
    until = time.monotonic() + 60
    while set(found) != uids:
        assert time.monotonic() < until
        found.update(host.poll(0.2))
    return found


@needs_chromium
@pytest.mark.slow
def test_a_browser_that_is_killed_fails_its_episodes_only(pages: str, temporary: Path) -> None:
    host = open_host(NAME, {"url": pages, "episodes_per_browser": 1})
    for number, uid in enumerate("ab"):
        host.start(uid, PROMPT, number)
        wait(host, {uid})
    both = folders(temporary)
    assert len(both) == 2
    owner = {folder: processes_of(folder) for folder in both}
    first = min(both, key=lambda folder: folder.stat().st_ctime)
    for process in owner[first]:
        with suppress(ProcessLookupError):  # some end with the first one
            os.kill(process, signal.SIGKILL)
    for uid in "ab":
        host.step(uid, Answer("click[two]"))
    seen = wait(host, {"a", "b"})
    failed = [uid for uid, each in seen.items() if isinstance(each, Failure)]
    assert len(failed) == 1
    failure = seen[failed[0]]
    assert isinstance(failure, Failure) and failure.source == "environment"
    assert "click[two] failed" in failure.message or "the browser is gone" in failure.message
    host.start("c", PROMPT, 2)  # a new browser
    assert isinstance(wait(host, {"c"})["c"], Observation)
    for uid in "abc":
        host.close(uid)
    host.shutdown()


@needs_chromium
@pytest.mark.slow
def test_a_page_that_crashes_fails_its_episode_only(pages: str, temporary: Path) -> None:
    async def play() -> None:
        one, two = Browser(url=pages, step_seconds=20.0), Browser(url=pages)
        await asyncio.gather(one.reset(PROMPT, 0), two.reset(PROMPT, 0))
        assert len(folders(temporary)) == 1  # one browser for both
        session = await one._tab.new_cdp_session(one._page)
        with suppress(Exception):  # it has no reply
            await asyncio.wait_for(session.send("Page.crash"), 2.0)
        with pytest.raises(BrowserError, match="crashed"):
            await one.step(Answer("click[two]"))
        await one.close()
        assert await do(two, "click[two]") == "Second\n[0 link] One"
        await two.close()

    asyncio.run(play())


@needs_chromium
@pytest.mark.slow
def test_a_page_that_hangs_fails_its_episode_only(pages: str, temporary: Path) -> None:
    host = open_host(NAME, {"url": pages, "step_seconds": 2.0, "allowed_hosts": ["127.0.0.1"]})
    for uid in "ab":
        host.start(uid, PROMPT, 0)
    wait(host, {"a", "b"})
    assert len(folders(temporary)) == 1  # one browser for both
    host.step("a", Answer("click[hang]"))
    host.step("b", Answer("click[two]"))
    seen = wait(host, {"a", "b"})
    failure = seen["a"]
    assert isinstance(failure, Failure) and "click[hang] took longer than step_seconds=2" in failure.message
    assert isinstance(seen["b"], Observation) and "Second" in text_of(seen["b"])
    host.close("a")
    host.start("c", PROMPT, 0)
    assert isinstance(wait(host, {"c"})["c"], Observation)
    host.step("c", Answer("click[loop]"))
    failure = wait(host, {"c"})["c"]
    assert isinstance(failure, Failure) and "took longer than step_seconds=2" in failure.message
    host.close("c")
    host.step("b", Answer("back[]"))
    assert "Hello" in text_of(wait(host, {"b"})["b"])  # type: ignore[arg-type]
    host.shutdown()


@needs_chromium
@pytest.mark.slow
def test_a_process_that_is_killed_takes_its_browser_along(pages: str, temporary: Path) -> None:
    host = open_host(NAME, {"url": pages})
    host.start("a", PROMPT, 0)
    wait(host, {"a"})
    [folder] = folders(temporary)
    os.kill(int(folder.name.split("-")[2]), signal.SIGKILL)
    host.step("a", Answer("click[two]"))
    failure = wait(host, {"a"})["a"]
    assert isinstance(failure, Failure)
    until = time.monotonic() + 20
    while processes_of(folder):
        assert time.monotonic() < until
        time.sleep(0.1)
    host.start("b", PROMPT, 0)  # removes the folder that remained
    assert isinstance(wait(host, {"b"})["b"], Observation)
    assert folder not in folders(temporary)
    host.shutdown()
