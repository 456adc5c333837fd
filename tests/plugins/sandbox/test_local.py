# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a program is one line
"""Programs in a sandbox of this machine: their input, their ends, and that nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.first import first
from tests.plugins.sandbox.conftest import needs_bubblewrap
from tests.raising import raises
from whet.errors import SandboxError
from whet.plugins.sandbox.local import LANGUAGES, LocalSandbox
from whet.programs.protocol import Job, Language, Limits, Program, open_sandbox

MORE = {
    "perl": Language("a.pl", ["perl", "a.pl"]),
    "java": Language("A.java", ["java", "-XX:+UseSerialGC", "-Xmx64m", "A.java"]),
}
SHORT = Limits(seconds=1.0)
WAYS = [pytest.param("sandbox", marks=needs_bubblewrap), "unisolated"]


@pytest.fixture(params=WAYS)
def box(request: pytest.FixtureRequest) -> LocalSandbox:
    found: LocalSandbox = request.getfixturevalue(request.param)
    return found


def test_a_program_reads_writes_and_leaves_files(box: LocalSandbox) -> None:
    code = "import sys\nsys.stdout.write(sys.stdin.read()[::-1])\n"
    code += "sys.stderr.write(open('in.txt').read())\nopen('a.txt', 'w').write('left')"
    ran = box.run_job(Job(code=code, stdin=b"abc\xc3\xa9", files={"in.txt": b"given"}, collect=["a.txt", "b.txt"]))
    assert (ran.end, ran.code, ran.stdout, ran.stderr) == ("ok", 0, "écba".encode(), b"given")
    assert ran.files == {"a.txt": b"left"}
    again = box.run_job(Job(code="import os\nprint(os.listdir('.'))"))
    assert again.stdout == b"[]\n"  # nothing of the program before


@pytest.mark.parametrize(
    ("code", "limits", "end", "exit_code"),
    [
        ("import sys\nsys.exit(3)", SHORT, "failed", 3),
        ("1 / 0", SHORT, "failed", 1),
        ("import sys\nsys.exit('why')", SHORT, "failed", 1),
        ("import os\nos.abort()", SHORT, "failed", -6),
        ("while True:\n    pass", SHORT, "timeout", -9),
        pytest.param("while True:\n    pass", Limits(cpu_seconds=1.0), "timeout", -24, marks=pytest.mark.slow),
        ("while True:\n    print('a' * 10**5)", SHORT, "output", -9),
        ("import os, time\nfor _ in range(9):\n    os.fork() or time.sleep(60)", Limits(processes=4), None, None),
        ("x = bytearray(10**9)", Limits(memory_bytes=2**28), "failed", 1),
        ("open('x', 'wb').write(bytes(10**6))", Limits(file_bytes=10**5), "failed", 1),
    ],
)  # fmt: skip
def test_how_a_program_ends(
    box: LocalSandbox, code: str, limits: Limits, end: str | None, exit_code: int | None
) -> None:
    start = time.monotonic()
    ran = box.run_job(Job(code=code, limits=limits))
    if end is None:
        assert ran.end in ("failed", "processes")
    else:
        assert (ran.end, ran.code) == (end, exit_code)
    assert time.monotonic() - start < 8


def test_a_traceback_is_of_the_program_alone(box: LocalSandbox) -> None:
    ran = box.run_job(Job(code="def f():\n    return {}['key']\nf()"))
    assert ran.stderr.decode().splitlines() == [
        "Traceback (most recent call last):",
        '  File "solution.py", line 3, in <module>',
        '  File "solution.py", line 2, in f',
        "KeyError: 'key'",
    ]


def test_threads_and_handlers_at_the_end_run(box: LocalSandbox) -> None:
    code = "import atexit, threading, time\natexit.register(print, 'last')\n"
    code += "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')"
    assert box.run_job(Job(code=code)).stdout == b"main\nthread\nlast\n"


def test_programs_side_by_side(box: LocalSandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        rans = list(pool.map(lambda number: box.run_job(Job(code=f"print({number})")), range(24)))
    assert [int(ran.stdout) for ran in rans] == list(range(24))


def test_languages(box: LocalSandbox) -> None:
    add = {
        "cpp": "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }",
        "c": '#include <stdio.h>\nint main() { int a, b; scanf("%d %d", &a, &b); printf("%d", a + b); }',
        "bash": "read a b; echo $((a + b))",
        "python": "a, b = map(int, input().split()); print(a + b)",
    }
    for language, source in add.items():
        runs = box.run(Program(language, source), [b"1 2", b"30 4"])
        assert [(ran.end, int(ran.stdout)) for ran in runs] == [("ok", 3), ("ok", 34)], language
    [broken] = box.run(Program("cpp", "int main( {"), [b""])
    assert broken.end == "compile" and b"error" in broken.stderr


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("python", "print(2 * int(open('/dev/stdin').read()), file=open('/dev/stdout', 'w'))"),
        ("python", "import sys\nprint(2 * int(open(0).read()))\nassert open('/proc/self/cmdline').read()"),
        ("python", "import multiprocessing\ndef f(x): return 2 * x\nwith multiprocessing.Pool(2) as pool: print(*pool.map(f, [int(input())]))"),
        ("bash", "read a < /dev/stdin; echo $((2 * a)) > /dev/stdout; cat <(echo) >> /dev/stderr"),
        ("c", '#include <stdio.h>\nint main() { int a; freopen("/dev/stdin", "r", stdin); scanf("%d", &a); printf("%d", 2 * a); }'),
        ("javascript", "const fs = require('fs'); console.log(2 * Number(fs.readFileSync('/dev/stdin', 'utf8')))"),
        ("javascript", "require('readline').createInterface({input: process.stdin}).on('line', a => console.log(2 * a))"),
        ("perl", "print 2 * <STDIN>;"),
        pytest.param("java", "class A { public static void main(String[] a) { System.out.println(2 * new java.util.Scanner(System.in).nextInt()); } }", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_ways_to_read_and_write(box: LocalSandbox, language: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (LANGUAGES | MORE)[language].run[0]
    if not command.startswith("./") and language != "python" and shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    if "multiprocessing" in source and box.name == "unisolated":
        pytest.skip("its locks lie in /dev/shm, where a program without namespaces may not write")
    monkeypatch.setattr(box, "languages", LANGUAGES | MORE)
    limits = Limits(seconds=30.0, cpu_seconds=30.0)
    [ran] = box.run(Program(language, source, limits, limits), [b"21\n"])
    assert (ran.end, ran.stdout.strip()) == ("ok", b"42"), ran


@needs_bubblewrap
def test_scratch_and_shared_memory_have_one_limit(sandbox: LocalSandbox) -> None:
    code = "import os\nfor folder in ('/tmp', '/dev/shm'):\n    open(folder + '/a', 'wb').write(bytes(2 * 10**6))\n"
    code += "print(os.listdir('/tmp'), os.listdir('/dev/shm'))"
    ran = sandbox.run_job(Job(code=code, limits=Limits(scratch_bytes=5 * 10**6)))
    assert (ran.end, ran.stdout) == ("ok", b"['a'] ['a']\n")
    assert sandbox.run_job(Job(code=code, limits=Limits(scratch_bytes=3 * 10**6))).end == "failed"


@pytest.fixture
def toolchain() -> Iterator[Path]:
    """A folder outside of /tmp."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_folders_of_a_toolchain(toolchain: Path) -> None:
    folder = toolchain / "bin"
    folder.mkdir(mode=0o755)
    (folder / "double").write_text('#!/bin/sh\nread a < "$1"; echo $((a + a)); echo x > $0 || exit 7\n')
    (folder / "double").chmod(0o755)
    table = {"twice": Language("a.txt", ["double", "a.txt"])}
    program = Program("twice", "21\n")
    for isolated in (True, False) if shutil.which("bwrap") else (False,):
        with raises(
            SandboxError, "language twice", found=re.compile("^double .*No such file"), change=re.compile("paths")
        ):
            LocalSandbox(isolated=isolated, languages=table).run(program, [b""])
        box = LocalSandbox(isolated=isolated, languages=table, paths=[str(folder.parent)])
        [ran] = box.run(program, [b""])
        assert (ran.stdout, ran.code) == (b"42\n", 7)
        box.close()
    for wrong in ("toolchain", str(folder / "none"), str(folder / "double"), "/", "/tmp"):
        with raises(SandboxError, "paths", found=wrong):
            LocalSandbox(paths=[wrong])


