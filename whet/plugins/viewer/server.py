# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of `whet view`. It never writes, reads only below its folder, and answers only requests to this
machine's addresses. So a foreign site whose name resolves to this machine gets no data."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, unquote, urlsplit

from whet.errors import ConfigError
from whet.guard import HEAD_SECONDS, is_own
from whet.plugins.viewer.records import SHOWN, SORTED, Query, Records, inside, is_number
from whet.tracking.runs import CONFIG, MAIN, STATE, State, is_locked, main_names

MAX_POINTS, MAX_ROWS = 2000, 500  # of an answer
INSIDE = {"checkpoints", "media", "profile", "rollouts", "tokens"}  # folders of a run, in which there is no other run
MAX_STEP = 2**53  # the page's numbers are floats, exact up to here
MAX_DEPTH = 5  # of a run below the folder
LIVE_SECONDS = 90.0  # since the last line, of a run that has steps left
Curve = tuple[list[int], list[float]]  # steps and values, in the order of steps
TYPES = {  # of files that are sent; others are not
    **{f".{name}": f"text/{name}; charset=utf-8" for name in ("html", "css")},
    **{f".{name}": f"image/{name}" for name in ("png", "jpeg", "webp", "gif", "bmp")},
    **{f".{name}": f"video/{name}" for name in ("mp4", "webm")},
    ".js": "text/javascript; charset=utf-8",
    ".jpg": "image/jpeg",
    ".mov": "video/quicktime",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Site:
    """Answers the page's requests from the runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[Path, tuple[Curves, Records]] = {}
        self._lock = threading.Lock()

    def runs(self, _: Mapping[str, str]) -> object:
        """Lists the runs: name, state, last step, names of all and of the main metrics, and the steps with files."""
        found, known = [], set[str]()
        for name, path in find_runs(self.root).items():
            curves, records = self._opened(path)
            curves.refresh()
            shown = path.name if name == "." else name
            names = {"metrics": curves.names(), "main": curves.main()}
            known |= {*curves.names()}
            found.append({"id": name, "name": shown, **curves.summary(), **names, "files": records.steps()})
        panels = [
            name for row in MAIN for each in row for name in sorted(known) if fnmatchcase(name, each.lstrip("-~"))
        ]
        return {"folder": self.root.name, "runs": found, "panels": panels}

    def curves(self, query: Mapping[str, str]) -> object:
        """Returns the points of the metrics in `names`, which commas separate."""
        curves, _ = self._run(query)
        curves.refresh()
        return curves.points(query["names"].split(","), MAX_POINTS)

    def seconds(self, query: Mapping[str, str]) -> object:
        """Returns the seconds of a run's steps, by phase."""
        curves, _ = self._run(query)
        curves.refresh()
        return curves.seconds([name for name in curves.names() if name.startswith("time/")], MAX_POINTS // 4)

    def trajectories(self, query: Mapping[str, str]) -> object:
        """Returns a part of a list of trajectories."""
        _, records = self._run(query)
        step = query.get("step", "")
        show, sort = query.get("show", "all"), query.get("sort", "file")
        if show not in SHOWN or sort not in {"file", *SORTED}:
            raise LookupError(show, sort)
        asked = Query(query.get("kind", "step"), int(step) if step else None, show, sort, query.get("text", ""))
        return records.page(asked, int(query.get("offset", 0)), min(int(query.get("limit", 100)), MAX_ROWS))

    def trajectory(self, query: Mapping[str, str]) -> object:
        """Returns a trajectory with its tokens and its group."""
        _, records = self._run(query)
        return records.trajectory(query["kind"], int(query["step"]), int(query["line"]))

    def beside(self, query: Mapping[str, str]) -> object:
        """Returns the trajectory of run `other` for the step and prompt of a trajectory of `run`; null without one."""
        kind, step = query["kind"], int(query["step"])
        record = self._run(query)[1].trajectory(kind, step, int(query["line"]))["record"]
        other = self._run({"run": query["other"]})[1]
        try:
            return other.beside(kind, step, record)
        except LookupError:
            return None

    def config(self, query: Mapping[str, str]) -> object:
        """Returns the config.yaml of a run."""
        folder = self._path(query)
        path = folder / "config.yaml"
        return {"text": inside(folder, path).read_text("utf-8", "replace") if path.exists() else ""}

    def media(self, run: str, name: str) -> Path:
        """Returns the file of an image or video."""
        return self._run({"run": run})[1].media(name)

    def _run(self, query: Mapping[str, str]) -> tuple[Curves, Records]:
        return self._opened(self._path(query))

    def _path(self, query: Mapping[str, str]) -> Path:
        """Returns the folder of a run. It has to be among the runs of `find_runs`.  Raises: LookupError."""
        path = self.root / query["run"]
        with self._lock:
            if path in self._open:
                return path
        return find_runs(self.root)[query["run"]]

    def _opened(self, path: Path) -> tuple[Curves, Records]:
        with self._lock:
            if path not in self._open:
                self._open[path] = Curves(path), Records(path)
            return self._open[path]


class Handler(BaseHTTPRequestHandler):
    """Answers one request. It does not trust the values of the request."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    site: Site
    own_host: str
    server: ViewerServer

    def handle_one_request(self) -> None:
        """Reads a request and answers it. `ViewerServer` closes the connection if the headers take too long."""
        self.server.reading[self.connection] = time.monotonic()
        try:
            super().handle_one_request()
        finally:
            self.server.reading.pop(self.connection, None)

    def parse_request(self) -> bool:
        """Reads the headers of a request."""
        is_read = super().parse_request()
        self.server.reading.pop(self.connection, None)
        return is_read

    def do_GET(self) -> None:
        """Sends the page, one of its files, numbers as JSON, or an image."""
        if not is_own(self.headers.get("Host", ""), self.own_host):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers only to its own address")
        try:
            url = urlsplit(self.path)
            kind, content = self._content(unquote(url.path), {k: v[-1] for k, v in parse_qs(url.query).items()})
        except (LookupError, ValueError, OSError, RecursionError):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", b"the server has no such page")
        return self._send(HTTPStatus.OK, kind, content)

    def _content(self, path: str, query: Mapping[str, str]) -> tuple[str, bytes]:
        match path.split("/")[1:]:
            case [""]:
                return TYPES[".html"], _static("index.html")
            case ["static", name]:
                return TYPES[Path(name).suffix], _static(name)
            case ["media", run, name]:
                file = self.site.media(unquote(run), name)
                return TYPES[file.suffix.lower()], file.read_bytes()
            case ["api", ("runs" | "curves" | "seconds" | "trajectories" | "trajectory" | "beside" | "config") as name]:
                answer = json.dumps(getattr(self.site, name)(query), ensure_ascii=False, allow_nan=False)
                return "application/json", answer.encode("utf-8", "backslashreplace")
        raise LookupError(path)

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as http.server names it
        """Logs nothing."""


class ViewerServer(ThreadingHTTPServer):
    """Serves each connection in a thread of its own; closes it if its headers take too long."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self.reading: dict[socket.socket, float] = {}  # by connection: since when the server waits for its headers
        super().__init__(*arguments)

    def service_actions(self) -> None:
        """Closes connections that wait too long for their headers; runs after each poll."""
        late = time.monotonic() - HEAD_SECONDS
        for connection in [each for each, since in self.reading.copy().items() if since < late]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def open_server(root: Path, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """Returns a listening server; port 0 takes a free one.  Raises: ConfigError without runs, and for a port in use."""
    if not root.is_dir() or not find_runs(root):
        state = "holds no run" if root.is_dir() else "is no folder"
        expected = "a run's folder (it has metrics.jsonl), or a folder with runs in it"
        raise ConfigError(str(root), state, expected)
    handler = type("SiteHandler", (Handler,), {"site": Site(root), "own_host": host})
    try:
        return ViewerServer((host, port), handler)
    except OSError as error:
        change = "choose another port, or 0 for any"
        raise ConfigError(f"--host {host} --port {port}", str(error.strerror), "a free port", change) from error


def _static(name: str) -> bytes:
    """Reads a file of the page.  Raises: LookupError."""
    folder = resources.files("whet.plugins.viewer") / "static"
    if name not in {each.name for each in folder.iterdir()}:
        raise LookupError(name)
    return (folder / name).read_bytes()


METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"


class CurvesFile:
    """The curves in a JSONL file of metrics, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves: dict[str, Curve] = {}
        self.last_step = 0
        self._offset, self._inode = 0, -1
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Reads appended lines, or the whole file if a resumed run has replaced it. Skips an incomplete last line, and
        lines that are not objects."""
        with self._lock:
            try:
                stat = self.path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self.curves, self.last_step = {}, 0
                    self._offset, self._inode = 0, stat.st_ino
                if stat.st_size == self._offset:
                    return
                with inside(self.path.parent, self.path).open("rb") as file:
                    file.seek(self._offset)
                    content = file.read()
            except (OSError, LookupError):
                return
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            return
        if not 0 <= step <= MAX_STEP:
            return
        self.last_step = step
        for name, value in record.items():
            if is_number(value):
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)


class Curves:
    """The curves of a run: its metrics and its timings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = (CurvesFile(folder / METRICS), CurvesFile(folder / TIMINGS))

    def refresh(self) -> None:
        """Reads the lines that the run has appended since the last call."""
        for file in self.files:
            file.refresh()

    def names(self) -> list[str]:
        """Returns the names of all metrics."""
        return sorted({name for file in self.files for name in list(file.curves)})

    def main(self) -> list[str]:
        """Returns the metrics that `whet plot` draws by default, in the same order."""
        found = main_names(self.names(), lambda name: self._named([name]).get(name))
        return [name.lstrip("-~") for name in found]

    def points(self, names: Sequence[str], most: int) -> dict[str, object]:
        """Returns steps and values of metrics in `names` that the run has, each thinned to about `most` points."""
        return {name: thinned(*curve, most) for name, curve in self._named(names).items()}

    def seconds(self, names: Sequence[str], most: int) -> dict[str, object]:
        """Returns the sums of metrics over ranges of steps; the result's `width` gives at most `most` ranges."""
        found = self._named(names)
        width = max(1, -(-max((steps[-1] + 1 for steps, _ in found.values()), default=1) // most))
        starts = sorted({step // width for steps, _ in found.values() for step in list(steps)})
        place = {start: at for at, start in enumerate(starts)}
        sums = {name: [0.0] * len(starts) for name in found}
        for name, (steps, values) in found.items():
            for step, value in zip(list(steps), list(values), strict=False):
                if step // width in place:  # another thread may append a line meanwhile
                    sums[name][place[step // width]] += value
        return {"width": width, "steps": [start * width for start in starts], "sums": sums}

    def _named(self, names: Sequence[str]) -> dict[str, Curve]:
        return {name: curve for file in self.files for name, curve in list(file.curves.items()) if name in names}

    def summary(self) -> dict[str, object]:
        """Returns the last step, the number of steps in the config (None: unknown), state and error of run.json, and
        whether the run is active: its state is "running", and its files changed in the last 90 seconds or a process
        holds its lock. Without run.json the state is "", and an unfinished run is active if its files changed."""
        step = max(file.last_step for file in self.files)
        try:
            config = inside(self.folder, self.folder / CONFIG).read_text("utf-8")
            [total] = map(int, re.findall(r"^  total_steps: (\d{1,15})$", config, re.M)[:1])
        except (OSError, ValueError, LookupError):
            total = None
        ages = [time.time() - path.stat().st_mtime for path in (file.path for file in self.files) if path.exists()]
        is_young = bool(ages) and min(ages) < LIVE_SECONDS
        state, error, noted = _noted_state(self.folder / STATE)
        total = total if noted is None else noted  # a run may end earlier than its config says
        is_live = is_young and (total is None or step < total)
        if state == "running":
            is_live = is_young or is_locked(self.folder)
            state = "running" if is_live else "killed"
        is_live = is_live and state in ("", "running")
        return {"step": step, "total": total, "state": state, "error": error, "live": is_live}


def _noted_state(path: Path) -> tuple[str, str, int | None]:
    """Reads a run's recorded state, its error and its number of steps; "", "", None if the file lacks them."""
    try:
        noted = json.loads(inside(path.parent, path).read_bytes())
        steps = noted.get("total_steps")
        if noted["state"] in get_args(State):
            return noted["state"], str(noted.get("error") or ""), steps if type(steps) is int else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    return "", "", None


def thinned(x: Sequence[int], y: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Returns about `most` points of a curve: both ends, and the smallest and largest value of each range, so that no
    peak is lost."""
    if len(x) <= most:
        return list(x), list(y)
    stretch = -(-2 * len(x) // most)
    kept = {0, len(x) - 1}
    for start in range(0, len(x), stretch):
        places = range(start, min(start + stretch, len(x)))
        kept |= {min(places, key=y.__getitem__), max(places, key=y.__getitem__)}
    return [x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]


def find_runs(root: Path) -> dict[str, Path]:
    """Returns the folders of runs at and below `root`, by relative path ("." for `root`); does not follow links."""
    found: dict[str, Path] = {}
    for place, folders, files in os.walk(root):
        path = Path(place)
        name = path.relative_to(root).as_posix()
        if METRICS in files or "rollouts" in folders:
            found[name] = path
            folders[:] = [each for each in folders if each not in INSIDE]
        if len(path.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
        folders[:] = sorted(each for each in folders if not each.startswith("."))
    return found
