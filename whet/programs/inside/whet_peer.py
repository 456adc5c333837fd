# SPDX-License-Identifier: Apache-2.0
"""Untrusted code in its own process, and its connection to the tests (whet_tester); nothing of whet is imported.

    tester - nursery - candidate

The tester reads the code, forks the nursery, and only then reads the tests, so that no candidate has the tests in its
memory. A candidate, forked by the nursery, runs the code and serves calls. Plain values (numbers, texts, containers of
them) are copied, so the code cannot choose how they compare; other objects stay in their process, and the other process
has a `Remote`. Changes that a candidate makes to itself (replaced functions, exits, writes) do not reach the tester,
which alone writes the verdict. A candidate's output goes to the tester's standard output, which a test may capture."""

from __future__ import annotations

import builtins
import collections
import datetime as dt
import decimal
import fractions
import io
import math
import operator
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct("!Q")
SHOWN = 300  # longest error message, in characters
PRINTED = 1 << 16  # bytes of output that a call may print; more output is lost
MODULE = "solution"
TESTS = "tests"
NO_PYTEST = "pytest is not installed in the sandbox's interpreter"
PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice}
CONTAINERS = {collections.OrderedDict, collections.deque, collections.Counter, decimal.Decimal, fractions.Fraction}
DATES = {dt.date, dt.datetime, dt.time, dt.timedelta}
COPIED = PLAIN | CONTAINERS | DATES
# A value of a subclass of one of these types is copied as a value of this type.
BASES = (int, float, complex, str, bytes, bytearray, tuple, list, dict, frozenset, set)
GLOBALS = {(kind.__module__, kind.__qualname__): kind for kind in COPIED}
CHANGEABLE = {collections.Counter, fractions.Fraction}  # classes in Python, whose attributes can be set
MUTABLE = (list, dict, set, bytearray, collections.deque)


class LostError(Exception):
    """Raised if the candidate has ended, or does not reply before the deadline."""


class Copier(pickle.Pickler):
    """Pickles plain values as copies, and all other objects as names of objects in this process."""

    def __init__(self, file: io.BytesIO, peer: Peer) -> None:
        super().__init__(file, protocol=4)
        self.peer = peer

    def persistent_id(self, obj: object) -> tuple[str, int] | None:
        """Returns the name of an object that is sent by name; None for a value that is copied."""
        kind = type(obj)
        if kind is Remote:
            return "yours", object.__getattribute__(obj, "_number")
        if kind in COPIED or issubclass(kind, BASES) or _is_numpy_number(obj):
            return None
        if isinstance(obj, type) and GLOBALS.get((obj.__module__, obj.__qualname__)) is obj:
            return None
        number = id(obj)
        self.peer.objects[number] = obj
        return "mine", number

    def reducer_override(self, obj: Any) -> Any:
        """Pickles a value of a subclass as its plain type."""
        kind = type(obj)
        if kind in COPIED or isinstance(obj, type):
            return NotImplemented
        base = next((base for base in BASES if issubclass(kind, base)), None)
        if base is None:
            return type(obj.item()), (obj.item(),)
        return base, (base(list(obj)) if base is tuple else dict(obj) if base is dict else base(obj),)


class Reader(pickle.Unpickler):
    """Unpickles the bytes of a Copier. It imports and calls only the plain types."""

    def __init__(self, data: bytes, peer: Peer) -> None:
        super().__init__(io.BytesIO(data))
        self.peer = peer

    def find_class(self, module: str, name: str) -> object:
        """Returns a plain type. A class written in Python comes wrapped in a function, so that no message can set
        attributes of the class."""
        kind = GLOBALS[module, name]
        return (lambda *values: kind(*values)) if kind in CHANGEABLE else kind

    def persistent_load(self, pid: tuple[str, int]) -> object:
        """Returns the object of a name: a `Remote` for an object of the other process, or an object of this process."""
        kind, number = pid
        return Remote(self.peer, number) if kind == "mine" else self.peer.objects[number]