def test_a_language_of_ones_own() -> None:
    awk = Language("a.awk", ["awk", "-f", "a.awk"])
    box = LocalSandbox(isolated=False, languages={"awk": awk, "lost": Language("a", ["no-such-tool"])})
    [ran] = box.run(Program("awk", "{ print $1 * 2 }"), [b"21\n"])
    assert ran.stdout == b"42\n"
    with raises(SandboxError, "language lost", found=re.compile("^no-such-tool .* unisolated")):
        box.run(Program("lost", ""), [b""])
    box.close()


def test_a_toolchain_that_cannot_start_is_an_error_and_a_program_that_ends_so_is_not(toolchain: Path) -> None:
    tool = toolchain / "tool"
    tool.write_text("#!/bin/sh\necho 'tool: error while loading shared libraries: libx.so' >&2\nexit 127\n")
    tool.chmod(0o755)
    for language in (Language("a.x", [str(tool), "a.x"]), Language("a.x", ["./a"], [str(tool), "a.x"], "a")):
        box = LocalSandbox(isolated=False, languages={"x": language}, paths=[str(toolchain)])
        said = "(tool: error while loading shared libraries: libx.so)"
        with raises(SandboxError, "language x", found=re.compile(re.escape(said))):
            box.run(Program("x", "anything"), [b""])
    [ran] = LocalSandbox(isolated=False).run(Program("bash", "no-such-command"), [b""])
    assert (ran.end, ran.code) == ("failed", 127)


