# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a program is one line
"""Programs without namespaces change and read nothing outside of their scratch folder. A marked folder, which every user
of the machine may write, stands in the place of `/`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.raising import raises
from whet.errors import SandboxError
from whet.plugins.sandbox.inside import whet_landlock
from whet.plugins.sandbox.local import LocalSandbox
from whet.programs.protocol import Job, Language, Program

pytestmark = pytest.mark.skipif(not whet_landlock.version(), reason="the kernel has no Landlock")
SECRET = "the secret of another user"


@pytest.fixture
def mark() -> Iterator[Path]:
    """A folder with files, a folder and a link in it, all open to everybody."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        folder = Path(made, "mark")
        (folder / "below").mkdir(parents=True)
        (folder / "secret.txt").write_text(SECRET)
        (folder / "below" / "run.sh").write_text("#!/bin/sh\necho BROKE\n")
        (folder / "link").symlink_to("secret.txt")
        for each in (made, folder, folder / "below", folder / "secret.txt", folder / "below" / "run.sh"):
            Path(each).chmod(0o777)
        yield folder


def state(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that a program could change, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        stat = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        attributes = () if path.is_symlink() else tuple(os.listxattr(path))
        found[str(path)] = (stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink, content, attributes)
    return found


# Each tries to change the folder M, or to read M/secret.txt. What a line raises does not keep the next from trying.
WRITES = {
    "remove all": "shutil.rmtree(M)",
    "remove a file": "os.remove(M + '/secret.txt')",
    "rm -rf": "subprocess.run(['rm', '-rf', M])",
    "find -delete": "subprocess.run(['find', M, '-delete'])",
    "write": "open(M + '/secret.txt', 'w').write('x')",
    "append": "open(M + '/secret.txt', 'a').write('x')",
    "open without writing": "os.open(M + '/secret.txt', os.O_RDWR | os.O_TRUNC)",
    "truncate": "os.truncate(M + '/secret.txt', 0)",
    "create": "open(M + '/new', 'w')",
    "a folder": "os.mkdir(M + '/new')",
    "a pipe": "os.mkfifo(M + '/new')",
    "a socket": "import socket; socket.socket(socket.AF_UNIX).bind(M + '/new')",
    "a link there": "os.symlink('/etc', M + '/new')",
    "a name there": "open('a', 'w').close(); os.link('a', M + '/new')",
    "rename there": "os.rename(M + '/secret.txt', M + '/other')",
    "move away": "os.rename(M + '/secret.txt', 'mine')",
    "move a folder away": "os.rename(M + '/below', 'mine')",
    "move over it": "open('a', 'w').close(); os.replace('a', M + '/secret.txt')",
    "a name of it": "os.link(M + '/secret.txt', 'mine'); open('mine', 'w').write('x')",
    "through a link": "os.symlink(M, 'mine'); open('mine/secret.txt', 'w').write('x')",
    "through the root of /proc": "open('/proc/self/root' + M + '/secret.txt', 'w').write('x')",
    "through the parent's root": "open(f'/proc/{os.getppid()}/root' + M + '/secret.txt', 'w').write('x')",
    "through a folder that is open": "d = os.open(M, os.O_PATH); os.open('secret.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=d)",
    "through /proc/self/fd": "d = os.open(M + '/secret.txt', os.O_PATH); open(f'/proc/self/fd/{d}', 'w').write('x')",
    "the mode": "os.chmod(M + '/secret.txt', 0)",
    "the mode of all": "subprocess.run(['chmod', '-R', '000', M])",
    "the owner": "os.chown(M + '/secret.txt', 1, 1)",
    "an attribute": "os.setxattr(M + '/secret.txt', 'user.x', b'x')",
    "another working folder": "os.chdir(M); shutil.rmtree('below')",
    "another root": "os.chroot(M); shutil.rmtree('/')",
    "root again": "os.setuid(0); shutil.rmtree(M)",
    "by a child that stays": "os.fork() or (os.setsid(), os.fork() or shutil.rmtree(M))",
    "by a thread": "import threading; t = threading.Thread(target=shutil.rmtree, args=(M,)); t.start(); t.join()",
    "in a namespace": "subprocess.run(['unshare', '-Urm', 'rm', '-rf', M])",
    "by another language": "subprocess.run(['perl', '-e', f'unlink \"{M}/secret.txt\"'])",
}
READS = {
    "open": "print(open(M + '/secret.txt').read())",
    "cat": "print(subprocess.run(['cat', M + '/secret.txt'], capture_output=True).stdout)",
    "a link": "os.symlink(M + '/secret.txt', 'a'); print(open('a').read())",
    "a name": "os.link(M + '/secret.txt', 'a'); print(open('a').read())",
    "a copy": "shutil.copyfile(M + '/secret.txt', 'a'); print(open('a').read())",
    "/proc": "print(open('/proc/self/root' + M + '/secret.txt').read())",
    "the parent's /proc": "print(open(f'/proc/{os.getppid()}/root' + M + '/secret.txt').read())",
    "every process's /proc": "import glob; print([open(p + M + '/secret.txt').read() for p in glob.glob('/proc/[0-9]*/root')])",
    "the parent's variables": "print(open(f'/proc/{os.getppid()}/environ').read() or 1/0, 'BROKE')",
    "names": "print(os.listdir(M), 'BROKE')",
    "a program there": "subprocess.run([M + '/below/run.sh'])",
    "as the shell's": "subprocess.run(['sh', M + '/below/run.sh'])",
}


def tried(box: LocalSandbox, line: str, mark: Path) -> bytes:
    ran = box.run_job(Job(code=f"import os, shutil, subprocess\nM = {str(mark)!r}\n{line}"))
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_elsewhere(name: str, unisolated: LocalSandbox, mark: Path) -> None:
    before = state(mark.parent)
    tried(unisolated, WRITES[name], mark)
    assert state(mark.parent) == before


@pytest.mark.parametrize("name", READS)
def test_nothing_is_read_elsewhere(name: str, unisolated: LocalSandbox, mark: Path) -> None:
    said = tried(unisolated, READS[name], mark)
    assert SECRET.encode() not in said and b"BROKE\n" not in said


def test_what_a_user_owns_is_held_too(mark: Path) -> None:
    """For a user who is not root the folder is his own, so nothing but Landlock and the filter holds the program."""
    code = f"""
import os, shutil, subprocess, sys
sys.path.insert(0, {str(Path(whet_landlock.__file__).parent)!r})
import whet_landlock, whet_seccomp
M = {str(mark)!r}
os.chdir({str(mark.parent)!r}); os.mkdir("scratch")
whet_landlock.hold([sys.base_prefix, "/usr"], "scratch")
os.chdir("scratch")
whet_seccomp.install(whet_seccomp.program(isolated=False))
for line in {[each for name, each in WRITES.items() if "child" not in name]!r}:
    try:
        exec(line)
    except Exception:
        pass
    os.system("rm -rf ./*")
"""
    before = state(mark)
    subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True)
    assert state(mark) == before and (mark.parent / "scratch").is_dir()