class Printed(io.BytesIO):
    """A buffer for printed bytes, up to a limit."""

    def write(self, data: Any) -> int:
        """Keeps the bytes, up to the limit."""
        return super().write(data) if self.tell() < PRINTED else len(data)

    def take(self) -> str:
        """Returns the printed text, and empties the buffer."""
        text = self.getvalue()[:PRINTED].decode(errors="replace")
        self.seek(0)
        self.truncate()
        return text

    def close(self) -> None:
        """Does nothing: the buffer stays open if the code replaces or closes its standard output."""


class Peer:
    """An end of the connection of tester and candidate. If `trusted`, the other end may use all of its objects."""

    def __init__(self, connection: socket.socket, *, trusted: bool) -> None:
        self.connection, self.trusted = connection, trusted
        self.objects: dict[int, object] = {}
        self.printed = Printed()
        self.deadline = float("inf")
        self.errors: dict[str, type] = {}

    def ask(self, name: str, *values: object, **more: object) -> Any:
        """Sends a request to the other process, and serves its requests until the result comes."""
        self.send("do", name, values, more)
        while True:
            kind, *rest = self.receive()
            if kind == "do":
                self.serve(*rest)
                continue
            sys.stdout.write(rest.pop())
            if kind == "raise":
                raise self._error(*rest)
            value, changes = rest
            for place, new in changes:
                _fill(values[place], new)
            return value

    def serve(self, name: str, values: tuple[Any, ...], more: dict[str, object]) -> None:
        """Serves a request of the other process: does the operation `name`, and sends its result or error."""
        try:
            before = [self.pack(each) if isinstance(each, MUTABLE) else None for each in values]
            value = self._do(name, values, more)
            changed = [
                (place, each)
                for place, (each, old) in enumerate(zip(values, before, strict=True))
                if old is not None and self.pack(each) != old
            ]
            self.send("return", value, changed, self.printed.take())
        except LostError:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            self.send("raise", names, [f"{each}"[:SHOWN] for each in error.args], self.printed.take())

    def _do(self, name: str, values: tuple[Any, ...], more: dict[str, object]) -> object:
        target = values[0]
        if not self.trusted and not _is_offered(name, target, values):
            raise AttributeError(f"{name} of an object of the tests")
        if name == "call":
            return target(*values[1:], **more)
        return OPERATIONS[name](*values)

    def send(self, *message: object) -> None:
        """Sends a message to the other process."""
        data = self.pack(message)
        try:
            self.connection.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LostError("it ended") from error

    def pack(self, value: object) -> bytes:
        """Returns the bytes of a message, by `Copier`."""
        file = io.BytesIO()
        Copier(file, self).dump(value)
        return file.getvalue()

    def receive(self) -> Any:
        """Waits for a message, at most until the deadline, and returns it.  Raises: LostError."""
        return Reader(self._exactly(*LENGTH.unpack(self._exactly(LENGTH.size))), self).load()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise LostError("it took too long")
            try:
                self.connection.settimeout(min(left, 3600.0))
                part = self.connection.recv(min(size - len(data), 1 << 20))
            except TimeoutError:
                continue
            except OSError:
                part = b""
            if not part:
                raise LostError("it ended")
            data += part
        return bytes(data)

    def _error(self, names: list[str], arguments: list[str]) -> BaseException:
        known = [self.errors.get(name) or getattr(builtins, name, None) for name in names]
        try:
            return next(each for each in known if isinstance(each, type) and issubclass(each, Exception))(*arguments)
        except Exception:
            return Exception(*arguments)


