# SPDX-License-Identifier: Apache-2.0
"""Environments that hang, die, raise and answer wrongly: each fails its own episode. All processes are real."""

import asyncio
import gc
import logging
import math
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.raising import check_fields, raises
from whet.config.schema import EnvironmentConfig
from whet.environments.host import Deadlines, EnvironmentHost, InlineHost, ProcessHost, Result, open_host
from whet.environments.protocol import Answer, Observation, read_observation
from whet.environments.running import _serve
from whet.environments.toolbox import tools_of
from whet.errors import ConfigError, EnvError
from whet.processes import frames
from whet.processes.template import Caller
from whet.registry import ENVIRONMENTS, register_environment
from whet.rollout.build import open_environments
from whet.types import Failure, Message, Prompt

ENVIRONMENT = '''
import asyncio, atexit, ctypes, os, random, signal, subprocess, sys, threading, time
from whet.environments.protocol import Observation
from whet.errors import ConfigError
from whet.registry import register_environment
from whet.types import Message

loaded_in = os.getpid()
calls = 0

class OwnError(ConfigError): pass

class Odd:
    def __reduce__(self): raise TypeError("stays here")
    def __str__(self): return "odd"

def say(text, **more):
    return Observation(False, (Message("tool", str(text)),), **more)

def do(verb, rest):
    """What an answer says is done."""
    if verb == "exit": sys.exit(0)
    if verb == "cancel": raise asyncio.CancelledError
    if verb == "interrupt": raise KeyboardInterrupt
    if verb == "raise": raise RuntimeError(rest)
    if verb == "refuse": raise ConfigError("environment.options.size", 7, "at most 3", "lower it to 3")
    if verb == "refuse_twice": raise ConfigError.joined([OwnError("a", Odd(), "b"), ConfigError("c", None, "d", "e")])
    if verb == "none": return None
    if verb == "paid": return Observation(True, reward="a lot")
    if verb == "nan": return Observation(True, reward=float("nan"))
    if verb == "text": return Observation(False, "a text")
    if verb == "dict": return Observation(False, ({"role": "tool", "content": "x"},))
    if verb == "role": return Observation(False, (Message(3, "x"),))
    if verb == "field": return Observation(True, fields={"lock": threading.Lock()})
    if verb == "die": os._exit(3)
    if verb == "segv": ctypes.string_at(0)
    if verb == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if verb == "fork": os.fork()
    if verb == "hang": time.sleep(1000)
    if verb == "chdir": os.chdir("/")
    if verb == "descriptors":
        for each in map(int, os.listdir("/proc/self/fd")):
            try: each > 2 and os.write(each, b"x" * 50)
            except OSError: pass
    if verb == "daemon":
        subprocess.run(["sh", "-c", "setsid sleep 1000 & echo $! > " + rest])
    if verb == "pid": return say(os.getpid())
    if verb == "atexit": atexit.register(open, rest, "w"); return say(verb)
    if verb == "random": return say(random.random())
    if verb == "end": return Observation(True, reward=0.5, fields={"words": 1})
    return say(f"{verb} {rest}".strip())

class Short:
    """The form of one method."""
    def __init__(self, prompt, *, note="", at_reset=""):
        self.note, self.seen = note, []
        do(*at_reset.partition(" ")[::2])
    def step(self, answer):
        global calls
        calls += 1
        self.seen.append(answer)
        if answer == "seen": return say(f"{self.note} {calls} {','.join(self.seen)}")
        return do(*answer.partition(" ")[::2])

class Long:
    def __init__(self, *, log): self.log = log
    async def reset(self, prompt, seed):
        self.seed = seed
        await asyncio.sleep(0.01)
        return say(f"{prompt.uid} {seed}", context="replace", max_tokens=7)
    async def step(self, answer):
        verb, _, rest = answer.text.partition(" ")
        if verb == "wait": await asyncio.sleep(float(rest))
        return say(f"{answer.finish_reason} {answer.token_ids}") if verb == "all" else do(verb, rest)
    async def close(self):
        with open(self.log, "a") as file: file.write(f"{self.seed} ")
        if self.seed == 13: await asyncio.sleep(1000)

@register_environment("shared_for_a_test", shared=True)
class Shared(Long):
    total = 0
    async def step(self, answer):
        verb, _, rest = answer.text.partition(" ")
        if verb == "add": self.total += int(rest); return say(self.total)
        return await super().step(answer)
'''

PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
QUICK = Deadlines(reset=20.0, step=20.0, close=2.0)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "worlds.py").write_text(ENVIRONMENT)
    return str(tmp_path / "worlds.py")


@pytest.fixture
def opened(file: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EnvironmentHost]]:
    """Opens an environment of the file; at the end all are shut down."""
    monkeypatch.setattr(ENVIRONMENTS, "_live", dict(ENVIRONMENTS._live))
    hosts = []

    def open_it(name: str, options: dict[str, Any] | None = None, **settings: Any) -> EnvironmentHost:
        hosts.append(open_host(f"{file}:{name}", options, **{"deadlines": QUICK, **settings}))
        return hosts[-1]

    yield open_it
    for host in hosts:
        host.shutdown()


def wait_for(host: EnvironmentHost, count: int, seconds: float = 20.0) -> dict[str, Observation | Failure]:
    """The next results, that many or more."""
    results: list[Result] = []
    until = time.monotonic() + seconds
    while len(results) < count and time.monotonic() < until:
        results += host.poll(0.5)
    return dict(results)


def started(host: EnvironmentHost, *uids: str) -> None:
    for number, uid in enumerate(uids):
        host.start(uid, PROMPT, number)
    assert all(isinstance(result, Observation) for result in wait_for(host, len(uids)).values())


def told(host: EnvironmentHost, uid: str, text: str) -> str:
    """The text of the message with which an environment replies."""
    host.step(uid, Answer(text))
    result = wait_for(host, 1)[uid]
    assert isinstance(result, Observation), result
    return str(result.messages[0].content)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


# The normal run.


def test_pure_environments_step_in_the_caller() -> None:
    host = open_host("calculator", {"role": "user"})
    assert isinstance(host, InlineHost)
    host.start("a", PROMPT, 0)
    host.start("b", PROMPT, 0)
    assert host.poll(60.0) == [("a", Observation(done=False)), ("b", Observation(done=False))]
    host.step("a", Answer("<calc>6*7</calc>"))
    host.step("b", Answer("42"))
    assert host.poll(60.0) == [("a", Observation(False, (Message("user", "42"),))), ("b", Observation(done=True))]
    host.close("a")
    host.close("a")
    host.shutdown()
    with raises(ConfigError, re.compile("depth$"), found=3, expected=re.compile("'calculator'")):
        open_host("calculator", {"depth": 3})