def test_other_processes_and_services_are_not_reached(unisolated: LocalSandbox, mark: Path) -> None:
    listening = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    addresses = [("127.0.0.1", 0), str(mark / "socket"), f"\0whet-test-{os.getpid()}"]
    with listening[0], listening[1], listening[2]:
        for each, address in zip(listening, addresses, strict=True):
            each.bind(address)
            each.listen()
        (mark / "socket").chmod(0o777)
        for each in listening:
            line = (
                f"import socket; s = socket.socket({each.family!r}); s.connect({each.getsockname()!r}); print('BROKE')"
            )
            line = line.replace("<AddressFamily.AF_INET: 2>", "2").replace("<AddressFamily.AF_UNIX: 1>", "1")
            assert b"BROKE\n" not in tried(unisolated, line, mark)
    if whet_landlock.version() < whet_landlock.SIGNALS_SINCE:
        return
    user = whet_landlock.NOBODY if os.getuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as other:
        for line in (f"os.kill({other.pid}, 9)", "os.kill(-1, 9)", "os.kill(os.getppid(), 9)", "os.killpg(0, 9)"):
            tried(unisolated, line, mark)
            assert other.poll() is None, line
        other.kill()


def test_a_program_still_does_what_it_may(unisolated: LocalSandbox) -> None:
    code = """
import json, os, shutil, sqlite3, subprocess, tempfile, unittest
os.makedirs("a/b"); open("a/x", "w").write("1"); os.rename("a/x", "a/b/y"); os.symlink("a/b/y", "l"); os.link("l", "h")
with tempfile.TemporaryDirectory() as d: open(d + "/z", "w").write("2"); assert d.startswith(os.getcwd())
open("helper.py", "w").write("value = 3")
import helper
print(open("l").read(), helper.value, os.path.expanduser("~") == os.getcwd())
print(subprocess.run(["python3", "-c", "print(4)"], capture_output=True, text=True).stdout, sqlite3.connect("db"))
shutil.rmtree("a"); open("/dev/null", "w").write("x"); os.urandom(4)
"""
    ran = unisolated.run_job(Job(code=code))
    assert ran.end == "ok" and ran.stdout.startswith(b"1 3 True\n4\n"), ran
    if os.getuid() == 0:
        assert unisolated.run_job(Job(argv=["id", "-u"])).stdout == b"65534\n"