def test_what_a_killed_program_started_ends_with_it(box: LocalSandbox, tmp_path: Path) -> None:
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n"
    code += "        os.execvp('sleep', ['sleep', '7654321'])\n    os._exit(0)\ntime.sleep(0.2)"
    assert box.run_job(Job(code=code)).end == "ok"
    until = time.monotonic() + 5
    while found := [each.pid for each in psutil.process_iter(["cmdline"]) if "7654321" in (each.info["cmdline"] or ())]:
        assert time.monotonic() < until, found
        time.sleep(0.05)


@needs_bubblewrap
def test_a_sandbox_that_was_killed_is_replaced() -> None:
    box = LocalSandbox()
    assert box.run_job(Job(code="print(1)")).stdout == b"1\n"
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "whet_zygote.py" in " ".join(each.cmdline()):
                each.kill()
    assert box.run_job(Job(code="print(2)")).stdout == b"2\n"
    box.close()
    assert box.run_job(Job(code="print(3)")).stdout == b"3\n"  # it starts again
    box.close()


@pytest.mark.parametrize("how", first(1, ["kill", "end"], others=pytest.mark.slow))
def test_it_ends_with_its_owner(box: LocalSandbox, how: str) -> None:
    code = f"""
import os, signal, threading
from whet.plugins.sandbox.local import LocalSandbox
from whet.programs.protocol import Job
box = LocalSandbox(isolated={box.name == "bubblewrap"})
box.run_job(Job(code="1"))
job = Job(code="import os; os.execvp('sleep', ['sleep', '8765432'])")
threading.Thread(target=box.run_job, args=(job,), daemon=True).start()
import time; time.sleep(0.5)
print(os.getpid(), flush=True)
if {how == "kill"}:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": "."})
    until = time.monotonic() + 5
    while any("8765432" in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_there_is_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with raises(SandboxError, "sandbox=bubblewrap", expected=re.compile("bwrap")):
        LocalSandbox().run_job(Job(code="1"))
    with raises(SandboxError, "sandbox", found="docker", expected=re.compile("bubblewrap, http.*unisolated")):
        open_sandbox("docker")
    with raises(SandboxError, "languages.lua", found={"path": "x"}, expected=re.compile("file .*run")):
        open_sandbox("unisolated", None, '{"lua": {"path": "x"}}')


def test_many_runs_leave_nothing(box: LocalSandbox) -> None:
    box.run_job(Job(code="1"))
    descriptors, threads = len([*Path("/proc/self/fd").iterdir()]), threading.active_count()
    processes = len(psutil.Process().children(recursive=True))
    for _ in range(20):
        box.run_job(Job(code="open('x', 'w').write('y')", collect=["x"]))
    assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors and threading.active_count() <= threads
    until = time.monotonic() + 5
    while len(psutil.Process().children(recursive=True)) > processes:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_program_that_was_too_late_is_not_run_again(box: LocalSandbox) -> None:
    start = time.monotonic()
    program = Program("python", "import time\ntime.sleep(float(input()))", Limits(seconds=0.5))
    runs = box.run(program, [b"0", b"60", b"0", b"60"])
    assert [ran.end for ran in runs] == ["ok", "timeout", "timeout", "timeout"] and time.monotonic() - start < 5
