# SPDX-License-Identifier: Apache-2.0
"""Web pages in Chromium as an environment: text with numbered elements, clicks and words, a scorer at the end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError, describe
from whet.options import Count, NonNegative, Positive
from whet.registry import load_target, register_environment
from whet.types import Message, Prompt
from whet_environments.browser.actions import Action, read_action
from whet_environments.browser.chromium import Chromium, Launch, chromiums, find_chromium, is_allowed
from whet_environments.browser.page import CAN_USE, Seen, read_page
from whet_environments.game import MOST_READ, Context, row_seed

LOCAL = ("127.0.0.1",)
CLOSE_SECONDS = 1.5  # with those of chromium.py less than the 5 s that whet gives to close
EMPTY = "about:blank"
A_TURN = "() => new Promise(done => setTimeout(done, 0))"  # of the page's event loop
REPLACED = "Execution context was destroyed"  # in the error of playwright where a new page comes during a call
RULES = (
    "You use a web browser. Answer with click[number or name], type[number, words], search[words], back[] or "
    "stop[answer]. The last one counts."
)
NOT_POSSIBLE = "That is not possible on this page."
NOT_ALLOWED = "That page is on a host that is not allowed."
Scorer = Callable[[str, str, Prompt, float], float | Awaitable[float]]


class BrowserError(RuntimeError):
    """A browser that crashed, or a page that cannot be reached or does not answer in time."""


def exact_answer(url: str, answer: str, prompt: Prompt, seconds: float) -> float:
    """1 where the answer of `stop[answer]` is the prompt's ground truth, in any case. The scorer by default."""
    truth = prompt.ground_truth
    return float(truth is not None and answer.strip().lower() == str(truth).strip().lower())


@dataclass
class _Own:
    """The shop of this process, for episodes without a `url`."""

    stack: ExitStack
    url: str


_OWN: dict[int, _Own] = {}  # by number of products


def own_shop(num_products: int) -> str:
    """The address of a shop that this process serves until it ends."""
    if num_products not in _OWN:
        from whet_environments.webshop.catalogue import catalogue
        from whet_environments.webshop.server import running

        stack = ExitStack()
        _OWN[num_products] = _Own(stack, stack.enter_context(running(catalogue(num_products, 0))))
    return f"{_OWN[num_products].url}/?seed={{seed}}"


