# SPDX-License-Identifier: Apache-2.0
"""Every attack is stopped by the measure that it names, and leaves nothing on the machine."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.plugins.sandbox.attacks import ATTACKS, CHEATS, PRELUDE, SHADOWS, Attack
from tests.plugins.sandbox.conftest import needs_bubblewrap
from whet.plugins.sandbox.local import LocalSandbox
from whet.plugins.scores.code import Suite, compute_score, run_tests
from whet.programs.inside.whet_peer import NO_PYTEST
from whet.programs.protocol import Job, Limits, Ran

LIMITS = Limits(seconds=3.0, cpu_seconds=3.0)
PYTEST_FILE = """from solution import f

def test_two():
    assert f(2) == 4

def test_three():
    assert f(3) == 9 and abs(f(3) - 9) < 1e-6
"""
ASSERTIONS = ["assert f(2) == 4", "assert f(3) == 9 and abs(f(3) - 9) < 1e-6 and 9 in [f(3)]"]

pytestmark = [pytest.mark.slow, needs_bubblewrap]


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, object]]:
    """The things that a program must not reach: a file, services of this machine, a variable."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        secret = Path(folder, "answers")
        secret.write_text("42")
        listening = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        listening[0].bind(("127.0.0.1", 0))
        listening[1].bind(f"\0whet-test-{os.getpid()}")
        listening[2].bind(f"{folder}/socket")
        for each in listening:
            each.listen()
        yield {
            "SECRET_FILE": str(secret),
            "HOST_PORT": listening[0].getsockname()[1],
            "HOST_ABSTRACT": f"\0whet-test-{os.getpid()}",
            "HOST_PATH": f"{folder}/socket",
        }
        for each in listening:
            each.close()


def attacked(sandbox: LocalSandbox, attack: Attack, host: dict[str, object]) -> Ran:
    if attack.is_shell:
        job = Job(argv=["sh", "-c", attack.code], limits=LIMITS, collect=["result"])
    else:
        names = "".join(f"{name} = {value!r}\n" for name, value in host.items())
        job = Job(code=f"{PRELUDE}{names}{attack.code}", stdin=b"WHET_STDIN", limits=LIMITS, collect=["result"])
    return sandbox.run_job(job)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda each: each.name)
def test_an_attack_is_held(attack: Attack, sandbox: LocalSandbox, host: dict[str, object]) -> None:
    free = psutil.virtual_memory().available
    least, over = [free], threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            least[0] = min(least[0], psutil.virtual_memory().available)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        ran = attacked(sandbox, attack, host)
    finally:
        over.set()
        watching.join()
    assert ran.end in attack.ends, ran
    assert b"BROKE" not in ran.stdout, ran
    assert not ran.files
    assert ran.seconds < LIMITS.seconds + 1.5
    assert free - least[0] < 2 * 2**30
    assert left_behind() == []


def left_behind() -> list[str]:
    """Programs that are still there a moment after their end."""
    until = time.monotonic() + 2
    while True:
        found = [
            " ".join(each.info["cmdline"] or ())
            for each in psutil.process_iter(["cmdline"])
            if "1234567" in " ".join(each.info["cmdline"] or ())
        ]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


@pytest.fixture(scope="module")
def with_pytest() -> Iterator[LocalSandbox]:
    """The sandbox, with the interpreter of this environment, which has pytest."""
    folder = Path(sys.prefix).resolve()
    if folder.is_relative_to("/tmp"):
        pytest.skip("the environment lies in /tmp, and programs have another /tmp")
    box = LocalSandbox(python=f"{folder}/bin/python")
    yield box
    box.close()


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_not_paid(name: str, sandbox: LocalSandbox) -> None:
    results = run_tests(sandbox, "python", CHEATS[name], Suite("code", ASSERTIONS), LIMITS)
    assert [ok for ok, _ in results] == [False, False], results
    calls = [{"args": [number], "expected": number**2} for number in (2, 3)]
    results = run_tests(sandbox, "python", CHEATS[name], Suite("call", calls, "f"), LIMITS)
    assert [ok for ok, _ in results] == [False, False], results


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_not_paid_by_pytest(name: str, with_pytest: LocalSandbox) -> None:
    [[ok, why]] = run_tests(with_pytest, "python", CHEATS[name], Suite("pytest", [PYTEST_FILE]), LIMITS)
    assert not ok and NO_PYTEST not in why


@pytest.mark.parametrize("name", SHADOWS)
def test_a_name_of_the_tests_is_not_the_codes(name: str, sandbox: LocalSandbox, with_pytest: LocalSandbox) -> None:
    code, assertion = SHADOWS[name]
    [[ok, _]] = run_tests(sandbox, "python", code, Suite("code", [assertion]), LIMITS)
    assert not ok
    imports = "import math\nfrom solution import *\n" if "math" in assertion else "from solution import *\n"
    file = f"{imports}\ndef test_f():\n" + "".join(f"    {line}\n" for line in assertion.splitlines())
    [[ok, _]] = run_tests(with_pytest, "python", code, Suite("pytest", [file]), LIMITS)
    assert not ok


def test_the_honest_answer_is_paid(sandbox: LocalSandbox, with_pytest: LocalSandbox) -> None:
    answer = "def f(x):\n    return x * x"
    assert compute_score(f"```python\n{answer}\n```", ASSERTIONS)["reward"] == 1.0
    assert run_tests(with_pytest, "python", answer, Suite("pytest", [PYTEST_FILE]), LIMITS) == [(True, "")]


def test_there_are_enough() -> None:
    assert len(ATTACKS) >= 60 and len({each.name for each in ATTACKS}) == len(ATTACKS) and len(CHEATS) >= 40
    assert all(each.held_by for each in ATTACKS)
