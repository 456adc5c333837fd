# SPDX-License-Identifier: Apache-2.0
"""Runs tests of untrusted code, in a process that the code cannot access (explained in whet_peer)."""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import pathlib
import socket
import sys
import time
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.programs.inside.whet_peer import MODULE, NO_PYTEST, SHOWN, TESTS, LostError, Peer, execute, is_near, nurse
else:
    from whet_peer import MODULE, NO_PYTEST, SHOWN, TESTS, LostError, Peer, execute, is_near, nurse

NOT_DUMPABLE = 4  # for prctl: no other process may read this process's memory or open its descriptors
PYTEST = ["-q", "-x", "-c", os.devnull, "--rootdir=/", "--noconftest", "--import-mode=importlib", "--assert=plain"]
PYTEST += ["-p", "no:cacheprovider"]


class Tester:
    """Runs the tests against a candidate."""

    def __init__(self, nursery: socket.socket, tests: dict[str, Any]) -> None:
        self.nursery, self.tests = nursery, tests
        self.peer: Peer | None = None
        self.names: dict[str, Any] = {}

    def start(self) -> None:
        """Starts a new candidate.  Raises: LostError if the code does not run."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.nursery, [b"c"], [theirs.fileno()])
        self.peer = peer = Peer(ours, trusted=False)
        peer.deadline = time.monotonic() + self.tests["seconds"]
        error, names, errors = peer.receive()
        if error is not None:
            self.peer = None
            raise LostError(error)
        peer.errors = {name: _error_class(name, bases) for name, bases in errors.items()}
        # The candidate may have invented these names: its `__builtins__` and similar names are not used.
        self.names = {name: value for name, value in {**names, **peer.errors}.items() if not name.startswith("__")}

    def run(self) -> list[tuple[bool, str]]:
        """Returns for each test whether it passed, and the reason of a failure."""
        run = getattr(self, f"run_{self.tests['kind']}")
        results = list[tuple[bool, str]]()
        for each in self.tests["cases"]:
            try:
                if self.peer is None:
                    self.start()
                assert self.peer is not None
                self.peer.deadline = time.monotonic() + self.tests["seconds"]
                run(each)
                results.append((True, ""))
            except LostError as error:
                self.peer = None
                results.append((False, f"{error}"))
            except BaseException as error:
                results.append((False, f"{type(error).__name__}: {error}"[:SHOWN]))
        return results

    def run_code(self, case: str) -> None:
        """Runs statements with assertions, which can use the names of the code; with an entry point calls `check`."""
        space = types.ModuleType(TESTS)
        vars(space).update({name: self.names[name] for name in self._offered()})
        execute(self.tests["setup"] + "\n" + case, space)
        if self.tests["entry"]:
            vars(space)["check"](self._entry())

    def run_call(self, case: dict[str, Any]) -> None:
        """Calls the entry point, and compares the returned value with the expected one."""
        args, expected, tolerance = case["args"], case["expected"], self.tests["tolerance"]
        entry = self._entry()
        found = _listed(entry(**args) if isinstance(args, dict) else entry(*args))
        if not (_same(found, _listed(expected), tolerance) or _same([found], expected, tolerance)):
            raise AssertionError(f"returned {found!r}; expected {expected!r}")

    def run_pytest(self, case: str) -> None:
        """Runs a file of tests, which import the code as the module `solution`. The code may write to the scratch
        folder, so pytest reads nothing there: tests are in memory, without configuration, conftest.py or plugins."""
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        try:
            import pytest
        except ImportError as error:
            raise RuntimeError(NO_PYTEST) from error
        module, tests, passed = types.ModuleType(MODULE), types.ModuleType(TESTS), list[str]()
        vars(module).update(self.names, __all__=[*self._offered()])
        sys.modules[MODULE] = module

        class Tests(pytest.Module):
            def _getobj(self) -> types.ModuleType:
                execute(case, tests)
                return tests

        class InMemory:
            def pytest_collection(self, session: Any) -> bool:
                node = Tests.from_parent(session, path=pathlib.Path("/", f"{TESTS}.py"), nodeid=TESTS)
                session.items = [*session.genitems(node)]
                session.testscollected = len(session.items)
                return True

            def pytest_runtest_logreport(self, report: Any) -> None:
                if report.when == "call" and report.passed:
                    passed.append(report.nodeid)

        written = os.dup(1)
        os.dup2(2, 1)  # pytest's output must not be read as the verdict
        try:
            status = pytest.main([*PYTEST], [InMemory()])
        finally:
            os.dup2(written, 1)
        if status != 0 or not passed:
            raise AssertionError(f"pytest ended with {int(status)}, and {len(passed)} tests passed")

    def _offered(self) -> list[str]:
        """Lists the names of the code that tests can use without an import. Leaves out names of builtins and of the
        tests' own imports; the name under test is always included."""
        used = {*vars(builtins), *self.tests["imported"]} - {self.tests["tested"]}
        return [name for name in self.names if name not in used]

    def _entry(self) -> Any:
        """Returns the function under test. `Solution.f`, or `f` if the code has no function `f`, is Solution().f."""
        name, _, method = self.tests["entry"].partition(".")
        if name not in self.names and "Solution" in self.names and not method:
            name, method = "Solution", name
        if name not in self.names:
            raise NameError(f"the code defines no {name!r}")
        return getattr(self.names[name](), method) if method else self.names[name]


def _error_class(name: str, bases: list[str]) -> type:
    found = next((each for base in bases if isinstance(each := getattr(builtins, base, None), type)), Exception)
    return type(name, (found,), {})


def _listed(value: Any) -> object:
    """Converts tuples in a value to lists, as in JSON."""
    if type(value) in (list, tuple):
        return [_listed(each) for each in value]
    return {key: _listed(each) for key, each in value.items()} if type(value) is dict else value


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Tells whether values are equal; numbers may differ by the tolerance if one of them is a float."""
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        return all(_same(one, other, tolerance) for one, other in zip(found, expected, strict=True))
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        return all(_same(found[key], value, tolerance) for key, value in expected.items())
    kinds = {type(found), type(expected)}
    return found == expected or (float in kinds and kinds <= {int, float} and is_near(found, expected, tolerance))


def main() -> None:
    """Reads the code, forks the nursery, reads the tests, and writes the verdict after the secret word of the tests."""
    code = json.loads(_read_frame())
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        try:
            nurse(code, theirs)
        finally:
            os._exit(1)
    theirs.close()
    ctypes.CDLL(None).prctl(NOT_DUMPABLE, 0, 0, 0, 0)
    sys.path[:] = [each for each in sys.path if os.path.realpath(each) not in (os.getcwd(), "/tmp")]  # not the code's
    sys.stdout = open(os.devnull, "w")
    tests = json.loads(_read_frame())
    results = Tester(ours, tests).run()
    with open(1, "w", closefd=False) as out:
        out.write(f"\n{tests['word']}{json.dumps(results)}\n")
    os._exit(0)


def _read_frame() -> str:
    """Reads a text as `whet_peer.frame` encodes it, and no byte after it."""
    with open(0, "rb", buffering=0, closefd=False) as raw:
        data, size = b"", int(raw.readline())
        while len(data) < size:
            part = raw.read(size - len(data))
            if not part:
                raise EOFError("standard input has ended")
            data += part
    return data.decode()
