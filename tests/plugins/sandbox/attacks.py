# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - a program is one line
"""Programs that try to break out of the sandbox, or to be paid for nothing. Each prints BROKE where it succeeds.

`held_by` names what holds it, in the words of whet/plugins/sandbox/inside: a resource limit, the watch of the supervisor, a
namespace, the filter of system calls, the missing rights, or the two processes of a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """A program, the measure that stops it, and the ends that it may have."""

    name: str
    held_by: str
    code: str
    ends: Sequence[str] = ("ok", "failed")
    is_shell: bool = False


PRELUDE = """\
import ctypes, errno, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(each) if isinstance(each, int) else each for each in arguments])
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def tried(function, *arguments):
    try:
        found = function(*arguments)
    except BaseException as error:
        print("held:", type(error).__name__, error)
    else:
        print("BROKE", found)
"""

_OVER = ("timeout", "memory", "processes", "output", "disk", "failed")

ATTACKS = [
    # processes
    Attack("fork bomb", "process limit", "while True:\n    os.fork()", _OVER),
    Attack("fork bomb of a shell", "process limit", "f() { f | f & }; f; sleep 60", ("ok", *_OVER), is_shell=True),
    Attack("fork and swallow errors", "process limit", "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass", _OVER),
    Attack("thread bomb", "process limit", "while True:\n    threading.Thread(target=time.sleep, args=(60,)).start()", _OVER),
    Attack("raising the process limit", "no capabilities", "tried(resource.setrlimit, resource.RLIMIT_NPROC, (10**5, 10**5))"),
    # memory
    Attack("memory of one process", "memory limit", "x = []\nwhile True:\n    x.append(bytearray(10**7))", _OVER),
    Attack("one huge allocation", "memory limit", "tried(lambda: len(bytearray(10**11)))"),
    Attack("shared memory without a file", "watch of memory", "m = [mmap.mmap(-1, 10**8) for _ in range(40)]\nfor each in m:\n    for i in range(0, 10**8, 4096):\n        each[i] = 1\nprint('BROKE')", _OVER),
    Attack("memory of many processes", "watch of memory", "for _ in range(20):\n    if not os.fork():\n        x = bytearray(4 * 10**7)\n        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(60)\ntime.sleep(60)", _OVER),
    Attack("memory in the scratch folder and in processes", "watch of memory", "for i in range(4): open(f'/tmp/{i}', 'wb').write(bytes(15 * 2**20))\nx = bytearray(480 * 2**20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('BROKE' if len(x) else '')\ntime.sleep(5)\n", ("memory", "failed")),
    Attack("memfd_create", "filter of system calls", "tried(os.memfd_create, 'x')"),
    Attack("System V shared memory", "filter of system calls", "tried(call, 29, 0, 10**9, 0o1600)"),
    Attack("POSIX message queues", "filter of system calls", "tried(call, 240, b'/x', 0o102, 0o600, None)"),
    Attack("locked memory", "resource limit", "tried(lambda: 1 // (libc.mlockall(3) == 0))"),
    Attack("raising the memory limit", "no capabilities", "tried(resource.setrlimit, resource.RLIMIT_DATA, (2**40, 2**40))"),
    Attack("a string that doubles", "memory limit", "x = 'a'\nwhile True:\n    x += x", _OVER),
    Attack("nested brackets", "the parser", "tried(lambda: eval('(' * 10**5 + ')' * 10**5))", ("ok", "failed")),
    # time
    Attack("an endless loop", "time limit", "while True:\n    pass", ("timeout",)),
    Attack("an endless sleep", "time limit", "time.sleep(10**6)", ("timeout",)),
    Attack("a huge power", "time limit", "9 ** 9 ** 9", _OVER),
    Attack("a regular expression that backtracks", "time limit", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", ("timeout",)),
    Attack("ignoring signals", "time limit", "for each in range(1, 64):\n    try: signal.signal(each, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True:\n    pass", ("timeout", "failed")),
    Attack("stopping itself", "time limit", "os.kill(os.getpid(), signal.SIGSTOP)", ("timeout",)),
    Attack("many processes that compute", "time limit", "for _ in range(20): os.fork() or None\nwhile True: pass", _OVER),
    # disk
    Attack("a large file", "file size limit", "open('/tmp/x', 'wb').write(bytes(10**8))\nprint('BROKE')", ("failed", "disk")),
    Attack("many large files", "size of the scratch folder", "for i in range(100): open(f'/tmp/{i}', 'wb').write(bytes(10**7))\nprint('BROKE')", ("failed", "disk")),
    Attack("many small files", "number of files in the scratch folder", "for i in range(10**5): open(f'/tmp/{i}', 'w')\nprint('BROKE')", ("failed",)),
    Attack("a sparse file", "file size limit", "tried(os.truncate, os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 10**12)", ("failed", "ok", "disk")),
    Attack("space reserved ahead", "file size limit", "tried(os.posix_fallocate, os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 0, 10**9)", ("failed", "ok", "disk")),
    Attack("many files in /dev/shm", "number of files in the scratch folder", "for i in range(10**5): open(f'/dev/shm/{i}', 'w')\nprint('BROKE')", ("failed",)),
    Attack("large files in both folders", "size of the scratch folder", "for i in range(4): open(f'/dev/shm/{i}', 'wb').write(bytes(10**7)); open(f'/tmp/{i}', 'wb').write(bytes(10**7))\nprint('BROKE')", ("failed", "disk")),
    Attack("deep folders", "number of files in the scratch folder", "for i in range(10**5):\n    os.mkdir('d'); os.chdir('d')\nprint('BROKE')", ("failed",)),
    # output
    Attack("a flood on standard output", "output limit", "while True:\n    os.write(1, b'a' * 65536)", ("output",)),
    Attack("a flood on standard error", "output limit", "while True:\n    os.write(2, b'a' * 65536)", ("output",)),
    Attack("a flood of children after the end", "namespace of processes", "if not os.fork():\n    os.setsid()\n    while True: os.write(1, b'a' * 4096)", ("ok", "output")),
    # descriptors
    Attack("many open files", "limit of open files", "x = [open('/dev/null') for _ in range(10**5)]\nprint('BROKE')", ("failed",)),
    Attack("many pipes with large buffers", "limit of open files", "import fcntl\nfor _ in range(10**4):\n    fcntl.fcntl(os.pipe()[1], 1031, 2**20)\nprint('BROKE')", ("failed",)),
    Attack("descriptors that were left open", "closed before the start", "found = []\nfor each in range(3, 4096):\n    try: found.append(os.fstat(each) and each)\n    except OSError: pass\nprint('BROKE' if found else 'held', found)"),
    # signals and other processes
    Attack("killing every process", "namespace of processes", "os.kill(-1, signal.SIGKILL)", ("ok", "failed")),
    Attack("killing process 1", "namespace of processes", "os.kill(1, signal.SIGKILL)\ntime.sleep(0.2)\nprint('alive')"),
    Attack("killing by guessed numbers", "namespace of processes", "for each in range(3, 40000):\n    if each != os.getpid():\n        try: os.kill(each, signal.SIGKILL); print('BROKE', each)\n        except OSError: pass"),
    Attack("ptrace", "filter of system calls", "tried(call, 101, 16, 1, 0, 0)"),
    Attack("reading another process's memory", "filter of system calls", "tried(call, 310, 1, 0, 0, 0, 0, 0)"),
    Attack("a descriptor of another process", "filter of system calls", "tried(call, 438, os.pidfd_open(1), 0, 0)"),
    Attack("/proc", "a /proc of its own processes", "print('BROKE' if {*os.listdir('/proc')} - {'self', 'thread-self', str(os.getpid())} else 'held', os.listdir('/proc'))"),
    Attack("/proc of the machine", "a /proc of its own processes", "for each in ('sys', 'meminfo', 'cmdline', 'net', 'kcore', 'sysrq-trigger', 'mounts', '1', '1/fd', '1/root'): print('BROKE' if os.path.lexists(f'/proc/{each}') and each not in ('net', 'mounts') else 'held', each)"),
    Attack("descriptors of process 1", "processes that are not dumpable", "for each in range(64):\n    try: os.open(f'/proc/1/fd/{each}', os.O_RDWR); print('BROKE', each)\n    except OSError: pass"),
    Attack("leaving by the root of process 1", "processes that are not dumpable", "tried(os.listdir, '/proc/1/root')\ntried(os.listdir, '/proc/1/cwd')"),
    Attack("root and folders of itself", "namespace of mounts", "tried(open, '/proc/self/root/etc/passwd')\ntried(lambda: open('/proc/self/root' + SECRET_FILE).read())\ntried(lambda: open('/proc/self/cwd/..' + SECRET_FILE).read())"),
    Attack("names of the machine's files among mounts", "namespace of mounts", "text = open('/proc/self/mountinfo').read()\nprint('BROKE' if SECRET_FILE in text or 'answers' in text else 'held')"),
    Attack("what /proc/self lets a process set", "a read-only /proc", "for each in ('oom_score_adj', 'mem', 'uid_map', 'setgroups', 'comm', 'loginuid', 'clear_refs', 'attr/current', 'timerslack_ns'): tried(open, f'/proc/self/{each}', 'r+b')"),
    Attack("a mount over /proc", "filter of system calls", "tried(call, 165, b'proc', b'/proc', b'proc', 0, None)"),
    Attack("showing process 1 again", "no capabilities", "tried(call, 165, b'proc', b'/proc', b'proc', 32, b'hidepid=0')"),
    Attack("/proc/1/mem", "a /proc of its own processes", "tried(open, '/proc/1/mem', 'rb')"),
    Attack("/proc/self/exe for writing", "a /proc of its own processes", "tried(open, '/proc/self/exe', 'wb')"),
    Attack("core_pattern", "a /proc of its own processes", "tried(open, '/proc/sys/kernel/core_pattern', 'w')"),
    Attack("/sys", "namespace of mounts", "tried(os.listdir, '/sys')"),
    Attack("cgroups", "namespace of mounts", "tried(os.listdir, '/sys/fs/cgroup')"),
    Attack("the zygote's memory through its namespace", "namespace of processes", "print('BROKE' if os.getppid() != 1 else 'held', os.getppid())"),
    # namespaces and mounts
    Attack("a new namespace of users", "filter of system calls", "tried(lambda: call(272, 0x10000000))"),
    Attack("clone into a new namespace", "filter of system calls", "tried(call, 56, 0x10000000 | 17, 0, 0, 0, 0)"),
    Attack("clone3", "filter of system calls", "tried(call, 435, 0, 0)"),
    Attack("setns", "filter of system calls", "tried(call, 308, os.pidfd_open(1), 0x20000000)"),
    Attack("mounting a file system", "filter of system calls", "tried(call, 165, b'tmpfs', b'/tmp', b'tmpfs', 0, None)"),
    Attack("the new calls for mounts", "filter of system calls", "tried(call, 430, b'tmpfs', 0)"),
    Attack("taking /proc away", "filter of system calls", "tried(call, 166, b'/proc', 2)"),
    Attack("chroot", "filter of system calls", "tried(os.chroot, '/tmp')"),
    Attack("pivot_root", "filter of system calls", "tried(call, 155, b'/tmp', b'/tmp')"),
    Attack("a file by handle", "filter of system calls", "tried(call, 304, -100, b'x' * 32, 0)"),
    # the kernel
    Attack("bpf", "filter of system calls", "tried(call, 321, 0, 0, 0)"),
    Attack("perf events", "filter of system calls", "tried(call, 298, b'x' * 128, 0, -1, -1, 0)"),
    Attack("userfaultfd", "filter of system calls", "tried(call, 323, 0)"),
    Attack("io_uring", "filter of system calls", "tried(call, 425, 8, b'x' * 120)"),
    Attack("keys", "filter of system calls", "tried(call, 250, 0, -3, 0)"),
    Attack("the kernel's log", "filter of system calls", "tried(call, 103, 3, b'x' * 100, 100)"),
    Attack("loading a module", "filter of system calls", "tried(call, 313, 0, b'', 0)"),
    Attack("the clock", "filter of system calls", "tried(time.clock_settime, time.CLOCK_REALTIME, 0)"),
    Attack("calls of the x32 interface", "filter of system calls", "tried(call, 0x40000000 + 101, 0, 0, 0, 0)"),
    # files
    Attack("/etc/passwd", "namespace of mounts", "tried(open, '/etc/passwd')"),
    Attack("/etc/shadow", "namespace of mounts", "tried(open, '/etc/shadow')"),
    Attack("a file of the run", "namespace of mounts", "tried(lambda: open(SECRET_FILE).read())"),
    Attack("home folders", "namespace of mounts", "print('BROKE' if any(os.path.exists(f'/{each}') for each in ('home', 'var', 'run', 'mnt')) else 'held')"),
    Attack("writing anywhere", "read-only file systems", "import itertools\nfor top, folders, _ in itertools.islice(os.walk('/'), 3000):\n    if not top.startswith(('/tmp', '/dev/shm')):\n        try: open(top + '/whet-attack', 'w'); print('BROKE', top)\n        except OSError: pass"),
    Attack("the code inside the sandbox", "read-only file systems", "tried(open, '/opt/whet/whet_zygote.py', 'a')"),
    Attack("a hard link to a system file", "namespace of mounts", "tried(os.link, '/usr/bin/env', '/tmp/env')"),
    Attack("a link that is given back", "links are not followed", "os.symlink('/usr/bin/env', 'result')"),
    Attack("a pipe that is given back", "plain files alone", "os.mkfifo('result')"),
    Attack("a folder that is given back", "plain files alone", "os.mkdir('result')"),
    Attack("a device", "no capabilities", "tried(os.mknod, '/tmp/mem', 0o20666, os.makedev(1, 1))"),
    Attack("programs in /dev", "read-only file systems", "tried(open, '/dev/x', 'w')\ntried(os.symlink, '/usr', '/dev/x')"),
    Attack("/dev/mem", "namespace of mounts", "tried(open, '/dev/mem', 'rb')"),
    Attack("programs that give rights", "no new privileges", "su root -c 'echo BROKE'; mount -t tmpfs x /tmp && echo BROKE; chsh </dev/null; exit 0", is_shell=True),
    Attack("becoming another user", "no capabilities", "tried(os.setuid, 0)"),
    # secrets
    Attack("environment variables", "a fixed environment", "print('BROKE' if 'WHET_SECRET' in os.environ or 'PATH' not in os.environ else 'held', [*os.environ])"),
    Attack("environment of its parents", "a /proc of its own processes", "tried(lambda: open(f'/proc/{os.getppid()}/environ').read())"),
    Attack("what the zygote holds", "a job for each process", "import gc\nprint('BROKE' if any(isinstance(each, (bytes, str)) and 'WHET_' + 'STDIN' in repr(each) for each in gc.get_objects()) else 'held')"),
    # network
    *(
        Attack(f"network: {name}", held_by, f"def reach():\n    s = socket.socket({family}, {kind}); s.settimeout(2); return s.{use}\ntried(reach)")
        for name, held_by, family, kind, use in (
            ("TCP", "namespace of the network", 2, 1, "connect(('1.1.1.1', 80))"),
            ("the machine's own services", "namespace of the network", 2, 1, "connect(('127.0.0.1', HOST_PORT))"),
            ("UDP", "namespace of the network", 2, 2, "sendto(b'x', ('8.8.8.8', 53))"),
            ("IPv6", "namespace of the network", 10, 1, "connect(('2606:4700:4700::1111', 80))"),
            ("raw packets", "no capabilities", 2, 3, "bind(('0.0.0.0', 0))"),
            ("AF_NETLINK", "filter of system calls", 16, 3, "bind((0, 0))"),
            ("AF_PACKET", "filter of system calls", 17, 3, "bind(('lo', 0))"),
            ("AF_VSOCK", "filter of system calls", 40, 1, "connect((2, 1))"),
            ("AF_ALG", "filter of system calls", 38, 5, "bind(('hash', 'sha256'))"),
            ("AF_BLUETOOTH", "filter of system calls", 31, 5, "bind(('', 0))"),
            ("AF_TIPC", "filter of system calls", 30, 1, "close()"),
            ("abstract sockets of the machine", "namespace of the network", 1, 1, "connect(HOST_ABSTRACT)"),
            ("sockets at a path", "namespace of mounts", 1, 1, "connect(HOST_PATH)"),
        )
    ),
    # what stays behind
    Attack("a daemon", "namespace of processes", "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(1234567)\n    os._exit(0)\ntime.sleep(0.1)"),
    Attack("a daemon of a shell", "namespace of processes", "setsid sh -c 'sleep 1234567 &' </dev/null >/dev/null 2>&1", is_shell=True),
    Attack("a job at the end", "namespace of processes", "import atexit\natexit.register(lambda: os.fork() or time.sleep(1234567))", ("ok", "timeout")),
    # compilers
    Attack("including a device", "time limit", "echo '#include \"/dev/urandom\"' > a.c; gcc a.c && echo BROKE; exit 0", ("ok", *_OVER), is_shell=True),
    Attack("including a file of the machine", "namespace of mounts", "echo '#include \"/etc/passwd\"' > a.c; gcc -E a.c | grep -q root: && echo BROKE; exit 0", is_shell=True),
    Attack("templates without end", "memory and time limit", "echo 'template<int n> struct a { a<n+1> x; a<n+2> y; }; a<0> z; int main(){}' > a.cpp; g++ -ftemplate-depth=100000 a.cpp && echo BROKE; exit 0", ("ok", *_OVER), is_shell=True),
    Attack("a huge binary", "file size limit", "echo 'char a[1ull<<33]={1}; int main(){}' > a.c; gcc -mcmodel=large a.c && ls -l a.out && echo BROKE; exit 0", ("ok", *_OVER), is_shell=True),
]  # fmt: skip

# Code that is to define `f` with f(2) == 4 and f(3) == 9, and does not. Each must fail all its tests.
CHEATS = {
    "leaving with success": "import sys\nsys.exit(0)",
    "leaving at once": "import os\nos._exit(0)",
    "leaving in the call": "import os\ndef f(x):\n    os._exit(0)",
    "an object that equals all": "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\ndef f(x): return Any()",
    "a number that equals all": "class Any(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\ndef f(x): return Any(7)",
    "a text that equals all": "class Any(str):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\ndef f(x): return Any('7')",
    "a list whose entries equal all": "class Any:\n    def __eq__(self, other): return True\nclass L(list):\n    def __eq__(self, other): return True\ndef f(x): return L([Any()])",
    "a difference that is 0": "class Any:\n    def __sub__(self, other): return 0\n    __rsub__ = __sub__\n    def __abs__(self): return 0\ndef f(x): return Any()",
    "a container that has all": "class Any:\n    def __contains__(self, each): return True\n    def __iter__(self): return iter(())\ndef f(x): return Any()",
    "replacing builtins": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\nbuiltins.all = lambda each: True\ndef f(x): return 0",
    "replacing json and pickle": "import json, pickle, os\njson.dumps = lambda *a, **k: '[[true, \"\"]]'\npickle.loads = lambda *a: True\ndef f(x): return 0",
    "replacing the tester": "import sys\nsys.modules['__main__'].Tester = None\nimport whet_peer, whet_tester\nwhet_tester.Tester.run = lambda self: [[True, '']]\nwhet_peer.Copier.dump = lambda self, value: None\ndef f(x): return 0",
    "printing a verdict": "print('[[true, \"\"], [true, \"\"]]')\nimport os\nfor each in range(1, 64):\n    try: os.write(each, b'[[true, \"\"], [true, \"\"]]\\n')\n    except OSError: pass\ndef f(x): return 0",
    "swallowing exceptions": "def f(x):\n    try:\n        raise SystemExit(0)\n    except BaseException:\n        return None",
    "raising what tests catch": "def f(x): raise AssertionError",
    "leaving by exception": "def f(x): raise SystemExit(0)",
    "stopping iteration": "def f(x): raise StopIteration",
    "killing the tester": "import os, signal\ndef f(x):\n    for each in range(2, 50):\n        if each != os.getpid():\n            try: os.kill(each, signal.SIGKILL)\n            except OSError: pass\n    return 0",
    "reading the tests in files": "import glob, re\nexpected = {}\nfor each in glob.glob('/tmp/*') + glob.glob('/proc/*/fd/*') + glob.glob('/dev/fd/*'):\n    try: expected.update((int(a), int(b)) for a, b in re.findall(r'f\\((\\d)\\) == (\\d)', open(each).read()))\n    except Exception: pass\ndef f(x): return expected.get(x)",
    "reading the tests in memory": "import gc, re\nexpected = {}\nfor each in gc.get_objects():\n    for one in (each.values() if type(each) is dict else each if type(each) in (list, tuple) else ()):\n        if isinstance(one, (str, bytes)):\n            text = one if isinstance(one, str) else one.decode(errors='replace')\n            expected.update((int(a), int(b)) for a, b in re.findall(r'f\\((\\d)\\) == (\\d)', text) if len(text) < 10**4)\nexpected.pop(2, None) if expected.get(2) != 4 else None\ndef f(x): return expected.get(x) if 'assert' in ''.join(str(v) for v in expected) else None",
    "reading the tester through /proc": "import glob, re\nexpected = {}\ndef look():\n    for each in glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/fd/*') + glob.glob('/proc/[0-9]*/environ'):\n        try:\n            if each.endswith('/mem'):\n                for line in open(each[:-3] + 'maps'):\n                    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n                    if 'rw' in line:\n                        f = open(each, 'rb', 0); f.seek(a); text = f.read(min(b - a, 10**7)).decode('latin-1')\n                        expected.update((int(a), int(b)) for a, b in re.findall(r'assert f\\((\\d)\\) == (\\d)', text) if (a, b) in (('2', '4'), ('3', '9')))\n            elif not each.startswith('/proc/self'):\n                import os; text = os.read(os.open(each, os.O_RDONLY | os.O_NONBLOCK), 10**6).decode()\n                expected.update((int(a), int(b)) for a, b in re.findall(r'f\\((\\d)\\) == (\\d)', text))\n        except Exception: pass\ndef f(x):\n    look()\n    return expected.get(x)",
    "writing into the tester through /proc": "import glob, os\ndef f(x):\n    for each in glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/fd/*'):\n        try: os.write(os.open(each, os.O_WRONLY | os.O_NONBLOCK), b'[[true, \"\"], [true, \"\"]]\\n')\n        except OSError: pass\n    return 0",
    "reading standard input": "import sys, re\ntext = sys.stdin.read()\nexpected = dict((int(a), int(b)) for a, b in re.findall(r'f\\((\\d)\\) == (\\d)', text))\ndef f(x): return expected.get(x)",
    "the tester through its own function": "def f(x, g=None): return 0\nimport sys\nfor name, module in list(sys.modules.items()):\n    if name == 'tests': module.f = lambda x: x * x",
    "frames of the caller": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for value in list(frame.f_locals.values()):\n            if type(value).__name__ == 'Peer': value.deadline = float('inf')\n        frame = frame.f_back\n    return 0",
    "a broken message": "import gc\ndef f(x):\n    for each in gc.get_objects():\n        if type(each).__name__ == 'socket': each.sendall(b'\\0' * 7 + b'\\x05hello')\n    return 0",
    "a hostile pickle": "import gc, os, pickle, struct\nclass Evil:\n    def __reduce__(self): return (os.system, ('echo BROKE >&2',))\ndef f(x):\n    data = pickle.dumps(('return', Evil(), []))\n    for each in gc.get_objects():\n        if type(each).__name__ == 'socket': each.sendall(struct.pack('!Q', len(data)) + data)\n    return 0",
    "endless import": "while True: pass",
    "endless call": "def f(x):\n    while True: pass",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x + 1)",
    "a result without end": "def f(x):\n    def g():\n        while True: yield 1\n    return g()",
    "a huge result": "def f(x): return [0] * 10**9",
    "memory in the call": "def f(x):\n    y = []\n    while True: y.append(bytearray(10**7))",
    "a fork in the call": "import os\ndef f(x):\n    while True: os.fork()",
    "no function": "x = 1",
    "broken code": "def f(x:\n    return",
    # files that pytest, or an import, may read
    "conftest.py that replaces tests": "open('conftest.py', 'w').write('def pytest_runtest_setup(item): item.obj = lambda *a, **k: None\\ndef pytest_sessionfinish(session): session.exitstatus = 0')\ndef f(x): return 0",
    "conftest.py that runs no test": "open('/tmp/conftest.py', 'w').write('def pytest_pyfunc_call(pyfuncitem): return True')\ndef f(x): return 0",
    "pytest.ini that only collects": "open('pytest.ini', 'w').write('[pytest]\\naddopts = --collect-only')\ndef f(x): return 0",
    "pyproject.toml that only collects": "open('pyproject.toml', 'w').write('[tool.pytest.ini_options]\\naddopts = \"--collect-only\"')\ndef f(x): return 0",
    "overwriting the tests": "import threading\ndef write():\n    while True:\n        for name in ('/tmp/test_solution.py', '/tmp/tests.py'): open(name, 'w').write('def test_a(): pass')\nthreading.Thread(target=write, daemon=True).start()\ndef f(x): return 0",
    "reading the tests from a file": "import glob, re\ndef f(x):\n    text = ''.join(open(each).read() for each in glob.glob('/tmp/*.py'))\n    return dict((int(a), int(b)) for a, b in re.findall(r'f\\((\\d)\\) == (\\d)', text)).get(x)",
    "modules in the scratch folder": "for name in ('pytest', 'unittest', 'decimal', 'numpy', 'tests', 'sitecustomize'): open(f'/tmp/{name}.py', 'w').write('class Module: pass\\ndef main(*a): return 0')\ndef f(x): return 0",
    "a plugin of pytest": "import os\nos.environ['PYTEST_ADDOPTS'] = '--collect-only'\nos.environ['PYTEST_PLUGINS'] = 'evil'\nopen('evil.py', 'w').write('def pytest_pyfunc_call(pyfuncitem): return True')\ndef f(x): return 0",
    "skipping the test": "import unittest\ndef f(x): raise unittest.SkipTest('not today')",
    "an exception that is called Skipped": "class Skipped(Exception): pass\ndef f(x): raise Skipped('not today')",
}  # fmt: skip

# Code that puts its own names in the place of those that an assertion uses. Each must fail.
# The candidate's end of the connection tells the tester what it likes.
FORGES = "import sys, fractions\npeer = sys._getframe(2).f_locals['peer']\nplain = peer.pack\n"
FRACTION = "b'cfractions\\nFraction\\n(N}X\\x06\\0\\0\\0__eq__(X\\x04\\0\\0\\0mineK\\x05tQstb0'"
SHADOWS = {
    "a class of the tester": (
        FORGES + f"peer.objects[5] = lambda *a: True\npeer.pack = lambda value: {FRACTION} + plain(value)\n"
        "def f(x): return fractions.Fraction(1)",
        "assert f(3) == 9",
    ),
    "builtins of the tests": (
        FORGES + "class Names(dict): pass\nzero = lambda *a: 0\n"
        "def pack(value):\n    if len(value) == 3 and isinstance(value[1], dict) and 'f' in value[1]:\n"
        "        value[1]['__builtins__'] = {'abs': zero, 'round': zero}\n    return plain(value)\n"
        "peer.pack = pack\nf = lambda x: -1",
        "assert abs(f(3) - 9) < 1e-6",
    ),
    "abs": ("def f(x): return 0\ndef abs(x): return 0", "assert abs(f(2) - 4) < 1e-6"),
    "set": ("def f(x): return [0]\ndef set(x): return 0", "assert set(f(2)) == set([4])"),
    "sorted": ("def f(x): return []\ndef sorted(x): return 1", "assert sorted(f(2)) == sorted([1, 2])"),
    "len": ("def f(x): return []\nlen = lambda x: 1", "assert len(f(2)) == len([1, 2])"),
    "all": ("def f(x): return 0\nall = lambda x: True", "assert all(f(i) == i * i for i in range(2, 9))"),
    "range": ("def f(x): return 0\ndef range(*a): return []", "for i in range(2, 5):\n    assert f(i) == i * i"),
    "int": ("def f(x): return 0\ndef int(x): return 7", "assert int(f(2)) == int('4')"),
    "isinstance": ("def f(x): return ''\ndef isinstance(*a): return True", "assert isinstance(f(2), int)"),
    "an exception": (
        "class IndexError(Exception): pass\ndef f(x): raise IndexError",
        "try:\n    f(2)\n    raise AssertionError\nexcept IndexError:\n    pass",
    ),
    "math, not imported": (
        "def f(x): return 0\nclass math:\n    isclose = staticmethod(lambda a, b: True)",
        "assert math.isclose(f(2), 4)",
    ),
    "a function of math": (
        "def f(x): return 0\nimport math\nmath.isclose = lambda a, b: True",
        "assert math.isclose(f(2), 4)",
    ),
    "an import of the tests": (
        "def f(x): return 0\nclass math:\n    isclose = staticmethod(lambda a, b: True)",
        "import math\nassert math.isclose(f(2), 4)",
    ),
}
