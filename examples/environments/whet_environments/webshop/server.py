# SPDX-License-Identifier: Apache-2.0
"""The shop as a web server on 127.0.0.1.

    python -m whet_environments.webshop.server [--port 0] [--products 10000] [--seed 0]

prints its address. `GET /?seed=5` begins a session whose goal has that seed and leads to its pages, which are plain
HTML: links, a form for the search, a form for Buy Now. Their addresses name the whole state, so Back works.
For programs:

    POST /api/sessions {"seed": 5}                       a view, with the session's id
    POST /api/sessions/ID/actions {"action": "click[x]"} a view
    DELETE /api/sessions/ID
    GET /ID/reward                                       {"is_done", "reward"}

A view has text, buttons, is_possible, is_done, reward. It needs starlette and uvicorn (the extra webshop).
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from html import escape
from typing import Any

from whet.errors import ConfigError, DeadlineError, pip_install
from whet_environments.webshop.catalogue import Catalogue, catalogue
from whet_environments.webshop.pages import DONE, START, Part, Session, State, parts

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ConfigError(
        "packages starlette and uvicorn", "not installed", change=f"run {pip_install('serve')}"
    ) from error

HOST = "127.0.0.1"
MAX_SESSIONS = 10_000  # the oldest one is forgotten first
MAX_BODY = 200_000  # bytes
START_SECONDS = 20.0
STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:1em auto}a{margin-right:.7em}[aria-checked=true]{font-weight:bold}"
)


class ShopServer:
    """The sessions of a catalogue, and the application that serves them."""

    def __init__(self, shop: Catalogue) -> None:
        self._shop = shop
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.asgi = Starlette(
            routes=[
                Route("/", self.begin),
                Route("/api/sessions", self.api_begin, methods=["POST"]),
                Route("/api/sessions/{id}/actions", self.api_act, methods=["POST"]),
                Route("/api/sessions/{id}", self.api_end, methods=["DELETE"]),
                Route("/{id}/", self.show),
                Route("/{id}/buy", self.buy, methods=["POST"]),
                Route("/{id}/reward", self.reward),
            ]
        )

    async def begin(self, request: Request) -> Response:
        """Begins a session and leads to its search page."""
        seed = request.query_params.get("seed", "0")
        if not (seed.isascii() and seed.isdigit() and len(seed) < 30):
            raise HTTPException(400, f"seed={seed[:50]!r}; expected a whole number >= 0: correct it")
        return RedirectResponse(f"/{self._open(int(seed))}/", 303)

    async def show(self, request: Request) -> Response:
        """The page of the state in the address, by default the search page; after the purchase only the end."""
        session = self._session(request)
        if session.reward is None:
            session.go(self._state(request))
        return HTMLResponse(page_html(session))

    async def buy(self, request: Request) -> Response:
        """Buys the item of the state in the address."""
        session, state = self._session(request), self._state(request)
        if state.page != "item":
            raise HTTPException(400, f"nothing can be bought on the page {state.page}; expected the page of an item")
        if session.reward is None:
            session.go(state)
            session.go(DONE)
        return RedirectResponse("./", 303)

    async def reward(self, request: Request) -> Response:
        """The end of a session: {"is_done", "reward"}."""
        reward = self._session(request).reward
        return JSONResponse({"is_done": reward is not None, "reward": reward or 0.0})

    async def api_begin(self, request: Request) -> Response:
        """Begins a session for a program."""
        seed = (await _body(request)).get("seed")
        if type(seed) is not int or seed < 0:
            raise HTTPException(400, f"seed={seed!r}; expected a whole number >= 0: correct it")
        id_ = self._open(seed)
        return JSONResponse({"id": id_, **_view(self._sessions[id_], is_possible=True)})

    async def api_act(self, request: Request) -> Response:
        """Carries out the last action of a text."""
        session, action = self._session(request), (await _body(request)).get("action")
        if not isinstance(action, str):
            raise HTTPException(400, f"action={action!r}; expected a text such as click[buy now]: correct it")
        return JSONResponse(_view(session, is_possible=session.act(action)))

    async def api_end(self, request: Request) -> Response:
        """Forgets a session."""
        self._session(request)
        del self._sessions[request.path_params["id"]]
        return JSONResponse({})

    def _open(self, seed: int) -> str:
        id_ = secrets.token_hex(8)
        self._sessions[id_] = Session(self._shop, self._shop.goal(random.Random(seed)))
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return id_

    def _session(self, request: Request) -> Session:
        session = self._sessions.get(request.path_params["id"])
        if session is None:
            raise HTTPException(404, "no session has this id; begin one at /?seed=0")
        return session

    def _state(self, request: Request) -> State:
        query = request.url.query
        try:
            return State.from_query(query, self._shop) if query else START
        except ValueError as error:
            raise HTTPException(404, str(error)) from error


def page_html(session: Session) -> str:
    """The page of a session: the strings of `Session.text`, with links and forms."""
    body = "\n".join(_html(part, session.state) for part in parts(session.shop, session.state))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>WebShop</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><h1>WebShop</h1><p>Instruction:</p><p>{escape(session.goal.instruction())}</p>\n{body}</body></html>"
    )


def _html(part: Part, state: State) -> str:
    text = escape(part.text)
    if part.kind == "input":
        hidden = '<input type="hidden" name="page" value="results"><input type="hidden" name="n" value="0">'
        field = '<input type="text" name="q" maxlength="200" aria-label="words">'
        return f'<form method="get" action="./">{hidden}{field}<button>{text}</button></form>'
    if part.next_state == DONE:
        return f'<form method="post" action="buy?{escape(state.to_query())}"><button>{text}</button></form>'
    if part.next_state is None:
        return f"<h2>{text}</h2>" if part.kind == "title" else f"<p>{text}</p>"
    role = f' role="radio" aria-checked="{str(part.chosen).lower()}"' if part.kind == "option" else ""
    return f'<a href="./?{escape(part.next_state.to_query())}"{role}>{text}</a>'


def _view(session: Session, *, is_possible: bool) -> dict[str, Any]:
    return {
        "text": session.text(),
        "buttons": session.buttons(),
        "is_possible": is_possible,
        "is_done": session.reward is not None,
        "reward": session.reward or 0.0,
    }


async def _body(request: Request) -> dict[str, Any]:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY:
            raise HTTPException(413, f"the body has more than {MAX_BODY} bytes; send less")
    try:
        found = _json(content)
    except ValueError as error:
        raise HTTPException(400, f"the body is no JSON object: {error}") from error
    return found


def _json(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError(f"found {type(found).__name__}")
    return found


def bind(port: int) -> socket.socket:
    """A socket on 127.0.0.1.  Raises: ConfigError where the port is taken."""
    # Named as TCP, since asyncio sends without Nagle's delay (40 ms) only then.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
        bound.listen(128)  # whoever reads the address may call before the server has started
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError("--port", f"{port} of {HOST}: {error}", "a free port", "choose another one, or 0") from error
    return bound


def _uvicorn(shop: Catalogue) -> uvicorn.Server:
    config = uvicorn.Config(ShopServer(shop).asgi, log_level="warning", access_log=False, server_header=False)
    config.timeout_graceful_shutdown = 2
    return uvicorn.Server(config)


@contextmanager
def running(shop: Catalogue, port: int = 0) -> Iterator[str]:
    """A server in a thread of this process.  Yields its address.  Raises: ConfigError, DeadlineError."""
    bound = bind(port)
    server = _uvicorn(shop)
    thread = threading.Thread(target=lambda: server.run([bound]), name="webshop", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + START_SECONDS
        while not server.started:
            if time.monotonic() > until or not thread.is_alive():
                raise DeadlineError("server of the shop", f"not started within {START_SECONDS:g} s", change="try again")
            time.sleep(0.01)
        yield f"http://{HOST}:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        bound.close()


def main() -> int:
    """Serves until a signal; Ctrl-C ends it without a traceback."""
    parser = argparse.ArgumentParser(prog="whet_environments.webshop.server", description="The shop as a web server.")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--products", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the catalogue")
    options = parser.parse_args()
    if options.products < 1 or options.seed < 0:
        parser.error("--products has to be at least 1, and --seed at least 0")
    try:
        bound = bind(options.port)
    except ConfigError as error:
        parser.error(str(error))
    with suppress(KeyboardInterrupt):  # uvicorn raises it once more after its own end
        server = _uvicorn(catalogue(options.products, options.seed))
        sys.stdout.write(f"http://{HOST}:{bound.getsockname()[1]}\n")
        sys.stdout.flush()
        server.run([bound])
    return 0


if __name__ == "__main__":
    sys.exit(main())