class Remote:
    """A stand-in for an object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: object, **options: object) -> object:
        return self._peer.ask("call", self, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # copy, pickle and inspect look for these
            raise AttributeError(name)
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._peer.ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is Remote and self._peer.ask("eq", self, other) is True)

    def __hash__(self) -> int:
        return hash(self._number)

    def __contains__(self, wanted: object) -> bool:
        return any(wanted == each for each in iter(self._peer.ask("iter", self)))  # compares here, hidden from the code


def _forward(name: str) -> Callable[..., object]:
    return lambda self, *values: self._peer.ask(name, self, *values)


def _among_remotes(name: str) -> Callable[[Remote, object], object]:
    """Builds the operation `name` between two objects of the code. An operation with a value of the tests is refused:
    it would show the expected result to the code, and let the code decide the comparison."""
    return lambda self, other: self._peer.ask(name, self, other) if type(other) is Remote else NotImplemented


UNARY: dict[str, Callable[..., object]] = {
    "len": len, "iter": iter, "next": next, "bool": bool, "str": str, "repr": repr, "int": int, "float": float,
    "abs": abs, "neg": operator.neg, "reversed": reversed, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem,
    "enter": lambda each: each.__enter__(), "exit": lambda each, *_: each.__exit__(None, None, None),
}  # fmt: skip
BINARY = {
    name: getattr(operator, name)
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lt", "le", "gt", "ge"]
}
OPERATIONS = {**UNARY, **BINARY, "eq": operator.eq, "getattr": getattr, "setattr": setattr}
for _name in (*UNARY, *BINARY):
    setattr(Remote, f"__{_name.rstrip('_')}__", _among_remotes(_name) if _name in BINARY else _forward(_name))


def _is_offered(name: str, target: object, values: tuple[object, ...]) -> bool:
    """Tells whether the candidate may do the operation `name` with an object of the tests: call it, iterate over it, or
    read public names of an object whose class the tests define."""
    if name in ("call", "iter", "next", "len", "bool", "getitem", "str", "repr"):
        return not isinstance(target, (types.ModuleType, type)) or target in COPIED
    return name == "getattr" and type(target).__module__ == TESTS and not str(values[1]).startswith("_")


def _is_numpy_number(obj: object) -> bool:
    return type(obj).__module__ == "numpy" and getattr(obj, "shape", None) == () and hasattr(obj, "item")


def _fill(old: Any, new: Any) -> None:
    """Replaces the content of a container by the content `new`, after a call changed the container's copy."""
    old.clear()
    (old.update if isinstance(old, (dict, set)) else old.extend)(new)


# -- the candidate's side


def nurse(code: list[str], control: socket.socket) -> None:
    """Runs the nursery: forks a candidate for each connection. A candidate is killed before the next one is forked."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    candidate = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if candidate:
            os.kill(candidate, signal.SIGKILL)
            os.waitpid(candidate, 0)
        if not message:
            os._exit(0)
        connection = socket.socket(fileno=descriptors[0])
        candidate = os.fork()
        if candidate == 0:
            control.close()
            be_candidate(code, connection)
        connection.close()


def be_candidate(code: list[str], connection: socket.socket) -> None:
    """Runs imports and the code as a module, sends the names that the code defines, and serves calls."""
    peer = Peer(connection, trusted=True)
    sys.stdout = io.TextIOWrapper(peer.printed, "utf-8", "replace", write_through=True)
    module, before = types.ModuleType(MODULE), dict[str, object]()
    sys.modules[MODULE] = module
    try:
        for part in code:
            before = dict(vars(module))
            execute(part, module)
        error = None
    except BaseException as found:
        found.__traceback__ = found.__traceback__ and found.__traceback__.tb_next
        error = "".join(traceback.format_exception(found))[-SHOWN:]
    names = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__") and (name not in before or before[name] is not value)
    }
    peer.printed.take()
    errors = {
        name: [kind.__name__ for kind in value.__mro__[1:]]
        for name, value in names.items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    try:
        peer.send(error, names, errors)
        while True:
            peer.serve(*peer.receive()[1:])
    except LostError:
        pass
    finally:
        os._exit(0)


def execute(code: str, module: types.ModuleType) -> None:
    """Runs code in a module, without this file's `from __future__`."""
    exec(compile(code, f"{module.__name__}.py", "exec", dont_inherit=True), vars(module))


# -- what whet uses too


def is_near(found: float, expected: float, tolerance: float) -> bool:
    """|found - expected| <= tolerance * (|expected| + 0.001); with 1e-5 this is numpy.allclose, which verl calls."""
    return math.isfinite(expected) and abs(found - expected) <= tolerance * (abs(expected) + 1e-3)


def frame(text: str) -> bytes:
    """Encodes a text for `main`: the number of its bytes, a line end, the bytes."""
    data = text.encode(errors="replace")
    return f"{len(data)}\n".encode() + data