@register_environment("browser", shared=True)
class Browser:
    """A task on web pages. The first page is the row's field `url`, else the option; `{seed}` in it is the seed.

    Without either it is a shop of this process, with `num_products`. `scorer` names a function
    `(url of the last page, answer, prompt, seconds) -> number`, by default the reward of that shop, or `exact_answer`.
    It runs at `stop[answer]`, and at the limit of steps with an empty answer. Only `allowed_hosts` are reached. The
    episode fails where the browser crashes, where a page is gone, and where a step takes longer than `step_seconds`
    (the start of the browser with the first page: `start_seconds`).
    """

    def __init__(
        self,
        *,
        url: str = "",
        scorer: str = "",
        allowed_hosts: Sequence[str] = LOCAL,
        num_products: Count = 1000,
        max_steps: Count = 20,
        context: Context = "append",
        format_penalty: NonNegative = 0.0,
        max_tokens: Count | None = None,
        max_characters: Count = 8000,
        start_seconds: Positive = 60.0,
        step_seconds: Positive = 30.0,
        settle_seconds: NonNegative = 0.0,
        chromium: str = "",
        episodes_per_browser: Count = 8,
    ) -> None:
        self._launch = Launch(find_chromium(chromium), tuple(allowed_hosts), episodes_per_browser)
        self._url, self._scorer, self._num_products = url, _scorer(scorer), num_products
        self._max_steps, self._left, self._context = max_steps, 0, context
        self._penalty, self._max_tokens, self._characters = format_penalty, max_tokens, max_characters
        self._start_seconds, self._seconds, self._settle = start_seconds, step_seconds, settle_seconds
        self._chromium: Chromium | None = None
        self._tab: Any = None  # playwright's context
        self._loading: set[Any] = set()  # requests of whole pages that have no answer yet
        self._seen: Seen | None = None
        self._blocked, self._is_refused, self._is_crashed = 0, False, False

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Opens the first page in a new context.  Raises: BrowserError, ConfigError."""
        self._prompt = prompt
        url = str(prompt.extra_info.get("url") or self._url)
        if not url:
            url, self._scorer = own_shop(self._num_products), self._scorer or _shop_reward()
        url = url.replace("{seed}", str(row_seed(prompt, seed)))
        if not url.startswith(("http://", "https://")) or not is_allowed(url, self._launch.hosts):
            raise ConfigError(
                "url",
                url,
                f"a page of an allowed host: {', '.join(self._launch.hosts)}",
                "correct it, or add its host to environment.options.allowed_hosts",
            )
        await self._within(self._open(url), "opening the browser", "start_seconds", self._start_seconds)
        self._left = self._max_steps
        return self._observe(RULES, 0.0)

    async def step(self, answer: Answer) -> Observation:
        """Carries out the last action of the answer.  Raises: BrowserError, RuntimeError after the end."""
        if not self._left:
            raise RuntimeError("step was called after the end of the episode, or before reset; call reset first")
        self._left -= 1
        action = read_action(answer.text[-MOST_READ:])
        if action is not None and action.verb == "stop":
            self._left = 0
            return self._end(await self._score(action.text), is_done=True)
        self._is_refused = False
        is_done = action is not None and await self._within(self._act(action), f"{action.verb}[{action.text[:50]}]")
        said = ("" if not self._is_refused else NOT_ALLOWED) if is_done else NOT_POSSIBLE
        reward = 0.0 if is_done else 0.0 - self._penalty  # not -0
        if not self._left:
            return self._end(reward + await self._score(""), is_done=False)
        return self._observe(said, reward)

    async def close(self) -> None:
        """Closes the context; the last one of a process ends it."""
        tab, self._tab = self._tab, None
        used, self._chromium = self._chromium, None
        self._left = 0
        if used is None:
            return
        try:
            if tab is not None and not self._is_crashed and used.is_alive:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await tab.close()
        except Exception:  # it is gone, or hangs: the process takes no new episode, and ends with its last one
            used.is_broken = True
        finally:
            await chromiums(self._launch).release(used)

    def choices(self) -> list[str]:
        """Actions that the page has."""
        names = self._seen.names if self._seen is not None else ()
        clicks = [f"click[{number}]" for number, (kind, _) in enumerate(names) if kind not in ("field", "choice")]
        return [*clicks, *(["search[lamp]"] if any(kind == "field" for kind, _ in names) else []), "back[]"]

    async def _open(self, url: str) -> None:
        self._chromium = await chromiums(self._launch).acquire()
        self._tab = await self._chromium.browser.new_context(
            accept_downloads=False, service_workers="block", viewport={"width": 1280, "height": 900}
        )
        self._tab.on("request", self._begun)
        for event in ("requestfinished", "requestfailed"):
            self._tab.on(event, self._ended)
        self._tab.on("page", lambda page: page.on("crash", self._crashed))
        await self._tab.route("**/*", self._route)
        page = await self._tab.new_page()
        await page.goto(url, timeout=0, wait_until="load")
        await self._read()

    def _crashed(self, page: Any) -> None:
        self._is_crashed = True

    def _begun(self, request: Any) -> None:
        if not is_allowed(request.url, self._launch.hosts):
            self._blocked += 1
            self._is_refused = self._is_refused or request.is_navigation_request()
        elif request.is_navigation_request():
            self._loading.add(request)

    def _ended(self, request: Any) -> None:
        self._loading.discard(request)

    async def _route(self, route: Any) -> None:
        if is_allowed(route.request.url, self._launch.hosts):
            await route.continue_()
        else:
            await route.abort("aborted")  # keeps the present page

    @property
    def _page(self) -> Any:
        """The newest page.  Raises: BrowserError where it is gone."""
        if not self._tab.pages:
            raise BrowserError("the browser is gone: its process was killed, or it closed the last page")
        return self._tab.pages[-1]

    async def _act(self, action: Action) -> bool:
        """Carries out an action and reads the page after it.  Returns False where the page does not have it."""
        assert self._seen is not None
        is_done = await (self._back() if action.verb == "back" else self._use(action, self._seen))
        await self._read()
        return is_done

    async def _back(self) -> bool:
        page = self._page
        if await page.evaluate("history.length") <= 2:  # the empty page, and the first one
            return False
        await page.go_back(timeout=0, wait_until="commit")
        if page.url != EMPTY:
            return True
        await page.go_forward(timeout=0, wait_until="commit")
        return False

    async def _use(self, action: Action, seen: Seen) -> bool:
        from playwright.async_api import Error

        number = action.number
        if action.verb == "search":
            number = seen.first_field()
        elif number is None or number >= len(seen.names):
            number = seen.number_of(action.text) if action.verb == "click" else None
        if number is None:
            return False
        try:
            return await self._use_element(action, await seen.element(number), seen.names[number][0])
        except Error:  # it is gone, or does not take the words; a browser that has crashed shows when the page is read
            return False

    async def _use_element(self, action: Action, element: Any, kind: str) -> bool:
        """Uses an element that can be used; force: playwright's own test of that waits for one that cannot."""
        if not await element.evaluate(CAN_USE, action.text if kind == "choice" and action.verb == "type" else None):
            return False
        if action.verb == "click":
            await element.click(force=True, timeout=0)
        elif kind == "choice":
            await element.select_option(label=action.text, force=True, timeout=0)
        elif kind == "field":
            await element.fill(action.text, force=True, timeout=0)
            if action.verb == "search":
                await element.press("Enter", timeout=0)
        else:
            return False
        return True

    async def _read(self) -> None:
        """Waits until pages that were asked for are there, and reads the newest one."""
        from playwright.async_api import Error

        while True:
            page = self._page
            try:
                await page.evaluate(A_TURN)  # the navigation of a click has begun after it
                while self._loading:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(self._settle)
                await page.wait_for_load_state("load", timeout=0)
                seen = await read_page(page, self._characters)
            except Error as error:
                if REPLACED not in error.message:
                    raise
                continue  # a new page came in between
            if not self._loading and page is self._page:
                break
        if page.url.startswith("chrome-error:"):
            raise BrowserError(
                "the page cannot be reached: its server is gone, or it led to a host that is not allowed"
            )
        self._seen = seen

    async def _within(
        self, work: Awaitable[Any], what: str, option: str = "step_seconds", seconds: float | None = None
    ) -> Any:
        """The result of some work with the browser.  Raises: BrowserError for its errors and the deadline."""
        from playwright.async_api import Error

        seconds = seconds or self._seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise BrowserError(f"{what} took longer than {option}={seconds:g}") from error
        except Error as error:
            crashed = "the page crashed: " if self._is_crashed else ""
            raise BrowserError(f"{what} failed: {crashed}{_reason(error.message)}") from error

    async def _score(self, answer: str) -> float:
        async def found() -> float:
            value = (self._scorer or exact_answer)(self._page.url, answer, self._prompt, self._seconds)
            return float(await value if inspect.isawaitable(value) else value)

        return float(await self._within(found(), "the scorer"))

    def _fields(self, reward: float) -> dict[str, float]:
        return {"success": float(reward == 1.0), "blocked": float(self._blocked)}

    def _end(self, reward: float, *, is_done: bool) -> Observation:
        return Observation(done=is_done, truncated=not is_done, reward=reward, fields=self._fields(reward))

    def _observe(self, said: str, reward: float) -> Observation:
        assert self._seen is not None
        texts = (RULES if self._context == "replace" and said != RULES else "", said, self._seen.text)
        return Observation(
            done=False,
            messages=(Message("user", "\n\n".join(each for each in texts if each)),),
            reward=reward,
            fields=self._fields(0.0),
            context=self._context,
            state_key=self._seen.text,
            max_tokens=self._max_tokens,
        )


def _reason(message: str) -> str:
    """The first line of an error, and the line with which Chromium ended, if there is one."""
    first, *rest = message.splitlines() or [""]
    return "; ".join((first, *[line.strip() for line in rest if ":FATAL:" in line][:1]))


def _shop_reward() -> Scorer:
    from whet_environments.webshop.client import shop_reward

    return shop_reward


def _scorer(name: str) -> Scorer | None:
    """The function of the option `scorer`.  Raises: ConfigError."""
    if not name:
        return None
    try:
        return load_target(name)  # type: ignore[no-any-return]
    except Exception as error:  # importing the file runs code of the user
        raise ConfigError(
            "environment.options.scorer", f"{name}: {describe(error)}", "a function that can be loaded", "correct it"
        ) from error