@pytest.mark.parametrize("name", ["/etc/passwd", "../a", "a/../../b", "", "a//b", "a\0b"])
def test_names_lie_in_the_scratch_folder(name: str, unisolated: LocalSandbox) -> None:
    for job in (Job(code="1", files={name: b"x"}), Job(code="1", collect=[name])):
        with raises(SandboxError, "file", found=name):
            unisolated.run_job(job)
    for language in (Language(name, ["true"]), Language("a", ["true"], ["true"], name)):
        with pytest.raises(SandboxError):
            unisolated.run(Program("x", "", command=language), [b""])


LINKS = {
    "a link": "os.symlink(M + '/secret.txt', 'found')",
    "a link to a folder": "os.symlink(M, 'a')",
    "a folder that becomes a link": "os.mkdir('a'); os.rmdir('a'); os.symlink(M, 'a')",
    "a link into /proc": "os.symlink(f'/proc/{os.getppid()}/root' + M, 'a')",
    "a pipe": "os.mkfifo('found')",
    "a folder": "os.mkdir('found')",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_file_that_is_collected_is_the_programs_own(name: str, unisolated: LocalSandbox, mark: Path) -> None:
    code = f"import os\nM = {str(mark)!r}\n{LINKS[name]}\nos.mkdir('b'); open('b/own', 'w').write('mine')"
    ran = unisolated.run_job(Job(code=code, collect=["found", "a/secret.txt", "b/own", "./b/own", "b"]))
    assert ran.end == "ok" and dict(ran.files) == {"b/own": b"mine", "./b/own": b"mine"}


def test_root_is_left_or_held_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(whet_landlock.os, "geteuid", lambda: 0)
    monkeypatch.setattr(whet_landlock, "_set_capabilities", lambda kept: None)
    monkeypatch.setattr(whet_landlock.LIBC, "prctl", lambda *_: 0)
    for name in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(whet_landlock.os, name, refuse)
    monkeypatch.setattr(whet_landlock, "version", lambda: 1)
    whet_landlock.leave_root([])  # Landlock holds it
    monkeypatch.setattr(whet_landlock, "version", lambda: 0)
    with pytest.raises(PermissionError) as refused:
        whet_landlock.leave_root([])
    assert "root" in str(refused.value) and "Landlock" in str(refused.value)
    for name in ("setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(whet_landlock.os, name, lambda *_: None)
    whet_landlock.leave_root([str(tmp_path)])  # nobody can read it
    monkeypatch.setattr(whet_landlock.os, "access", lambda path, *_, **__: path != "/root/python")
    with pytest.raises(PermissionError) as refused:
        whet_landlock.leave_root(["/usr", "/root/python"])
    assert "/root/python" in str(refused.value)


def test_a_kernel_without_landlock_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for version, told in ((0, True), (1, False)):
        monkeypatch.setattr(whet_landlock, "version", lambda version=version: version)
        caplog.clear()
        box = LocalSandbox(isolated=False)
        assert box.run_job(Job(code="print(1)")).end == "ok"
        box.close()
        assert ("Landlock" in caplog.text) == told