def test_the_short_form_has_a_process_an_episode(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short", {"note": "hello"})
    assert isinstance(host, ProcessHost)
    started(host, "a", "b")
    assert [told(host, uid, "one") for uid in "ab"] == ["one", "one"]
    assert told(host, "a", "seen") == "hello 2 one,seen"  # what the module counts is its own, too
    assert len({told(host, uid, "pid") for uid in "ab"} | {str(os.getpid())}) == 3
    host.step("a", Answer("end"))
    assert wait_for(host, 1) == {"a": Observation(True, reward=0.5, fields={"words": 1})}


def test_later_episodes_find_processes_that_were_forked_ahead(
    opened: Callable[..., EnvironmentHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one for each episode, no more than ran at a time, and another in the place of one that died."""
    host = opened("Short")
    assert isinstance(host, ProcessHost)
    started(host, "a", "b", "c")
    first = {told(host, uid, "pid") for uid in "abc"}
    for uid in "abc":
        host.close(uid)
    assert wait_until(lambda: host.poll(0.01) == [] and not host._taken)
    ahead = len(host._spares)
    assert ahead == len(host._children.running) == 3
    monkeypatch.setattr(host._children, "start", lambda: pytest.fail("a reset waited for a fork"))
    started(host, "a", "d")
    second = {told(host, uid, "pid") for uid in "ad"}
    assert len(first | second) == 5
    monkeypatch.undo()
    [spare] = host._spares
    host._children._server._running[spare.number].connection.shutdown(socket.SHUT_RDWR)  # it exits
    assert wait_until(lambda: host.poll(0.01) == [] and not host._spares)
    started(host, "e")
    assert told(host, "e", "pid") not in first | second


def test_the_process_of_a_closed_episode_is_killed_before_it_can_exit_in_its_own_way(
    opened: Callable[..., EnvironmentHost], tmp_path: Path
) -> None:
    """Taking an interpreter down costs more than its start."""
    host, left = opened("Short"), 6
    started(host, *map(str, range(left)))
    pids = [int(told(host, str(uid), "pid")) for uid in range(left)]
    assert {told(host, str(uid), f"atexit {tmp_path}/{uid}") for uid in range(left)} == {"atexit"}
    for uid in range(left):
        host.close(str(uid))
    assert wait_until(lambda: host.poll(0.01) == [] and not any(map(is_running, pids)))
    assert list(tmp_path.glob("[0-9]")) == []


def test_the_long_form_is_reset_with_a_seed_and_closed_once(
    opened: Callable[..., EnvironmentHost], tmp_path: Path
) -> None:
    host = opened("Long", {"log": str(tmp_path / "closed")})
    host.start("a", PROMPT, 5)
    host.start("b", PROMPT, 6)
    assert wait_for(host, 2) == {
        "a": Observation(False, (Message("tool", "0:7 5"),), context="replace", max_tokens=7),
        "b": Observation(False, (Message("tool", "0:7 6"),), context="replace", max_tokens=7),
    }
    host.step("a", Answer("all", token_ids=(3, 4), finish_reason="length"))
    result = wait_for(host, 1)["a"]
    assert isinstance(result, Observation) and result.messages[0].content == "length (3, 4)"
    host.step("b", Answer("raise no"))
    assert isinstance(wait_for(host, 1)["b"], Failure)
    host.close("a")
    host.close("b")  # a failure of its code is no reason to leave it open
    host.shutdown()
    assert sorted((tmp_path / "closed").read_text().split()) == ["5", "6"]


def test_draws_are_those_of_the_seed(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short")
    for uid, seed in (("a", 3), ("b", 3), ("c", 4)):
        host.start(uid, PROMPT, seed)
    wait_for(host, 3)
    first, second, third = (told(host, uid, "random") for uid in "abc")
    assert first == second != third


def test_episodes_beyond_the_limit_wait_for_a_place(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short", max_episodes=2)
    for uid in "abcd":
        host.start(uid, PROMPT, 0)
    assert wait_for(host, 2).keys() == {"a", "b"}
    assert host.poll(0.3) == []
    assert host.begun() == ["a", "b"]
    host.close("d")  # it never had one
    host.close("a")
    assert wait_for(host, 1).keys() == {"c"}
    assert host.begun() == ["c"] and host.begun() == []
    host.step("c", Answer("die"))
    assert isinstance(wait_for(host, 1)["c"], Failure)
    host.start("a", PROMPT, 0)  # its id is free again
    assert wait_for(host, 1).keys() == {"a"}


def test_the_limit_of_episodes_holds_in_one_process_and_in_none(
    opened: Callable[..., EnvironmentHost], tmp_path: Path
) -> None:
    shared = opened("Shared", {"log": str(tmp_path / "closed")}, max_episodes=2)
    for uid in "abcd":
        shared.start(uid, PROMPT, ord(uid))
    assert wait_for(shared, 2).keys() == {"a", "b"}
    assert shared.poll(0.3) == []
    shared.close("c")  # it never had a place
    shared.step("b", Answer("die"))  # the place of a is that of its replay
    assert wait_for(shared, 2).keys() == {"b", "d"}
    assert told(shared, "a", "add 1") == "1"
    shared.start("e", PROMPT, ord("e"))
    assert shared.poll(0.3) == []
    shared.close("a")
    assert wait_for(shared, 1).keys() == {"e"}
    shared.shutdown()
    assert (tmp_path / "closed").read_text().split() == [str(ord(uid)) for uid in "ade"]

    inline = open_host("calculator", max_episodes=2)
    for uid in "abcd":
        inline.start(uid, PROMPT, 0)
    assert [uid for uid, _ in inline.poll(0.0)] == ["a", "b"]
    inline.close("c")
    assert inline.poll(0.0) == []
    assert inline.begun() == ["a", "b"]
    inline.close("a")
    assert inline.begun() == ["d"]
    inline.step("b", Answer("42"))
    assert inline.poll(0.0) == [("d", Observation(done=False)), ("b", Observation(done=True))]


def test_an_episode_may_be_closed_at_any_time(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short", deadlines=Deadlines(20.0, 20.0, 0.3))
    started(host, "a", "b")
    pid = int(told(host, "a", "pid"))
    host.step("a", Answer("hang"))
    host.close("a")
    host.start("a", PROMPT, 0)
    assert wait_for(host, 1) == {"a": Observation(done=False)}
    assert wait_until(lambda: not (host.poll(0.05) or is_running(pid)))
    assert [told(host, uid, "one") for uid in "ab"] == ["one", "one"]


# What goes wrong.


@pytest.mark.slow
def test_a_refusal_of_options_keeps_its_fields(opened: Callable[..., EnvironmentHost], file: str) -> None:
    tools = tools_of(EnvironmentConfig(tools=["python"]))
    for settings in ({}, {"tools": tools}):
        host = opened("Short", {"at_reset": "refuse"}, **settings)
        assert isinstance(host, ProcessHost)
        refusal = host.refusal()
        assert refusal is not None and type(refusal) is ConfigError
        check_fields(refusal, "environment.options.size", found=7, expected="at most 3", change=re.compile("3$"))
        twice = opened("Short", {"at_reset": "refuse_twice"}, **settings).refusal()
        assert twice is not None and type(twice) is ConfigError and len(twice.others) == 1
        check_fields(twice, "a", found="odd", expected="b", change="")
        check_fields(twice.others[0], "c", found=None, expected="d", change="e")
        assert opened("Short", {"at_reset": "raise no"}, **settings).refusal() is None
        assert opened("Short", **settings).refusal() is None


def test_a_refusal_of_options_names_the_environment(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_live", dict(ENVIRONMENTS._live))
    options = {"at_reset": "refuse"}
    for config, at in (
        (EnvironmentConfig(name=f"{file}:Short", options=options), "environment"),
        (EnvironmentConfig(agents={"a": {"name": f"{file}:Short", "options": options}}), "environment.agents.a"),
    ):
        with ExitStack() as undo, pytest.raises(EnvError) as raised:
            open_environments(config, undo)
        key = f"{at}.name={file}:Short, {at}.options={options}: environment.options.size"
        check_fields(raised.value, key, found=7, expected="at most 3", change=re.compile("3$"))


def test_an_episode_that_meets_a_refusal_fails_with_it(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short", {"at_reset": "refuse"})
    host.start("a", PROMPT, 0)
    failed = wait_for(host, 1)["a"]
    assert type(failed) is Failure and failed.source == "environment" and "environment.options.size=7" in failed.message


WRONG = {
    "exit": r"SystemExit: 0 \(",
    "cancel": r"asyncio\.exceptions\.CancelledError \(",
    "raise no": r"RuntimeError: no \(",
    "none": r"Observation: .*None \(NoneType\)",
    "paid": r"Observation\.reward: 'a lot' \(str\)",
    "nan": r"Observation\.reward: nan \(float\)",
    "text": r"Observation\.messages: 'a text' \(str\)",
    "dict": r"Observation\.messages\[0\]: {'content': 'x', 'role': 'tool'} \(dict\)",
    "role": r"Observation\.messages\[0\]: Message\(",
    "field": "the observation .*TypeError: cannot pickle",
    "interrupt": r"KeyboardInterrupt \(",
    "die": "the environment's process .*: exit code 3",
    "segv": "the environment's process .*: SIGSEGV",
    "killed": "the environment's process .*: SIGKILL .*out of memory",
    "descriptors": "the environment's process wrote ",
}


def is_late(result: object, call: str, seconds: float) -> bool:
    """Tells whether a call failed because of its deadline."""
    if not isinstance(result, Failure) or result.source != "environment" or not result.timed_out:
        return False
    return re.match(f"{call} .* {seconds:g} s", result.message) is not None


@pytest.mark.slow
def test_what_goes_wrong_in_a_step_fails_its_episode_and_no_other(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short")
    started(host, *WRONG, "fork", "chdir")
    for uid in (*WRONG, "fork", "chdir"):
        host.step(uid, Answer(uid))
    results = wait_for(host, len(WRONG) + 2)
    assert host.poll(0.2) == []
    for uid, message in WRONG.items():
        result = results[uid]
        assert isinstance(result, Failure), uid
        assert (result.source, result.timed_out) == ("environment", False) and re.match(message, result.message), uid
    assert [results[uid].messages[0].content for uid in ("fork", "chdir")] == ["fork", "chdir"]
    assert told(host, "fork", "seen").strip() == "2 fork,seen"
    assert Path.cwd() != Path("/")


@pytest.mark.parametrize("deed", ["exit", "die", "raise no"])
def test_what_goes_wrong_in_a_reset_fails_its_episode(opened: Callable[..., EnvironmentHost], deed: str) -> None:
    host = opened("Short", {"at_reset": deed})
    host.start("a", PROMPT, 0)
    result = wait_for(host, 1)["a"]
    assert isinstance(result, Failure) and re.match(WRONG[deed], result.message)
    host.close("a")


def test_a_hanging_step_fails_in_time_and_leaves_nothing(
    opened: Callable[..., EnvironmentHost], tmp_path: Path
) -> None:
    host = opened("Short", deadlines=Deadlines(20.0, 0.5, 2.0))
    started(host, "a", "b")
    pid = int(told(host, "a", "pid"))
    assert told(host, "a", f"daemon {tmp_path / 'left'}").startswith("daemon")
    left = int((tmp_path / "left").read_text())
    host.step("a", Answer("hang"))
    assert told(host, "b", "one") == "one"
    late = wait_for(host, 1)
    assert is_late(late["a"], "step", 0.5)
    assert wait_until(lambda: not (is_running(pid) or is_running(left)))
    host.step("a", Answer("one"))
    assert wait_for(host, 1) == late


def test_a_hanging_reset_or_close_fails_in_time(
    opened: Callable[..., EnvironmentHost], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = opened("Short", {"at_reset": "hang"}, deadlines=Deadlines(0.5, 20.0, 2.0))
    host.start("a", PROMPT, 0)
    assert is_late(wait_for(host, 1)["a"], "reset", 0.5)
    host = opened("Long", {"log": str(tmp_path / "closed")}, deadlines=Deadlines(20.0, 20.0, 0.3))
    host.start("b", PROMPT, 13)
    wait_for(host, 1)
    start = time.monotonic()
    host.shutdown()
    assert time.monotonic() - start < 5.0
    [record] = caplog.records
    assert record.levelno == logging.WARNING and record.args and "b" in record.args and "0.3 s" in str(record.args)


def test_what_an_episode_leaves_behind_ends_with_it(opened: Callable[..., EnvironmentHost], tmp_path: Path) -> None:
    host = opened("Short")
    started(host, "a")
    told(host, "a", f"daemon {tmp_path / 'left'}")
    left = int((tmp_path / "left").read_text())
    assert is_running(left)
    host.close("a")
    assert wait_until(lambda: not (host.poll(0.05) or is_running(left)))


def test_a_process_that_dies_between_two_steps_fails_the_next(opened: Callable[..., EnvironmentHost]) -> None:
    host = opened("Short")
    started(host, "a")
    os.kill(int(told(host, "a", "pid")), 9)
    assert host.poll(0.3) == []
    host.step("a", Answer("one"))
    assert wait_for(host, 1) == {
        "a": Failure("environment", "the environment's process died: SIGKILL (out of memory, or killed by hand)")
    }


# Shared processes, and none.


def test_a_shared_process_serves_many_at_a_time(opened: Callable[..., EnvironmentHost], tmp_path: Path) -> None:
    host = opened("Shared", {"log": str(tmp_path / "closed")})
    uids = [str(number) for number in range(20)]
    started(host, *uids)
    start = time.monotonic()
    for uid in uids:
        host.step(uid, Answer("wait 0.8"))
    assert wait_for(host, 20).keys() == set(uids)
    assert time.monotonic() - start < 12.0  # of 16 one after the other
    assert len({told(host, uid, "pid") for uid in uids}) == 1


def test_where_one_episode_ends_a_shared_process_the_others_are_replayed(
    opened: Callable[..., EnvironmentHost], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = opened("Shared", {"log": str(tmp_path / "closed")}, deadlines=Deadlines(20.0, 1.0, 1.0))
    started(host, "a", "b", "c")
    pid = told(host, "a", "pid")
    assert [told(host, "a", f"add {number}") for number in (1, 2)] == ["1", "3"]
    host.step("c", Answer("hang"))
    host.step("b", Answer("add 5"))  # under way, behind it
    with caplog.at_level(logging.WARNING):
        results = wait_for(host, 2)
    assert is_late(results["c"], "step", 1)
    assert isinstance(results["b"], Observation) and results["b"].messages[0].content == "5"
    assert [record.args[1] for record in caplog.records if record.args] == [2]  # type: ignore[index]
    assert told(host, "a", "add 4") == "7"
    assert told(host, "a", "pid") != pid
    host.step("b", Answer("die"))
    [(uid, died)] = wait_for(host, 1).items()
    assert uid == "b" and isinstance(died, Failure) and re.match(WRONG["die"], died.message)
    assert (died.source, died.timed_out) == ("environment", False)
    assert told(host, "a", "add 1") == "8"
    host.close("a")
    host.shutdown()
    assert (tmp_path / "closed").read_text().split() == ["0"]


def test_an_answer_that_nobody_waits_for_any_more_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one of 30 MB that is on its way when its deadline passes: the owner closes the connection first."""
    owner, connection = socket.socketpair()

    class Much:
        def step(self, answer: str) -> Observation:
            owner.close()
            return Observation(False, (Message("tool", "x" * 30_000_000),))

    owner.sendall(frames.pack(1, pickle.dumps(("reset", 1, (PROMPT, 0)))))
    owner.sendall(frames.pack(2, pickle.dumps(("step", 1, (Answer("x"),)))))
    asyncio.run(_serve(Caller(connection), lambda prompt: Much(), True))
    gc.collect()
    assert caplog.text == ""


def test_a_class_that_cannot_travel_runs_here_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_live", dict(ENVIRONMENTS._live))
    lock = threading.Lock()

    @register_environment("holds_a_lock")
    class HoldsALock:
        def __init__(self, prompt: Prompt) -> None:
            pass

        async def step(self, answer: str) -> Observation:
            with lock:
                return Observation(True, (Message("tool", f"{os.getpid()}"),))

    with caplog.at_level(logging.WARNING):
        host = open_host("holds_a_lock")
    [record] = caplog.records
    assert record.args and record.args[0] == "holds_a_lock" and "TypeError" in str(record.args)  # type: ignore[index]
    started(host, "a")
    assert told(host, "a", "x") == str(os.getpid())
    host.shutdown()


def test_a_class_of_this_program_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_live", dict(ENVIRONMENTS._live))

    @register_environment("local")
    class Local:
        def __init__(self, prompt: Prompt) -> None:
            self.uid = prompt.uid

        def step(self, answer: str) -> Observation:
            return Observation(False, (Message("tool", f"{self.uid} {answer} {os.getpid()}"),))

    host = open_host("local")
    assert isinstance(host, ProcessHost)
    started(host, "a")
    uid, answer, pid = told(host, "a", "x").split()
    assert (uid, answer) == ("0:7", "x") and int(pid) != os.getpid()
    host.shutdown()


def test_a_pure_environment_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_live", dict(ENVIRONMENTS._live))

    @register_environment("waits", pure=True)
    class Waits:
        def __init__(self, prompt: Prompt) -> None:
            pass

        async def step(self, answer: str) -> Observation:
            import asyncio

            await asyncio.sleep(0)
            return Observation(True)

    host = open_host("waits")
    started(host, "a")
    host.step("a", Answer("x"))
    ((_, result),) = host.poll(0.0)
    assert isinstance(result, Failure) and "registered with pure=True" in result.message


def test_observations_are_read_into_plain_values() -> None:
    read = read_observation(Observation(1, [Message("tool", "x")], True))  # type: ignore[arg-type]
    assert read == Observation(True, (Message("tool", "x"),), 1.0)
    assert (type(read.done), type(read.reward)) == (bool, float)
    for wrong, said in [
        ({"context": "insert"}, "context: 'insert' (str)"),
        ({"max_tokens": 0}, "max_tokens: 0 (int)"),
        ({"fields": {3: 4}}, "fields: {3: 4} (dict)"),
        ({"done": "no"}, "done: 'no' (str)"),
        ({"done": None}, "done: None (NoneType)"),
        ({"done": 0.5}, "done: 0.5 (float)"),
        ({"truncated": "yes"}, "truncated: 'yes' (str)"),
        ({"reward": "1"}, "reward: '1' (str)"),
        ({"reward": math.inf}, "reward: inf (float)"),
        ({"messages": "text"}, "messages: 'text' (str)"),
        ({"messages": ["text"]}, "messages[0]: 'text' (str)"),
        ({"messages": [Message("tool", 5)]}, "messages[0].content: 5 (int)"),
        ({"messages": [Message("tool", ["x"])]}, "messages[0].content: ['x'] (list)"),
        ({"messages": [Message("tool", "x", 3)]}, "messages[0].fields: 3 (int)"),
        ({"media": "cat.png"}, "media: 'cat.png' (str)"),
        ({"fields": None}, "fields: None (NoneType)"),
        ({"context": ["append"]}, "context: ['append'] (list)"),
        ({"state_key": 3}, "state_key: 3 (int)"),
        ({"max_tokens": True}, "max_tokens: True (bool)"),
        ({"max_tokens": 2.0}, "max_tokens: 2.0 (float)"),
    ]:
        key, found = said.split(": ", 1)
        with raises(EnvError, f"Observation.{key}", found=found):
            read_observation(Observation(**{"done": False, **wrong}))
